"""NcclGroup: NCCL broadcasts among processes without a common torch process group.

The NCCL library of torch is called through ctypes. The processes connect by vLLM's protocol, so
trainers that support vLLM can send to this group.
"""

import ctypes
import pickletools
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.errors import UpdateFailed

_ID_BYTES = 128
ID_KEY = "broadcast_from/0/0"  # the store's key for the group's id, which rank 0 writes
_FLOAT, _UINT8, _SUM = 7, 1, 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: _UINT8,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: _FLOAT,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_POLL_SECONDS = 0.001
_LIFE_SECONDS = 0.5  # seconds between two checks that the trainer is alive


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
    ]
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL. Raises UpdateFailed."""
    code = getattr(_library(), name)(*arguments)
    if code:
        text = _library().ncclGetErrorString(code).decode()
        raise UpdateFailed(f"{name}: {text} (error {code})", code="transfer_failed")


def read_id(pickled: bytes) -> bytes:
    """Return the 128 bytes of a group's id from a pickle, without executing the pickle.

    Raises UpdateFailed.
    """
    try:
        for _, argument, _ in pickletools.genops(pickled):
            if isinstance(argument, bytes) and len(argument) == _ID_BYTES:
                return argument
    except ValueError:
        pass
    raise UpdateFailed(
        "the trainer's store has no id of an NCCL group of 128 bytes", code="transfer_failed"
    )


def pickled_id(unique: bytes) -> bytes:
    """Return the pickle of an id's bytes, as vLLM's receivers read it."""
    return b"\x80\x04C" + bytes([_ID_BYTES]) + unique + b"."


class NcclGroup:
    """The processes that get weights from rank 0 through NCCL.

    store: torch's TCPStore, by which the processes connect.
    rank, size: this process's rank, and the number of processes.
    seconds: timeout of a broadcast.
    Raises UpdateFailed.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, seconds: float
    ) -> None:
        self._store = store
        self._key = ID_KEY  # a key that can be read from the store as long as the trainer lives
        self._rank, self._size = rank, size
        self._seconds = seconds
        self._device = device
        self._comm = ctypes.c_void_p()
        self._open()

    def _open(self) -> None:
        unique = _UniqueId()
        if self._rank == 0:
            _call("ncclGetUniqueId", ctypes.byref(unique))
            self._store.set(ID_KEY, pickled_id(bytes(unique)))
        else:
            ctypes.memmove(ctypes.byref(unique), read_id(self._store.get(ID_KEY)), _ID_BYTES)
        with torch.cuda.device(self._device):
            self._join(unique)
            self._run("ncclAllReduce", torch.zeros(1, device=self._device), _FLOAT, _SUM)

    def _join(self, unique: _UniqueId) -> None:
        self._stream = torch.cuda.Stream(self._device)
        _call("ncclCommInitRank", ctypes.byref(self._comm), self._size, unique, self._rank)

    def broadcast(self, tensor: Tensor) -> None:
        """Receive rank 0's tensor into a contiguous tensor on the group's device. Raises
        UpdateFailed."""
        known = tensor.dtype in _TYPES
        raw = tensor if known else tensor.reshape(-1).view(torch.uint8)
        with torch.cuda.device(self._device):
            self._run("ncclBroadcast", raw, _TYPES[raw.dtype], 0)

    def _run(self, name: str, tensor: Tensor, kind: int, argument: int) -> None:
        """Run a collective operation in place, and wait for its end.

        name: NCCL's function.
        kind: NCCL's number of the dtype.
        argument: NCCL's number of the reduction, or the broadcasting rank.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        place, stream = tensor.data_ptr(), self._stream.cuda_stream
        _call(name, place, place, tensor.numel(), kind, argument, self._comm, stream)
        tensor.record_stream(self._stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        self._wait(done.query)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._seconds
        look = time.monotonic() + _LIFE_SECONDS
        while not done():
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now > look:
                look = now + _LIFE_SECONDS
                try:
                    self._store.check([self._key])
                except RuntimeError as error:
                    self.close()
                    raise UpdateFailed(
                        f"the trainer is gone: {error}", code="transfer_failed"
                    ) from None
            if now > deadline:
                self.close()
                raise UpdateFailed(
                    f"nothing came from the trainer for {self._seconds:.0f} s",
                    code="transfer_failed",
                )

    def close(self) -> None:
        """Leave the group, also in the middle of a broadcast. Idempotent."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm.value:
            _library().ncclCommAbort(comm)


class TorchNcclGroup(NcclGroup):
    """The processes that get weights from rank 0 of a torch process group.

    torch opens such a group at the first broadcast: only then does the trainer write the id to the
    store.
    """

    def _open(self) -> None:
        # torch numbers a group's communicators from 0; the number is the key of the id in the store
        self._key = "0"

    def broadcast(self, tensor: Tensor) -> None:
        if not self._comm.value:
            unique = _UniqueId()
            try:
                raw = self._store.get(self._key)
            # torch raises RuntimeError for network errors and timeouts
            except RuntimeError as error:
                raise UpdateFailed(
                    f"the trainer has not begun its broadcast: {str(error)[:200]}",
                    code="transfer_failed",
                ) from None
            if len(raw) != _ID_BYTES:
                raise UpdateFailed(
                    f"the id of the trainer's group has {len(raw)} bytes, not {_ID_BYTES}",
                    code="transfer_failed",
                )
            ctypes.memmove(ctypes.byref(unique), raw, _ID_BYTES)
            with torch.cuda.device(self._device):
                self._join(unique)
        super().broadcast(tensor)
