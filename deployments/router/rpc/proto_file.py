"""read_proto: parses .proto files to descriptors. message: the message classes of our own files.

Files are parsed at run time, because generated code would work with some versions of protobuf only.
"""

import re
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

_SCALARS = {
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}
_FIELD = re.compile(r"(?:(optional|repeated) )?(\w+) (\w+) = (\d+);")
_VALUE = re.compile(r"(\w+) = (\d+);")
_RPC = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);")
_BLOCK = re.compile(r"(message|service|oneof|enum) (\w+) \{(\})?")


def read_proto(path: Path) -> FileDescriptorProto:
    """Return the descriptor that protoc would make of a .proto file.

    Only the syntax of our own files is supported: one statement per line, messages at the top
    level, enums inside messages, scalar and message fields. Raises ValueError that names the line
    of any other syntax.
    """
    file = FileDescriptorProto(name=path.name, syntax="proto3")
    open_: list[DescriptorProto | ServiceDescriptorProto | EnumDescriptorProto | str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("//")[0].strip()
        if not _parse_statement(file, open_, text):
            raise ValueError(f"{path}:{number}: not understood: {text}")
    if open_ or not file.package:
        raise ValueError(f"{path}: it ends in the middle, or has no package")
    enums = {f"{m.name}.{e.name}" for m in file.message_type for e in m.enum_type}
    for message in file.message_type:
        for field in message.field:
            _resolve(file.package, message, field, enums)
        # As in protoc, the oneofs of optional fields come after the declared ones.
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


def _parse_statement(
    file: FileDescriptorProto,
    open_: list[DescriptorProto | ServiceDescriptorProto | EnumDescriptorProto | str],
    text: str,
) -> bool:
    if text in ("", 'syntax = "proto3";'):
        return True
    if text == "}":
        return bool(open_) and open_.pop() is not None
    if text.startswith("package "):
        file.package = text[len("package ") : -1]
        return True
    inside = open_[-1] if open_ else None
    block = _BLOCK.fullmatch(text)
    if block is not None:
        kind, name, empty = block.groups()
        if kind == "message" and inside is None:
            open_.append(file.message_type.add(name=name))
        elif kind == "service" and inside is None:
            open_.append(file.service.add(name=name))
        elif kind == "enum" and isinstance(inside, DescriptorProto):
            open_.append(inside.enum_type.add(name=name))
        elif kind == "oneof" and isinstance(inside, DescriptorProto):
            inside.oneof_decl.add(name=name)
            open_.append(name)
        else:
            return False
        if empty:
            open_.pop()
        return True
    if isinstance(inside, EnumDescriptorProto) and (value := _VALUE.fullmatch(text)):
        inside.value.add(name=value[1], number=int(value[2]))
        return True
    if isinstance(inside, ServiceDescriptorProto) and (rpc := _RPC.fullmatch(text)):
        inside.method.add(
            name=rpc[1],
            input_type=f".{file.package}.{rpc[2]}",
            server_streaming=True if rpc[3] else None,
            output_type=f".{file.package}.{rpc[4]}",
        )
        return True
    message = open_[-2] if isinstance(inside, str) else inside
    field = _FIELD.fullmatch(text)
    if field is None or not isinstance(message, DescriptorProto):
        return False
    added = message.field.add(name=field[3], number=int(field[4]), type_name=field[2])
    repeated = field[1] == "repeated"
    added.label = (
        FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    )
    if field[1] == "optional":
        added.proto3_optional = True
    if isinstance(inside, str):
        added.oneof_index = len(message.oneof_decl) - 1
    return True


def _resolve(
    package: str, message: DescriptorProto, field: FieldDescriptorProto, enums: set[str]
) -> None:
    name = field.type_name
    if name in _SCALARS:
        field.ClearField("type_name")
        field.type = _SCALARS[name]
    elif f"{message.name}.{name}" in enums:
        field.type = FieldDescriptorProto.TYPE_ENUM
        field.type_name = f".{package}.{message.name}.{name}"
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{package}.{name}"


PROTO = Path(__file__).with_name("manta.proto")
POOL = descriptor_pool.DescriptorPool()
for _path in (PROTO, PROTO.with_name("health.proto")):
    POOL.Add(read_proto(_path))

INFERENCE, HEALTH = "manta.v1.Inference", "grpc.health.v1.Health"


def message(name: str) -> Any:
    """Return a message's class by its name in manta.v1, or its full name "grpc.health.v1.Name"."""
    full = name if "." in name else f"manta.v1.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full))


def methods(service: str) -> dict[str, tuple[Any, Any, bool]]:
    """Return {method name: (request class, response class, whether responses are streamed)} of a
    service.

    service: its full name.
    """
    descriptor = POOL.FindServiceByName(service)
    return {
        method.name: (
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.server_streaming,
        )
        for method in descriptor.methods
    }
