"""Adapters in an object store: copied to a temporary folder to be read, and not kept on disk."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHTS_FILE

MAX_WEIGHT_BYTES = 8 << 30


def is_remote(path: str) -> bool:
    return "://" in path


@contextmanager
def fetched(path: str, *, weights: bool) -> Iterator[tuple[Path, str]]:
    """A folder with the adapter's files (weights=False: the configuration alone), gone afterwards,
    and a stamp that changes when they do.

    path: a URL that fsspec knows. Raises AdapterError; storage_full if there is no room for a copy.
    """
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
    with tempfile.TemporaryDirectory(prefix="manta-adapter-") as folder:
        for name, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHT_BYTES)):
            try:
                _check_size(store, f"{root}/{name}", limit)
                state.update(str(store.checksum(f"{root}/{name}")).encode())
                if weights or name == CONFIG_FILE:
                    store.get_file(f"{root}/{name}", f"{folder}/{name}")
            except FileNotFoundError:
                raise AdapterError(f"{path}: {name} is missing", code="adapter_not_found") from None
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise AdapterError(
                    f"{path}: {name}: {error}", code="storage_full" if full else None
                ) from None
        yield Path(folder), state.hexdigest()


def _check_size(store: Any, path: str, limit: int) -> None:
    size = store.info(path).get("size")
    if size is not None and size > limit:
        raise AdapterError(f"{path}: {size} bytes are more than the {limit} that are allowed")
