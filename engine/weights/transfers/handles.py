"""Opens the tensors that a trainer on the same machine shares by CUDA IPC or shared memory.

Trainers send handles as a pickle, which is never executed. Only the names that torch writes when it
serialises tensors are accepted in a pickle, and this module opens the tensors.
"""

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from engine.weights.index import CODES
from engine.weights.transfers.plain_pickle import Call, read_plain, refused

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_REDUCTIONS = "torch.multiprocessing.reductions"
_REBUILD = f"{_REDUCTIONS}.rebuild_cuda_tensor"
_STORAGES: dict[str, Any] = {
    "torch.storage.TypedStorage": torch.storage.TypedStorage,
    "torch.storage.UntypedStorage": torch.storage.UntypedStorage,
}
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
_TYPES = {*_STORAGES, *_TENSORS, *(f"torch.{name}" for name in DTYPES)}
_SHARED_MEMORY = "/dev/shm"

# Functions that pickles of SGLang's trainers call, besides torch's; modules differ between
# versions.
_SGLANG_REBUILD = {
    f"sglang.srt.{module}._rebuild_cuda_tensor_modified"
    for module in ("utils.patch_torch", "patch_torch")
}
_METADATA = {
    f"sglang.srt.{module}.FlattenedTensorMetadata"
    for module in ("weight_sync.tensor_bucket", "model_executor.model_runner")
}
_PER_RANK = {
    f"sglang.srt.model_executor.{module}.LocalSerializedTensor"
    for module in ("model_runner", "model_runner_components.weight_updater")
}
_BY_VALUE = "torch.storage._load_from_bytes"
_BY_FILE = f"{_REDUCTIONS}.rebuild_storage_filename"
_BY_DESCRIPTOR = f"{_REDUCTIONS}.rebuild_storage_fd"
_EMPTY = f"{_REDUCTIONS}.rebuild_storage_empty"
_TYPED = f"{_REDUCTIONS}.rebuild_typed_storage"
_SHARED_TENSOR = f"{_REDUCTIONS}.rebuild_tensor"
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_CALLS = {
    _REBUILD, *_SGLANG_REBUILD, *_METADATA, *_PER_RANK, _BY_VALUE, _BY_FILE, _BY_DESCRIPTOR,
    _EMPTY, _TYPED, _SHARED_TENSOR, _TENSOR, _PARAMETER, "multiprocessing.resource_sharer.DupFd",
}  # fmt: skip
_FILE_HEADER = 64  # bytes before the data in torch's shared files, which hold a reference count
_SERIALIZED = "serialized_named_tensors"


class SharedBytes(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a segment of shared memory (`multiprocessing`), and an offset in bytes."""

    name: str
    offset: int = 0

    def read(self, num_bytes: int) -> Tensor:
        """Return the bytes, uint8 [num_bytes], mapped and not copied. Raises UpdateFailed."""
        if not re.fullmatch(r"/?[A-Za-z0-9_.-]+", self.name) or self.offset < 0:
            raise refused(f"no segment of shared memory is called {self.name!r}")
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        path = os.path.join(_SHARED_MEMORY, self.name.lstrip("/"))
        try:
            raw = np.memmap(path, np.uint8, "c", self.offset, (num_bytes,))
        except (OSError, ValueError) as error:
            raise refused(f"shared memory {self.name}: {error}") from None
        return torch.from_numpy(raw)


def read_handles(encoded: str) -> list[dict[str, Any]]:
    """Read the handles in a base64 pickle; return {GPU's UUID: handle} for each tensor.

    A handle is the result of torch's `reduce_tensor`, with strings in place of functions and types.
    A pickle of a single dictionary holds the handle of one buffer with all tensors.
    Raises UpdateFailed for a pickle that holds anything else.
    """
    field = "ipc_handles_pickled"
    handles = read_plain(_decoded(encoded, field), {*_TYPES, _REBUILD}, field)
    if isinstance(handles, dict):
        handles = [handles]
    if not isinstance(handles, list) or not all(isinstance(entry, dict) for entry in handles):
        raise refused("ipc_handles_pickled: not a list with a dictionary for each tensor")
    return handles


def _decoded(encoded: str, field: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(f"{field} cannot be read: {error!r}") from None


def plain_handle(handle: Any) -> list[Any]:
    """Convert the result of torch's `reduce_tensor` to plain data for `UpdateInfo.cuda_handles`."""
    _, arguments = handle
    return [_plain(argument) for argument in arguments]


def _plain(argument: Any) -> Any:
    if isinstance(argument, type):
        return f"{argument.__module__}.{argument.__qualname__}"
    if isinstance(argument, torch.dtype):
        return str(argument)
    return list(argument) if isinstance(argument, tuple) else argument


def from_plain(arguments: list[Any]) -> tuple[Any, ...]:
    """Convert the result of `plain_handle` to a handle for `rebuild_arguments`."""
    return tuple(tuple(item) if isinstance(item, list) else item for item in arguments)


def open_handle(handles: dict[str, Any], device: torch.device) -> Tensor:
    """Open a device tensor of another process by its handles, without a copy.

    handles: GPU's UUID -> handle, from `read_handles`.
    Raises UpdateFailed.
    """
    if device.type != "cuda":
        raise refused("CUDA handles were sent, and this engine runs on the CPU")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in handles:
        known = ", ".join(map(str, handles))
        raise refused(f"no handle is of this engine's GPU {uuid}; there are those of {known}")
    return _open_cuda(handles[uuid], device)


def _open_cuda(handle: Any, device: torch.device) -> Tensor:
    try:
        tensor: Tensor = rebuild_cuda_tensor(*rebuild_arguments(handle, device))
    except (RuntimeError, TypeError, ValueError) as error:
        raise refused(f"a CUDA IPC handle cannot be opened: {error}") from None
    return tensor


def rebuild_arguments(handle: Any, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a handle, with this device.

    handle: (function, arguments), or the arguments alone.
    Raises UpdateFailed for a handle of another form.
    """
    if isinstance(handle, tuple) and len(handle) == 2 and handle[0] == _REBUILD:
        handle = handle[1]
    match handle:
        case (
            cls, tuple(size), tuple(stride), int(offset), storage, dtype, int(), bytes(memory),
            int(size_bytes), int(offset_bytes), bool(), bytes(counter), int(counter_offset),
            bytes(event), bool(synchronise),
        ) if (
            cls in _TENSORS
            and storage in _STORAGES
            and all(isinstance(number, int) for number in (*size, *stride))
        ):  # fmt: skip
            kind = DTYPES.get(str(dtype).removeprefix("torch."))
            if kind is not None:
                return (
                    torch.Tensor, torch.Size(size), stride, offset, _STORAGES[storage], kind,
                    device.index, memory, size_bytes, offset_bytes, False, counter,
                    counter_offset, event, synchronise,
                )  # fmt: skip
    raise refused("a handle is none of torch.multiprocessing.reductions.reduce_tensor")


class SerializedTensors:
    """The tensors of a message of SGLang's trainers, which serialise them for each rank.

    encoded: a base64 pickle for each rank, with handles of all tensors.
    load_format: "" for (name, tensor) pairs; "flattened_bucket" for one flat tensor with all.
    device: the engine's device, which decides the pickle to read.
    Raises UpdateFailed.
    """

    def __init__(self, encoded: list[str], load_format: str, device: torch.device) -> None:
        self._flat = load_format == "flattened_bucket"
        self._device = device
        self._uuid = ""
        if device.type == "cuda":
            self._uuid = str(torch.cuda.get_device_properties(device).uuid)
        self._data = self._own([_decoded(entry, _SERIALIZED) for entry in encoded])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name. Raises UpdateFailed."""
        match self._data:
            case {"flattened_tensor": tensor, "metadata": list(parts)} if self._flat:
                yield from self._bucket(self._open(tensor), parts)
            case list() | dict() if not self._flat:
                for pair in self._data.items() if isinstance(self._data, dict) else self._data:
                    match pair:
                        case (str(name), tensor):
                            yield name, self._open(tensor)
                        case _:
                            raise refused(f"{_SERIALIZED} holds no pairs of name and tensor")
            case _:
                form = "a flattened bucket" if self._flat else "a list of names and tensors"
                raise refused(f"{_SERIALIZED} is not {form}; load_format names its form")

    def _own(self, pickles: list[bytes]) -> Any:
        """Return the data of the pickle with the handles of this engine's GPU."""
        gpus = set()
        for raw in pickles:
            data = read_plain(raw, _TYPES, _SERIALIZED, _CALLS)
            if len(pickles) == 1 or not self._uuid:
                return data
            if (gpu := _gpu(data)) in (self._uuid, ""):
                return data
            gpus.add(gpu)
        known = ", ".join(sorted(gpus)) or "none"
        raise refused(f"{_SERIALIZED}: no entry is of this engine's GPU {self._uuid}; got {known}")

    def _open(self, value: Any) -> Tensor:
        if isinstance(value, Call) and value.function in _PER_RANK:
            values = value.state.get("values") if isinstance(value.state, dict) else None
            if not isinstance(values, list) or not all(isinstance(raw, bytes) for raw in values):
                raise refused(f"{_SERIALIZED}: a tensor has no values of ranks")
            value = self._own(values)
        if not isinstance(value, Call):
            raise refused(f"{_SERIALIZED} holds something that is no tensor")
        try:
            return self._tensor(value)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            reason = str(error).split("\n")[0][:200]
            raise refused(f"{_SERIALIZED}: a tensor cannot be opened: {reason}") from None

    def _tensor(self, call: Call) -> Tensor:
        match call.function, call.arguments:
            case name, arguments if name == _REBUILD or name in _SGLANG_REBUILD:
                if not self._uuid:
                    raise refused(
                        f"{_SERIALIZED}: CUDA handles were sent, and this engine runs on the CPU"
                    )
                gpu = arguments[6] if len(arguments) > 6 else None
                if isinstance(gpu, str) and gpu != self._uuid:
                    raise refused(
                        f"{_SERIALIZED}: the tensors are on GPU {gpu}, and this engine is on "
                        f"{self._uuid}; weights of another GPU come by "
                        "/update_weights_from_distributed"
                    )
                return _open_cuda((*arguments[:6], 0, *arguments[7:]), self._device)
            case name, (Call() as tensor, *_) if name == _PARAMETER:
                return self._tensor(tensor)
            case name, (_, Call() as storage, (offset, size, stride, *_)) if name == _SHARED_TENSOR:
                return _values(storage).as_strided(size, stride, offset)
            case name, (Call() as storage, offset, size, stride, *_) if name == _TENSOR:
                return _values(storage).as_strided(size, stride, offset)
        raise refused(f"{_SERIALIZED} holds {call.function} where a tensor is wanted")

    def _bucket(self, flat: Tensor, parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a flattened bucket.

        flat: the bucket, as bytes or as elements of the dtype of all tensors.
        parts: the metadata of each tensor: name, shape, dtype and position in the bucket.
        """
        for part in parts:
            match part:
                case Call(
                    state={
                        "name": str(name), "shape": tuple(shape), "dtype": dtype,
                        "start_idx": int(begin), "end_idx": int(end),
                    }
                ) if str(dtype).removeprefix("torch.") in DTYPES and begin >= 0:  # fmt: skip
                    kind = DTYPES[str(dtype).removeprefix("torch.")]
                    try:
                        raw = flat[begin:end]
                        aligned = raw.storage_offset() * raw.itemsize % kind.itemsize == 0
                        yield name, (raw if aligned else raw.clone()).view(kind).view(shape)
                    except (RuntimeError, TypeError) as error:
                        raise refused(f"{_SERIALIZED}: tensor {name}: {error}") from None
                case _:
                    raise refused(f"{_SERIALIZED}: metadata has no tensor's name, shape and dtype")


def _gpu(data: Any) -> str:
    """Return the GPU's UUID in the first CUDA handle of a pickle's data; "" without a handle.

    torch itself writes the GPU's index in the trainer's process instead of a UUID. The result is
    then "number INDEX", which matches no GPU.
    """
    values = [*data.values()] if isinstance(data, dict) else data
    for value in values if isinstance(values, list) else [values]:
        call = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if isinstance(call, Call) and call.function in {_REBUILD, *_SGLANG_REBUILD}:
            gpu = call.arguments[6] if len(call.arguments) > 6 else None
            return gpu if isinstance(gpu, str) else f"number {gpu}"
    return ""


def _values(storage: Call) -> Tensor:
    """Return all elements of a serialised storage in host memory."""
    match storage.function, storage.arguments:
        case name, (bytes(raw),) if name == _BY_VALUE:
            # torch's weights-only unpickler executes no code of the pickle
            try:
                loaded: Any = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
            except Exception as error:  # the unpickler may raise any exception on damaged bytes
                kind = type(error).__name__
                raise ValueError(f"its bytes are no storage of torch ({kind})") from None
            return torch.empty(0, dtype=loaded.dtype).set_(loaded._untyped_storage)
        case name, (Call() as untyped, dtype) if name == _TYPED:
            return _raw(untyped).view(DTYPES[str(dtype).removeprefix("torch.")])
    raise refused(f"{_SERIALIZED} holds {storage.function} where a storage is wanted")


def _raw(storage: Call) -> Tensor:
    """Return the bytes of a shared storage."""
    match storage.function, storage.arguments:
        case name, (_, bytes(), bytes(handle), int(size)) if name == _BY_FILE:
            file = SharedBytes(handle.decode(errors="replace"), _FILE_HEADER)
            return file.read(size)
        case name, _ if name == _EMPTY:
            return torch.empty(0, dtype=torch.uint8)
        case name, _ if name == _BY_DESCRIPTOR:
            raise refused(
                f"{_SERIALIZED}: tensors in host memory come as file descriptors, which another "
                "program's process does not get; in the trainer call "
                'torch.multiprocessing.set_sharing_strategy("file_system")'
            )
    raise refused(f"{_SERIALIZED} holds {storage.function} where a storage is wanted")
