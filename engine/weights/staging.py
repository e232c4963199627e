"""WeightStage: collects tensors that arrive one by one in a folder of safetensors files.

The folder is in shared memory if possible. Every rank of the engine reads a weight update from such
a folder, so an incomplete update never enters the model. An engine with one rank need not wait for
the files: it keeps the tensors on its device, loads them, and then writes the files for replicas
that join later.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.private_folder import temporary_folders, why_unusable
from engine.shards import weight_files
from engine.weights.index import CODES, file_header

logger = logging.getLogger("manta.engine")

_FILE_BYTES = 256 << 20
_PIECE_BYTES = 16 << 20
_PREFIX, _LOCK = "manta-weights-", "owner.lock"
# a file that exists until all tensors are written; it has the reason if writing failed
_WRITING = "writing"
_WRITE_SECONDS = 120.0  # maximum seconds to wait until another process's files are written
# minimum age of an unlocked folder to delete; the owner of a younger one may be about to lock it
_YOUNG_SECONDS = 60.0
_SHARED_MEMORY = Path("/dev/shm")


class WeightStage:
    """A folder to which tensors are added; its creator has to call `discard`.

    folder: the folder; `close` writes the tensors, but held ones are written after `release` (see
        `wait_until_written`).
    held: name -> tensor on the device `hold_on`, until it is written; empty if the device had too
        little room.
    """

    def __init__(self, num_bytes: int = 0, hold_on: torch.device | None = None) -> None:
        """Create the folder, in shared memory if that has enough room.

        num_bytes: the expected bytes of all tensors; 0 = unknown.
        hold_on: the device on which to keep the tensors; None = only files have them.
        Raises ConfigError if no folder for temporary files is writable.
        """
        parents = [path for path in temporary_folders() if not why_unusable(path)]
        if not parents:
            raise ConfigError(
                "no folder for temporary files can be written; set TMPDIR", param="weights"
            )
        if _SHARED_MEMORY in parents and shutil.disk_usage(_SHARED_MEMORY).free > num_bytes:
            parents.insert(0, _SHARED_MEMORY)
        for parent in parents:
            _discard_ownerless(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parents[0]))
        self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._names: set[str] = set()
        self._files = 0
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        self.held: dict[str, Tensor] = {}
        self._hold_on = hold_on
        self._writer: threading.Thread | None = None
        # set once the engine has loaded the held tensors, or they are discarded
        self._over = threading.Event()
        self._discarded = False
        if hold_on is not None:
            (self.folder / _WRITING).touch()

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the device `hold_on` if it has room, else to the host.

        Raises ConfigError for a name that was added before, and for an unknown dtype.
        """
        if name in self._names:
            raise ConfigError(f"tensor {name} was sent twice", param="weights")
        if tensor.dtype not in CODES:
            raise ConfigError(f"tensor {name}: dtype {tensor.dtype} is not known", param="weights")
        self._names.add(name)
        if self._hold_on is not None:
            try:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._hold_on)
                self.held[name] = copy.copy_(tensor.detach())
                return
            except torch.OutOfMemoryError:
                self._hold_none()
        self._add_host_copy(name, tensor)

    def _hold_none(self) -> None:
        """Move the held tensors to the host, and keep no tensors on the device from now on."""
        while self.held:
            self._add_host_copy(*self.held.popitem())
        self._hold_on = None
        torch.cuda.empty_cache()

    def _add_host_copy(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the host, for the next file."""
        # copied even if already in host memory, as the storage may be larger, or shared with
        # another process
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._add(name, copied.copy_(tensor.detach()))

    def _add(self, name: str, copied: Tensor) -> None:
        """Add a tensor in host memory to the next file."""
        self._waiting[name] = copied
        self._bytes += copied.nbytes
        if self._bytes >= _FILE_BYTES:
            self._write()

    def close(self) -> None:
        """Write the remaining tensors to files, except held ones, which `release` writes.

        Raises ConfigError.
        """
        if not self._names:
            raise ConfigError("no tensor was sent", param="weights")
        if self._hold_on is not None:
            if self._hold_on.type == "cuda":
                torch.cuda.current_stream(self._hold_on).synchronize()
            self._writer = threading.Thread(target=self._write_held, name="staging", daemon=True)
            self._writer.start()
            return
        if self._waiting:
            self._write()
        (self.folder / _WRITING).unlink(missing_ok=True)

    def _write_held(self) -> None:
        """Write the held tensors to files after `release`, and free them; runs on a thread."""
        # waits until the engine has loaded the tensors, which copies to files would delay
        self._over.wait()
        marker, device = self.folder / _WRITING, self._hold_on
        assert device is not None
        cuda = device.type == "cuda"
        try:
            copy: Callable[[Tensor], Tensor] = _PinnedCopy(device) if cuda else torch.clone
            for name, tensor in list(self.held.items()):
                if self._discarded:
                    break
                self._add(name, copy(tensor))
                del tensor
            if self._waiting:
                self._write()
            marker.unlink()
        except Exception as error:
            if not self._discarded:
                why = error.message if isinstance(error, ConfigError) else repr(error)
                logger.warning("weights of a trainer were not written: %s", why)
                with contextlib.suppress(OSError):
                    marker.write_text(why)
        self.held.clear()
        if cuda:
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Write the held tensors to files in the background, then free them."""
        self._over.set()

    def _write(self) -> None:
        self._files += 1
        try:
            save_file(self._waiting, self.folder / f"model-{self._files:05}.safetensors")
        except OSError as error:
            full = error.errno == errno.ENOSPC
            way = "; make /dev/shm larger (docker: --shm-size) or set TMPDIR" if full else ""
            raise ConfigError(f"{self.folder}: {error}{way}", param="weights") from None
        self._waiting, self._bytes = {}, 0

    def discard(self) -> None:
        """Delete the folder. Idempotent."""
        self._discarded = True
        self._over.set()
        if self._writer is not None:
            self._writer.join()
        self.held.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        shutil.rmtree(self.folder, ignore_errors=True)


class _PinnedCopy:
    """A copier of tensors to the host on a separate stream, in pieces of pinned memory.

    A large copy to pageable memory could delay launches of other threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def __call__(self, tensor: Tensor) -> Tensor:
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = (both.reshape(-1).view(torch.uint8) for both in (tensor, copied))
        with torch.cuda.stream(self._stream):
            for piece, place in zip(
                source.split(_PIECE_BYTES), target.split(_PIECE_BYTES), strict=True
            ):
                pinned = self._pinned[: len(piece)].copy_(piece, non_blocking=True)
                self._stream.synchronize()
                place.copy_(pinned)
        return copied


def save_file(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write contiguous tensors in host memory as a safetensors file.

    Other threads can run meanwhile, unlike with safetensors' writer. Raises OSError.
    """
    header, _ = file_header(tensors.items())
    with file.open("wb") as stream:
        stream.write(header)
        for tensor in tensors.values():
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def wait_until_written(folder: Path, seconds: float = _WRITE_SECONDS) -> None:
    """Wait until all tensors of a WeightStage's folder are in files; return at once for other
    folders.

    Raises ConfigError if that fails, or takes longer than `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (marker := folder / _WRITING).exists():
        with contextlib.suppress(FileNotFoundError):
            if why := marker.read_text():
                raise ConfigError(f"{folder}: not written: {why}", param="weights")
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{folder}: the tensors of a trainer were not written within {seconds:.0f} s; send "
                "them again",
                param="weights",
            )
        time.sleep(0.05)


def _discard_ownerless(parent: Path) -> None:
    """Delete the folders of killed processes, which are no longer locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # a folder of another user, or one that is being created or deleted
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock).st_mtime > _YOUNG_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def checkpoint_bytes(folder: str | Path) -> int:
    """Return the bytes of a model folder's weights; 0 if it has none."""
    try:
        return sum(path.stat().st_size for path in weight_files(Path(folder)))
    except (ConfigError, OSError):
        return 0


def stage(tensors: Iterable[tuple[str, Tensor]], num_bytes: int = 0) -> WeightStage:
    """Return a WeightStage with all the tensors. Raises ConfigError, and exceptions of the
    iterable."""
    staged = WeightStage(num_bytes)
    try:
        for name, tensor in tensors:
            staged.add(name, tensor)
        staged.close()
    except BaseException:
        staged.discard()
        raise
    return staged
