"""Parallel reading of checkpoint bytes into parameters, in the order of the files.

Threads are effective, because positional reads and device copies both release the GIL. On the CPU
bytes are read directly into the parameter if no conversion is necessary, and checked while they are
in the processor's cache. Parameters are packed as soon as they are complete. On CUDA each thread
has two pinned buffers and a stream. One buffer is filled while the other is copied to the device.
Transient parameters have memory from their first part until they are packed. So all parts of such a
parameter are read together, wherever they are in the files. Readers wait while too much of this
memory is in use.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.parameter import Source, some_rows, span
from engine.weights.stored import StoredTensor

# Bytes of a chunk, large enough that the overhead is negligible. On the CPU a chunk must fit in the
# cache; on CUDA each thread has two pinned chunks.
CPU_CHUNK = 2 << 20
CUDA_CHUNK = 8 << 20
_GAP = 4096  # maximum bytes between parts that are read in one call
# number of threads: one copies some 3 GB/s from the page cache, and the bus takes 25 to 55 GB/s
CUDA_THREADS = 16
_LOOK = 0.1  # seconds between reports
# The minimum limit for the bytes of unpacked parameters, several times what the threads read at
# once, so that threads do not wait for each other with small layers.
LEAST_OPEN = {"cpu": 64 << 20, "cuda": 512 << 20}
# dtype -> (integer dtype, exponent bits), which are all ones only in infinities and NaNs
EXPONENTS: dict[torch.dtype, tuple[Any, int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of a part of a stored tensor (`source`) to rows of a parameter.

    whole: the parameter's tensor.
    at: the first row of `whole` to fill.
    """

    whole: Tensor
    at: int
    source: Source
    stored: StoredTensor

    @property
    def target(self) -> Tensor:
        """The rows of the parameter to fill; the tensor must have memory."""
        return self.whole[self.at : self.at + self.source.num_rows]

    def split(self, limit: int) -> Iterator["Transfer"]:
        """Divide the transfer by rows into parts that read at most ``limit`` bytes (or one row)."""
        source, stored = self.source, self.stored
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        step = max(1, limit // max(1, row_bytes))
        count = source.num_rows
        if source.transpose or count <= step:
            yield self
            return
        rows = source.rows if source.rows is not None else (0, count)
        for at in range(0, count, step):
            part = replace(source, rows=some_rows(rows, at, at + step))
            yield Transfer(self.whole, self.at + at, part, stored)

    @property
    def byte_range(self) -> tuple[int, int]:
        """The (offset, length) of the rows' bytes in the file; of the whole tensor if
        transposed."""
        stored, source = self.stored, self.source
        if source.transpose or source.rows is None:
            return stored.offset, stored.num_bytes
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        begin, end = span(source.rows)
        return stored.offset + begin * row_bytes, (end - begin) * row_bytes

    def to_values(self, raw: Tensor) -> Tensor:
        """Return the values of raw bytes, with the shape of the target.

        raw: uint8, of byte_range's length.
        """
        source, stored = self.source, self.stored
        values = raw.view(stored.dtype)
        if source.transpose or source.rows is None:
            return source.part_of(values.view(stored.shape))
        values = values.view(-1, *stored.shape[1:])
        rows = source.rows
        within = None if isinstance(rows, tuple) else rows - span(rows)[0]
        return replace(source, rows=within).part_of(values)


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of loading weights.

    done, total: the bytes read so far, and the bytes of all files.
    seconds: the time since loading began.
    """

    done: int
    total: int
    seconds: float

    @property
    def fraction(self) -> float:
        return self.done / max(1, self.total)

    def __str__(self) -> str:
        """Return the progress for people: "12.3 of 16.1 GB, 9.8 GB/s, 1 s left"."""
        rate = self.done / max(self.seconds, 1e-6)
        speed = f"{rate / 1e9:.1f} GB/s"
        if self.done >= self.total:
            return f"{self.total / 1e9:.1f} GB in {self.seconds:.1f} s, {speed}"
        time_left = f"{(self.total - self.done) / rate:.0f} s left" if self.done else "no byte yet"
        return f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {speed}, {time_left}"


@dataclass(slots=True)
class Job:
    """A group of transfers, with work to do when all are done.

    then: a function to call when all transfers are done. On the CPU a reading thread calls it. On
        CUDA `run_jobs` calls it for jobs with `allocate`; for other jobs the caller of `run_jobs`
        does, when all jobs are done.
    allocate: a function that allocates the num_bytes of the transfers' targets, which `then` frees;
        None = the memory is already allocated.
    """

    transfers: list[Transfer]
    then: Callable[[], None]
    allocate: Callable[[], None] | None = None
    num_bytes: int = 0
    left: int = 0  # number of unread parts
    begun: bool = False
    allocated: torch.cuda.Event | None = None  # event after the memory's last earlier use

    def end(self) -> None:
        """Call `then`, once; later calls do nothing."""
        self.then()
        self.then = _nothing


def run_jobs(
    jobs: Sequence[Job],
    device: torch.device,
    progress: Callable[[Loading], None] | None = None,
    open_bytes: int = 0,
) -> None:
    """Run all jobs on threads, with one or two chunks of host memory per thread.

    open_bytes: the maximum bytes that jobs may have allocated and not freed; a single job may have
        more.
    Raises ConfigError naming file and tensor, on the CPU also for a number that is not finite.
    """
    cuda = device.type == "cuda"
    # On the CPU parts are packed as soon as they are read, and joined reads gain nothing.
    together = CUDA_CHUNK if cuda else 0
    queue = _Queue(jobs, CUDA_CHUNK if cuda else CPU_CHUNK, together, open_bytes)
    descriptors: dict[Path, int] = {}
    try:
        for file in queue.files:
            descriptors[file] = os.open(file, os.O_RDONLY)
        if cuda:
            torch.cuda.synchronize(device)  # earlier work may still write to the memory
            count = min(CUDA_THREADS, max(4, len(os.sched_getaffinity(0))))
        else:
            count = max(2, torch.get_num_threads())
        count = max(1, min(count, queue.pieces))

        inference = torch.is_inference_mode_enabled()
        streams: list[torch.cuda.Stream] = []

        def make_reader() -> _Reader:
            if not cuda:
                return _CpuReader(descriptors)
            reader = _CudaReader(descriptors, device, queue.largest)
            streams.append(reader.stream)
            return reader

        def finish(job: Job) -> None:
            # Memory was allocated on the default stream, which must wait for the readers' copies
            # before the next use of the memory.
            with torch.cuda.stream(torch.cuda.default_stream(device)):
                for stream in list(streams):
                    torch.cuda.current_stream(device).wait_stream(stream)
                job.end()

        how = (make_reader, not cuda, inference)
        threads = [
            Thread(target=queue.work, args=how, name="weights", daemon=True) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            queue.watch(len(threads), progress, finish)
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
    def allocate(self, job: Job) -> None:
        """Allocate the job's memory, before the job's first part is read."""
        ...

    def run(self, parts: Sequence[Transfer], transient: Job | None) -> int:
        """Read parts, and write or (on CUDA) launch copies to their targets; return the bytes read.

        parts: consecutive parts of one file.
        transient: the job of these parts, if it allocates.
        """
        ...


@dataclass(slots=True)
class _Piece:
    """The adjacent parts of a file that a thread reads in one call, and the job of each part.

    With separate reads a checkpoint with ten thousand small tensors would wait for the GIL as
    often.
    """

    parts: list[Transfer]
    jobs: list[Job]
    end: int = 0  # end of the parts' bytes in the file

    @property
    def transient(self) -> Job | None:
        """The job of all parts, if it has `allocate`; else None."""
        return self.jobs[0] if self.jobs[0].allocate is not None else None

    def takes(self, part: Transfer, job: Job, limit: int) -> bool:
        """Whether `job`'s next part can be read in the same call, of at most `limit` bytes."""
        if not self.parts or part.stored.file != self.parts[0].stored.file:
            return False
        if self.transient is not (None if job.allocate is None else job):
            return False
        begin, (offset, length) = self.parts[0].byte_range[0], part.byte_range
        aligned = (offset - begin) % part.stored.dtype.itemsize == 0
        return 0 <= offset - self.end < _GAP and offset + length - begin <= limit and aligned

    def add_transfer(self, part: Transfer, job: Job) -> None:
        self.parts.append(part)
        self.jobs.append(job)
        self.end = sum(part.byte_range)


class _Queue:
    """The unread parts, in the order of files.

    All parts of a job with `allocate` are at the position of its first part. So a job ends before
    the next one, and at most two jobs have memory at a time.
    """

    def __init__(self, jobs: Sequence[Job], chunk: int, together: int, open_bytes: int) -> None:
        """Divide the jobs into parts, in order.

        chunk: the maximum bytes of a part.
        together: the maximum bytes of parts that are read in one call.
        open_bytes: as in `run_jobs`.
        """
        entries = []
        self.total = self.largest = 0
        for number, job in enumerate(jobs, 1):
            mine = []
            for transfer in job.transfers:
                for part in transfer.split(chunk):
                    offset, length = part.byte_range
                    mine.append(((str(part.stored.file), offset), part))
                    job.left += 1
                    self.total += length
                    self.largest = max(self.largest, length)
            # drops references, so that parts and matrices are freed once they are read and packed
            job.transfers = []
            first = min((place for place, _ in mine), default=None)
            for place, part in mine:
                key = (place, 0, place) if job.allocate is None else (first, number, place)
                entries.append((key, part, job))
        entries.sort(key=lambda entry: entry[0])
        self.files = {entry[1].stored.file for entry in entries}
        self._waiting: deque[_Piece] = deque(_Piece([], [job]) for job in jobs if not job.left)
        piece = _Piece([], [])
        for _, part, job in entries:
            if not piece.takes(part, job, together):
                piece = _Piece([], [])
                self._waiting.append(piece)
            piece.add_transfer(part, job)
            self.largest = max(self.largest, piece.end - piece.parts[0].byte_range[0])
        self.pieces = len(self._waiting)
        self._changed = Condition()
        self._open_bytes = open_bytes
        self._open = 0  # allocated bytes
        self._read_jobs: list[Job] = []  # jobs that the caller's thread has to end
        self._done = 0
        self._ended = 0  # threads that have ended
        self._error: BaseException | None = None

    def work(self, make_reader: Callable[[], _Reader], then: bool, inference: bool) -> None:
        """Read until no part is left; this is the body of a thread.

        then: whether the thread also runs `then` of a job after its last part.
        inference: the caller's inference mode of torch, which each thread has to set.
        """
        try:
            # parameters created in inference mode cannot be written outside of it
            with torch.inference_mode():
                reader = make_reader()
            while (piece := self._next(reader)) is not None:
                ended = self._read(reader, piece)
                del piece  # drops the reference, so that memory of packed parts is freed
                for job in ended:
                    if then:
                        with torch.inference_mode(inference):
                            self._end(job, job.end)
                    elif job.allocate is not None:
                        with self._changed:
                            self._read_jobs.append(job)
                            self._changed.notify_all()
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _read(self, reader: _Reader, piece: _Piece) -> list[Job]:
        """Read the piece's parts and return the jobs whose last part is among them."""
        if not piece.parts:
            return piece.jobs
        with torch.inference_mode():
            count = reader.run(piece.parts, piece.transient)
        ended = []
        with self._changed:
            self._done += count
            for job in piece.jobs:
                job.left -= 1
                if not job.left:
                    ended.append(job)
        return ended

    def _next(self, reader: _Reader) -> _Piece | None:
        """Return the next piece, or None if there is none.

        The call waits while too much memory is allocated. The jobs that have memory can end
        meanwhile, as all their parts come before the piece.
        """
        with self._changed:
            while self._waiting:
                job = self._waiting[0].transient
                if job is None or job.begun:
                    return self._waiting.popleft()
                if not self._open or self._open + job.num_bytes <= self._open_bytes:
                    job.begun = True
                    self._open += job.num_bytes
                    reader.allocate(job)
                    return self._waiting.popleft()
                self._changed.wait()
        return None

    def _end(self, job: Job, then: Callable[[], None]) -> None:
        """Finish a job after its last part was read, and count its memory as freed.

        then: the function to call.
        """
        then()
        if job.allocate is not None:
            with self._changed:
                self._open -= job.num_bytes
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self.close()

    def close(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def watch(
        self,
        threads: int,
        progress: Callable[[Loading], None] | None,
        finish: Callable[[Job], None],
    ) -> None:
        """Report progress until the threads have ended, and finish jobs on the caller's thread.

        Raises the exception of a thread.

        finish: finishes a job that must end on the caller's thread.
        """
        began = time.monotonic()
        last = -1
        over = False
        while not over:
            with self._changed:
                self._changed.wait_for(lambda: self._ended == threads or self._read_jobs, _LOOK)
                read, self._read_jobs = self._read_jobs, []
                over, done = self._ended == threads and not read, self._done
            while read and self._error is None:
                job = read.pop(0)
                self._end(job, partial(finish, job))
                del job
            if progress is not None and done != last and self._error is None:
                progress(Loading(done, self.total, time.monotonic() - began))
                last = done
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    pass


def allocate(job: Job) -> None:
    assert job.allocate is not None
    with torch.inference_mode():
        job.allocate()


def _direct(part: Transfer) -> bool:
    """Whether the target's bytes are the stored bytes, without a conversion."""
    # checks whether the parameter's rows have the stored layout
    source, target = part.source, part.whole
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

    def allocate(self, job: Job) -> None:
        allocate(job)

    def run(self, parts: Sequence[Transfer], transient: Job | None) -> int:
        return sum(map(self._run, parts))

    def _run(self, part: Transfer) -> int:
        offset, length = part.byte_range
        target, direct = part.target, _direct(part)
        raw = (
            target.view(-1).view(torch.uint8) if direct else torch.empty(length, dtype=torch.uint8)
        )
        _read(self._descriptors[part.stored.file], raw, offset, [part])
        if not direct:
            target.copy_(part.to_values(raw))
        _check_finite(part)
        return length


def _check_finite(part: Transfer) -> None:
    """Raise ConfigError for a NaN or infinity in a part that was just read, on the CPU."""
    kind = EXPONENTS.get(part.target.dtype)
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
    """A reader with a stream, two pinned buffers and the events of their last copies."""

    def __init__(self, descriptors: dict[Path, int], device: torch.device, size: int) -> None:
        self._descriptors = descriptors
        self._device = device
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def allocate(self, job: Job) -> None:
        """Allocate the job's memory on the packing stream, which may still read it for an earlier
        job."""
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            allocate(job)
            job.allocated = torch.cuda.Event()
            job.allocated.record()

    def run(self, parts: Sequence[Transfer], transient: Job | None) -> int:
        self._turn ^= 1
        event = self._events[self._turn]
        event.synchronize()
        ranges = [part.byte_range for part in parts]
        begin, end = ranges[0][0], sum(ranges[-1])
        raw = self._buffers[self._turn][: end - begin]
        _read(self._descriptors[parts[0].stored.file], raw, begin, parts)
        with torch.cuda.stream(self.stream):
            if transient is not None and transient.allocated is not None:
                self.stream.wait_event(transient.allocated)
            for part, (offset, length) in zip(parts, ranges, strict=True):
                self._copy(part, raw[offset - begin :][:length])
            event.record(self.stream)
        return sum(length for _, length in ranges)

    def _copy(self, part: Transfer, raw: Tensor) -> None:
        """Launch the copy of a part to the device.

        raw: the part's bytes, pinned.
        """
        target = part.target
        if _direct(part):
            target.view(-1).view(torch.uint8).copy_(raw, non_blocking=True)
        else:
            staged = raw.to(self._device, non_blocking=True)
            target.copy_(part.to_values(staged), non_blocking=True)


def _read(descriptor: int, raw: Tensor, offset: int, parts: Sequence[Transfer]) -> None:
    """Fill a buffer from the file at an offset.

    raw: uint8 on the host, as long as the bytes of the parts.
    """
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
