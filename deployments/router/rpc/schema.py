"""The messages and services of our .proto files, as classes of a pool of their own."""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from deployments.router.rpc.proto_file import read_proto

PROTO = Path(__file__).with_name("manta.proto")
POOL = descriptor_pool.DescriptorPool()
for _path in (PROTO, PROTO.with_name("health.proto")):
    POOL.Add(read_proto(_path))

INFERENCE, HEALTH = "manta.v1.Inference", "grpc.health.v1.Health"


def message(name: str) -> Any:
    """Return the class of a message by its name: "Answer", or with its package."""
    full = name if "." in name else f"manta.v1.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full))


def methods(service: str) -> dict[str, tuple[Any, Any, bool]]:
    """Return the methods of a service: name -> the classes of request and answer, and whether
    answers are streamed."""
    found = POOL.FindServiceByName(service)
    return {
        one.name: (
            message_factory.GetMessageClass(one.input_type),
            message_factory.GetMessageClass(one.output_type),
            one.server_streaming,
        )
        for one in found.methods
    }
