"""A cache of object code on disk; a compiler's output depends only on its arguments.

Compiling a small model's kernels would add about a second to each start of a CPU replica, and half
a second for each kernel in CUDA C++. The files are next to Triton's own cache, in folders that only
their owner can read or write. If a file belongs to another user or has a wrong digest, the code is
compiled again and the file replaced.
"""

import contextlib
import hmac
import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from kernels.launch.cache import cache_folder

_DIGEST = 32  # bytes of the digest at the beginning of a file


def cached(folder: str, inputs: str, compile_code: Callable[[], bytes]) -> bytes:
    """Return object code from the cache, or compile and cache it.

    folder: the name of the code's folder.
    inputs: a text of everything that determines the code, including the compiler's version.
    If the cache cannot be used, the code is compiled at each call.
    """
    name = blake2b(inputs.encode(), digest_size=20).hexdigest()
    path = cache_folder() / folder / f"{name}.o"
    with contextlib.suppress(OSError):
        if (code := _read(path)) is not None:
            return code
    code = compile_code()
    with contextlib.suppress(OSError):
        _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    """Return the code in a file, or None if another user owns it or its digest is wrong. Raises
    OSError.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return None
        digest, code = file.read(_DIGEST), file.read()
    return code if hmac.compare_digest(digest, _digest(code)) else None


def _write(path: Path, code: bytes) -> None:
    """Write a file and move it into place, so that readers never see a part of it. Raises
    OSError.
    """
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
