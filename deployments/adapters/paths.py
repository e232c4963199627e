"""The places that adapters may come from: the allow-list of roots, and the watched folder. Nothing
here opens a file outside a root."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, NAME, stamp

logger = logging.getLogger("manta.router")

MAX_PATH = 1024  # characters
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
# In a path that comes over the network: nothing that one of the layers below might read as
# something else. No escapes, queries, users, chains of file systems, other systems' separators.
_PLAIN = re.compile(r"[A-Za-z0-9._/@+=, -]+")
_ANY = r"(?:[a-z][a-z0-9+.-]*:/)?(?:/[^\s/:;,'\"]+)+/?"


def without_paths(message: str, path: str, name: str) -> str:
    """An engine's message about the adapter at `path`, for a client that must not learn the
    machine's folders. A file of the adapter keeps its own name."""
    text = message.replace(path, name) if path else message
    return re.sub(f"(?<!{re.escape(name)}){_ANY}", name, text)


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def allowed_path(given: str, roots: Sequence[str]) -> str:
    """The folder that a caller may add as an adapter, without links; or its URL.

    given: inside one of the roots; a relative path is looked for in each, in order. roots: absolute
    folders and URLs of the operator. Raises AdapterError: invalid_adapter_path for what is no plain
    path, adapter_path_not_allowed for one outside the roots, or that a link leads out of them.
    """
    text = given.rstrip("/")
    url = _URL.match(text)
    rest = text[url.end() :] if url else text.removeprefix("/")
    parts = rest.split("/")
    if len(given) > MAX_PATH or not _PLAIN.fullmatch(rest):
        raise _invalid("it may have letters, digits and ._/@+=,- only")
    if any(not part.strip(". ") for part in parts):
        raise _invalid("an empty part, or one of dots alone, is not allowed")
    for root in roots:
        base = root.rstrip("/")
        if is_url(base) or url:
            if is_url(base) and text.startswith(base + "/"):
                return text
            continue
        if text.startswith("/") and not text.startswith(base + "/"):
            continue
        real = os.path.realpath(os.path.join(base, text))
        inside = os.path.realpath(base)
        if not _within(real, inside):
            raise _not_allowed("a link leads out of the allowed roots")
        if text.startswith("/") or os.path.exists(real):
            return real
    if not roots:
        raise _not_allowed("adapters.roots names no folder or URL to load from")
    if not text.startswith("/") and not url:
        raise AdapterError("no allowed root has such a folder", code="adapter_not_found")
    raise _not_allowed("it is in none of the allowed roots")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter's folder, and a stamp that changes when its files do."""

    path: str
    stamp: str


def still_allowed(path: str, roots: Sequence[str]) -> str:
    """Resolve the links of a path that was allowed before, and check the path again. Raises
    AdapterError.

    path: path that `allowed_path` or `scan` gave before.
    roots: allowed roots, whose own names may have links and odd characters.
    """
    real = path if is_url(path) else os.path.realpath(path)
    for root in roots:
        inside = root if is_url(root) else os.path.realpath(root)
        if _within(real, inside):
            return real
    raise _not_allowed("a link leads out of the allowed roots, or they are others now")


def scan(folder: str) -> dict[str, AdapterFolder]:
    """The adapters in a watched folder, by name: its subfolders that have a configuration and are
    no links out of it. Reads none of their files. Raises OSError if the folder cannot be read.
    """
    folders: dict[str, AdapterFolder] = {}
    root = os.path.realpath(folder)
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if name.startswith(".") or not NAME.fullmatch(name):
            continue  # a hidden one is on its way: written there, renamed when it is whole
        real = os.path.realpath(os.path.join(root, name))
        if not _within(real, root) or not os.path.isdir(real):
            continue
        if not os.path.lexists(os.path.join(real, CONFIG_FILE)):
            continue
        try:
            folders[name] = AdapterFolder(real, stamp(Path(real)))
        except AdapterError:
            # Listed all the same: a request for it learns what is wrong with it.
            folders[name] = AdapterFolder(real, "broken")
    return folders


def _within(path: str, root: str) -> bool:
    """Whether a path is below a root. Both are without links, or both are URLs. A root is not
    within itself."""
    return path.startswith(root.rstrip("/") + "/")


def _invalid(why: str) -> AdapterError:
    return AdapterError(f"this is not a path of an adapter: {why}", code="invalid_adapter_path")


def _not_allowed(why: str) -> AdapterError:
    return AdapterError(
        f"adapters may not be loaded from there: {why}", code="adapter_path_not_allowed"
    )
