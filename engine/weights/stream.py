"""Parallel reading of checkpoint bytes into parameters, in the order in which files have them.

Threads, because a positional read and a device copy both release the interpreter lock. On the CPU
bytes go straight into the parameter where nothing has to be converted, they are looked at while
they are in the processor's cache, and what belongs together is packed as soon as it is there. On
CUDA each thread owns two pinned buffers and a stream: one buffer is being read into while the other
is being copied to the device.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.parameter import Source, some_rows, span
from engine.weights.stored import StoredTensor

# Large enough that the costs of a chunk vanish, and small: on the CPU it is to stay in the cache,
# and of pinned ones there are two a thread.
CPU_CHUNK = 2 << 20
CUDA_CHUNK = 8 << 20
_GAP = 4096  # bytes between two tensors that are read with them, rather than by another call
CUDA_THREADS = 16  # a thread copies some 3 GB/s out of the page cache, the bus takes 25 to 55 GB/s
_LOOK = 0.1  # seconds between reports
# Of a number, the bits that are all ones in infinities and NaNs, and only there.
_EXPONENTS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
}


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


@dataclass(frozen=True, slots=True)
class Loading:
    """How far it is. done, total: bytes of the files. seconds: since it began."""

    done: int
    total: int
    seconds: float

    @property
    def fraction(self) -> float:
        return self.done / max(1, self.total)

    def __str__(self) -> str:
        """For people: "12.3 of 16.1 GB, 9.8 GB/s, 1 s left"."""
        rate = self.done / max(self.seconds, 1e-6)
        speed = f"{rate / 1e9:.1f} GB/s"
        if self.done >= self.total:
            return f"{self.total / 1e9:.1f} GB in {self.seconds:.1f} s, {speed}"
        left = f"{(self.total - self.done) / rate:.0f} s left" if self.done else "no byte yet"
        return f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {speed}, {left}"


@dataclass(slots=True)
class Job:
    """Transfers that end together. then: what comes after them. On the CPU one of the threads calls
    it, as soon as all are there; on CUDA it is the caller's to call, when all jobs are done."""

    transfers: list[Transfer]
    then: Callable[[], None]
    left: int = 0  # parts that are not read


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    progress: Callable[[Loading], None] | None = None,
) -> None:
    """Do them all. Host memory: a chunk or two for each thread.

    Raises ConfigError naming file and tensor, on the CPU also for a number that is not finite.
    """
    cuda = device.type == "cuda"
    # On the CPU parts are packed as soon as they are there, and nothing is won by waiting for more.
    queue = _Queue(jobs, CUDA_CHUNK if cuda else CPU_CHUNK, CUDA_CHUNK if cuda else 0)
    descriptors: dict[Path, int] = {}
    try:
        for file in queue.files:
            descriptors[file] = os.open(file, os.O_RDONLY)
        if cuda:
            torch.cuda.synchronize(device)  # what the memory was before may still be written
            count = min(CUDA_THREADS, max(4, len(os.sched_getaffinity(0))))
        else:
            count = max(2, torch.get_num_threads())
        count = max(1, min(count, queue.pieces))

        inference = torch.is_inference_mode_enabled()

        def make_reader() -> _Reader:
            if cuda:
                return _CudaReader(descriptors, device, queue.largest)
            return _CpuReader(descriptors)

        how = (make_reader, not cuda, inference)
        threads = [
            Thread(target=queue.work, args=how, name="weights", daemon=True) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            queue.watch(len(threads), progress)
        finally:
            queue.close()
            for thread in threads:
                thread.join()
        if cuda:
            torch.cuda.synchronize(device)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", param="model") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class _Reader(Protocol):
    def run(self, parts: Sequence[Transfer]) -> int:
        """parts: of one file, behind each other. Returns the bytes read; on CUDA their copies to
        the device are launched."""
        ...


@dataclass(slots=True)
class _Piece:
    """Parts that one thread reads at once, and the job of each. A checkpoint with ten thousand
    small tensors would else pay for as many reads, each with a turn at the interpreter's lock."""

    parts: list[Transfer]
    jobs: list[Job]
    end: int = 0  # of their bytes in the file

    def takes(self, part: Transfer, limit: int) -> bool:
        """Whether the next part belongs here too."""
        if not self.parts or part.stored.file != self.parts[0].stored.file:
            return False
        begin, (offset, length) = self.parts[0].byte_range[0], part.byte_range
        aligned = (offset - begin) % part.stored.dtype.itemsize == 0
        return 0 <= offset - self.end < _GAP and offset + length - begin <= limit and aligned

    def add(self, part: Transfer, job: Job) -> None:
        self.parts.append(part)
        self.jobs.append(job)
        self.end = sum(part.byte_range)


class _Queue:
    """The parts that are to be read, in the order of files, and how far that is."""

    def __init__(self, jobs: Sequence[Job], chunk: int, together: int) -> None:
        """chunk: bytes of a part at most. together: of parts that are read at once."""
        entries = []
        self.total = self.largest = 0
        for job in jobs:
            for transfer in job.transfers:
                for part in transfer.split(chunk):
                    offset, length = part.byte_range
                    entries.append((str(part.stored.file), offset, part, job))
                    job.left += 1
                    self.total += length
                    self.largest = max(self.largest, length)
            job.transfers = []  # a part is held until it is read, a matrix until it is packed
        entries.sort(key=lambda entry: entry[:2])
        self.files = {entry[2].stored.file for entry in entries}
        self._waiting: deque[_Piece] = deque(_Piece([], [job]) for job in jobs if not job.left)
        piece = _Piece([], [])
        for *_, part, job in entries:
            if not piece.takes(part, together):
                piece = _Piece([], [])
                self._waiting.append(piece)
            piece.add(part, job)
            self.largest = max(self.largest, piece.end - piece.parts[0].byte_range[0])
        self.pieces = len(self._waiting)
        self._changed = Condition()
        self._done = 0
        self._ended = 0  # threads
        self._error: BaseException | None = None

    def work(self, make_reader: Callable[[], _Reader], then: bool, inference: bool) -> None:
        """What a thread does. then: it also does what comes after a job's last part. inference:
        torch's mode of the caller, which is one of each thread."""
        try:
            with torch.inference_mode():  # else parameters made in that mode refuse
                reader = make_reader()
            while (piece := self._next()) is not None:
                ended = self._read(reader, piece)
                del piece  # what its parts hold is packed now
                for job in ended if then else ():
                    with torch.inference_mode(inference):
                        job.then()
                    job.then = _nothing
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _read(self, reader: _Reader, piece: _Piece) -> list[Job]:
        """The jobs that end with it."""
        if not piece.parts:
            return piece.jobs
        with torch.inference_mode():
            count = reader.run(piece.parts)
        ended = []
        with self._changed:
            self._done += count
            for job in piece.jobs:
                job.left -= 1
                if not job.left:
                    ended.append(job)
        return ended

    def _next(self) -> _Piece | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self.close()

    def close(self) -> None:
        self._waiting.clear()

    def watch(self, threads: int, progress: Callable[[Loading], None] | None) -> None:
        """Report until the threads have ended. Raises what one has raised."""
        began = time.monotonic()
        last = -1
        over = False
        while not over:
            with self._changed:
                self._changed.wait_for(lambda: self._ended == threads, _LOOK)
                over, done = self._ended == threads, self._done
            if progress is not None and done != last and self._error is None:
                progress(Loading(done, self.total, time.monotonic() - began))
                last = done
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    pass


def _direct(part: Transfer) -> bool:
    """Whether the target has the very bytes that are read."""
    source, target = part.source, part.target
    return (
        target.dtype == part.stored.dtype
        and target.is_contiguous()
        and not source.transpose
        and not isinstance(source.rows, np.ndarray)
        and (source.columns is None or source.columns == (0, part.stored.shape[1]))
    )


class _CpuReader:
    def __init__(self, descriptors: dict[Path, int]) -> None:
        self._descriptors = descriptors

    def run(self, parts: Sequence[Transfer]) -> int:
        return sum(map(self._run, parts))

    def _run(self, part: Transfer) -> int:
        offset, length = part.byte_range
        target, direct = part.target, _direct(part)
        raw = (
            target.view(-1).view(torch.uint8) if direct else torch.empty(length, dtype=torch.uint8)
        )
        _read(self._descriptors[part.stored.file], raw, offset, [part])
        if not direct:
            target.copy_(part.take(raw))
        _check_finite(part)
        return length


def _check_finite(part: Transfer) -> None:
    """Of what is on the CPU and in its cache."""
    kind = _EXPONENTS.get(part.target.dtype)
    if kind is None:
        return
    words, exponent = kind
    bits: Any = part.target.contiguous().view(-1).view(torch.uint8).numpy().view(words)
    if bits.size and (bits & words(exponent)).max() == exponent:
        raise not_finite(part.stored, part.target.dtype)


def not_finite(stored: StoredTensor, dtype: torch.dtype) -> ConfigError:
    name = str(dtype).removeprefix("torch.")
    return ConfigError(
        f"{stored.file}: tensor {stored.name} holds NaN or infinity (as {name})", param="model"
    )


class _CudaReader:
    """A stream, two pinned buffers and the events of their last copies."""

    def __init__(self, descriptors: dict[Path, int], device: torch.device, size: int) -> None:
        self._descriptors = descriptors
        self._device = device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def run(self, parts: Sequence[Transfer]) -> int:
        self._turn ^= 1
        event = self._events[self._turn]
        event.synchronize()
        ranges = [part.byte_range for part in parts]
        begin, end = ranges[0][0], sum(ranges[-1])
        raw = self._buffers[self._turn][: end - begin]
        _read(self._descriptors[parts[0].stored.file], raw, begin, parts)
        with torch.cuda.stream(self._stream):
            for part, (offset, length) in zip(parts, ranges, strict=True):
                self._copy(part, raw[offset - begin :][:length])
            event.record(self._stream)
        return sum(length for _, length in ranges)

    def _copy(self, part: Transfer, raw: Tensor) -> None:
        """Launch it. raw: the part's bytes, pinned."""
        target = part.target
        if _direct(part):
            target.view(-1).view(torch.uint8).copy_(raw, non_blocking=True)
        else:
            staged = raw.to(self._device, non_blocking=True)
            target.copy_(part.take(staged), non_blocking=True)


def _read(descriptor: int, raw: Tensor, offset: int, parts: Sequence[Transfer]) -> None:
    """Fill raw (uint8, on the host), which has the parts, from the file at offset."""
    view = memoryview(raw.numpy().data)
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            stored = next(part.stored for part in parts if offset < sum(part.byte_range))
            raise ConfigError(
                f"{stored.file}: tensor {stored.name}: the file ended while it was being read",
                param="model",
            )
        view = view[count:]
        offset += count
