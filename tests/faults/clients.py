"""Streaming clients that never retry, and record effects of faults: errors, missing or repeated
tokens, changed usage, pauses."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 120.0  # seconds for a whole stream


class Near(float):
    """A log-probability that is equal to another if they differ by less than 1e-4.

    Recomputed tokens are summed in another order than tokens that were decoded one by one.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass
class Said:
    """An answer, collected from its events.

    gap: the longest pause between two events, in seconds. gap_end, first: times of that pause's end
        and of the first event, in monotonic seconds.
    status: HTTP status; 0 if no answer came. prompt, output: tokens by usage.
    logprobs: for each choice, the text and log-probability of each token and of its most likely
        alternatives.
    migrations: how often a choice moved to another replica.
    """

    error: str = ""
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    prompt: int = -1
    output: int = -1
    logprobs: dict[int, list[list[tuple[str, Near]]]] = field(default_factory=dict)
    migrations: int = 0
    gap: float = 0.0
    gap_end: float = 0.0
    first: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """The parts of an answer that a fault must not change."""
        texts, finishes = sorted(self.texts.items()), sorted(self.finishes.items())
        logprobs = sorted(self.logprobs.items())
        return self.error, texts, finishes, self.prompt, self.output, logprobs

    def take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                assert index not in self.finishes, "a choice ended twice"
                self.finishes[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(
                    [
                        (case["token"], Near(case["logprob"]))
                        for case in (item, *item["top_logprobs"])
                    ]
                    for item in choice["logprobs"]["content"]
                )
        if event.get("usage"):
            self.prompt = event["usage"]["prompt_tokens"]
            self.output = event["usage"]["completion_tokens"]
            self.migrations = event["usage"].get("timing", {}).get("migrations", 0)


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """Return the bytes of a POST request that asks to close the connection after the answer."""
    payload = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}", "", ""]
    return "\r\n".join(lines).encode() + payload


async def ask(
    port: int,
    body: dict[str, Any],
    prefix: str = "",
    *,
    header: str = "",
    said: Said | None = None,
) -> Said:
    """Send one streamed request, and return its answer.

    Failures are not raised or retried: `error` of the answer describes them.
    header: a further header line. said: the object to collect the answer in, while it arrives.
    """
    said = said or Said()
    try:
        async with asyncio.timeout(TIMEOUT):
            await _ask(said, port, body, prefix, header)
    except (OSError, EOFError, TimeoutError) as error:
        said.error = said.error or f"{type(error).__name__}: {error}"
    return said


async def _ask(said: Said, port: int, body: dict[str, Any], prefix: str, header: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        headers = ("x-return-timing: 1", *[header] * bool(header))
        writer.write(post(prefix + path, {**body, **options}, *headers))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        for line in head[1:]:
            name, _, value = line.partition(": ")
            said.headers[name.lower()] = value
        said.status = int(head[0].split()[1])
        if said.status != 200:
            said.error = f"{head[0]}: {(await reader.read(4096)).decode('utf-8', 'replace')}"
            return
        last, buffer = 0.0, b""
        while size := int(await reader.readline() or b"", 16):
            buffer += (await reader.readexactly(size + 2))[:-2]
            *events, buffer = buffer.split(b"\n\n")
            events = [event for event in events if not event.startswith(b":")]  # no comments
            if not events:
                continue
            now = time.monotonic()
            said.first = said.first or now
            if last and now - last > said.gap:
                said.gap, said.gap_end = now - last, now
            last = now
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                said.take_event(json.loads(data))
        said.error = said.error or "the stream ended without [DONE]"
    except ValueError as error:
        said.error = said.error or f"the stream was cut: {error}"
    finally:
        writer.close()
