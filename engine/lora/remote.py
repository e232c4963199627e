"""Adapters in an object store: copied to a temporary folder to be read, and not kept on disk."""

import errno
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE

MAX_WEIGHT_BYTES = 8 << 30
MAX_SECONDS = 100.0  # whoever adds one gets an answer while the router still waits for it


def is_remote(path: str) -> bool:
    return "://" in path


@contextmanager
def fetched(path: str, *, weights: bool) -> Iterator[tuple[Path, str]]:
    """A folder with the adapter's files (weights=False: the configuration alone), gone afterwards,
    and a stamp that changes when they do.

    path: a URL that fsspec knows. Raises AdapterError, after MAX_SECONDS at the latest;
    storage_full if there is no room for a copy.
    """
    if "::" in path or path.startswith(("file:", "local:")):
        raise AdapterError(f"{path}: not the URL of an object store", code="adapter_not_found")
    copy: Future[tuple[TemporaryDirectory[str], str]] = Future()

    def work() -> None:
        try:
            copy.set_result(_copy(path, weights=weights))
        except BaseException as error:
            copy.set_exception(error)

    # Not every store of fsspec's can be given a limit or be interrupted, so the thread is left to
    # itself, and what it may bring yet is deleted.
    Thread(target=work, name="adapter-download", daemon=True).start()
    try:
        folder, seen = copy.result(MAX_SECONDS)
    except TimeoutError:
        copy.add_done_callback(_discard)
        raise AdapterError(
            f"{path}: the object store has not delivered the adapter within {MAX_SECONDS:g} s; see "
            "whether it can be reached from here, or copy the files to a local folder and add that"
        ) from None
    with folder as name:
        yield Path(name), seen


def _discard(copy: Future[tuple[TemporaryDirectory[str], str]]) -> None:
    if copy.exception() is None:
        copy.result()[0].cleanup()


def _copy(path: str, *, weights: bool) -> tuple[TemporaryDirectory[str], str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise AdapterError(f"{path}: reading from a URL needs fsspec: pip install fsspec") from None
    try:
        store, root = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise AdapterError(f"{path}: {error}") from None
    state = blake2b(digest_size=16)
    with ExitStack() as stack:
        folder = TemporaryDirectory(prefix="manta-adapter-")
        stack.enter_context(folder)
        for name, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHT_BYTES)):
            try:
                _check_size(store, f"{root}/{name}", limit)
                state.update(str(store.checksum(f"{root}/{name}")).encode())
                if weights or name == CONFIG_FILE:
                    store.get_file(f"{root}/{name}", f"{folder.name}/{name}")
            except FileNotFoundError:
                raise AdapterError(f"{path}: {name} is missing", code="adapter_not_found") from None
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = str(error) or type(error).__name__  # fsspec's own timeout says nothing
                raise AdapterError(
                    f"{path}: {name}: {reason}", code="storage_full" if full else None
                ) from None
        stack.pop_all()  # all is there, and the caller's
    return folder, state.hexdigest()


def _check_size(store: Any, path: str, limit: int) -> None:
    size = store.info(path).get("size")
    if size is not None and size > limit:
        raise AdapterError(f"{path}: {size} bytes are more than the {limit} that are allowed")
