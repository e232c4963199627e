"""build_asgi: the OpenAI-compatible HTTP API over a Backend, as a bare ASGI application."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from deployments.adapters.book import AdapterRecord
from deployments.api import adapters
from deployments.api.answer import Answer
from deployments.api.auth import check_key
from deployments.api.call import (
    Call,
    chat_call,
    check_context,
    completion_call,
    encode_texts,
    find_model,
    in_thread,
    template_options,
)
from deployments.api.claims import deadline_of, key_of
from deployments.api.constraints import check_constraints
from deployments.api.errors import (
    INVALID,
    NOT_FOUND,
    OVERLOADED,
    ApiError,
    did_you_mean,
    from_backend,
    internal,
    invalid,
    shown,
    wrong_type,
)
from deployments.api.exchange import ClientGone, Exchange, Message, Receive, Scope, Send, UntilGone
from deployments.api.fields import (
    check_names,
    take_bool,
    take_object,
    take_str,
    take_token_ids,
)
from deployments.api.generations import start
from deployments.api.json_body import parse_json
from deployments.api.messages import check_messages, text_size
from deployments.api.options import ApiOptions
from deployments.api.requests_route import REQUESTS, explain_request, owner_of
from deployments.backend import DRAINING, Backend, ModelCard
from engine.errors import MantaError

Handler = Callable[["Api", Exchange], Awaitable[None]]

log = logging.getLogger("manta.api")

_PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
_OPEN_ROUTES = ("/health", "/ready")
_MODELS = "/v1/models/"
_ADAPTERS = f"{adapters.PATH}/"
_TOKENIZE = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
    }
)
_DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})


def build_asgi(backend: Backend, options: ApiOptions | None = None) -> "Api":
    """The application: ``await app(scope, receive, send)``."""
    return Api(backend, options or ApiOptions())


class Api:
    """One per router process; all state is the count of requests in flight."""

    def __init__(self, backend: Backend, options: ApiOptions) -> None:
        self.backend = backend
        self.options = options
        self.in_flight = 0  # generation requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        exchange = Exchange(scope, receive, send, tell_id=self.options.tell_request_id)
        route, status = "other", 499
        try:
            try:
                exchange.check_envelope()
                path = exchange.path
                if path not in _OPEN_ROUTES:
                    admin = path == adapters.PATH or path.startswith(_ADAPTERS)
                    check_key(exchange, self.options, admin=admin)
                route, handler = _find(exchange)
                await handler(self, exchange)
                status = 200
            except ClientGone:
                raise
            except ApiError as error:
                status = error.status
                await exchange.fail(error)
            except MantaError as error:
                answer = from_backend(error)
                status = answer.status
                await exchange.fail(answer)
            except Exception:
                status = 500
                log.exception("request %s failed", exchange.request_id)
                if exchange.started:
                    raise  # the server closes the connection: a broken answer, not a short one
                await exchange.fail(internal())
        except ClientGone:
            status = 499
        finally:
            if self.options.observe is not None:
                self.options.observe(route, status, time.monotonic() - began)

    async def read(self, exchange: Exchange) -> dict[str, Any]:
        """The body as a JSON object; large ones are parsed off the event loop."""
        data = await exchange.body(self.options.max_body_bytes, self.options.body_timeout_s)
        return take_object(await in_thread(lambda: parse_json(data), len(data)))

    async def generate(self, exchange: Exchange, *, chat: bool) -> None:
        if self.in_flight >= self.options.max_in_flight:
            raise ApiError(
                503,
                "overloaded",
                "too many requests are in flight",
                kind=OVERLOADED,
                headers=(("retry-after", "1"),),
            )
        # Only now: a body that comes slowly, or never, must not take the place of another request.
        body = await self.read(exchange)
        key = key_of(exchange, body, self.options)
        deadline = deadline_of(exchange, body, self.options)
        self.backend.admit(key)
        self.in_flight += 1
        try:
            call = await (chat_call if chat else completion_call)(body, self.backend, self.options)
            exchange.ignored += call.ignored
            if call.card.parent is not None:
                call.adapter = await self._pin(call.card.id, deadline)
                call.card = self.backend.models().get(call.card.id, call.card)
            check_context(call, body, chat=chat)
            call.key, call.deadline = key, deadline
            call.owner = owner_of(exchange, self.options) or ""
            call.timing = exchange.values(b"x-return-timing") == [b"1"]
            await self._answer(exchange, call, chat)
        finally:
            self.in_flight -= 1

    async def _pin(self, name: str, deadline: float | None) -> AdapterRecord:
        """The adapter as it is now. Its first request waits here until its files were read."""
        try:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(seconds):
                return await self.backend.adapters.pin(name)
        except TimeoutError:
            message = "the request's deadline has passed"
            raise MantaError(message, code="deadline_exceeded") from None

    async def _answer(self, exchange: Exchange, call: Call, chat: bool) -> None:
        answer = Answer(call, chat=chat)
        generation = start(call, self.backend, exchange.request_id)
        async with UntilGone(exchange.receive, generation.abort):
            if call.stream:
                await answer.stream(generation, exchange)
                return
            body = await answer.collect(generation)
        await exchange.answer(200, body)

    async def model_of(self, body: dict[str, Any]) -> ModelCard:
        """For routes where the model needs no name."""
        if body.get("model") is None:
            bases = [card for card in self.backend.models().values() if card.parent is None]
            if len(bases) == 1:
                return bases[0]
        return await find_model(body.get("model"), self.backend)


async def _chat(api: Api, exchange: Exchange) -> None:
    await api.generate(exchange, chat=True)


async def _completions(api: Api, exchange: Exchange) -> None:
    await api.generate(exchange, chat=False)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "manta",
        "root": card.root or card.id,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }


async def _models(api: Api, exchange: Exchange) -> None:
    await api.backend.adapters.refresh()
    cards = [_model(card) for card in api.backend.models().values()]
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": cards}))


async def _one_model(api: Api, exchange: Exchange) -> None:
    card = await find_model(exchange.path[len(_MODELS) :], api.backend)
    await exchange.answer(200, msgspec.json.encode(_model(card)))


async def _tokenize(api: Api, exchange: Exchange) -> None:
    body = await api.read(exchange)
    exchange.ignored += check_names(body, _TOKENIZE, strict=api.options.strict)
    card = await api.model_of(body)
    tokenizer = api.backend.tokenizer(card.id)
    prompt, chat = body.get("prompt"), body.get("messages")
    if (prompt is None) == (chat is None):
        raise invalid(
            "give either prompt or messages",
            "prompt",
            "missing_field" if prompt is None else "conflicting_fields",
        )
    if chat is not None:
        messages = check_messages(chat, exchange.ignored)
        check_constraints({"tools": body.get("tools")})
        options = template_options(body, api.options)
        ids = await in_thread(
            lambda: tokenizer.encode_chat(messages, **options), text_size(messages)
        )
    else:
        text = take_str(body, "prompt", api.options.max_body_bytes) or ""
        special = take_bool(body, "add_special_tokens", True)
        ids = (await encode_texts(tokenizer, [text], special))[0]
    strings = None
    if take_bool(body, "return_token_strs"):
        strings = [tokenizer.token_text(token) for token in ids]
    answer = {
        "count": len(ids),
        "max_model_len": card.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    await exchange.answer(200, msgspec.json.encode(answer))


async def _detokenize(api: Api, exchange: Exchange) -> None:
    body = await api.read(exchange)
    exchange.ignored += check_names(body, _DETOKENIZE, strict=api.options.strict)
    card = await api.model_of(body)
    tokenizer = api.backend.tokenizer(card.id)
    tokens = body.get("tokens")
    if tokens is None:
        raise invalid("tokens is required", "tokens", "missing_field")
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "a list of token ids")
    skip = take_bool(body, "skip_special_tokens")
    ids = take_token_ids(tokens, "tokens", card.vocab_size) if tokens else tokens
    text = await in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=skip), 4 * len(ids))
    await exchange.answer(200, msgspec.json.encode({"prompt": text}))


async def _request(api: Api, exchange: Exchange) -> None:
    await explain_request(exchange, api.options)


async def _health(api: Api, exchange: Exchange) -> None:
    await exchange.answer(200, b'{"status":"ok"}')


async def _ready(api: Api, exchange: Exchange) -> None:
    if not api.backend.ready():
        code, message = "not_ready", "no engine replica can take requests yet"
        if api.backend.state().draining:
            code, message = "draining", DRAINING
        raise ApiError(503, code, message, kind=OVERLOADED, headers=(("retry-after", "1"),))
    await exchange.answer(200, b'{"status":"ready"}')


async def _metrics(api: Api, exchange: Exchange) -> None:
    text = api.options.metrics() if api.options.metrics is not None else ""
    await exchange.answer(200, text.encode(), _PLAIN)


_GET = ("GET", "HEAD")
_POST = ("POST",)
_ROUTES: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/v1/chat/completions": (_POST, _chat),
    "/v1/completions": (_POST, _completions),
    "/v1/models": (_GET, _models),
    adapters.PATH: (("GET", "HEAD", "POST"), adapters.adapters),
    "/tokenize": (_POST, _tokenize),
    "/detokenize": (_POST, _detokenize),
    "/health": (_GET, _health),
    "/ready": (_GET, _ready),
    "/metrics": (_GET, _metrics),
}


def _find(exchange: Exchange) -> tuple[str, Handler]:
    """The route of an exact path: nothing is normalised, so nothing can be smuggled past a check.

    Raises ApiError 404, 405.
    """
    path = exchange.path
    label, found = path, _ROUTES.get(path)
    if found is None and path.startswith(_MODELS) and len(path) > len(_MODELS):
        label, found = _MODELS + "{id}", (_GET, _one_model)
    elif found is None and path.startswith(REQUESTS):
        label, found = REQUESTS + "{id}", (_GET, _request)
    if found is None and path.startswith(_ADAPTERS) and len(path) > len(_ADAPTERS):
        label, found = _ADAPTERS + "{name}", (("GET", "HEAD", "DELETE"), adapters.one_adapter)
    if found is None:
        raise ApiError(
            404,
            "not_found",
            f"there is no {shown(path)}{did_you_mean(path, _ROUTES, 0.5)}",
            kind=NOT_FOUND,
        )
    methods, handler = found
    if exchange.method not in methods:
        raise ApiError(
            405,
            "method_not_allowed",
            f"{label} takes {' or '.join(methods)}",
            kind=INVALID,
            headers=(("allow", ", ".join(methods)),),
        )
    return label, handler


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """No route speaks WebSocket: an ordinary error if the server can send one."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return

    async def as_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    exchange = Exchange({**scope, "method": "GET"}, _nothing, as_http)
    await exchange.fail(ApiError(400, "websocket_not_supported", "no route takes WebSockets"))


async def _nothing() -> Message:
    await asyncio.Future()
    raise AssertionError
