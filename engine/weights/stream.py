"""Parallel reading of checkpoint bytes into parameters.

Threads, because a positional read and a device copy both release the interpreter lock. On the CPU
bytes go straight into the parameter where nothing has to be converted. On CUDA each thread owns
two pinned buffers and a stream: one buffer is being read into while the other is being copied to
the device.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from threading import local

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.parameter import Source, some_rows, span
from engine.weights.stored import StoredTensor

CHUNK_BYTES = 32 << 20  # large enough that per-chunk costs vanish, small enough to pin 16 of them
CUDA_THREADS = 8  # a thread copies some 3 GB/s out of the page cache, the bus takes over 25 GB/s


@dataclass(frozen=True, slots=True)
class Transfer:
    """Fill target (a view of a parameter) with what source takes of a stored tensor."""

    target: Tensor
    source: Source
    stored: StoredTensor

    def split(self, limit: int) -> Iterator["Transfer"]:
        """By rows, so that each part reads at most ``limit`` bytes (or one row)."""
        source, stored = self.source, self.stored
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        each = max(1, limit // max(1, row_bytes))
        count = source.num_rows
        if source.transpose or count <= each:
            yield self
            return
        rows = source.rows if source.rows is not None else (0, count)
        for at in range(0, count, each):
            part = replace(source, rows=some_rows(rows, at, at + each))
            yield Transfer(self.target[at : at + each], part, stored)

    @property
    def byte_range(self) -> tuple[int, int]:
        """(offset, length) of the bytes that hold the rows; all of the tensor's if transposed."""
        stored, source = self.stored, self.source
        if source.transpose or source.rows is None:
            return stored.offset, stored.num_bytes
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        begin, end = span(source.rows)
        return stored.offset + begin * row_bytes, (end - begin) * row_bytes

    def take(self, raw: Tensor) -> Tensor:
        """raw uint8 [byte_range's length] -> the values, shaped like target."""
        source, stored = self.source, self.stored
        values = raw.view(stored.dtype)
        if source.transpose or source.rows is None:
            return source.take(values.view(stored.shape))
        values = values.view(-1, *stored.shape[1:])
        rows = source.rows
        within = None if isinstance(rows, tuple) else rows - span(rows)[0]
        return replace(source, rows=within).take(values)


def run_transfers(
    transfers: Sequence[Transfer], device: torch.device, progress: Callable[[float], None] | None
) -> None:
    """Do them all. progress gets the fraction of bytes done. Raises ConfigError naming the file."""
    cuda = device.type == "cuda"
    parts = [part for transfer in transfers for part in transfer.split(CHUNK_BYTES)]
    total = sum(part.byte_range[1] for part in parts) or 1
    files = {part.stored.file for part in parts}
    descriptors: dict[Path, int] = {}
    try:
        for file in files:
            descriptors[file] = os.open(file, os.O_RDONLY)
        reader = _CudaReader(descriptors, device, parts) if cuda else _CpuReader(descriptors)
        workers = CUDA_THREADS if cuda else max(2, torch.get_num_threads())
        with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
            futures = [pool.submit(reader.run, part) for part in parts]
            done = 0
            try:
                for future in as_completed(futures):
                    done += future.result()
                    if progress is not None:
                        progress(done / total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if cuda:
            torch.cuda.synchronize(device)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", param="model") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class _CpuReader:
    def __init__(self, descriptors: dict[Path, int]) -> None:
        self._descriptors = descriptors

    @torch.inference_mode()  # a mode of the thread; without it parameters made in that mode refuse
    def run(self, part: Transfer) -> int:
        """Returns the bytes read."""
        offset, length = part.byte_range
        source, target = part.source, part.target
        direct = (
            target.dtype == part.stored.dtype
            and target.is_contiguous()
            and not source.transpose
            and not isinstance(source.rows, np.ndarray)
            and (source.columns is None or source.columns == (0, part.stored.shape[1]))
        )
        raw = (
            target.view(-1).view(torch.uint8) if direct else torch.empty(length, dtype=torch.uint8)
        )
        _read(self._descriptors[part.stored.file], raw, offset, part.stored)
        if not direct:
            target.copy_(part.take(raw))
        return length


class _Lane:
    """What a thread owns: a stream, two pinned buffers and the events of their last copies."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)]
        self.turn = 0


class _CudaReader:
    def __init__(
        self, descriptors: dict[Path, int], device: torch.device, parts: Sequence[Transfer]
    ) -> None:
        self._descriptors = descriptors
        self._device = device
        self._size = max((part.byte_range[1] for part in parts), default=1)
        self._lanes = local()

    @torch.inference_mode()  # a mode of the thread; without it parameters made in that mode refuse
    def run(self, part: Transfer) -> int:
        """Returns the bytes read; their copy to the device is launched."""
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            torch.cuda.set_device(self._device)
            lane = self._lanes.lane = _Lane(self._size, self._device)
        lane.turn ^= 1
        event = lane.events[lane.turn]
        event.synchronize()
        offset, length = part.byte_range
        raw = lane.buffers[lane.turn][:length]
        _read(self._descriptors[part.stored.file], raw, offset, part.stored)
        with torch.cuda.stream(lane.stream):
            staged = raw.to(self._device, non_blocking=True)
            part.target.copy_(part.take(staged), non_blocking=True)
            event.record(lane.stream)
        return length


def _read(descriptor: int, raw: Tensor, offset: int, stored: StoredTensor) -> None:
    """Fill raw (uint8, on the host) from the file at offset."""
    view = memoryview(raw.numpy().data)
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name}: the file ended while it was being read",
                param="model",
            )
        view = view[count:]
        offset += count
