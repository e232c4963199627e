"""TrainerGroup: a trainer and the engines that get its weights, joined by a store of torch.

The trainer is rank 0 and holds the store. On CUDA they broadcast through NCCL, on CPUs through
gloo.
"""

import contextlib
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engine.errors import UpdateFailed
from engine.weights.nccl import NcclGroup, TorchNcclGroup

SECONDS = 300.0  # longest wait for the others


class TrainerGroup(Protocol):
    """The processes of one trainer's updates."""

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor of the group's device with rank 0's. Raises UpdateFailed."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class GlooGroup:
    """A group of CPUs, connected through the store."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        wait = timedelta(seconds=seconds)
        with _failing():
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, wait)
        self._store = store

    def broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _failing():
            # bytes, as gloo does not know every dtype
            self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        self._group = self._store = None


@contextlib.contextmanager
def _failing() -> Any:
    try:
        yield
    except RuntimeError as error:  # torch's errors of the network and of time
        reason = str(error).split("\n")[0][:200]
        raise UpdateFailed(
            f"the connection to the trainer has failed: {reason}", code="transfer_failed"
        ) from None


def open_group(
    address: str,
    port: int,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float = SECONDS,
    name: str = "",
) -> TrainerGroup:
    """Join a trainer's group, or open it as rank 0; return when all have joined.

    address, port: where the store of rank 0 listens.
    seconds: longest wait for the others, here and in a broadcast.
    name: the name of torch's process group that rank 0 has opened; "": vLLM's kind of group.
    Raises UpdateFailed.
    """
    with _failing():
        store: Any = TCPStore(address, port, size, rank == 0, timedelta(seconds=seconds))
    if name:  # the prefixes that torch's process groups put before their keys
        for prefix in (name, f"{name}/", f"{device.type}/"):
            store = PrefixStore(prefix, store)
    if device.type == "cuda":
        kind = TorchNcclGroup if name else NcclGroup
        return kind(store, rank, size, device, seconds)
    return GlooGroup(store if name else PrefixStore("manta", store), rank, size, seconds)
