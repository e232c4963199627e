"""A raw ASGI client, which can send invalid requests that HTTP libraries refuse, and hang up."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    sends: list[bytes] = field(default_factory=list)  # one item a send of body

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} twice"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of each server-sent event, parsed as JSON, or the text "[DONE]"."""
        payloads = [line[6:] for line in self.body.decode().split("\n\n") if line]
        return [item if item == "[DONE]" else json.loads(item) for item in payloads]


def scope_of(
    method: str, path: str, headers: Iterable[tuple[bytes, bytes]], query: bytes = b""
) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": list(headers),
        "http_version": "1.1",
    }


class Client:
    """A client of a raw ASGI application that sends one request at a time.

    hang_up: an event that makes `receive` return http.disconnect.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: Iterable[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),),
        *,
        hang_up: asyncio.Event | None = None,
        send_fails: bool = False,
        reply: Reply | None = None,
        query: bytes = b"",
    ) -> Reply:
        reply = reply if reply is not None else Reply()
        parts = [body] if isinstance(body, bytes) else list(body)
        gone = hang_up if hang_up is not None else asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                assert reply.status == 0, "two answers"
                reply.status = message["status"]
                reply.headers = [(k.decode(), v.decode("latin-1")) for k, v in message["headers"]]
                return
            if send_fails:
                raise ConnectionResetError
            reply.sends.append(message.get("body", b""))
            reply.body += message.get("body", b"")

        await self.app(scope_of(method, path, headers, query), receive, send)
        return reply

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        return await self.request("POST", path, json.dumps(body).encode(), **options)

    async def chat(self, **fields: Any) -> Reply:
        return await self.post("/v1/chat/completions", {**CHAT, **fields})

    async def completion(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {**COMPLETION, **fields})


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 32,
}
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": "hello",
    "temperature": 0,
    "max_tokens": 32,
}
