"""Requests to the server before the load starts, such as for the served models."""

import asyncio
import os
import socket
import ssl

import msgspec

from loadtest.errors import RunError
from loadtest.http import Address, ConnectionPool, request_head
from loadtest.scenario.schema import Target, read_key


class _WholeResponse:
    """A ResponseHandler that collects a whole answer, for requests before the load starts."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.error: str | None = None
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data

    def on_end(self, now: float) -> None:
        self.over.set()

    def on_lost(self, error: str, now: float) -> None:
        self.error = error
        self.over.set()


async def get(target: Target, path: str) -> tuple[int, bytes]:
    """Send a GET request to the first URL and return (status, body). Raises RunError with the
    address tried.
    """
    url = target.urls[0]
    address = Address.of(url)
    pool = ConnectionPool(address)
    headers = {"accept": "application/json"}
    if target.key_file is not None:
        headers["authorization"] = f"Bearer {read_key(target.key_file)}"
    answer = _WholeResponse()
    try:
        connection = await pool.connect(target.connect_timeout)
    except ssl.SSLError as error:
        raise RunError(f"{url}: TLS failed: {error.reason or error}") from None
    except TimeoutError:
        raise RunError(f"{url}: no connection within {target.connect_timeout:g} s") from None
    except socket.gaierror as error:
        raise RunError(f"{url}: {error.strerror}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RunError(f"{url}: {reason}") from None
    try:
        head = request_head(address, "GET", path, headers | target.headers)
        connection.send(head + b"\r\n", answer)
        async with asyncio.timeout(target.connect_timeout):
            await answer.over.wait()
    except TimeoutError:
        raise RunError(f"{url}: no answer within {target.connect_timeout:g} s") from None
    finally:
        connection.abandon()
    if answer.error is not None:
        raise RunError(f"{url}: {answer.error}")
    return answer.status, answer.body


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


async def first_model(target: Target) -> str:
    """Return the first model that the server lists. Raises RunError."""
    status, body = await get(target, "/v1/models")
    where = f"{target.urls[0]}/v1/models"
    if status != 200:
        raise RunError(f"{where}: status {status}; name the model with --model")
    try:
        cards = msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RunError(f"{where}: no list of models; name the model with --model") from None
    if not cards:
        raise RunError(f"{where}: an empty list of models")
    return cards[0].id
