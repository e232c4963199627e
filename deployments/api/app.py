"""build_asgi: the OpenAI-compatible HTTP API over a Backend, as a bare ASGI application."""

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import replace
from typing import Any

import msgspec

from deployments.api.auth import authenticate
from deployments.api.caller import CALLER
from deployments.api.context import ApiContext
from deployments.api.dialects.anthropic import routes as anthropic
from deployments.api.dialects.ollama import routes as ollama
from deployments.api.dialects.ollama.writer import error_object as ollama_error
from deployments.api.fields.generation import Queued
from deployments.api.generate import generates
from deployments.api.generation.tenancy import queue_place, take_queue
from deployments.api.http.cors import answer_preflight, is_preflight, tell_origin
from deployments.api.http.errors import ApiError, from_backend, internal
from deployments.api.http.exchange import (
    ClientDisconnected,
    HttpExchange,
    Message,
    Receive,
    Scope,
    Send,
)
from deployments.api.http.json_body import INLINE_CHARS
from deployments.api.options import ApiOptions
from deployments.api.page.routes import FILES
from deployments.api.pooling import tei
from deployments.api.routes import locate, refusal
from deployments.api.services import adapters, models
from deployments.api.stream.response_store import ResponseStore
from deployments.backend import Backend
from engine.errors import MantaError, short_traceback

log = logging.getLogger("manta.api")

_ADAPTERS, _MODELS = f"{adapters.PATH}/", f"{models.PATH}/"
_TEI = frozenset(route.path for route in tei.ROUTES)
_REFUSING = 1.0  # seconds after a 429 or 503 in which `refuse_early` checks requests
_BODY_SECONDS = 0.1  # seconds for which `refuse_early` waits for a request's body


def build_asgi(backend: Backend, options: ApiOptions | None = None) -> "Api":
    """Return the ASGI application: ``await app(scope, receive, send)``."""
    return Api(backend, options or ApiOptions())


class Api:
    """The HTTP API as an ASGI application.

    A router process has two of these applications: one for HTTP, and one for calls over Serve
    handles, which need no API key.
    context: the backend, options and state for the handlers of later requests
    """

    def __init__(self, backend: Backend, options: ApiOptions) -> None:
        self.context = ApiContext(backend, options, ResponseStore(options.store_bytes))
        self._refused_at = -math.inf  # monotonic seconds of the last 429 or 503

    @property
    def options(self) -> ApiOptions:
        return self.context.options

    @property
    def in_flight(self) -> int:
        """The number of generation requests that have not ended."""
        return self.context.counter.in_flight

    def change_options(self, **fields: Any) -> None:
        """Change options for later requests. fields: field of ApiOptions -> its new value."""
        options = replace(self.context.options, **fields)
        self.context = replace(self.context, options=options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, send)
        if scope["type"] != "http":
            return
        began = time.monotonic()
        context = self.context
        options = context.options
        exchange = HttpExchange(scope, receive, send, tell_id=options.tell_request_id)
        named, status = "other", 499
        origins = options.cors_origins
        if origins:
            tell_origin(exchange, origins)
        try:
            try:
                exchange.check_envelope()
                path, route = locate(exchange.path)
                exchange.path = path
                _choose_errors(exchange)
                if origins and is_preflight(exchange):
                    await answer_preflight(exchange, origins)
                    status = 200
                    return
                if not (path.startswith(FILES) if route is None else route.open):
                    admin = path.startswith(_ADAPTERS) if route is None else route.admin
                    if path == models.PATH or path.startswith(_MODELS):
                        admin |= exchange.method not in ("GET", "HEAD")  # changes what is served
                    exchange.caller = scope.get(CALLER) or authenticate(
                        exchange, options, admin=admin
                    )
                if route is None or exchange.method not in route.operations:
                    raise refusal(path, route)
                named = route.path
                answer = await route.operations[exchange.method].handler(context, exchange)
                if answer is not None:
                    await exchange.answer_json(answer)
                status = 200
            except ClientDisconnected:
                raise
            except (ApiError, MantaError) as error:
                refused = from_backend(error)
                status = refused.status
                if status in (429, 503):
                    self._refused_at = time.monotonic()
                await exchange.fail(refused)
            except Exception as error:
                status = 500
                log.error("request %s failed: %s", exchange.request_id, short_traceback(error))
                if exchange.started:
                    # The HTTP server then closes the connection, so the client notices the
                    # truncated answer.
                    raise
                await exchange.fail(internal())
        except ClientDisconnected:
            status = 499
        finally:
            for end in exchange.on_end:
                end()
            if options.observe is not None:
                options.observe(named, status, time.monotonic() - began)

    async def refuse_early(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Refuse a generation request before Serve's layers; return None if it has been answered,
        else the `receive` with which it has to be passed on.

        An early refusal skips Serve's layers, which cost many times as much as the refusal itself.
        Requests are checked only within `_REFUSING` seconds after another refusal, and only if a
        short body arrives with the head. Of the body only the fields of `Queued` are read. A
        request that is not refused here is checked again. The checks have the order of `generate`:
        first the limits of the key, then the queue.
        """
        began = time.monotonic()
        if began - self._refused_at > _REFUSING or scope["method"] != "POST":
            return receive
        context = self.context
        options, model = context.options, context.backend.only
        exchange = HttpExchange(scope, receive, send)
        exchange.path, route = locate(exchange.path)
        operation = None if route is None else route.operations.get("POST")
        if not model or operation is None or not generates(operation.handler):
            return receive
        try:
            exchange.check_envelope()
            caller = exchange.caller = authenticate(exchange, options, admin=False)
        except ApiError:
            return receive
        if options.share_by == "user" and not caller.tenant:
            return receive  # queue shares are by user, which is another field in each dialect
        if exchange.content_length is None or exchange.content_length > INLINE_CHARS:
            return receive  # a long body has to be read before the connection takes a next request
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            return receive
        try:
            # A body in several parts, or compressed, is no JSON here.
            fields = msgspec.json.decode(message.get("body", b""), type=Queued)
            place = queue_place(exchange, take_queue(fields, None), options)
            context.backend.admit(place.key, place.priority, model)
            return _after(message, receive)
        except (msgspec.DecodeError, RecursionError, ApiError):
            return _after(message, receive)
        except MantaError as error:
            answer = from_backend(error)
        try:
            context.count_request(exchange)
        except ApiError as error:
            answer = error
        self._refused_at = began
        if options.cors_origins:
            tell_origin(exchange, options.cors_origins)
        _choose_errors(exchange)
        with contextlib.suppress(ClientDisconnected):
            await exchange.fail(answer)
        if options.observe is not None:
            options.observe(exchange.path, answer.status, time.monotonic() - began)
        return None


def _after(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that returns a message which was already received, then the next ones."""
    received = [message]

    async def again() -> Message:
        return received.pop() if received else await receive()

    return again


def _choose_errors(exchange: HttpExchange) -> None:
    """Set the format of a request's error bodies to that of its API dialect."""
    path = exchange.path
    if path.startswith(anthropic.PATH) or models.VERSION_HEADER in exchange.headers:
        exchange.error_object = anthropic.error_object
    elif path.startswith(ollama.PREFIX):
        exchange.error_object = ollama_error
    elif path in _TEI:
        exchange.error_object = tei.error_object


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """Refuse a WebSocket connection, by an HTTP error if the server can send one; no route takes
    WebSockets."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return

    async def as_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    exchange = HttpExchange({**scope, "method": "GET"}, _nothing, as_http)
    await exchange.fail(ApiError(400, "websocket_not_supported", "no route takes WebSockets"))


async def _nothing() -> Message:
    await asyncio.Future()
    raise AssertionError
