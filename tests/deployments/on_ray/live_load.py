"""Random requests on raw sockets, with all ways in which a client can disconnect."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

from tests.deployments.on_ray.live import NAME

WAYS = ("whole", "stream", "drop", "early", "half-close", "half a body")
BUSY = "busy"  # outcome of a request that is still refused after all PAUSES, on a slow machine
PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)  # seconds before each try
WEIGHTS = (25, 25, 20, 12, 12, 6)
_TEXT = "the sea is grey and old , we write a short line about it in two words or less"
_WORDS = _TEXT.split()


def random_body(order: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a random body for it; answers are so short that a thousand take a minute on
    two cores."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": order.randint(1, 12)}
    words = " ".join(order.choices(_WORDS, k=order.randint(1, 24)))
    if order.random() < 0.5:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": words}]
        if order.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": order.randint(0, 3)}
    else:
        path = "/v1/completions"
        ids = [order.randint(40, 240) for _ in range(order.randint(1, 30))]
        kinds: list[Any] = [words, words, ids, [words, words + "!"]]
        body["prompt"] = order.choice(kinds)
        if order.random() < 0.2:
            body["logprobs"] = order.randint(0, 3)
    if order.random() < 0.15:
        body["n"] = 2
    if order.random() < 0.25:
        body["stop"] = order.choice([["e"], [" a", "th"], ["zzzz"]])
    if order.random() < 0.4:
        body["temperature"] = 0
    if order.random() < 0.3:
        body["seed"] = order.randint(0, 2**31)
    if order.random() < 0.2:
        body["ignore_eos"] = True
    if order.random() < 0.04:
        body["temperature"] = 7  # refused
    return path, body


async def exchange(port: int, order: random.Random) -> str:
    """Send one request in a random way, and return its outcome. Raises AssertionError on a wrong
    answer."""
    path, body = random_body(order)
    (way,) = order.choices(WAYS, WEIGHTS)
    refused = body.get("temperature") == 7
    body["stream"] = way in ("stream", "drop") or order.random() < 0.5 * (way != "whole")
    if way == "drop":
        body["max_tokens"] = order.choice([12, 300])
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if way == "half a body":
            writer.write(head + payload[: len(payload) // 2])
            await asyncio.sleep(order.random() * 0.02)
            return way
        writer.write(head + payload)
        if way == "early":
            await asyncio.sleep(order.random() * 0.03)
            return way
        if way == "drop":
            for _ in range(order.randint(1, 6)):  # lines: head, empty, first chunk...
                await asyncio.wait_for(reader.readuntil(b"\n\n" if not refused else b"\n"), 30)
            return way
        if way == "half-close":
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(-1), 60)
        if way == "half-close" and (not answer or b'"invalid_http"' in answer):
            return "half-close, dropped"  # HAProxy treats a half-closed connection as closed
        head_, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head_.split(b" ", 2)[1])
        if refused and way == "half-close" and not rest:
            return "half-close, cut"  # the body was to follow the head, on a connection now closed
        if status == 503 and b"\r\nretry-after: " in head_ and b'"overloaded"' in rest:
            return BUSY
        if refused:
            assert status == 400 and b'"invalid_value"' in rest, answer
            return "refused"
        if way == "half-close" and (status != 200 or not _is_whole(rest, body["stream"])):
            return "half-close, cut"
        assert status == 200 and b"x-request-id" in head_.lower(), answer
        assert _is_whole(rest, body["stream"]), answer
        return way
    except asyncio.IncompleteReadError:
        assert way == "drop", way
        return "drop, over before"
    except ConnectionResetError:
        assert way == "half-close", way
        return "half-close, reset"
    finally:
        if order.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


def _is_whole(rest: bytes, stream: bool) -> bool:
    if stream:
        return b"data: [DONE]" in rest
    return bool(json.loads(rest)["usage"]["prompt_tokens"])


async def load(port: int, requests: int, at_once: int, seed: int) -> Counter[str]:
    """Send `requests` requests from `at_once` clients, and return outcome -> number of requests."""
    seen: Counter[str] = Counter()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            went = BUSY
            for wait in PAUSES:
                await asyncio.sleep(wait)
                went = await exchange(port, random.Random(seed * 1_000_003 + number))
                if went != BUSY:
                    break
            seen[went] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return seen
