"""BlockFormat: the format of a file with one KV block or snapshot, and the checks of such files.

A file is a page of 4 KiB with the header, then the slot's bytes. The header has the fingerprint, a
digest of everything that decides what a block's bytes mean, then KV group, hash and length. A
checksum covers header and bytes; with a key, AES-256-GCM encrypts the bytes and authenticates the
header. Files are opened with O_DIRECT where memory and file system allow.
"""

import contextlib
import errno
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from engine.errors import ConfigError

PAGE = 4096
STATES = -1  # the group number in the keys of recurrent states' snapshots
MAGIC = b"MANTAKV2"
# magic, fingerprint, group, hash, bytes, nonce, tag
_HEADER = Struct("<8s16si16sQ12s16s")
_SUM = Struct("<I")

Key = tuple[int, bytes]  # group, hash


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Host memory in slots of num_bytes each, from `address` on."""

    view: memoryview
    num_bytes: int
    address: int

    @property
    def aligned(self) -> bool:
        """Whether each slot can be read and written with O_DIRECT."""
        return not (self.address % PAGE or self.num_bytes % PAGE)

    @property
    def count(self) -> int:
        return len(self.view) // self.num_bytes

    def slot(self, number: int) -> memoryview:
        return self.view[number * self.num_bytes : (number + 1) * self.num_bytes]


class Damaged(Exception):
    """The error of a file that is short, damaged, or of another key or fingerprint."""


class BlockFormat:
    """The format in which slots are written to files and read from them.

    key: encrypts the files, 32 bytes; b"" = they are plain.
    direct: whether to open files with O_DIRECT where that is possible.
    """

    def __init__(self, key: bytes = b"", *, direct: bool = True) -> None:
        """Set up the format. Raises ConfigError if encryption needs a package that is missing."""
        self._cipher = _cipher(key) if key else None
        self._direct = direct

    def is_direct(self, memory: SlotMemory) -> bool:
        """Whether files of these slots are opened with O_DIRECT."""
        return self._direct and memory.aligned and self._cipher is None

    def write(
        self, path: Path, fingerprint: bytes, key: Key, memory: SlotMemory, slot: int
    ) -> None:
        """Write a slot to a new file. Raises OSError."""
        data: Any = memory.slot(slot)
        header = (MAGIC, fingerprint, key[0], key[1], memory.num_bytes)
        page = mmap.mmap(-1, PAGE)
        if self._cipher is None:
            _HEADER.pack_into(page, 0, *header, b"", b"")
            _SUM.pack_into(page, _HEADER.size, _checksum(page[: _HEADER.size], data))
        else:
            nonce = os.urandom(12)
            bound = _HEADER.pack(*header, nonce, b"")
            sealed = self._cipher.encrypt(nonce, data, bound)
            _HEADER.pack_into(page, 0, *header, nonce, sealed[-16:])
            data = memoryview(sealed)[:-16]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with opened(path, flags, direct=self.is_direct(memory)) as file:
                if os.writev(file, [page, data]) != PAGE + memory.num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def read(
        self,
        path: Path,
        fingerprint: bytes,
        key: Key,
        memory: SlotMemory,
        slot: int,
        page: mmap.mmap,
    ) -> None:
        """Read a file into a slot. Raises OSError, and Damaged.

        page: a buffer for the header.
        """
        place, direct = memory.slot(slot), self.is_direct(memory)
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW, direct=direct) as file:
            if os.fstat(file).st_size != PAGE + memory.num_bytes:
                raise Damaged(f"{path} has another size")
            if os.preadv(file, [page, place], 0) != PAGE + memory.num_bytes:
                raise Damaged(f"{path} is short")
            if not direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        header = (MAGIC, fingerprint, *key, memory.num_bytes)
        *fields, nonce, tag = _HEADER.unpack_from(page, 0)
        if tuple(fields) != header:
            raise Damaged(f"{path} is of another model, layout or block")
        if self._cipher is None:
            checksum = _checksum(page[: _HEADER.size], place)
            if (checksum,) != _SUM.unpack_from(page, _HEADER.size):
                raise Damaged(f"{path} has another checksum")
            return
        try:
            bound = _HEADER.pack(*header, nonce, b"")
            place[:] = self._cipher.decrypt(nonce, bytes(place) + tag, bound)
        except Exception as error:  # cryptography's InvalidTag
            raise Damaged(f"{path} is not what was encrypted") from error


def _checksum(header: bytes, data: memoryview) -> int:
    """Return one CRC-32 over the header, the sums of data's pages, and the last partial page.

    A page's sum adds its 64-bit words. Sums are as fast as reading memory. A CRC of all bytes took
    five times as long as a read from a folder in memory.
    """
    whole = len(data) - len(data) % PAGE
    words = np.frombuffer(data[:whole], np.uint64).reshape(-1, PAGE // 8)
    return zlib.crc32(data[whole:], zlib.crc32(words.sum(axis=1), zlib.crc32(header)))


def path_of(folder: Path, key: Key) -> Path:
    """Return the path of a block's or snapshot's file."""
    name = key[1].hex()
    return folder / name[:2] / f"{name}.{'s' if key[0] == STATES else key[0]}"


def key_of(name: str) -> Key | None:
    """Return a block's group and hash from its file name; None for other names."""
    digest, _, group = name.partition(".")
    try:
        return STATES if group == "s" else int(group), bytes.fromhex(digest)
    except ValueError:
        return None


@contextlib.contextmanager
def opened(path: Path, flags: int, *, direct: bool = False) -> Any:
    """Open a file for a `with` block, and yield its descriptor.

    direct: whether to use O_DIRECT if the file system supports that.
    """
    try:
        file = os.open(path, flags | os.O_DIRECT if direct else flags, 0o600)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        with contextlib.suppress(FileNotFoundError):
            if flags & os.O_CREAT:  # O_DIRECT may be refused after the file was created
                path.unlink()
        file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def read_key(path: str) -> bytes:
    """Read an encryption key from a file of 32 bytes or 64 hexadecimal digits. Raises
    ConfigError."""
    way_out = "make one with `openssl rand -hex 32`, mode 0600"
    try:
        data = Path(path).read_bytes()
        open_to_others = Path(path).stat().st_mode & 0o077
    except OSError as error:
        raise ConfigError(
            f"disk_kv_key_file: {path}: {error.strerror or error}; {way_out}",
            param="disk_kv_key_file",
        ) from error
    if open_to_others:
        raise ConfigError(
            f"disk_kv_key_file: others than this user can read {path}; run `chmod 600 {path}`",
            param="disk_kv_key_file",
        )
    if len(data) != 32:
        try:
            data = bytes.fromhex(data.decode().strip())
        except ValueError:
            data = b""
    if len(data) != 32:
        raise ConfigError(
            f"disk_kv_key_file: {path} has no key of 32 bytes; {way_out}", param="disk_kv_key_file"
        )
    return data


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            "disk_kv_key_file: the package cryptography is missing; run `pip install cryptography`,"
            " or set disk_kv_clear instead",
            param="disk_kv_key_file",
        ) from error
    return AESGCM(key)
