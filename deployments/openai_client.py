"""http_client: creates an HTTP client for OpenAI's Python client, whose streams survive broken
connections.

  client = OpenAI(base_url="http://127.0.0.1:8000/v1", http_client=http_client())

A streamed completion that breaks is resumed after its last complete event, at any router; the
caller sees a pause. If the proxy is briefly unreachable when a completion begins, the caller sees a
pause as well, but only if an earlier completion has succeeded. Other requests pass through
unchanged. The module works with httpx and httpx2, so with all versions of the client since 1.0 and
libraries built on it.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

from deployments.resumable_stream import PATIENCE, ResumableStream

_STREAMS = ("/completions", "/responses", "/messages")
# Text in the body of a 404 for an unknown path; a 404 for an unknown model has another code.
_NOWHERE = b'"code":"not_found"'


def http_client(*, patience: float = PATIENCE, **options: Any) -> Any:
    """Return an HTTP client for OpenAI(http_client=...).

    patience: seconds without data after which a stream is given up, with the error that broke it.
    options: options of httpx.Client.
    """
    from openai import DefaultHttpxClient

    httpx = _library(DefaultHttpxClient.__mro__[1])
    transport = options.pop("transport", None) or httpx.HTTPTransport(limits=_limits(httpx))
    around: Any = ResumingTransport(transport, patience)
    return DefaultHttpxClient(transport=around, **options)


def async_http_client(*, patience: float = PATIENCE, **options: Any) -> Any:
    """Return an HTTP client for AsyncOpenAI(http_client=...). Arguments: see `http_client`."""
    from openai import DefaultAsyncHttpxClient

    httpx = _library(DefaultAsyncHttpxClient.__mro__[1])
    transport = options.pop("transport", None) or httpx.AsyncHTTPTransport(limits=_limits(httpx))
    around: Any = AsyncResumingTransport(transport, patience)
    return DefaultAsyncHttpxClient(transport=around, **options)


def _limits(httpx: Any) -> Any:
    # The limits of OpenAI's client, which would be lost with a custom transport.
    return httpx.Limits(max_connections=1000, max_keepalive_connections=100)


class _Threads:
    """A synchronous httpx transport with the coroutine interface of _Asyncio.

    The coroutines block instead of suspending, so `_now` can run them without an event loop.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def send(self, request: Any) -> Any:
        return self._transport.handle_request(request)

    async def read(self, response: Any) -> bytes:
        data: bytes = response.read()
        return data

    def data(self, response: Any) -> AsyncIterator[bytes]:
        return _InTurn(iter(response.stream))

    async def close(self, response: Any) -> None:
        response.close()

    async def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class _InTurn:
    """An asynchronous iterator over a synchronous iterator, whose coroutines never suspend."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> "_InTurn":
        return self

    async def __anext__(self) -> bytes:
        for part in self._parts:
            return part
        raise StopAsyncIteration


class _Asyncio:
    """An asyncio httpx transport, with the few methods that _Completion uses."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def send(self, request: Any) -> Any:
        return await self._transport.handle_async_request(request)

    async def read(self, response: Any) -> bytes:
        data: bytes = await response.aread()
        return data

    def data(self, response: Any) -> AsyncIterator[bytes]:
        return aiter(response.stream)

    async def close(self, response: Any) -> None:
        await response.aclose()

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _now(work: Any) -> Any:
    """Run a coroutine that never suspends, because it only awaits methods of _Threads; return its
    result."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a coroutine for threads waited for an event loop")


class _Completion:
    """A completion's request and its response, which may arrive over several connections.

    body: the request's body. patience: as in `http_client`.
    """

    def __init__(
        self, transport: _Threads | _Asyncio, request: Any, body: bytes, patience: float
    ) -> None:
        self._transport, self._request, self._body = transport, request, body
        self._resuming = ResumableStream(patience)
        self._response: Any = None
        self._httpx = _library(type(request))

    async def answer(self, served: bool) -> Any:
        """Send the request and return the response. The body of a streamed response is this object.

        served: whether the server has answered before; if so, the request is retried while the
            server is unreachable.
        """
        httpx, transport = self._httpx, self._transport
        while True:
            try:
                response = await transport.send(self._again())
                if response.status_code == 404:
                    await transport.read(response)
                pause = self._refused(response) if served else None
                if pause is None:
                    return self._around(response) if _is_stream(response) else response
                await transport.close(response)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                # The request was not processed, so it may be sent again.
                pause = self._resuming.pause() if served else None
                if pause is None:
                    raise
            await transport.wait(pause)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the complete events of the response, and resume the stream when it breaks."""
        httpx, transport, resuming = self._httpx, self._transport, self._resuming
        while True:
            broke: Exception = httpx.RemoteProtocolError("the stream ended before its end")
            try:
                async for data in transport.data(self._response):
                    if whole := resuming.feed(data):
                        yield whole
            except httpx.TransportError as error:
                broke = error
            if resuming.finished:
                return
            pause = resuming.pause()
            while True:
                await transport.close(self._response)
                if pause is None:
                    raise broke
                await transport.wait(pause)
                try:
                    response = self._response = await transport.send(self._again())
                except httpx.TransportError as error:
                    broke, pause = error, resuming.pause()
                    continue
                if _is_stream(response):
                    break
                pause = resuming.pause(response.status_code, dict(response.headers))
                kind = response.headers.get("content-type", "")
                # The body of a final refusal has the error, which is yielded as an event.
                if pause is None and kind.startswith("application/json"):
                    # Callers expect events, not JSON.
                    yield b"data: %b\n\n" % await transport.read(response)
                    return

    async def end(self) -> None:
        await self._transport.close(self._response)

    def _again(self) -> Any:
        request = self._request
        headers = request.headers.copy()
        headers.update(self._resuming.headers)
        return type(request)(
            request.method,
            request.url,
            headers=headers,
            content=self._body,
            extensions=request.extensions,
        )

    def _refused(self, response: Any) -> float | None:
        """Return the seconds until the request should be sent again; None if the response is final.

        The request is sent again if no router has accepted it. A proxy that does not know its
        routers yet answers 404 for a valid path.
        """
        status = response.status_code
        if status in (502, 504) or (status == 404 and _NOWHERE in response.content):
            return self._resuming.pause(status, dict(response.headers))
        return None

    def _around(self, response: Any) -> Any:
        self._response = response
        return type(response)(
            response.status_code,
            headers=response.headers,
            stream=self,
            extensions=response.extensions,
        )


class _ResumingStream(_Completion):
    def __iter__(self) -> Iterator[bytes]:
        events: Any = self.events()
        try:
            while True:
                try:
                    event = _now(anext(events))
                except StopAsyncIteration:
                    return
                yield event
        finally:
            _now(events.aclose())

    def close(self) -> None:
        _now(self.end())


class _AsyncResumingStream(_Completion):
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.events()

    async def aclose(self) -> None:
        await self.end()


class ResumingTransport:
    """A transport for httpx or httpx2 whose streamed completions survive broken connections.

    transport: a transport of the library, by which requests are sent.
    """

    def __init__(self, transport: Any, patience: float = PATIENCE) -> None:
        self._inner = transport
        self._patience = patience
        self._served = False  # whether a server has answered, so that it is expected to come back

    def __enter__(self) -> "ResumingTransport":
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def handle_request(self, request: Any) -> Any:
        if not _is_completion(request):
            return self._inner.handle_request(request)
        kind = _stream_class(_library(type(request)), "SyncByteStream", _ResumingStream)
        completion = kind(_Threads(self._inner), request, request.read(), self._patience)
        response = _now(completion.answer(self._served))
        self._served |= response.status_code == 200
        return response

    def close(self) -> None:
        self._inner.close()


class AsyncResumingTransport:
    """An asyncio transport for httpx or httpx2; see ResumingTransport."""

    def __init__(self, transport: Any, patience: float = PATIENCE) -> None:
        self._inner = transport
        self._patience = patience
        self._served = False  # whether a server has answered, so that it is expected to come back

    async def __aenter__(self) -> "AsyncResumingTransport":
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)

    async def handle_async_request(self, request: Any) -> Any:
        if not _is_completion(request):
            return await self._inner.handle_async_request(request)
        kind = _stream_class(_library(type(request)), "AsyncByteStream", _AsyncResumingStream)
        completion = kind(_Asyncio(self._inner), request, await request.aread(), self._patience)
        response = await completion.answer(self._served)
        self._served |= response.status_code == 200
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def _library(cls: type) -> Any:
    """Return the library that defines a class: httpx or httpx2."""
    return sys.modules[cls.__module__.partition(".")[0]]


@cache
def _stream_class(httpx: Any, base: str, of: type) -> Any:
    """Return a subclass of our stream class that the library accepts as a body, as it also derives
    from the library's stream class.

    httpx: the library. base: name of its stream class. of: our stream class.
    """
    return type(of.__name__, (of, getattr(httpx, base)), {})


def _is_completion(request: Any) -> bool:
    return request.method == "POST" and request.url.path.endswith(_STREAMS)


def _is_stream(response: Any) -> bool:
    kind = response.headers.get("content-type", "")
    plain = "content-encoding" not in response.headers
    return response.status_code == 200 and plain and kind.startswith("text/event-stream")
