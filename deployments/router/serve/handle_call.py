"""In-process requests to our own ASGI app, which turn calls over Serve handles into HTTP
requests."""

import asyncio
import contextlib
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any
from urllib.parse import urlencode

from deployments.api.body_fields import MAX_DEADLINE
from deployments.api.caller import CALLER, Caller
from deployments.api.stream.event_ids import LAST, WANTED

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[Message]],
        Callable[[Message], Awaitable[None]],
    ],
    Awaitable[None],
]

_MAX_PARTS = 16  # maximum of unread parts of a response


def path_for(body: dict[str, Any]) -> str:
    """Return the path for a body: of chat completions if it has `messages`, else of completions."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


async def call(app: AsgiApp, body: dict[str, Any]) -> dict[str, Any]:
    """Send a chat or text completion, and return the JSON of the response.

    A failure is OpenAI's {"error": {...}} with an additional key "status".
    """
    return await control(app, path_for(body), "", {**body, "stream": False})


async def control(
    app: AsgiApp,
    path: str,
    query: str | Mapping[str, Any],
    body: dict[str, Any] | str | bytes | None,
    method: str = "",
) -> dict[str, Any]:
    """Send a request to a route, and return the JSON of the response. A failure is returned as by
    `call`.

    A response that is not JSON is returned as {"text": ...}.

    query: the URL's query, or its fields; a list repeats its field.
    body: a JSON object, or its text; None for a request without a body.
    method: the HTTP method; "": POST, or GET without a body.
    """
    if not isinstance(query, str):
        query = urlencode(query, doseq=True)
    exchange = AsgiCall(app, path, body, query=query, method=method)
    try:
        await exchange.started.wait()
        parts = [part async for part in exchange.parts()]
    finally:
        await exchange.end()
    return exchange.answer(b"".join(parts))


async def stream(
    app: AsgiApp, body: dict[str, Any], last_event_id: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a streamed response. A failure is the last item, in the form of `call`.

    Closing the generator aborts the request.

    last_event_id: id of the event after which a stream is resumed; "": a new stream with event ids;
        None: a new stream without them. With ids each chunk has `event_id`, and {"done": True}
        follows the last chunk.
    """
    headers: list[tuple[bytes, bytes]] = []
    if last_event_id is not None:
        headers.append((WANTED, b"1"))
        if last_event_id:
            headers.append((LAST, last_event_id.encode("ascii", "replace")))
    exchange = AsgiCall(app, path_for(body), {**body, "stream": True}, headers)
    try:
        await exchange.started.wait()
        if exchange.status != 200:
            yield exchange.answer(b"".join([part async for part in exchange.parts()]))
            return
        async for event in exchange.events():
            if event is not None:
                yield event
            elif last_event_id is not None:
                yield {"done": True}
    finally:
        await exchange.end()


async def post(
    app: AsgiApp, path: str, payload: bytes, caller: Caller, request_id: str, seconds: float
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send a POST request on behalf of a caller, and return status, headers and body of the
    response.

    Cancelling the call aborts the request.

    payload: the JSON body.
    caller: the caller with its tenant and rights, used instead of an API key.
    seconds: time until the request's deadline.
    """
    deadline = f"{min(seconds, MAX_DEADLINE):.3f}".encode()
    headers = ((b"x-request-id", request_id.encode()), (b"x-deadline-seconds", deadline))
    scope = _scope(path, payload, headers)
    scope[CALLER] = caller
    unread: list[Message] = [{"type": "http.request", "body": payload, "more_body": False}]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Future()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return start["status"], dict(start.get("headers", ())), b"".join(parts)


def wait_of(status: int, headers: dict[bytes, bytes]) -> float | None:
    """Return the seconds until a request should be sent again; None: the response is final.

    A request is retried if there was no room or no replica, or if the key's rate limit or budget
    was exhausted.

    status, headers: the response's status and headers.
    """
    if status not in (429, 503):
        return None
    if b"retry-after" not in headers:
        return None if headers.get(b"x-should-retry") == b"false" else 1.0
    with contextlib.suppress(ValueError):
        return max(1.0, float(headers[b"retry-after"]))
    return 1.0


def _scope(
    path: str,
    payload: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    method: str = "POST",
    query: str = "",
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            (b"host", b"handle"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(payload)).encode()),
            *headers,
        ],
        "client": None,
        "server": None,
    }


class AsgiCall:
    """A request to an ASGI app that runs in its own task and queues the parts of the response.

    body: a JSON object, or its text; None for a request without a body.
    method: the HTTP method; "": POST, or GET without a body.
    started: set once the response has started, after which `status` and `headers` are known.
    """

    def __init__(
        self,
        app: AsgiApp,
        path: str,
        body: dict[str, Any] | str | bytes | None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        query: str = "",
        method: str = "",
    ) -> None:
        text = json.dumps(body) if isinstance(body, dict) else body or b""
        payload = text.encode() if isinstance(text, str) else text
        self.status = 0
        self.started = asyncio.Event()
        self.headers: dict[bytes, bytes] = {}
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        # The app blocks while the caller does not read, as on a socket.
        self._room = asyncio.Semaphore(_MAX_PARTS)
        self._unread: list[Message] = [
            {"type": "http.request", "body": payload, "more_body": False}
        ]
        self._gone = asyncio.Event()
        method = method or ("GET" if body is None else "POST")
        scope = _scope(path, payload, headers, method, query)
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: AsgiApp, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self.started.set()
            self._parts.put_nowait(None)

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = dict(message.get("headers", ()))
            self.started.set()
        elif message["type"] == "http.response.body" and message.get("body"):
            if not self._gone.is_set():
                await self._room.acquire()
            self._parts.put_nowait(message["body"])

    async def parts(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            self._room.release()
            yield part

    async def events(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the JSON of each event of a streamed response, with the event's id, if any, as
        `event_id`; None for [DONE]."""
        tail = b""
        async for part in self.parts():
            *events, tail = (tail + part).split(b"\n\n")
            for event in events:
                fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
                data = fields.get(b"data")
                if data == b"[DONE]":
                    yield None
                elif data is not None:
                    chunk = json.loads(data)
                    if b"id" in fields:
                        chunk["event_id"] = fields[b"id"].decode()
                    yield chunk

    def answer(self, body: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        kind = self.headers.get(b"content-type", b"application/json")
        if body:
            is_json = kind.startswith(b"application/json")
            answer = json.loads(body) if is_json else {"text": body.decode("utf-8", "replace")}
        if self.status != 200:
            answer["status"] = self.status
            if b"retry-after" in self.headers:
                answer["retry_after"] = float(self.headers[b"retry-after"])
        return answer

    async def end(self) -> None:
        """End the call; an app that still runs sees a disconnect."""
        self._gone.set()
        self._room.release()  # wakes a send that waits for room
        await asyncio.wait([self._task])
        self._task.result()
