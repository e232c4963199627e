"""An HTTP/1.1 client for load tests. A connection has one request at a time and is reused for the
next one. The clock is read once per arrival of bytes. There are no retries and no redirects, since
a load test counts each answer of the server.
"""

import asyncio
import contextlib
import socket
import ssl
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

clock = time.monotonic

_MAX_HEAD = 2**16
_MAX_LINE = 2**12
# Some servers close a connection right after an answer without announcing it in the headers. To
# notice this, a connection is not reused for this many seconds.
_REST_S = 0.01
# Connections that have been idle for more than this many seconds are not reused, since servers
# close them after 5 s or more.
IDLE_S = 2.0


class ResponseHandler(Protocol):
    """The interface for receiving an answer. Each method gets the time at which the bytes
    arrived."""

    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...

    def on_end(self, now: float) -> None:
        """Handle the end of a complete answer."""

    def on_lost(self, error: str, now: float) -> None:
        """Handle an answer that ended early or is not HTTP. Not called after on_end."""


class Address(NamedTuple):
    """The server address in a URL.

    prefix: path of the URL, without a trailing slash.
    name: host name that TLS expects.
    """

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    head: bytes  # the Host header line
    name: str = ""

    @classmethod
    def of(cls, url: str) -> "Address":
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        head = f"host: {parts.netloc}\r\n".encode()
        host = parts.hostname or ""
        return cls(host, port, prefix, tls, head, host)


class HttpConnection(asyncio.BufferedProtocol):
    """A connection with at most one request in flight."""

    # One buffer for all connections: each read is processed before the loop reads the next socket.
    _shared = memoryview(bytearray(2**17))

    def __init__(self, pool: "ConnectionPool", slow_pause: float | None = None) -> None:
        self._pool = pool
        self._pause = slow_pause
        self.transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self._rest = b""
        self._feed: Callable[[bytes, float], None] = self._idle
        self._left = 0
        self._keep = True
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, request: bytes, handler: ResponseHandler) -> None:
        assert self.transport is not None and self._handler is None
        self._handler = handler
        self._rest = b""
        self._feed = self._head
        self.transport.write(request)

    def abandon(self) -> None:
        """Close the connection. The handler's methods are not called any more."""
        self._handler = None
        if self.transport is not None:
            self.transport.abort()

    # Received bytes.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared[:1024] if self._pause else self._shared

    def buffer_updated(self, nbytes: int) -> None:
        now = clock()
        if self._pause and self.transport is not None:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause, self._resume)
        try:
            self._feed(bytes(self._shared[:nbytes]), now)
        except ValueError as error:
            self._lose(f"not HTTP: {error}", now)

    def _resume(self) -> None:
        if self.usable:
            assert self.transport is not None
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        now = clock()
        if self._feed == self._until_eof:
            self._end(now)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self._lose(str(error) if error else "the server closed the connection", clock())

    def _lose(self, what: str, now: float) -> None:
        handler, self._handler = self._handler, None
        if self.transport is not None:
            self.transport.abort()
        if handler is not None:
            handler.on_lost(what, now)

    def _end(self, now: float) -> None:
        handler, self._handler = self._handler, None
        self._feed = self._idle
        assert self.transport is not None
        if not self._keep or self._pause:
            self.transport.close()
        else:
            self._pool.give_back(self, now)
        if handler is not None:
            handler.on_end(now)

    def _idle(self, data: bytes, now: float) -> None:
        raise ValueError("bytes without a request")

    def _head(self, data: bytes, now: float) -> None:
        data = self._rest + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD:
                raise ValueError("a head of more than 64 KiB")
            self._rest = data
            return
        lines = data[:end].split(b"\r\n")
        version, _, remainder = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"{lines[0][:40]!r} instead of a status")
        status = int(remainder[:3])
        headers: dict[bytes, bytes] = {}
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        self._rest = b""
        body = data[end + 4 :]
        if 100 <= status < 200:  # an interim answer; the real one follows
            if body:
                self._head(body, now)
            return
        connection = headers.get(b"connection", b"").lower()
        self._keep = b"close" not in connection and version != b"HTTP/1.0"
        assert self._handler is not None
        self._handler.on_head(status, headers, now)
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._left, self._feed = -1, self._chunks
        elif (length := headers.get(b"content-length")) is not None:
            self._left, self._feed = int(length), self._counted
            if self._left <= 0:
                self._end(now)
                return
        else:
            self._keep, self._feed = False, self._until_eof
        if body and self._handler is not None:
            self._feed(body, now)

    def _counted(self, data: bytes, now: float) -> None:
        if len(data) > self._left:
            raise ValueError("more bytes than announced")
        self._left -= len(data)
        assert self._handler is not None
        self._handler.on_body(data, now)
        if not self._left and self._handler is not None:
            self._end(now)

    def _until_eof(self, data: bytes, now: float) -> None:
        assert self._handler is not None
        self._handler.on_body(data, now)

    def _chunks(self, data: bytes, now: float) -> None:
        """Decode the chunks of a chunked answer.

        self._left: bytes until the chunk's end; 0: its line break is next; -1: a size line is next;
        -2: the last chunk was read, and trailers and an empty line follow.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        body: list[bytes] = []
        position, size, remaining = 0, len(data), self._left
        while position < size:
            if remaining > 0:
                piece = data[position : position + remaining]
                body.append(piece)
                position += len(piece)
                remaining -= len(piece)
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                if size - position > _MAX_LINE:
                    raise ValueError("a chunk's size line without an end")
                self._rest = data[position:]
                break
            line, position = data[position:end], end + 2
            if remaining == 0:
                if line:
                    raise ValueError("a chunk longer than its size")
                remaining = -1
            elif remaining == -1:
                remaining = int(line.split(b";", 1)[0], 16)
                if remaining < 0:
                    raise ValueError("a chunk of negative size")
                remaining = remaining or -2
            elif not line:
                remaining = -3
                break
        self._left = remaining
        if body and self._handler is not None:
            self._handler.on_body(b"".join(body) if len(body) > 1 else body[0], now)
        if remaining == -3 and self._handler is not None:
            if position < size:
                raise ValueError("bytes after the last chunk")
            self._end(now)


class ConnectionPool:
    """A pool of idle connections to one address; the newest is reused first."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[HttpConnection] = []

    def take_connection(self, now: float) -> HttpConnection | None:
        resting = bisect_right(self._idle, now - _REST_S, key=lambda idle: idle.idle_since)
        while resting:
            resting -= 1
            connection = self._idle.pop(resting)
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.abandon()
        return None

    def give_back(self, connection: HttpConnection, now: float) -> None:
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: HttpConnection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    async def connect(self, timeout: float, slow_pause: float | None = None) -> HttpConnection:
        """Open a new connection. Raises OSError (TimeoutError, ssl.SSLError among them)."""
        address = self.address
        async with asyncio.timeout(timeout):
            loop = asyncio.get_running_loop()
            name = address.name if address.tls else None
            if slow_pause is None:
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(self),
                    address.host,
                    address.port,
                    ssl=address.tls,
                    server_hostname=name,
                )
                return connection
            # a small receive buffer, so that the server notices when the client does not read
            family, kind, proto, _, where = (
                await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            )[0]
            sock = socket.socket(family, kind, proto)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                await loop.sock_connect(sock, where)
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(self, slow_pause),
                    sock=sock,
                    ssl=address.tls,
                    server_hostname=name,
                )
            except BaseException:
                sock.close()
                raise
            return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abandon()


def request_head(address: Address, method: str, path: str, headers: dict[str, str]) -> bytes:
    """Return a request's head without Content-Length and the final empty line."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    first = f"{method} {address.prefix}{path} HTTP/1.1\r\n"
    return first.encode() + address.head + lines.encode()


def with_body(head: bytes, body: bytes) -> bytes:
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        head,
        len(body),
        body,
    )
