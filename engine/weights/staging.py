"""WeightStage: tensors that arrive one by one, as a folder of safetensors in shared memory.

An update of weights is read from such a folder by every rank of the engine, so that a half-sent
update is never in the model.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.private_folder import temporary_folders, why_unusable
from engine.shards import weight_files
from engine.weights.index import CODES

_FILE_BYTES = 256 << 20
_PREFIX, _LOCK = "manta-weights-", "owner.lock"
_YOUNG_SECONDS = 60.0  # a folder's owner may be about to lock it
_SHARED_MEMORY = Path("/dev/shm")


class WeightStage:
    """A folder that fills with tensors. Whoever makes it discards it.

    folder: where the tensors are, once `close` was called.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        """Make the folder, in shared memory if it has the room.

        num_bytes: bytes that will come, as far as they are known.
        Raises ConfigError if no folder for temporary files can be written.
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

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor on any device. Raises ConfigError."""
        if name in self._names:
            raise ConfigError(f"tensor {name} was sent twice", param="weights")
        if tensor.dtype not in CODES:
            raise ConfigError(f"tensor {name}: dtype {tensor.dtype} is not known", param="weights")
        self._names.add(name)
        # a view of a larger storage, or of one that others share, is copied too
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        copied.copy_(tensor.detach())
        self._waiting[name] = copied
        self._bytes += copied.nbytes
        if self._bytes >= _FILE_BYTES:
            self._write()

    def close(self) -> None:
        """Write what waits. Raises ConfigError."""
        if self._waiting:
            self._write()
        if not self._names:
            raise ConfigError("no tensor was sent", param="weights")

    def _write(self) -> None:
        self._files += 1
        try:
            save_file(self._waiting, self.folder / f"model-{self._files:05}.safetensors")
        except Exception as error:  # safetensors has an error of its own
            full = getattr(error, "errno", 0) == errno.ENOSPC or "No space" in str(error)
            way = "; make /dev/shm larger (docker: --shm-size) or set TMPDIR" if full else ""
            raise ConfigError(f"{self.folder}: {error}{way}", param="weights") from None
        self._waiting, self._bytes = {}, 0

    def discard(self) -> None:
        """Delete the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def _discard_ownerless(parent: Path) -> None:
    """Delete the folders of processes that were killed, whose locks the kernel has released."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:  # another user's, or one that is being made or deleted
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
    """Stage all tensors; see `WeightStage`. Raises ConfigError, or what the iterable raises."""
    staged = WeightStage(num_bytes)
    try:
        for name, tensor in tensors:
            staged.add(name, tensor)
        staged.close()
    except BaseException:
        staged.discard()
        raise
    return staged
