"""A fake OpenAI-compatible server with chosen delays and faults, to check the load tester.

In a thread of the test:      with FakeServer(first=0.05, gap=0.01) as server: ... server.url
As a separate process:        python -m tests.loadtest.fake_server 0.04..0.1 0.012
    prints its URL and runs until its standard input ends. The first token comes 40 to 100 ms after
    a request, drawn at random, then one every 12 ms. Without figures: NullServer, which adds no
    delay.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FAULTS = (
    *("refuse_400", "refuse_429", "refuse_500", "refuse_503", "disconnect", "cut", "no_done"),
    *("no_finish", "error_event", "error_then_done", "garbage", "not_sse", "hang", "stall"),
    *("lose", "double", "wrong", "bad_http", "reset"),
)


def answer_ids(body: dict[str, Any]) -> list[int]:
    """Return the token ids of the right answer to a request, a hash of its prompt and model."""
    asked = json.dumps([body.get("prompt"), body.get("messages"), body.get("model")])
    seed = hashlib.sha256(asked.encode()).digest()
    return [100 + seed[i % 32] + i for i in range(body.get("max_tokens", 16))]


def text_of(token: int) -> str:
    return f" w{token}"


class FakeServer:
    """An OpenAI-compatible server with chosen delays and faults, in a thread.

    fault: (number of the request from 0, its body) -> one of FAULTS, or None for a right answer.
    first: seconds to the first token. gap: seconds between chunks. per_chunk: tokens of a chunk.
    closes: whether each connection is closed after an answer without announcing so in the head.
    until_seen: number of requests that must have arrived before any is answered, for 30 s at most.
    seen: the bodies of all generations, in order of arrival. open: connections at this moment.
    """

    def __init__(
        self,
        *,
        first: float | Callable[[int], float] = 0.0,
        gap: float = 0.0,
        per_chunk: int = 1,
        fault: Callable[[int, dict[str, Any]], str | None] | None = None,
        headers: dict[str, str] | None = None,
        tells_ids: bool = True,
        until_seen: int = 0,
        timing: Any = None,
        port: int = 0,
        closes: bool = False,
    ) -> None:
        self.first, self.gap, self.per_chunk, self.fault = first, gap, per_chunk, fault
        self.headers, self.tells_ids, self.timing = headers or {}, tells_ids, timing
        self.until_seen, self.closes = until_seen, closes
        self.seen: list[dict[str, Any]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.broken_off = 0
        self._port = port
        self.up = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self.up.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _main(self) -> None:
        asyncio.run(self.serve())

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self._port, backlog=2048)
        self._port = server.sockets[0].getsockname()[1]
        self.up.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.broken_off += 1
        except asyncio.CancelledError:
            pass
        finally:
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split()
        if method == "GET" and path in ("/v1/models", "/health"):
            card = {"id": "fake", "object": "model"}
            self._json(writer, 200, {"object": "list", "data": [card]})
            return True
        if method != "POST" or path not in ("/v1/completions", "/v1/chat/completions"):
            self._json(writer, 404, {"error": {"message": path, "code": "not_found"}})
            return True
        body = json.loads(raw)
        number = len(self.seen)
        self.seen.append(body)
        self.seen_headers.append(headers)
        fault = self.fault(number, body) if self.fault else None
        keep = await self._answer(writer, body, number, fault, "chat" in path)
        return keep and not self.closes

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        number: int,
        fault: str | None,
        chat: bool,
    ) -> bool:
        if fault and fault.startswith("refuse_"):
            status = int(fault.removeprefix("refuse_"))
            error = {"message": f"told to {fault}", "type": "made", "code": f"code_{status}"}
            self._json(writer, status, {"error": error})
            return True
        if fault == "disconnect":
            return False
        if fault == "reset":
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if fault == "bad_http":
            writer.write(b"hello\r\n\r\n")
            return False
        if fault == "hang":
            await asyncio.sleep(3600)
        deadline = time.monotonic() + 30
        while len(self.seen) < self.until_seen and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        first = self.first(number) if callable(self.first) else self.first
        if first:
            await asyncio.sleep(first)
        right = answer_ids(body)
        ids = list(right)
        if fault == "wrong":
            ids[len(ids) // 2] += 7
        elif fault == "lose":
            del ids[2:4]
        elif fault == "double":
            ids[3:3] = ids[1:3]
        usage = {
            "prompt_tokens": len(body["prompt"]) if "prompt" in body else 20,
            "completion_tokens": len(right),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        if self.timing is not None and self.seen_headers[number].get("x-return-timing") == "1":
            usage["timing"] = self.timing
        shows_ids = self.tells_ids and bool(body.get("return_token_ids"))
        if not body.get("stream") or fault == "not_sse":
            if fault == "garbage":
                self._json(writer, 200, ["what"])
                return True
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            text = "".join(map(text_of, ids))
            choice |= {"message": {"content": text}} if chat else {"text": text}
            if shows_ids:
                choice["token_ids"] = ids
            self._json(writer, 200, {"choices": [choice], "usage": usage})
            return True
        return await self._stream(writer, ids, usage, fault, chat, shows_ids, body)

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        ids: list[int],
        usage: dict[str, Any],
        fault: str | None,
        chat: bool,
        shows_ids: bool,
        body: dict[str, Any],
    ) -> bool:
        extra = "".join(f"{k}: {v}\r\n" for k, v in self.headers.items())
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\nx-request-id: r1\r\n" + extra.encode() + b"\r\n"
        )
        each_chunk = (body.get("stream_options") or {}).get("continuous_usage_stats")
        kind = {"id": "r1", "object": "chat.completion.chunk" if chat else "text_completion"}
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            self._event(writer, {**kind, "choices": [role]})
        due = time.monotonic()
        for at in range(0, len(ids), self.per_chunk):
            if at and self.gap:
                due += self.gap
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            if at >= len(ids) // 2:
                if fault == "cut":
                    await writer.drain()
                    return False
                if fault == "stall":
                    await asyncio.sleep(3600)
                if fault in ("error_event", "error_then_done"):
                    error = {"message": "made", "code": "replica_died"}
                    self._event(writer, {"error": error})
                    if fault == "error_then_done":
                        self._data(writer, b"data: [DONE]\n\n")
                    self._data(writer, b"")
                    return True
                if fault == "garbage":
                    self._data(writer, b"data: {nonsense\n\n")
            piece = ids[at : at + self.per_chunk]
            text = "".join(map(text_of, piece))
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if shows_ids:
                choice["token_ids"] = piece
            event: dict[str, Any] = {**kind, "choices": [choice]}
            if each_chunk:
                event["usage"] = {"completion_tokens": at + len(piece)}
            self._event(writer, event)
            await writer.drain()
        if fault != "no_finish":
            last: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            last |= {"delta": {}} if chat else {"text": ""}
            self._event(writer, {**kind, "choices": [last]})
        self._data(writer, b": a comment\n\n")
        self._event(writer, {**kind, "choices": [], "usage": usage})
        if fault != "no_done":
            self._data(writer, b"data: [DONE]\n\n")
        self._data(writer, b"")
        return True

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._data(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _data(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        extra = "".join(f"{k}: {v}\r\n" for k, v in self.headers.items()).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
            % (status, extra, len(data), data)
        )


class NullServer(asyncio.Protocol):
    """A server that uses little CPU time: at each tick it sends the same chunk to every stream."""

    TICK = 0.02
    streams: "dict[NullServer, int]" = {}  # noqa: RUF012 - one for all connections is meant
    HEAD = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    @staticmethod
    def chunk(event: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(event), event)

    PIECE: bytes = b""
    END: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        self.rest += data
        end = self.rest.find(b"\r\n\r\n")
        if end < 0:
            return
        if self.rest.startswith(b"GET"):
            body = b'{"data":[{"id":"null"}]}'
            self.rest = b""
            self.transport.write(  # type: ignore[attr-defined]
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            return
        length = int(self.rest.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(self.rest) < end + 4 + length:
            return
        at = self.rest.rfind(b'"max_tokens":')
        number = int(self.rest[at + 13 :].split(b",", 1)[0].rstrip(b"}"))
        self.rest = b""
        self.transport.write(self.HEAD)  # type: ignore[attr-defined]
        self.streams[self] = number

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.pop(self, None)

    @classmethod
    def tick(cls) -> None:
        for stream, left in list(cls.streams.items()):
            if left:
                cls.streams[stream] = left - 1
                stream.transport.write(cls.PIECE)  # type: ignore[attr-defined]
            else:
                del cls.streams[stream]
                stream.transport.write(cls.END)  # type: ignore[attr-defined]

    @classmethod
    async def serve(cls) -> None:
        piece = {
            "id": "cmpl-1234567890",
            "object": "text_completion",
            "created": 1,
            "model": "null",
        }
        piece["choices"] = [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]
        cls.PIECE = cls.chunk(b"data: " + json.dumps(piece).encode() + b"\n\n")
        piece["choices"] = [{"index": 0, "text": "", "finish_reason": "length"}]
        cls.END = cls.chunk(b"data: " + json.dumps(piece).encode() + b"\n\n")
        cls.END += cls.chunk(b"data: [DONE]\n\n") + cls.chunk(b"")
        loop = asyncio.get_running_loop()
        server = await loop.create_server(cls, "127.0.0.1", 0, backlog=2048)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        due = time.monotonic()
        parent = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not parent.done():
            cls.tick()
            due = max(due + cls.TICK, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


async def serve_delays(first: str, gap: str) -> None:
    """Run a FakeServer until standard input ends.

    first, gap: seconds, or a range "0.04..0.1" to draw from.
    """
    low, high = map(float, first.split("..")) if ".." in first else (float(first),) * 2

    def drawn(number: int) -> float:
        return low + (high - low) * (number * 0.6180339887498949 % 1.0)

    server = FakeServer(first=drawn, gap=float(gap))
    served = asyncio.create_task(server.serve())
    await asyncio.to_thread(server.up.wait)
    print(server.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    served.cancel()


if __name__ == "__main__":
    asyncio.run(serve_delays(*sys.argv[1:]) if sys.argv[1:] else NullServer.serve())
