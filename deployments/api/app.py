"""build_asgi: the OpenAI-compatible HTTP API over a Backend, as a bare ASGI application."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from deployments.api.auth import authenticate
from deployments.api.caller import CALLER
from deployments.api.context import ApiContext
from deployments.api.dialects.anthropic import routes as anthropic
from deployments.api.dialects.ollama import routes as ollama
from deployments.api.dialects.ollama.writer import error_body as ollama_error
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
from deployments.api.options import ApiOptions
from deployments.api.page.routes import FILES, LIVE
from deployments.api.pooling import tei
from deployments.api.response_store import ResponseStore
from deployments.api.routes import OPEN, locate, refusal
from deployments.api.services import adapters, models
from deployments.api.trainers import sglang, sglang_tensors, skyrl, vllm
from deployments.backend import Backend
from engine.errors import MantaError, short_traceback

log = logging.getLogger("manta.api")

_TRAINERS = frozenset().union(
    *(routes.ADMIN_PATHS for routes in (vllm, sglang, sglang_tensors, skyrl))
)
_ADAPTERS, _MODELS = f"{adapters.PATH}/", f"{models.PATH}/"


def build_asgi(backend: Backend, options: ApiOptions | None = None) -> "Api":
    """Return the ASGI application: ``await app(scope, receive, send)``."""
    return Api(backend, options or ApiOptions())


class Api:
    """The ASGI application, one for each kind of caller of a router process.

    context: what the handlers of the next request are given
    """

    def __init__(self, backend: Backend, options: ApiOptions) -> None:
        self.context = ApiContext(backend, options, ResponseStore(options.store_bytes))

    @property
    def options(self) -> ApiOptions:
        return self.context.options

    @property
    def in_flight(self) -> int:
        """The number of generation requests that have not ended."""
        return self.context.counter.in_flight

    def change_options(self, **fields: Any) -> None:
        """Change options for the requests to come."""
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
                if path.startswith(anthropic.PATH) or models.VERSION_HEADER in exchange.headers:
                    exchange.error_body = anthropic.error_body
                elif path.startswith(ollama.PREFIX):
                    exchange.error_body = ollama_error
                elif path in tei.PATHS:
                    exchange.error_body = tei.error_body
                if origins and is_preflight(exchange):
                    await answer_preflight(exchange, origins)
                    status = 200
                    return
                if path not in OPEN and not path.startswith(FILES):
                    admin = path in adapters.PATHS or path.startswith(_ADAPTERS)
                    admin |= path == LIVE or path in _TRAINERS
                    if path == models.PATH or path.startswith(_MODELS):
                        admin |= exchange.method not in ("GET", "HEAD")  # changes what is served
                    exchange.caller = scope.get(CALLER) or authenticate(
                        exchange, options, admin=admin
                    )
                if route is None or exchange.method not in route.operations:
                    raise refusal(path, route)
                named = route.path
                await route.handler(context, exchange)
                status = 200
            except ClientDisconnected:
                raise
            except (ApiError, MantaError) as error:
                answer = from_backend(error)
                status = answer.status
                await exchange.fail(answer)
            except Exception as error:
                status = 500
                log.error("request %s failed: %s", exchange.request_id, short_traceback(error))
                if exchange.started:
                    # The server closes the connection: the answer is cut, not complete.
                    raise
                await exchange.fail(internal())
        except ClientDisconnected:
            status = 499
        finally:
            for end in exchange.on_end:
                end()
            if options.observe is not None:
                options.observe(named, status, time.monotonic() - began)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """Refuse a WebSocket, with an ordinary error if the server can send one: no route speaks it."""
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
