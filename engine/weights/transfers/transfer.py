"""WeightTransfer: receives the weights that a trainer sends to an engine.

The messages are vLLM's: `init_info`, and `update_info` with names, dtypes and shapes. Tensors are
broadcast (`trainer_group`), or shared by a trainer on the same machine (`handles`), also in the
format of SGLang's trainers. The tensors are collected in a folder, from which the engine loads the
update like any other model folder.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from engine.errors import ConfigError, UpdateFailed
from engine.messages import NOT_JOINED
from engine.weights.staging import WeightStage
from engine.weights.transfers.handles import (
    DTYPES,
    SerializedTensors,
    SharedBytes,
    from_plain,
    open_handle,
    read_handles,
)
from engine.weights.transfers.trainer_group import SECONDS, TrainerGroup, open_group

# seconds without a message after which a new update may replace an unfinished one
ABANDONED_SECONDS = 60.0
# Name, dtype and shape of a tensor.
Header = tuple[str, torch.dtype, tuple[int, ...]]


def num_bytes(header: Header) -> int:
    """Return the bytes of the tensor that a header describes."""
    _, dtype, shape = header
    return math.prod(shape) * dtype.itemsize


class InitInfo(msgspec.Struct):
    """The message with the parameters of a trainer's group.

    rank_offset: this engine's rank in the group.
    world_size: the number of ranks of trainer and engines together.
    packed, packed_buffer_size_bytes: the defaults for updates whose UpdateInfo omits these fields,
        as from trainers of vLLM 0.28 or later.
    group_name: name of a torch process group (SGLang); "" = vLLM's group, which has no name.
    backend: the backend of the torch group, which must fit the engine's device.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    group_name: str = ""
    backend: str = ""


class SerializedInfo(msgspec.Struct):
    """The tensors of a message that SGLang's trainers serialise; see `SerializedTensors`."""

    serialized_named_tensors: list[str]
    load_format: str = ""


class CheckpointNames(Protocol):
    """The mapping of a checkpoint's tensor names to the model's names."""

    def name_of(self, stored: str) -> str:
        """Return the model's name for a checkpoint's tensor; "" if the model ignores the tensor."""
        ...

    def names(self) -> set[str]:
        """Return the model's names of all tensors that a checkpoint must have."""
        ...


class UpdateInfo(msgspec.Struct):
    """The message that announces tensors which the trainer sends or shares, in this order.

    packed: whether the tensors' bytes are concatenated in broadcasts, each of which ends with the
        tensor that exceeds packed_buffer_size_bytes; None = the value in InitInfo.
    ipc_handles: for each tensor {"cpu": its position in shared memory}.
    ipc_handles_pickled: CUDA IPC handles of each tensor, as a pickle in base64.
    cuda_handles: CUDA IPC handles as plain data, from a trainer that uses this library.
    tensor_sizes: bytes of each tensor, if there is one handle of a buffer with all of them.
    sizes: elements of each tensor, which SkyRL sends instead of bytes.
    group_name: the group in which tensors are broadcast; "" = vLLM's.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    packed_num_buffers: int = 2
    ipc_handles: list[dict[str, SharedBytes]] | None = None
    ipc_handles_pickled: str | None = None
    cuda_handles: list[dict[str, list[Any]]] | None = None
    tensor_sizes: list[int] | None = None
    sizes: list[int] | None = None
    group_name: str = ""

    def headers(self) -> list[Header]:
        """Return name, dtype and shape of each tensor. Raises UpdateFailed."""
        count = len(self.names)
        for key in ("dtype_names", "shapes", "ipc_handles", "tensor_sizes", "sizes"):
            values = getattr(self, key)
            if values is not None and len(values) != count:
                raise _wrong(f"{key} has {len(values)} entries for {count} names")
        for name in self.dtype_names:
            if name not in DTYPES:
                raise _wrong(f"dtype_names: {name!r} is no dtype of weights")
        dtypes = [DTYPES[name] for name in self.dtype_names]
        headers = list(zip(self.names, dtypes, map(tuple, self.shapes), strict=True))
        sizes = [num_bytes(header) for header in headers]
        if self.sizes is not None:
            if self.sizes != [math.prod(shape) for _, _, shape in headers]:
                raise _wrong("sizes are not the elements of shapes")
            self.tensor_sizes = sizes
        if self.tensor_sizes not in (None, sizes):
            raise _wrong("tensor_sizes are not the bytes of shapes and dtypes")
        return headers


class WeightTransfer:
    """The engine's receiver of a trainer's weights; all methods are called on one thread.

    device: the engine's device, where broadcasts arrive.
    num_bytes: bytes of the checkpoint; 0 = unknown.
    seconds: timeout for the trainer.
    hold: called with the folder of each complete update and its tensors on the device; None = the
        engine reads the folder's files.
    free_bytes: returns the device's free bytes, which held tensors could take.
    checkpoint: the names of a complete checkpoint's tensors; None = `collect` never completes an
        update.
    """

    def __init__(
        self,
        device: torch.device,
        num_bytes: int,
        seconds: float = SECONDS,
        hold: Callable[[str, Mapping[str, Tensor]], None] | None = None,
        free_bytes: Callable[[], int] = lambda: 0,
        checkpoint: CheckpointNames | None = None,
    ) -> None:
        if str(device) == "cuda":  # handles and streams need the device's index
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._num_bytes = num_bytes
        self._seconds = seconds
        self._hold = hold
        self._free_bytes = free_bytes
        self._checkpoint = checkpoint
        # a separate stream, so that copies and steps do not wait for each other
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._groups: dict[str, TrainerGroup] = {}  # group name -> group
        self._packing = (False, 0)  # (packed, bytes of a buffer) for updates that omit these fields
        self._stage: WeightStage | None = None
        # whether `start` began the current update, so that `finish` has to end it
        self._explicit = False
        self._heard = 0.0  # time at which the trainer's last message was handled
        self._folders: list[WeightStage] = []  # complete updates
        self._placed = ""  # the folder whose weights the engine has
        # (handle, tensor) of the last opened shared buffer
        self._buffer: tuple[dict[str, Any], Tensor] | None = None
        self._names: set[str] | None = None  # names of all tensors, once `collect` was called
        self._missing: set[str] = set()  # names that `collect` waits for

    def init(self, info: dict[str, Any]) -> None:
        """Join a trainer's group, and drop an update in progress. Raises UpdateFailed.

        info: the fields of InitInfo; {} leaves all groups, and only group_name leaves that group.
        """
        self._drop_stage()
        if not info.keys() - {"group_name"}:
            for name in [info["group_name"]] if info else [*self._groups]:
                self._leave(name)
            return
        self._leave(info.get("group_name", ""))
        wanted = _read(info, InitInfo, "init_info")
        own = "nccl" if self._device.type == "cuda" else "gloo"
        if wanted.backend not in ("", own):
            raise UpdateFailed(
                f"backend is {wanted.backend!r}, and this engine's device needs {own!r}",
                param="backend",
            )
        self._groups[wanted.group_name] = open_group(
            wanted.master_address,
            wanted.master_port,
            wanted.rank_offset,
            wanted.world_size,
            self._device,
            self._seconds,
            wanted.group_name,
        )
        self._packing = wanted.packed, wanted.packed_buffer_size_bytes

    def start(self, info: dict[str, Any]) -> None:
        """Begin an update of several messages, and drop an abandoned earlier one.

        Raises UpdateFailed, also during another trainer's update.

        info: not used, like that of `finish` and `drop`.
        """
        busy = self._stage is not None and self._explicit
        if busy and time.monotonic() - self._heard < ABANDONED_SECONDS:
            raise UpdateFailed(
                "an update of the weights has begun and goes on; finish_weight_update, or "
                "init_weight_transfer_engine, which drops it",
                code="update_in_progress",
            )
        self.drop({})
        with _as_update_error():
            self._stage = WeightStage(self._num_bytes, self._hold_on())
        self._explicit, self._heard = True, time.monotonic()

    def update(self, info: dict[str, Any]) -> str:
        """Receive the tensors of a message.

        Returns "" during an update that `start` began and `finish` will end. Otherwise the message
        is a complete update, whose folder is returned. Raises UpdateFailed, after which the update
        is dropped.

        info: the fields of UpdateInfo.
        """
        if self._stage is None:
            self.start({})
            self._explicit = False
        self._add(info)
        return "" if self._explicit else self.finish({})

    def collect(self, info: dict[str, Any]) -> str:
        """Receive the tensors of a message, during an update that `start` began.

        Returns the update's folder once all tensors of the checkpoint were received, "" before
        that. Without `checkpoint` the result is always "". Raises UpdateFailed, after which the
        update is dropped.

        info: the fields of UpdateInfo.
        """
        if self._stage is None:
            raise UpdateFailed("no update of the weights was started", code=NOT_JOINED)
        if self._checkpoint is None:
            self._add(info)
            return ""
        if self._names is None:
            self._names = self._checkpoint.names()
            self._missing = {*self._names}
        self._add(info, self._checkpoint)
        return "" if self._missing else self.finish({})

    def _add(self, info: dict[str, Any], checkpoint: CheckpointNames | None = None) -> None:
        """Receive the tensors of a message into the update's folder.

        checkpoint: names of the tensors to keep; None = all.
        """
        assert self._stage is not None
        try:
            with _as_update_error(), torch.cuda.stream(self._stream):
                for name, tensor in self._tensors(info):
                    if checkpoint is None or self._is_needed(name, checkpoint):
                        self._stage.add(name, tensor)
                if self._stream is not None:
                    # the trainer may overwrite shared tensors once its message is answered
                    self._stream.synchronize()
        except BaseException:
            self._drop_stage()
            raise
        self._heard = time.monotonic()

    def _is_needed(self, name: str, checkpoint: CheckpointNames) -> bool:
        """Whether the model uses a tensor. Raises UpdateFailed for an unexpected one."""
        needed = checkpoint.name_of(name)
        if needed and needed not in (self._names or ()):
            raise UpdateFailed(
                f"unexpected tensor {name}: the architecture has no use for it", param="update_info"
            )
        self._missing.discard(needed)
        return bool(needed)

    def finish(self, info: dict[str, Any]) -> str:
        """End an update that `start` has begun; return its folder. Raises UpdateFailed."""
        if self._stage is None:
            raise UpdateFailed("no update of the weights was started", code=NOT_JOINED)
        try:
            with _as_update_error(), torch.cuda.stream(self._stream):
                self._stage.close()
        except BaseException:
            self._drop_stage()
            raise
        stage = self._stage
        self._folders.append(stage)
        self._stage = self._buffer = self._names = None
        if self._hold is not None and stage.held:
            self._hold(str(stage.folder), stage.held)
        return str(stage.folder)

    def drop(self, info: dict[str, Any]) -> None:
        """Drop the updates that the engine has not loaded, complete or not."""
        self._drop_stage()
        for stage in self._folders:
            if str(stage.folder) != self._placed:
                stage.discard()
        self._folders = [stage for stage in self._folders if str(stage.folder) == self._placed]

    def in_place(self, folder: str) -> None:
        """Record which folder the engine has loaded, and release the folder's tensors.

        Other updates are dropped, unless an update is in progress.
        """
        self._placed = folder
        for stage in self._folders:
            if str(stage.folder) == folder:
                stage.release()
        if self._stage is None:
            self.drop({})

    def close(self) -> None:
        """Leave all groups and delete all folders. Idempotent."""
        self.init({})
        self._placed = ""
        self.drop({})

    def _hold_on(self) -> torch.device | None:
        """Return the device on which to keep tensors, if half of its free memory suffices; else
        None.

        The other half is for the layers being replaced, and for a trainer on the same device.
        """
        if self._hold is None or not self._num_bytes:
            return None
        return self._device if self._free_bytes() // 2 >= self._num_bytes else None

    def _leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def _drop_stage(self) -> None:
        self._buffer = self._names = None
        if self._stage is not None:
            self._stage.discard()
            self._stage = None

    def _tensors(self, info: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Receive a message's tensors; yield (name, tensor), valid until the next one is
        yielded."""
        if "serialized_named_tensors" in info:
            serialized = _read(info, SerializedInfo, "update_info")
            encoded = serialized.serialized_named_tensors
            yield from SerializedTensors(encoded, serialized.load_format, self._device)
            return
        message: UpdateInfo = _read(info, UpdateInfo, "update_info")
        headers = message.headers()
        if message.ipc_handles_pickled is not None or message.cuda_handles is not None:
            yield from self._shared_by_cuda(message)
        elif message.ipc_handles is not None:
            for (name, dtype, shape), places in zip(headers, message.ipc_handles, strict=True):
                if "cpu" not in places:
                    raise _wrong(f'ipc_handles of {name}: the key "cpu" is missing')
                raw = places["cpu"].read(num_bytes((name, dtype, shape)))
                yield name, raw.view(dtype).view(shape)
        else:
            yield from self._broadcast(message, headers)

    def _shared_by_cuda(self, message: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        headers = message.headers()
        if message.ipc_handles_pickled is not None:
            handles = read_handles(message.ipc_handles_pickled)
        else:
            handles = [
                {uuid: from_plain(arguments) for uuid, arguments in places.items()}
                for places in message.cuda_handles or ()
            ]
        if message.tensor_sizes is not None:
            if len(handles) != 1:
                raise _wrong(f"tensor_sizes go with the handle of one buffer, not {len(handles)}")
            (handle,) = handles
            if self._buffer is None or self._buffer[0] != handle:
                # opened once for all messages, as torch counts each opening
                self._buffer = handle, open_handle(handle, self._device).view(torch.uint8)
            sizes = message.tensor_sizes
            raws = self._buffer[1].flatten()[: sum(sizes)].split(sizes)
            for (name, dtype, shape), raw in zip(headers, raws, strict=True):
                yield name, raw.clone().view(dtype).view(shape)
            return
        if len(handles) != len(headers):
            raise _wrong(f"{len(handles)} handles for {len(headers)} names")
        # All tensors stay open until the last copy, as closing a tensor waits for earlier copies.
        tensors = [open_handle(handle, self._device) for handle in handles]
        for (name, dtype, shape), tensor in zip(headers, tensors, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise _wrong(
                    f"tensor {name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, and "
                    f"{list(shape)} and {dtype} were announced"
                )
        for (name, _, _), tensor in zip(headers, tensors, strict=True):
            yield name, tensor

    def _broadcast(
        self, message: UpdateInfo, headers: list[Header]
    ) -> Iterator[tuple[str, Tensor]]:
        group = self._groups.get(message.group_name)
        if group is None:
            named, first = "", "init_weight_transfer_engine"
            if message.group_name:
                named, first = f" called {message.group_name!r}", "init_weights_update_group"
            raise UpdateFailed(
                f"this engine is in no trainer's group{named}; {first} first", code=NOT_JOINED
            )
        try:
            packed, size = self._packing
            packed = packed if message.packed is None else message.packed
            limit = (message.packed_buffer_size_bytes or size) if packed else -1
            for chunk in chunks(headers, limit):
                sizes = [num_bytes(header) for header in chunk]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                if not packed:
                    (_, dtype, shape) = chunk[0]
                    group.broadcast(buffer.view(dtype).view(shape))
                else:
                    group.broadcast(buffer)
                for (name, dtype, shape), raw in zip(chunk, buffer.split(sizes), strict=True):
                    yield name, raw.clone().view(dtype).view(shape)
        except UpdateFailed:
            # the group is left, as its ranks are out of step after a failed broadcast
            self._leave(message.group_name)
            raise


def chunks(headers: list[Header], limit: int) -> Iterator[list[Header]]:
    """Divide tensors among broadcasts; yield the headers of each broadcast's tensors.

    A broadcast ends with the tensor with which its bytes exceed the limit.

    limit: bytes; -1 = a broadcast for each tensor.
    """
    chunk: list[Header] = []
    size = 0
    for header in headers:
        chunk.append(header)
        size += num_bytes(header)
        if size > limit:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextlib.contextmanager
def _as_update_error() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise UpdateFailed(error.message, param=error.param) from None


def _read(info: dict[str, Any], kind: type[Any], what: str) -> Any:
    try:
        return msgspec.convert(info, kind)
    except msgspec.ValidationError as error:
        raise UpdateFailed(f"{what}: {error}", param=what) from None


def _wrong(message: str) -> UpdateFailed:
    return UpdateFailed(f"update_info: {message}", param="update_info")
