"""TrainerGroup: the process group of a trainer and the engines that get its weights.

The trainer, rank 0, hosts the TCPStore by which the processes connect. Its broadcasts use NCCL on
CUDA, and gloo on CPUs.
"""

import contextlib
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from engine.errors import UpdateFailed
from engine.weights.transfers.nccl import NcclGroup, TorchNcclGroup

SECONDS = 300.0  # default timeout for the other processes of a group


class TrainerGroup(Protocol):
    """The interface of a group in which rank 0, the trainer, broadcasts tensors to engines."""

    def broadcast(self, tensor: Tensor) -> None:
        """Receive rank 0's tensor into a contiguous tensor on the group's device. Raises
        UpdateFailed."""
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class GlooGroup:
    """A group that broadcasts through gloo, for engines on CPUs."""

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
            # as bytes, because gloo does not support every dtype
            self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        self._group = self._store = None


@contextlib.contextmanager
def _failing() -> Any:
    try:
        yield
    except RuntimeError as error:  # torch's network errors and timeouts
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
    """Join a trainer's group, or open it as rank 0; return when all processes have joined.

    address, port: the address of rank 0's TCPStore.
    size: the number of processes.
    seconds: timeout for the other processes, here and in a broadcast.
    name: the name of the torch process group that rank 0 has opened; "" = a group of vLLM's
        protocol, which has no name.
    Raises UpdateFailed.
    """
    with _failing():
        store: Any = TCPStore(address, port, size, rank == 0, timedelta(seconds=seconds))
    if name:  # the prefixes that torch's process groups add to their keys
        for prefix in (name, f"{name}/", f"{device.type}/"):
            store = PrefixStore(prefix, store)
    if device.type == "cuda":
        kind = TorchNcclGroup if name else NcclGroup
        return kind(store, rank, size, device, seconds)
    return GlooGroup(store if name else PrefixStore("manta", store), rank, size, seconds)
