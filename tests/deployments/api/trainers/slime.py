"""The sending side of slime and miles: the pickles and the process group of SGLang's trainers."""

import base64
import io
import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

Tensors = Sequence[tuple[str, Tensor]]
_FIELDS = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")


def _module(path: str) -> ModuleType:
    """Return an empty module of this name, with the packages around it, for pickle to import."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        sys.modules.setdefault(package, ModuleType(package))
    return sys.modules[path]


def _sglang_class(module: str, name: str, fields: Sequence[str]) -> Any:
    """Return a data class that pickle names as SGLang's; its module stays in this process."""
    path = f"sglang.srt.{module}"
    data_class = make_dataclass(name, fields, namespace={"__module__": path})
    data_class.__module__ = path
    setattr(_module(path), name, data_class)
    return data_class


METADATA = _sglang_class("weight_sync.tensor_bucket", "FlattenedTensorMetadata", _FIELDS)
PER_RANK = _sglang_class(
    "model_executor.model_runner_components.weight_updater", "LocalSerializedTensor", ["values"]
)


def _rebuild_cuda_tensor_modified(*arguments: Any) -> Any:
    """Raise AssertionError. A pickle names this function as SGLang's, and it must not run."""
    raise AssertionError("it is run")


REBUILD = _rebuild_cuda_tensor_modified
REBUILD.__module__ = "sglang.srt.utils.patch_torch"
_module(REBUILD.__module__)._rebuild_cuda_tensor_modified = REBUILD  # type: ignore[attr-defined]


def serialized(value: Any, sharing: str = "file_system") -> bytes:
    """Serialise a value as SGLang's MultiprocessingSerializer does."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(sharing)
    try:
        stream = io.BytesIO()
        ForkingPickler(stream).dump(value)  # type: ignore[no-untyped-call]
        return stream.getvalue()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def encoded(value: Any, sharing: str = "file_system") -> str:
    return base64.b64encode(serialized(value, sharing)).decode()


def bucket(tensors: Tensors) -> dict[str, Any]:
    """Return a flattened bucket: the bytes of all tensors, and the place of each."""
    flat = [tensor.detach().flatten().view(torch.uint8) for _, tensor in tensors]
    metadata, at = [], 0
    for (name, tensor), raw in zip(tensors, flat, strict=True):
        end = at + raw.numel()
        metadata.append(METADATA(name, tensor.shape, tensor.dtype, at, end, raw.numel()))
        at = end
    return {"flattened_tensor": torch.cat(flat), "metadata": metadata}


def open_torch_group(port: int, size: int, name: str) -> Any:
    """Open a process group of torch with this process as rank 0, as slime does; return it."""
    wait = timedelta(seconds=60)
    address = f"tcp://127.0.0.1:{port}"
    store, rank, size = next(rendezvous(address, 0, size, timeout=wait))
    store.set_timeout(wait)
    group, _ = _new_process_group_helper(  # type: ignore[no-untyped-call]
        size,
        rank,
        [],
        Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        timeout=wait,
    )
    _world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def broadcast(group: Any, tensors: Sequence[Tensor]) -> None:
    """Broadcast tensors as slime does: all at once, in order."""
    works = [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
