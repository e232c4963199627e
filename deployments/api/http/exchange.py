"""HttpExchange: one HTTP request and its answer over raw ASGI. UntilDisconnect: a context manager
that ends its block when the client disconnects.
"""

import asyncio
import contextlib
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from deployments.api.caller import ANYONE, Caller
from deployments.api.http.errors import ApiError, Headers, invalid
from deployments.api.http.json_body import INLINE_CHARS, JsonObject, in_thread
from deployments.images.memory import HeldBytes

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

RaisedLimit = Callable[[int], tuple[int, str]]

JSON = b"application/json"
MAX_REQUEST_ID = 128  # characters
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 1024  # bytes of all headers' names and values
MAX_URL_BYTES = 8 * 1024  # path and query
LINGER_BYTES = 32 * 1024 * 1024  # limits, in bytes and seconds, of reading a refused body
LINGER_SECONDS = 1.0

# Content-Encoding of a body -> zlib's argument `wbits`
ENCODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}

_UNSAFE_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_HOST = re.compile(rb"[A-Za-z0-9.\-_]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


class ClientDisconnected(Exception):
    """Raised when the client has disconnected; ends a request without an error in the log."""


def request_id(given: Sequence[bytes] = ()) -> str:
    """Return the first x-request-id of a request, without characters that are unsafe in a header or
    a log; a new id if there is none."""
    text = given[0][: 8 * MAX_REQUEST_ID].decode("latin-1") if given else ""
    return _UNSAFE_ID.sub("", text)[:MAX_REQUEST_ID] or f"req-{secrets.token_hex(12)}"


class HttpExchange:
    """An HTTP request, read from ASGI, and the writer of its answer.

    Every answer has x-request-id unless tell_id is False, and x-ignored-fields if `ignored` is not
    empty. After `start` the status has been sent, so a failure must be reported within the stream.

    headers: {header name in lower case: values}
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, tell_id: bool = True) -> None:
        self.method: str = scope["method"]
        self.receive = receive
        self.caller: Caller = ANYONE  # ANYONE until the key has been checked
        self.began = time.monotonic()
        self.started = False
        self.content_length: int | None = None  # bytes of the body, by the header Content-Length
        self.body_size = 0  # bytes of the decompressed JSON body, once read
        self.parsed: JsonObject | None = None  # the parsed body, once read
        self.ignored: list[str] = []
        self.digest = b""  # digest of the body, once read
        self.always: list[tuple[bytes, bytes]] = []  # headers for answers of any status
        self.encoding = b""  # Content-Encoding of the body, once read
        self.on_end: list[Callable[[], None]] = []  # called after the answer was sent
        self.held: HeldBytes | None = None  # reservation for a body above max_body_bytes
        self.error_object: Callable[[ApiError], JsonObject] = ApiError.object  # error's JSON
        self._send = send
        self._tell_id = tell_id
        self.headers: dict[bytes, list[bytes]] = {}
        self._header_bytes = 0
        for name, value in scope["headers"]:
            self._header_bytes += len(name) + len(value)
            self.headers.setdefault(name.lower(), []).append(value)
        self._header_count = len(scope["headers"])
        self.root: str = scope.get("root_path", "")
        self.path: str = scope["path"]
        if self.root and self.path.startswith(self.root):
            self.path = self.path[len(self.root) :] or "/"
        self.query: bytes = scope.get("query_string", b"")
        self.request_id = request_id(self.headers.get(b"x-request-id", []))
        self._url_bytes = len(scope.get("raw_path") or self.path) + len(self.query)

    def parameters(self) -> dict[str, str]:
        """Return {field: value} of the query; for repeated fields the last value counts. Raises
        ApiError 400."""
        return dict(self._query_fields())

    def every_parameter(self, name: str) -> list[str]:
        """Return all values of a query field that may be repeated. Raises ApiError 400."""
        return [value for field, value in self._query_fields() if field == name]

    def _query_fields(self) -> list[tuple[str, str]]:
        try:
            return parse_qsl(self.query.decode("latin-1"), max_num_fields=16)
        except ValueError:
            raise ApiError(400, "invalid_value", "the query has more than 16 fields") from None

    @property
    def trace(self) -> tuple[str, str]:
        """The W3C headers traceparent and tracestate, unvalidated; "" for a missing header."""
        parents = self.headers.get(b"traceparent", [])
        if len(parents) != 1:
            return "", ""
        state = b",".join(self.headers.get(b"tracestate", []))
        return parents[0].decode("latin-1"), state.decode("latin-1")

    def check_envelope(self) -> None:
        """Check the sizes of URL and headers, and the body's framing, before the body is read.
        Raises ApiError 400, 414 or 431."""
        if self._url_bytes > MAX_URL_BYTES:
            raise closing(414, "uri_too_long", f"the URL is longer than {MAX_URL_BYTES} bytes")
        if self._header_count > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            raise closing(
                431,
                "headers_too_large",
                f"at most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in total",
            )
        hosts = self.headers.get(b"host", [])
        if len(hosts) > 1 or (hosts and not _HOST.fullmatch(hosts[0])):
            raise closing(400, "invalid_host", "the Host header is not valid")
        lengths = set(self.headers.get(b"content-length", []))
        if len(lengths) > 1 or not all(map(bytes.isdigit, lengths)):
            raise closing(400, "invalid_content_length", "Content-Length is not valid")
        for length in lengths:
            # Only short numbers are converted to an int.
            self.content_length = int(length) if len(length.lstrip(b"0")) <= 18 else 2**63
        if lengths and b"transfer-encoding" in self.headers:
            raise closing(
                400, "invalid_framing", "Content-Length and Transfer-Encoding exclude each other"
            )

    async def body(
        self, limit: int, timeout_s: float, raised: RaisedLimit, *, empty: bool = False
    ) -> bytes:
        """Return the whole JSON body as sent; if it is compressed, `encoding` is set.

        limit: maximum bytes.
        timeout_s: seconds within which the whole body must arrive.
        raised: called with the size of a body above the limit: its Content-Length or, without one,
            the bytes so far. Returns the limit to apply instead, and the name of its setting.
        empty: whether an empty body is accepted, with any content type.

        Raises ApiError 408, 413, 415 and 400 (cut short), ClientDisconnected, and as `raised`.
        """
        if not empty:
            self._check_media_type()
        length = self.content_length
        if length is not None and length > limit:
            limit = _raised(raised, length)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        limit = _raised(raised, size)
                    if part:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise closing(
                408, "request_timeout", f"the body did not arrive within {timeout_s:g} s"
            ) from None
        if length is not None and length != size:
            raise closing(
                400, "invalid_content_length", "the body is not as long as Content-Length says"
            )
        if empty and size:
            self._check_media_type()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_media_type(self) -> None:
        if b"content-encoding" in self.headers:
            named = b",".join(self.headers[b"content-encoding"]).lower().split(b",")
            encodings = [name.strip() for name in named if name.strip() not in (b"", b"identity")]
            if len(encodings) > 1 or not ENCODINGS.keys() >= set(encodings):
                raise closing(
                    415,
                    "unsupported_media_type",
                    f"content-encoding must be one of {b', '.join(ENCODINGS).decode()}, or none",
                    "content-encoding",
                )
            self.encoding = encodings[0] if encodings else b""
        types = self.headers.get(b"content-type", [])
        if len(types) == 1:
            kind, _, parameters = types[0].lower().partition(b";")
            charset = parameters.strip().replace(b'"', b"").replace(b" ", b"")
            if kind.strip() == JSON and charset in (b"", b"charset=utf-8", b"charset=utf8"):
                return
        raise closing(
            415, "unsupported_media_type", "content-type must be application/json", "content-type"
        )

    async def answer_json(self, value: Any, headers: Headers = ()) -> None:
        """Answer 200 with a value as JSON. Raises ClientDisconnected."""
        await self.answer(200, msgspec.json.encode(value), headers=headers)

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a whole answer at once. Raises ClientDisconnected."""
        await self._begin(status, content_type, headers, len(body))
        # For HEAD, the headers describe the body that GET would return.
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error. Raises ClientDisconnected.

        Before a connection is closed, further bytes from the client are read for a moment. Closing
        with unread data would reset the connection, and the client might never get the answer.
        """
        body = msgspec.json.encode(self.error_object(error))
        if _CLOSE[0] not in error.headers:
            await self.answer(error.status, body, headers=error.headers)
            return
        await self._begin(error.status, JSON, error.headers, len(body))
        await self.write(b"" if self.method == "HEAD" else body)
        allowance = LINGER_BYTES
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_SECONDS):
                while allowance > 0:
                    message = await self.receive()
                    allowance -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        await self.write(b"", more=False)

    async def start(self, content_type: bytes, headers: Headers = ()) -> None:
        """Begin a streamed answer with status 200. Raises ClientDisconnected."""
        await self._begin(200, content_type, headers)

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of a streamed answer. Raises ClientDisconnected."""
        await self._out({"type": "http.response.body", "body": data, "more_body": more})

    async def _out(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientDisconnected from None

    async def _begin(
        self, status: int, content_type: bytes, headers: Headers, length: int | None = None
    ) -> None:
        fields = [(b"content-type", content_type), *self.always]
        if self._tell_id:
            fields.append((b"x-request-id", self.request_id.encode()))
        if self.ignored:
            fields.append((b"x-ignored-fields", ", ".join(self.ignored).encode("ascii")))
        fields.extend((name.encode(), value.encode("latin-1")) for name, value in headers)
        if length is not None:
            fields.append((b"content-length", b"%d" % length))
        await self._out({"type": "http.response.start", "status": status, "headers": fields})
        self.started = True


class UntilDisconnect:
    """A context manager that ends its block when the client disconnects.

    A task waits on `receive`. When the client disconnects, the task calls `abort` and cancels the
    block, which then raises ClientDisconnected. `abort`, which is idempotent, is also called when
    the block ends otherwise. The body must have been read before, because `receive` can have only
    one reader.
    """

    def __init__(self, receive: Receive, abort: Callable[[], None]) -> None:
        self._receive = receive
        self._abort = abort
        self._gone = False

    async def __aenter__(self) -> None:
        self._owner = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self._gone = True
        self._abort()
        assert self._owner is not None
        self._owner.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        self._abort()
        if self._gone:
            assert self._owner is not None
            # Like asyncio.timeout, pass on cancellations by other tasks. Our own cancellation may
            # have been suppressed in the block, or replaced by an error that the abort caused
            # there.
            if self._owner.uncancel() == 0 or kind is not asyncio.CancelledError:
                raise ClientDisconnected from None


_CLOSE: Headers = (("connection", "close"),)


def closing(status: int, code: str, message: str, param: str | None = None) -> ApiError:
    """Return an error whose answer closes the connection, because the request was not fully
    read."""
    return ApiError(status, code, message, param=param, headers=_CLOSE)


def _raised(raised: RaisedLimit, size: int) -> int:
    """Return the limit from `raised` for a body of `size` bytes. Raises ApiError 413 if `size`
    exceeds it.

    raised: returns a limit in bytes, and the name of its setting.
    """
    limit, setting = raised(size)
    if size > limit:
        message = f"the body is larger than {limit} bytes"
        raise closing(413, "body_too_large", _with_setting(message, setting))
    return limit


def _with_setting(message: str, setting: str) -> str:
    return f"{message} ({setting})" if setting else message


async def decoded(data: bytes, encoding: bytes, limit: int, setting: str = "") -> bytes:
    """Decompress a body. encoding: a key of ENCODINGS. limit: maximum bytes of the result.

    setting: the limit's setting, for errors; "": none.

    Small bodies are decompressed on the event loop, larger ones in a thread, and never beyond the
    limit. Raises ApiError 400 invalid_encoding, 413 body_too_large.
    """
    unpack = zlib.decompressobj(ENCODINGS[encoding])
    try:
        body = unpack.decompress(data, INLINE_CHARS)
        if not unpack.eof:
            room = limit + 1 - len(body)
            body += await in_thread(lambda: unpack.decompress(unpack.unconsumed_tail, room), room)
    except zlib.error:
        raise _broken(encoding) from None
    if len(body) > limit:
        message = f"the body is larger than {limit} bytes unpacked"
        raise ApiError(413, "body_too_large", _with_setting(message, setting))
    if not unpack.eof or unpack.unused_data:
        raise _broken(encoding)
    return body


def _broken(encoding: bytes) -> ApiError:
    return invalid(
        f"the body is not one whole {encoding.decode()} stream, as content-encoding says",
        "content-encoding",
        "invalid_encoding",
    )
