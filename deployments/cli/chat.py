"""`manta chat`: holds a conversation with an OpenAI-compatible server, with the standard library
only."""

import contextlib
import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from deployments.environment import api_key
from deployments.error_text import reason
from deployments.resumable_stream import ResumableStream
from engine.errors import ConfigError, MantaError

_CONNECT = 5.0  # seconds to connect
_QUICK = 8.0  # maximum seconds for a response without generation
# Maximum seconds between two chunks; a long prompt on a CPU takes minutes.
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of every request of a conversation; None means the server's default."""

    model: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temperature: float | None = None


class ServerError(MantaError):
    """The error for an unreachable server, or for an error response.

    status: HTTP status of the response; 0 if there was none.
    headers: the response's headers, with lower-case names.
    """

    code = "server_error"

    def __init__(
        self, message: str, *, status: int = 0, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class ChatServer:
    """A client of an OpenAI-compatible server.

    url: the server's URL, with or without /v1 at its end. api: the same URL with /v1.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        if "://" not in url:
            url = f"http://{url}"
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{url}: not an address; give one like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self.api = self.url.removesuffix(path) + self._base
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        """Return the first model that the server lists. Raises ServerError if it lists none."""
        answer = self.ask("GET", "/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ServerError(f"{self.url} names no model; give --model") from error

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = _QUICK
    ) -> Any:
        """Send a request and return the JSON of its response.

        path: path after /v1.
        timeout: maximum seconds without a byte of the response.

        Raises ServerError.
        """
        response = self.request(method, path, body, timeout)
        try:
            return json.loads(response.read())
        except ValueError as error:
            raise ServerError(f"{self.url} sent something that is not JSON") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url} broke off: {reason(error)}") from error

    def stream_chat(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the text of an answer as it is generated; a broken stream is resumed. Raises
        ServerError."""
        resuming = ResumableStream()
        body = {**body, "stream": True}
        response = self.request("POST", "/chat/completions", body, headers=resuming.headers)
        while True:
            try:
                for raw in response:
                    for line in resuming.feed(raw).decode("utf-8", "replace").splitlines():
                        if line == "data: [DONE]":
                            return
                        if line.startswith("data:"):
                            yield from self._text(line[5:])
                broke = ServerError(f"{self.url} ended the answer before its end")
            except (OSError, http.client.HTTPException) as error:
                broke = ServerError(f"{self.url} broke off: {reason(error)}")
            finally:
                response.close()
            response = self._go_on(body, resuming, broke)

    def _go_on(
        self, body: dict[str, Any], resuming: ResumableStream, broke: ServerError
    ) -> http.client.HTTPResponse:
        """Request the remainder of an answer after its stream has broken, with pauses between
        attempts.

        Raises ServerError after the last attempt: `broke`, or the error of that attempt.

        broke: the error with which the stream broke.
        """
        pause = resuming.pause()
        while pause is not None:
            time.sleep(pause)
            try:
                return self.request("POST", "/chat/completions", body, headers=resuming.headers)
            except ServerError as error:
                broke, pause = error, resuming.pause(error.status, error.headers)
        raise broke

    def _text(self, data: str) -> Iterator[str]:
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise ServerError(f"{self.url} sent something that is not JSON") from error
        if "error" in chunk:
            raise ServerError(f"{self.url}: {_message(chunk)}")
        for choice in chunk.get("choices", []):
            if text := (choice.get("delta") or {}).get("content"):
                yield text

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = _TIMEOUT,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> http.client.HTTPResponse:
        """Send a request and return the response.

        path: path after /v1.
        timeout: maximum seconds without a byte of the response.

        Raises ServerError if the server cannot be reached, or for a status other than 200.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(_CONNECT, timeout))
        payload = None if body is None else json.dumps(body)
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            connection.request(method, self._base + path, payload, {**self._headers, **headers})
            response = connection.getresponse()
        except ssl.SSLError as error:
            raise ServerError(
                f"{self.url}: no TLS connection ({reason(error)}); is it an http:// server?"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"{self.url} cannot be reached ({reason(error)}); is `manta serve` running there?"
            ) from error
        if response.status != 200:
            answer = ""
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = response.read(1 << 16).decode("utf-8", "replace")
            try:
                detail = _message(json.loads(answer))
            except ValueError:
                detail = "not an OpenAI-compatible answer"
            fields = {name.lower(): value for name, value in response.getheaders()}
            way_out = "; --key FILE gives it" if response.status == 401 else ""
            message = f"{self.api}{path} answered {response.status}: {detail}{way_out}"
            raise ServerError(message, status=response.status, headers=fields)
        return response


def run(url: str, once: str | None, options: ChatOptions, key_file: Path | None) -> int:
    """Send one message or hold a conversation, and return the exit code.

    once: the one message to send; None: read messages from stdin.

    Raises MantaError if the server cannot be reached or answers with an error.
    """
    server = ChatServer(url, read_key(key_file))
    body: dict[str, Any] = {
        "model": options.model or server.first_model(),
        "max_tokens": options.max_tokens,
    }
    if options.temperature is not None:
        body["temperature"] = options.temperature
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if once is not None:
        answer(server, body, [*messages, {"role": "user", "content": once}])
        return 0
    return _converse(server, body, messages)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A complete answer.

    text: the whole text.
    first_token: time.monotonic() at the first text or, without any text, at the end.
    """

    text: str
    first_token: float


def answer(server: ChatServer, body: dict[str, Any], messages: list[dict[str, str]]) -> ChatAnswer:
    """Print an answer as it arrives, and return it."""
    parts: list[str] = []
    first = 0.0
    for text in server.stream_chat({**body, "messages": messages}):
        first = first or time.monotonic()
        parts.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return ChatAnswer("".join(parts), first or time.monotonic())


def _converse(server: ChatServer, body: dict[str, Any], messages: list[dict[str, str]]) -> int:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (enables line editing in input())
        print(
            f"{body['model']} at {server.url}. Empty line or Ctrl-D ends, Ctrl-C stops an answer."
        )
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if not text:
            return 0
        messages.append({"role": "user", "content": text})
        try:
            reply = answer(server, body, messages).text
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(" [stopped]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})


def read_key(path: Path | None) -> str | None:
    """Return the API key from the first word of a file, or from OPENAI_API_KEY. Raises ConfigError.

    path: the file; None: OPENAI_API_KEY.
    """
    if path is None:
        return api_key()
    try:
        lines = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key {path}: cannot be read ({error})") from error
    if not lines:
        raise ConfigError(f"--key {path}: is empty")
    if lines[0].startswith("sha256:"):
        raise ConfigError(
            f"--key {path}: has the digest of a key, as the server's keys file does, and a digest "
            "opens nothing; give a file with the key itself, which `manta key` has shown once"
        )
    return lines[0]


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return reason(Exception(text)) if text else "no reason given"
