"""A cache of object code on disk: what LLVM makes of a module depends on nothing but its arguments.

Compiling the kernels of a small model takes a CPU replica about a second of each start. The files
lie beside Triton's own cache, in a folder that only its owner can read or write. A file that is not
the user's, or whose bytes do not match their digest, is compiled again and replaced.
"""

import contextlib
import hmac
import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from kernels.launch.cache import cache_folder

_DIGEST = 32  # bytes, in front of the code


def cached(inputs: str, compile_code: Callable[[], bytes]) -> bytes:
    """Return the code that an earlier process compiled from these inputs, or compile and keep it.

    inputs: everything that decides the code, compiler's version included. A cache that cannot be
    read or written costs the time to compile, and nothing else.
    """
    path = (
        cache_folder() / "manta-cpu" / f"{blake2b(inputs.encode(), digest_size=20).hexdigest()}.o"
    )
    with contextlib.suppress(OSError):
        if (code := _read(path)) is not None:
            return code
    code = compile_code()
    with contextlib.suppress(OSError):
        _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    """The code in a file of ours that is whole. Raises OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return None
        digest, code = file.read(_DIGEST), file.read()
    return code if hmac.compare_digest(digest, _digest(code)) else None


def _write(path: Path, code: bytes) -> None:
    """Put a whole file in its place at once: other processes read meanwhile. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(code) + code)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _digest(code: bytes) -> bytes:
    return blake2b(code, digest_size=_DIGEST).digest()
