"""Checks of the places from which adapters may be loaded: the allowed roots and the watched folder.

Nothing in this module opens a file outside a root.
"""

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
# A path from the network must not have characters that a lower layer might interpret: escapes,
# queries, users, chained file systems, other systems' separators.
_PLAIN = re.compile(r"[A-Za-z0-9._/@+=, -]+")
_ANY = r"(?:[a-z][a-z0-9+.-]*:/)?(?:/[^\s/:;,'\"]+)+/?"


def without_paths(message: str, path: str, name: str) -> str:
    """Return an engine's error message about an adapter, without paths of the server's machine.

    Each absolute path is replaced by the adapter's name; a file inside the adapter keeps its file
    name.

    path: the adapter's folder or URL, which the message may contain.
    name: the adapter's name.
    """
    text = message.replace(path, name) if path else message
    return re.sub(f"(?<!{re.escape(name)}){_ANY}", name, text)


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def allowed_path(given: str, roots: Sequence[str]) -> str:
    """Return the real path (links resolved) or URL of a folder, if a caller may add it as an
    adapter.

    given: path or URL inside a root; a relative path is looked up in each root, in order.
    roots: absolute folders and URLs that the operator allows.

    Raises AdapterError: invalid_adapter_path if `given` is not a plain path,
    adapter_path_not_allowed if it is outside the roots or a link leads out of them, and
    adapter_not_found if no root has the relative path.
    """
    text = given.rstrip("/")
    url = _URL.match(text)
    path = text[url.end() :] if url else text.removeprefix("/")
    parts = path.split("/")
    if len(given) > MAX_PATH or not _PLAIN.fullmatch(path):
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
    """An adapter's folder, and a stamp that changes when the folder's files change."""

    path: str
    stamp: str


def still_allowed(path: str, roots: Sequence[str]) -> str:
    """Resolve the links of a path that was allowed before, check the path again, and return it.

    path: a path that `allowed_path` or `scan` returned earlier.
    roots: the allowed roots; their paths may contain links and any character.

    Raises AdapterError if the path is no longer inside a root.
    """
    real = path if is_url(path) else os.path.realpath(path)
    for root in roots:
        inside = root if is_url(root) else os.path.realpath(root)
        if _within(real, inside):
            return real
    raise _not_allowed("a link leads out of the allowed roots, or they are others now")


def scan(folder: str) -> dict[str, AdapterFolder]:
    """Return the adapters in a watched folder, by name, without opening their weights.

    An adapter is a subfolder that has a configuration file and is not a link out of the folder.
    Raises OSError if the folder cannot be read.
    """
    folders: dict[str, AdapterFolder] = {}
    root = os.path.realpath(folder)
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        if name.startswith(".") or not NAME.fullmatch(name):
            # by convention a folder is written under a hidden name, and renamed when it is complete
            continue
        real = os.path.realpath(os.path.join(root, name))
        if not _within(real, root) or not os.path.isdir(real):
            continue
        if not os.path.lexists(os.path.join(real, CONFIG_FILE)):
            continue
        try:
            folders[name] = AdapterFolder(real, stamp(Path(real)))
        except AdapterError:
            # Unreadable adapters are also listed, so that requests for them are answered with the
            # reason.
            folders[name] = AdapterFolder(real, "broken")
    return folders


def _within(path: str, root: str) -> bool:
    """Whether a path is strictly below a root.

    Both are paths without links, or both are URLs.
    """
    return path.startswith(root.rstrip("/") + "/")


def _invalid(why: str) -> AdapterError:
    return AdapterError(f"this is not a path of an adapter: {why}", code="invalid_adapter_path")


def _not_allowed(why: str) -> AdapterError:
    return AdapterError(
        f"adapters may not be loaded from there: {why}", code="adapter_path_not_allowed"
    )
