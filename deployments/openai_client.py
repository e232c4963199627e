"""OpenAI's client with streams that outlive their connections.

    client = OpenAI(base_url="http://127.0.0.1:8000/v1", http_client=http_client())

A streamed completion that breaks goes on after the last whole event, at whatever router answers:
the caller sees a pause. An edge that is away for a moment when a completion begins is a pause too,
once it has served a completion. Every other request passes through as it is. The module is for
httpx and httpx2, so for all generations of the client since 1.0 and for libraries built on it.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

from deployments.resuming import PATIENCE, ResumableStream

_STREAMS = ("/completions", "/responses", "/messages")
_NOWHERE = b'"code":"not_found"'  # a model that is not there has another code


def http_client(*, patience: float = PATIENCE, **options: Any) -> Any:
    """For OpenAI(http_client=...). patience: seconds without news after which a stream is given
    up, with the error that broke it. options: of httpx.Client."""
    from openai import DefaultHttpxClient

    httpx = _library(DefaultHttpxClient.__mro__[1])
    transport = options.pop("transport", None) or httpx.HTTPTransport(limits=_limits(httpx))
    around: Any = ResumingTransport(transport, patience)
    return DefaultHttpxClient(transport=around, **options)


def async_http_client(*, patience: float = PATIENCE, **options: Any) -> Any:
    """The same for AsyncOpenAI."""
    from openai import DefaultAsyncHttpxClient

    httpx = _library(DefaultAsyncHttpxClient.__mro__[1])
    transport = options.pop("transport", None) or httpx.AsyncHTTPTransport(limits=_limits(httpx))
    around: Any = AsyncResumingTransport(transport, patience)
    return DefaultAsyncHttpxClient(transport=around, **options)


def _limits(httpx: Any) -> Any:
    # The client's own, which httpx forgets when it is given a transport.
    return httpx.Limits(max_connections=1000, max_keepalive_connections=100)


class ResumingTransport:
    """Around a transport of httpx or httpx2."""

    def __init__(self, transport: Any, patience: float = PATIENCE) -> None:
        self._inner = transport
        self._patience = patience
        self._served = False  # a server is known to be there, and will come back

    def __enter__(self) -> "ResumingTransport":
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def handle_request(self, request: Any) -> Any:
        if not _is_completion(request):
            return self._inner.handle_request(request)
        stream = _stream_class(_library(type(request)), "SyncByteStream", _ResumingStream)(
            self._inner, request, request.read(), ResumableStream(self._patience)
        )
        while True:
            try:
                response = self._inner.handle_request(stream.again())
                if response.status_code == 404:
                    response.read()
                pause = stream.refused(response) if self._served else None
                if pause is None:
                    break
                response.close()
            except stream.unheard:
                pause = stream.refused() if self._served else None
                if pause is None:
                    raise
            time.sleep(pause)
        self._served |= response.status_code == 200
        return stream.around(response) if _is_stream(response) else response

    def close(self) -> None:
        self._inner.close()


class AsyncResumingTransport:
    """The same for asyncio."""

    def __init__(self, transport: Any, patience: float = PATIENCE) -> None:
        self._inner = transport
        self._patience = patience
        self._served = False  # a server is known to be there, and will come back

    async def __aenter__(self) -> "AsyncResumingTransport":
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)

    async def handle_async_request(self, request: Any) -> Any:
        if not _is_completion(request):
            return await self._inner.handle_async_request(request)
        stream = _stream_class(_library(type(request)), "AsyncByteStream", _AsyncResumingStream)(
            self._inner, request, await request.aread(), ResumableStream(self._patience)
        )
        while True:
            try:
                response = await self._inner.handle_async_request(stream.again())
                if response.status_code == 404:
                    await response.aread()
                pause = stream.refused(response) if self._served else None
                if pause is None:
                    break
                await response.aclose()
            except stream.unheard:
                pause = stream.refused() if self._served else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        self._served |= response.status_code == 200
        return stream.around(response) if _is_stream(response) else response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Parts:
    """A request and the parts of its answer, from one connection after the other."""

    def __init__(self, inner: Any, request: Any, body: bytes, resuming: ResumableStream) -> None:
        self._inner, self._request, self._body = inner, request, body
        self._resuming = resuming
        self._response: Any = None
        self._httpx = _library(type(request))

    def again(self) -> Any:
        given = self._request
        headers = given.headers.copy()
        headers.update(self._resuming.headers)
        return type(given)(
            given.method,
            given.url,
            headers=headers,
            content=self._body,
            extensions=given.extensions,
        )

    @property
    def unheard(self) -> tuple[type[Exception], ...]:
        """Errors of a request that no server will answer."""
        return self._httpx.NetworkError, self._httpx.RemoteProtocolError

    def refused(self, response: Any = None) -> float | None:
        """Seconds until the request is made again, when no server took the connection, or when the
        edge does not know its routers yet: then a path that was there is not."""
        if response is None:
            return self._resuming.pause()
        status = response.status_code
        if status in (502, 504) or (status == 404 and _NOWHERE in response.content):
            return self._resuming.pause(status, dict(response.headers))
        return None

    def around(self, response: Any) -> Any:
        self._response = response
        return type(response)(
            response.status_code,
            headers=response.headers,
            stream=self,
            extensions=response.extensions,
        )

    def _cut(self) -> Exception:
        error: Exception = self._httpx.RemoteProtocolError("the stream ended before its end")
        return error

    def _pause(self) -> float | None:
        """After an answer that is no stream."""
        response = self._response
        return self._resuming.pause(response.status_code, dict(response.headers))

    @property
    def _told(self) -> bool:
        """It says what is wrong."""
        kind: str = self._response.headers.get("content-type", "")
        return kind.startswith("application/json")


class _ResumingStream(_Parts):
    def __iter__(self) -> Iterator[bytes]:
        resuming = self._resuming
        while True:
            try:
                for data in self._response.stream:
                    if whole := resuming.feed(data):
                        yield whole
                broke = self._cut()
            except self._httpx.TransportError as error:
                broke = error
            if resuming.finished:
                return
            pause = resuming.pause()
            while True:
                self._response.close()
                if pause is None:
                    raise broke
                time.sleep(pause)
                try:
                    self._response = self._inner.handle_request(self.again())
                except self._httpx.TransportError as error:
                    broke, pause = error, resuming.pause()
                    continue
                if _is_stream(self._response):
                    break
                pause = self._pause()
                if pause is None and self._told:
                    yield b"data: %b\n\n" % self._response.read()  # as the caller expects it
                    return

    def close(self) -> None:
        self._response.close()


class _AsyncResumingStream(_Parts):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        resuming = self._resuming
        while True:
            try:
                async for data in self._response.stream:
                    if whole := resuming.feed(data):
                        yield whole
                broke = self._cut()
            except self._httpx.TransportError as error:
                broke = error
            if resuming.finished:
                return
            pause = resuming.pause()
            while True:
                await self._response.aclose()
                if pause is None:
                    raise broke
                await asyncio.sleep(pause)
                try:
                    self._response = await self._inner.handle_async_request(self.again())
                except self._httpx.TransportError as error:
                    broke, pause = error, resuming.pause()
                    continue
                if _is_stream(self._response):
                    break
                pause = self._pause()
                if pause is None and self._told:
                    yield b"data: %b\n\n" % await self._response.aread()
                    return

    async def aclose(self) -> None:
        await self._response.aclose()


def _library(cls: type) -> Any:
    """httpx or httpx2, whichever it is of."""
    return sys.modules[cls.__module__.partition(".")[0]]


@cache
def _stream_class(httpx: Any, base: str, of: type) -> Any:
    """httpx takes bodies of its own kind only."""
    return type(of.__name__, (of, getattr(httpx, base)), {})


def _is_completion(request: Any) -> bool:
    return request.method == "POST" and request.url.path.endswith(_STREAMS)


def _is_stream(response: Any) -> bool:
    kind = response.headers.get("content-type", "")
    plain = "content-encoding" not in response.headers
    return response.status_code == 200 and plain and kind.startswith("text/event-stream")
