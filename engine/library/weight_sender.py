"""WeightSender: sends a trainer's weights to engines, over NCCL or gloo.

The messages that announce weights are sent separately, for example over HTTP: `init_info` to
/init_weight_transfer_engine, `update_info` to /update_weights. Both messages are vLLM's, so the
sender works for vLLM's engines too.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.weights.transfers.trainer_group import SECONDS, TrainerGroup, open_group
from engine.weights.transfers.transfer import Header, chunks

_BUFFER = 1 << 30


class WeightSender:
    """The sender of weights: rank 0 in a group of one trainer and its engines.

    address, port: the address at which engines reach this process; the port must be free.
    receivers: number of engines (`GET /get_world_size`).
    device: the device of the tensors: NCCL connects GPUs, gloo CPUs.
    packed: whether tensors are packed into broadcasts of about buffer_bytes.
    seconds: timeout for the engines.
    """

    def __init__(
        self,
        address: str,
        port: int,
        receivers: int,
        device: str | torch.device = "cuda",
        *,
        packed: bool = True,
        buffer_bytes: int = _BUFFER,
        seconds: float = SECONDS,
    ) -> None:
        self.init_info: dict[str, Any] = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": receivers + 1,
        }
        self._device = torch.device(device)
        if str(self._device) == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._packed = packed
        self._buffer_bytes = buffer_bytes
        self._seconds = seconds
        self._group: TrainerGroup | None = None
        self._failure: Exception | None = None
        self._opening = threading.Thread(target=self._open, name="sender", daemon=True)
        self._opening.start()

    def _open(self) -> None:
        info = self.init_info
        address, port, size = info["master_address"], info["master_port"], info["world_size"]
        try:
            self._group = open_group(address, port, 0, size, self._device, self._seconds)
        except Exception as error:
            self._failure = error

    def update_info(self, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        """Return the message that announces tensors; call `send` with the tensors in the same
        order."""
        info: dict[str, Any] = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        if self._packed:
            info |= {"packed": True, "packed_buffer_size_bytes": self._buffer_bytes}
        return info

    @torch.no_grad()
    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast tensors to all engines, after the `update_info` message was sent to them.

        Returns once the last tensor is sent. Raises UpdateFailed.
        """
        self._opening.join()
        if self._failure is not None:
            raise self._failure
        assert self._group is not None
        pairs = [(name, tensor.detach()) for name, tensor in tensors]
        headers: list[Header] = [(name, item.dtype, tuple(item.shape)) for name, item in pairs]
        by_name = dict(pairs)
        for chunk in chunks(headers, self._buffer_bytes if self._packed else -1):
            items = [by_name[name].to(self._device).contiguous() for name, _, _ in chunk]
            if not self._packed:
                self._group.broadcast(items[0])
            else:
                raws = [item.reshape(-1).view(torch.uint8) for item in items]
                self._group.broadcast(torch.cat(raws))

    def close(self) -> None:
        """Leave the group of trainer and engines. Idempotent."""
        if self._group is not None:
            self._group.close()
