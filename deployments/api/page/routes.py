"""GET /page, /page/{name}: the web page and its files. GET /v1/live: the routers' present state.

The page needs no API key, because it is the same for everyone and reveals nothing about the
service. The requests that the page sends need a key.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError, Headers, shown
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import ANY, HTML, NAMES, RouteTable

# The page loads only files of this host: no inline scripts or styles, no embedding in frames, no
# forms.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Headers = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),  # revalidated by browsers each time
)
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
INDEX = "index.html"
ROUTES = RouteTable()
PAGE = "/page"
FILES = f"{PAGE}/"


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. tag: the ETag of its content."""

    content: bytes
    content_type: bytes
    tag: str

    @property
    def headers(self) -> Headers:
        return (*_HEADERS, ("etag", self.tag))


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name, such as `app.js` and `chat/chat.js`.

    Requested paths are looked up in this mapping and never on disk.
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


@ROUTES.get(
    "/v1/live",
    "What routers know now",
    ("object", "key_names", "routers"),
    statuses=NAMES,
    admin=True,
)
async def live(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the live view: the routers' present state. Raises ApiError 404 if the page is
    off."""
    options = context.options
    if not options.page or options.live is None:
        message = "the live view is off; http.page in the configuration turns it on"
        raise ApiError(404, "not_found", message)
    names = {digest.hex()[:32]: rule.name for digest, rule in options.rules.items() if rule.name}
    view = {"object": "live", "key_names": names, "routers": await options.live()}
    await exchange.answer_json(view, headers=(("cache-control", "no-store"),))


@ROUTES.get(f"{FILES}{{name}}", "Its scripts and styles", statuses=(404,), kinds=(ANY,), open=True)
@ROUTES.get(
    PAGE, "A page to talk to it and look into it", statuses=(404,), kinds=(HTML,), open=True
)
async def page(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with a file of the page. Raises ApiError 404 if there is no such file or no page."""
    if not context.options.page:
        message = "the page is off; http.page in the configuration turns it on"
        raise ApiError(404, "not_found", message)
    name = exchange.path[len(FILES) :] or INDEX
    file = page_files().get(name)
    if file is None:
        message = f"the page has no file {shown(name)}; it is at {PAGE}"
        raise ApiError(404, "not_found", message)
    same = exchange.headers.get(b"if-none-match") == [file.tag.encode()]
    body = b"" if same else file.content
    await exchange.answer(304 if same else 200, body, file.content_type, file.headers)
