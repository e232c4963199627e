"""fetched: downloads an adapter from an object store into a folder of the disk cache."""

import errno
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import blake2b
from threading import Thread
from typing import Any

from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE
from engine.lora.tiers.disk import CachedFolder

MAX_WEIGHT_BYTES = 8 << 30
MAX_SECONDS = 100.0  # shorter than the router's timeout for adding an adapter


def is_remote(path: str) -> bool:
    return "://" in path


@contextmanager
def fetched(path: str, entry: CachedFolder, *, weights: bool) -> Iterator[str]:
    """Download an adapter's files into an empty folder; yield a stamp that changes with the files.

    The folder is closed at the end of the `with` block.

    path: a URL that fsspec supports.
    entry: the empty folder.
    weights: whether to download the weights; otherwise only the configuration is downloaded.
    Raises AdapterError after MAX_SECONDS at the latest. The code is storage_full if the disk has no
    room for a copy, adapter_incompatible if the adapter is too large, store_unavailable if the
    store fails or does not answer.
    """
    copy: Future[str] = Future()

    def work() -> None:
        try:
            copy.set_result(_copy(path, entry, weights=weights))
        except BaseException as error:
            copy.set_exception(error)

    # Not every fsspec store has a timeout or can be interrupted. So after a timeout the thread
    # continues, and files that it still downloads are deleted.
    Thread(target=work, name="adapter-download", daemon=True).start()
    try:
        seen = copy.result(MAX_SECONDS)
    except TimeoutError:
        copy.add_done_callback(lambda _: entry.close())
        raise AdapterError(
            f"{path}: the object store has not delivered the adapter within {MAX_SECONDS:g} s; see "
            "whether it can be reached from here, or copy the files to a local folder and add that",
            code="store_unavailable",
        ) from None
    except BaseException:
        entry.close()
        raise
    with entry:
        yield seen


def _copy(path: str, entry: CachedFolder, *, weights: bool) -> str:
    if "::" in path or path.startswith(("file:", "local:")):
        raise AdapterError(f"{path}: not the URL of an object store", code="adapter_not_found")
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise AdapterError(f"{path}: reading from a URL needs fsspec: pip install fsspec") from None
    try:
        store, root = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from None
    state = blake2b(digest_size=16)
    name, size = "", 0
    names = (CONFIG_FILE, WEIGHTS_FILE)
    try:
        for name, limit in zip(names, (MAX_CONFIG_BYTES, MAX_WEIGHT_BYTES), strict=True):
            file_size = _size(store, f"{root}/{name}", limit)
            size += file_size if weights or name == CONFIG_FILE else 0
            state.update(str(store.checksum(f"{root}/{name}")).encode())
        entry.reserve(size)
        for name in names[: 1 + weights]:
            store.get_file(f"{root}/{name}", str(entry.folder / name))
    except FileNotFoundError:
        raise AdapterError(f"{path}: {name} is missing", code="adapter_not_found") from None
    except AdapterError as error:
        raise AdapterError(f"{path}: {error.message}", code=error.code) from None
    except Exception as error:  # stores raise various exceptions, not only OSError
        reason = str(error) or type(error).__name__  # fsspec's own timeout has no message
        code: str | None = "store_unavailable"
        if isinstance(error, PermissionError):
            code = None
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            code = "storage_full"
        raise AdapterError(f"{path}: {name}: {reason}", code=code) from None
    return state.hexdigest()


def _size(store: Any, path: str, limit: int) -> int:
    """Return the size of a file in bytes; 0 = not reported. Raises AdapterError above the limit."""
    size = store.info(path).get("size")
    if size is not None and size > limit:
        raise AdapterError(f"{size} bytes of {path} are more than the {limit} that are allowed")
    return int(size or 0)
