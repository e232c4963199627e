"""Hooks in uvicorn for Serve's HTTP servers: they turn plain-text refusals into error objects, and
clean request ids.

    bytes -> HttpProtocol (uvicorn's parser) -> EdgeMiddleware -> Serve's own layers -> Api

Serve calls `install` in every process that is about to open an HTTP port, its proxy or a router, if
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. haproxy/refusals.py has HAProxy's refusals.
"""

import asyncio
import logging
import re
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from deployments.api.http.errors import NO_RETRY, SERVER, ApiError, internal
from deployments.api.http.exchange import (
    JSON,
    LINGER_SECONDS,
    MAX_HEADER_BYTES,
    MAX_URL_BYTES,
    Message,
    Receive,
    Scope,
    Send,
    request_id,
)
from engine.errors import short_traceback

log = logging.getLogger("manta.api")

_ID = b"x-request-id"
_MAX_HEAD_BYTES = 4 * MAX_HEADER_BYTES  # of an incomplete head; `Api` checks complete heads
_UNKNOWN_METHOD = re.compile(rb"(?!(?:GET|HEAD|POST) )[A-Z]+ [^ ]+ HTTP/1\.[01]\r?\n")
_INVALID_HTTP = {
    400: ("invalid_http", "this is not valid HTTP/1.1"),
    408: ("request_timeout", "the head of the request did not arrive in time"),
    414: ("uri_too_long", f"the URL is longer than {MAX_URL_BYTES} bytes"),
    431: ("headers_too_large", f"the headers are larger than {MAX_HEADER_BYTES} bytes"),
    501: ("not_implemented", "the method or the transfer encoding is not known here"),
}


# Answers a request and returns None, or returns the `receive` with which Serve gets the request.
Refuse = Callable[[Scope, Receive, Send], Awaitable[Receive | None]]

_refuse_early: Refuse | None = None  # None: this process has no router


def refuse_early(refuse: Refuse | None) -> None:
    """Set the function that may answer this process's requests before Serve's layers.

    refuse: None: all requests go to Serve.
    """
    global _refuse_early
    _refuse_early = refuse


def install() -> list[Middleware]:
    """Install Manta's HTTP parser, and return the middleware; Serve calls it as its hook.

    uvicorn looks its parser up by name in HTTP_PROTOCOLS, and Serve leaves the name at "auto".
    """
    HTTP_PROTOCOLS["auto"] = f"{__name__}:HttpProtocol"
    return [Middleware(EdgeMiddleware)]


class EdgeMiddleware:
    """The ASGI middleware around all of Serve's layers.

    Requests get one clean x-request-id, and refusals in plain text become error objects. Serve's
    own routes (/-/...) are not changed.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        ids = [value for name, value in scope["headers"] if name == _ID]
        known = request_id(ids)
        if ids:
            # Serve would return the first id unchecked, and would decode it as UTF-8.
            others = [header for header in scope["headers"] if header[0] != _ID]
            scope["headers"] = [*others, (_ID, known.encode())]
        if _refuse_early is not None:
            passed_on = await _refuse_early(scope, receive, send)
            if passed_on is None:
                return
            receive = passed_on
        answer = _RefusalFilter(send)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if answer.started:
                # The HTTP server then closes the connection, so the client notices the truncated
                # answer.
                raise
            log.error("request %s failed: %s", known, short_traceback(error))
            await answer.refuse(internal(), known.encode())


class _RefusalFilter:
    """An ASGI `send` that replaces plain-text refusals by error objects, and passes other messages
    on."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._replaced = False
        self.started = False

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self.started = True
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            kind = headers.get(b"content-type", b"text/plain")
            if message["status"] >= 400 and kind.startswith(b"text/plain"):
                known = headers.get(_ID) or request_id().encode()
                await self.refuse(_refusal(message["status"]), known)
                return
        await self._send(message)

    async def refuse(self, error: ApiError, known: bytes) -> None:
        self._replaced = True
        body = error.body()
        headers = [(name.encode(), value.encode()) for name, value in error.headers]
        headers += [(_ID, known), *_about(body)]
        start = {"type": "http.response.start", "status": error.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _refusal(status: int) -> ApiError:
    """Return the error that replaces a refusal by Serve, whose text contains deployment names and
    addresses."""
    if status == 404:
        return ApiError(404, "not_found", "nothing is served at this path")
    if status == 408:
        late = "the request took too long"
        return ApiError(408, "deadline_exceeded", late, headers=NO_RETRY)
    if status == 503:
        return ApiError(503, "overloaded", "no router can take the request now", retry_after=1)
    if status < 500:
        return ApiError(status, "invalid_request", "the request was refused")
    return ApiError(status, "internal_error", internal().message, kind=SERVER)


def _about(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]


class JsonRefusals:
    """A mixin of uvicorn's HTTP/1.1 protocols that sends the parser's refusals as error objects.

    The mixin also limits the size of a request head, which httptools does not.

    A connection is closed a moment after a refusal. Closing at once, with unread data, would reset
    the connection, and the client might never get the answer.
    """

    if TYPE_CHECKING:  # attributes of uvicorn's protocols
        transport: asyncio.Transport
        loop: asyncio.AbstractEventLoop
        cycle: Any
        server_state: Any

    _data = b""  # the bytes being parsed
    _head: int | None = None  # bytes so far of an incomplete request head, if any
    _refused = False
    url = b""

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._data = data
        super().data_received(data)  # type: ignore[misc]
        self._data = b""
        if self._head is not None:
            self._head += len(data)
            if self._head > _MAX_HEAD_BYTES:
                self._refuse(414 if len(self.url) > MAX_URL_BYTES else 431)

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request. uvicorn calls this method while it handles the parser's
        exception."""
        error = sys.exception()
        # h11's exceptions have a suggested status.
        status = getattr(error, "error_status_hint", 400)
        if len(self.url) > MAX_URL_BYTES:
            status = 414
        elif type(error).__name__ == "HttpParserInvalidMethodError" and _UNKNOWN_METHOD.match(
            self._data
        ):
            status = 501
        self._refuse(status)

    def _refuse(self, status: int) -> None:
        self._refused = True
        self._head = None
        if self.cycle and not self.cycle.response_complete:
            if self.cycle.response_started:
                # An answer has begun, so no error object can be sent.
                self.transport.close()
                return
            self.cycle.disconnected = True  # end the request as if the connection were lost
            self.cycle.message_event.set()
        code, message = _INVALID_HTTP.get(status, _INVALID_HTTP[400])
        body = ApiError(status, code, message).body()
        headers = [
            *self.server_state.default_headers,
            *_about(body),
            (_ID, request_id().encode()),
            (b"connection", b"close"),
        ]
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


class ConnectionTimeouts:
    """A mixin that limits how long a connection may keep the server waiting; uvicorn has no limit.

    A request whose head does not arrive in time is refused. A client that does not read its answer
    is disconnected, and the application notices the disconnect. Neither limit has a cost per chunk.
    """

    if TYPE_CHECKING:  # attributes from uvicorn's protocols and JsonRefusals
        transport: asyncio.Transport
        loop: asyncio.AbstractEventLoop
        cycle: Any
        _head: int | None

        def _refuse(self, status: int) -> None: ...

    head_seconds = 30.0
    reader_seconds = 30.0
    reader_bytes = 4096  # bytes that a client must read within reader_seconds

    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        # With this limit `pause_writing` is called whenever the socket does not accept all bytes at
        # once.
        transport.set_write_buffer_limits(high=0)
        self._await_head()

    def on_message_begin(self) -> None:
        self._await_head()  # start the time limit of the next request's head
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()  # type: ignore[misc]

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._no_head)

    def _no_head(self) -> None:
        self._head_timer = None
        if self._head is not None:
            self._refuse(408)
        elif self.cycle is None:
            # No byte has arrived, so there is no request to answer.
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.reader_seconds, self._look, unread)

    def _look(self, before: int) -> None:
        if self.transport.get_write_buffer_size() <= before - self.reader_bytes:
            self._await_reader()
            return
        log.info("a client took nothing of its answer for %g s", self.reader_seconds)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._head_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(error)  # type: ignore[misc]


class HttpProtocol(ConnectionTimeouts, JsonRefusals, AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The protocol class that uvicorn instantiates for each connection."""
