"""Poison: malformed or huge requests that a server must refuse without harm to its other
clients."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from loadtest.http import Address, request_head

_PATIENCE_S = 5.0  # maximum wait for an answer to poison
_PIECE = 2**16  # bytes of a huge body per write
_HUGE = 64 * 2**20  # bytes of a huge body
_DEEP = 100_000  # depth of nested arrays


@dataclass(frozen=True)
class Poison:
    """A poisonous request.

    headers: lines after the usual head, each with its line break.
    body: bytes after the head.
    repeat: how many times the body is sent.
    """

    name: str
    headers: bytes
    body: bytes = b""
    repeat: int = 1


class PoisonOutcome(msgspec.Struct, frozen=True):
    """The outcome of one poisonous request.

    outcome: "refused" (4xx), "answered" (2xx), "failed" (5xx), "closed" (the connection ended
        without an answer), "silent" (no answer within some seconds) or "unreachable".
    status: the HTTP status, 0 without an answer.
    """

    name: str
    outcome: str
    status: int = 0


def _sized(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"content-type: application/json\r\ncontent-length: %d\r\n" % size


def poisons(model: str) -> Iterator[Poison]:
    """Yield every kind of poison for a chat with a model."""

    def chat(**fields: object) -> bytes:
        messages = [{"role": "user", "content": "Say something."}]
        return json.dumps({"model": model, "messages": messages, **fields}).encode()

    good = chat(max_tokens=1)
    whole = {
        "cut JSON": good[:-20],
        "not UTF-8": good.replace(b"Say", b"\xff\xfe\xfd"),
        "wrong types": chat(messages="text", max_tokens="many"),
        "half a surrogate": chat(messages=[{"role": "user", "content": "\ud800"}], max_tokens=1),
        "deep JSON": b'{"messages": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
        "endless output": chat(max_tokens=10**12),
        "not a number": good.replace(b'"max_tokens": 1', b'"max_tokens": 1, "temperature": NaN'),
        "negative counts": chat(max_tokens=-5, n=-1),
    }
    for name, body in whole.items():
        yield Poison(name, _sized(body), body)
    yield Poison("a longer length", _sized(good, len(good) + 1000), good)
    yield Poison("a shorter length", _sized(good, len(good) - 10), good)
    yield Poison("a negative length", b"content-length: -5\r\n", good)
    yield Poison("two lengths", _sized(good) + b"content-length: 3\r\n", good)
    chunked = b"transfer-encoding: chunked\r\n"
    yield Poison("a length and chunks", _sized(good) + chunked, b"0\r\n\r\n")
    yield Poison("a chunk without a size", chunked, b"zz\r\n" + good + b"\r\n0\r\n\r\n")
    yield Poison("a huge header", b"x-poison: " + b"a" * 2**20 + b"\r\n" + _sized(good), good)
    piece = b" " * _PIECE
    yield Poison("a huge body", _sized(b"", _HUGE), piece, _HUGE // _PIECE)


async def send(address: Address, poison: Poison) -> PoisonOutcome:
    """Send one poisonous request on a connection of its own, and return its outcome."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = (
                await asyncio.open_connection(
                    address.host,
                    address.port,
                    ssl=address.tls,
                    server_hostname=address.name or None,
                )
                if address.tls
                else await asyncio.open_connection(address.host, address.port)
            )
    except (OSError, TimeoutError):
        return PoisonOutcome(poison.name, "unreachable")
    head = request_head(address, "POST", "/v1/chat/completions", {"accept": "application/json"})
    answer = asyncio.create_task(reader.readuntil(b"\r\n"))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                writer.write(head + poison.headers + b"\r\n")
                for _ in range(poison.repeat):
                    if answer.done():
                        break
                    writer.write(poison.body)
                    await writer.drain()
            line = await answer
    except TimeoutError:
        return PoisonOutcome(poison.name, "silent")
    except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return PoisonOutcome(poison.name, "closed")
    finally:
        answer.cancel()
        writer.transport.abort()
    fields = line.split()
    status = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
    outcomes = {2: "answered", 4: "refused", 5: "failed"}
    return PoisonOutcome(poison.name, outcomes.get(status // 100, "closed"), status)


async def send_all(url: str, model: str, pause_s: float) -> list[PoisonOutcome]:
    """Send every kind of poison once, one after the other. Return the outcomes.

    If the coroutine is cancelled, it returns the outcomes so far. pause_s: seconds between two
    requests.
    """
    address = Address.of(url)
    outcomes: list[PoisonOutcome] = []
    with contextlib.suppress(asyncio.CancelledError):
        for poison in poisons(model):
            outcomes.append(await send(address, poison))
            await asyncio.sleep(pause_s)
    return outcomes
