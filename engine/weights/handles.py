"""The tensors that a trainer on the same machine shares: CUDA IPC handles, and shared memory.

Trainers send handles as a pickle. None is run: its opcodes are read one by one, which build plain
data, and of its names only those that torch's `reduce_tensor` writes are known.
"""

import base64
import binascii
import os
import pickletools
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from engine.errors import UpdateFailed
from engine.weights.index import CODES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_REBUILD = "torch.multiprocessing.reductions.rebuild_cuda_tensor"
_SIZE = "torch.Size"
_STORAGES: dict[str, Any] = {
    "torch.storage.TypedStorage": torch.storage.TypedStorage,
    "torch.storage.UntypedStorage": torch.storage.UntypedStorage,
}
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
_NAMES = {
    _REBUILD,
    _SIZE,
    *_STORAGES,
    *_TENSORS,
    *(f"torch.{name}" for name in DTYPES),
}
_SHARED_MEMORY = "/dev/shm"


class SharedBytes(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes in a segment of shared memory (`multiprocessing.shared_memory`), by its name."""

    name: str
    offset: int = 0

    def read(self, num_bytes: int) -> Tensor:
        """Return the bytes, uint8 [num_bytes], mapped and not copied. Raises UpdateFailed."""
        if not re.fullmatch(r"/?[A-Za-z0-9_.-]+", self.name) or self.offset < 0:
            raise _wrong(f"no segment of shared memory is called {self.name!r}")
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        path = os.path.join(_SHARED_MEMORY, self.name.lstrip("/"))
        try:
            raw = np.memmap(path, np.uint8, "c", self.offset, (num_bytes,))
        except (OSError, ValueError) as error:
            raise _wrong(f"shared memory {self.name}: {error}") from None
        return torch.from_numpy(raw)


class _Name(str):
    """A name in a pickle, which stands for itself."""


class _Mark:
    """The beginning of a tuple, a list or the items of a dictionary on the stack."""


def read_handles(encoded: str) -> list[dict[str, Any]]:
    """Return a base64 pickle's handles: of each tensor, GPU's UUID -> what `reduce_tensor` gave.

    A single dictionary is the handle of a buffer with all tensors. Names are strings. Raises
    UpdateFailed for a pickle that holds anything else.
    """
    try:
        raw = base64.b64decode(encoded, validate=True)
        handles = _Reader().read(raw)
    except (binascii.Error, ValueError, IndexError, KeyError, TypeError, AssertionError) as error:
        raise _wrong(f"ipc_handles_pickled cannot be read: {error!r}") from None
    if isinstance(handles, dict):
        handles = [handles]
    if not isinstance(handles, list) or not all(isinstance(entry, dict) for entry in handles):
        raise _wrong("ipc_handles_pickled: not a list with a dictionary for each tensor")
    return handles


def plain_handle(handle: Any) -> list[Any]:
    """Return what torch's `reduce_tensor` gives as plain data, for `UpdateInfo.cuda_handles`."""
    _, arguments = handle
    return [_plain(argument) for argument in arguments]


def _plain(argument: Any) -> Any:
    if isinstance(argument, type):
        return f"{argument.__module__}.{argument.__qualname__}"
    if isinstance(argument, torch.dtype):
        return str(argument)
    return list(argument) if isinstance(argument, tuple) else argument


def from_plain(arguments: list[Any]) -> tuple[Any, ...]:
    """Return the handle that `plain_handle` was given, as `read_handles` returns it."""
    return tuple(tuple(item) if isinstance(item, list) else item for item in arguments)


class _Reader:
    """Reads the plain data of one pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, raw: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                (value,) = self._stack
                return value
            self._do(opcode.name, argument)
        raise ValueError("no end")

    def _do(self, name: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_name(module, attribute))
        elif name == "REDUCE":
            (size,), function = stack.pop(), stack.pop()
            if function != _SIZE:
                raise _wrong(f"ipc_handles_pickled calls {function}, and nothing in it is run")
            stack.append(tuple(size))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._since_mark() if name == "APPENDS" else [stack.pop()]
            assert isinstance(stack[-1], list)
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            many = name == "SETITEMS"
            items = self._since_mark() if many else [stack.pop(-2), stack.pop()]
            assert isinstance(stack[-1], dict)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME"):
            raise _wrong(f"ipc_handles_pickled holds {name}, and nothing in it is run")

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(item := self._stack.pop(), _Mark):
            items.append(item)
        return items[::-1]


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": _Mark,
}


def _name(module: Any, attribute: Any) -> _Name:
    """Return a name in a pickle. Raises UpdateFailed for one that is not on the list."""
    name = f"{module}.{attribute}"
    if name not in _NAMES:
        raise _wrong(f"ipc_handles_pickled names {name}; only tensors of CUDA may be in it")
    return _Name(name)


def open_handle(handles: dict[str, Any], device: torch.device) -> Tensor:
    """Return the device tensor that another process shares by its handles, without a copy.

    handles: GPU's UUID -> handle, as `read_handles` returns them.
    Raises UpdateFailed.
    """
    if device.type != "cuda":
        raise _wrong("CUDA handles were sent, and this engine runs on the CPU")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in handles:
        known = ", ".join(map(str, handles))
        raise _wrong(f"no handle is of this engine's GPU {uuid}; there are those of {known}")
    arguments = rebuild_arguments(handles[uuid], device)
    try:
        tensor: Tensor = rebuild_cuda_tensor(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _wrong(f"a CUDA IPC handle cannot be opened: {error}") from None
    return tensor


def rebuild_arguments(handle: Any, device: torch.device) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a handle, with our device.

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
    raise _wrong("a handle is none of torch.multiprocessing.reductions.reduce_tensor")


def _wrong(message: str) -> UpdateFailed:
    return UpdateFailed(message, param="update_info")
