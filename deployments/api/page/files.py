"""PageFile, page_file: the page's files, which are read once, and the headers that keep it to its
own host."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from deployments.api.http.errors import Headers

# Everything is a file of this host: no inline script or style, no frame around it, no form.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Headers = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),  # asked for each time, and not sent again if it is the same
)
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """tag: of this content, as in an ETag header."""

    content: bytes
    content_type: bytes
    tag: str

    @property
    def headers(self) -> Headers:
        return (*_HEADERS, ("etag", self.tag))


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name, such as `app.js` and `chat/chat.js`.

    A request's path is looked up here and never on disk.
    """
    return dict(_below(files("deployments.api.page").joinpath("static"), ""))


def _below(folder: Traversable, path: str) -> Iterator[tuple[str, PageFile]]:
    for entry in folder.iterdir():
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            yield from _below(entry, f"{path}{entry.name}/")
        elif kind is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            yield f"{path}{entry.name}", PageFile(content, kind, tag)
