"""build_asgi: the OpenAI-compatible HTTP API over a Backend, as a bare ASGI application."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from deployments.adapters.record_store import AdapterRecord
from deployments.api import adapters
from deployments.api.agents import messages
from deployments.api.agents.answer import ItemAnswer
from deployments.api.agents.background import BackgroundRuns
from deployments.api.agents.store import ResponseStore
from deployments.api.agents.turn import Turn
from deployments.api.auth import authenticate
from deployments.api.caller import CALLER
from deployments.api.generation.answer.event_ids import EventIds, event_ids
from deployments.api.generation.answer.merge import start
from deployments.api.generation.answer.openai_response import OpenAIResponse
from deployments.api.generation.answer.replay import recall
from deployments.api.generation.fields import take_object
from deployments.api.generation.grammars import grammar_of, output_grammar_of
from deployments.api.generation.openai_request import (
    OpenAIRequest,
    chat_call,
    check_context,
    completion_call,
)
from deployments.api.generation.tenancy import deadline_of, key_of, priority_of, salt_of
from deployments.api.http.cors import answer_preflight, is_preflight, tell_origin
from deployments.api.http.encodings import decoded
from deployments.api.http.errors import (
    OVERLOADED,
    ApiError,
    from_backend,
    internal,
)
from deployments.api.http.exchange import (
    ClientDisconnected,
    HttpExchange,
    Message,
    Receive,
    Scope,
    Send,
    UntilDisconnect,
)
from deployments.api.http.json_body import parse_json
from deployments.api.http.off_loop import in_thread
from deployments.api.models import VERSION_HEADER, changes_models
from deployments.api.ollama import routes as ollama
from deployments.api.ollama.writer import error_body as ollama_error
from deployments.api.options import ApiOptions
from deployments.api.page.live import LIVE
from deployments.api.page.routes import FILES
from deployments.api.pooling import tei
from deployments.api.routes import OPEN, find, versioned
from deployments.api.served_model import asked_model
from deployments.backend import Backend, RecalledChoice
from engine.errors import MantaError, short_traceback

log = logging.getLogger("manta.api")

_ADAPTERS = f"{adapters.PATH}/"


def build_asgi(backend: Backend, options: ApiOptions | None = None) -> "Api":
    """The application: ``await app(scope, receive, send)``."""
    return Api(backend, options or ApiOptions())


class Api:
    """One per router process; all state is the count of requests in flight."""

    def __init__(self, backend: Backend, options: ApiOptions) -> None:
        self.backend = backend
        self.options = options
        self.in_flight = 0  # generation requests
        self.responses = ResponseStore(options.store_bytes)
        self.background = BackgroundRuns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await _refuse_websocket(scope, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        exchange = HttpExchange(scope, receive, send, tell_id=self.options.tell_request_id)
        route, status = "other", 499
        origins = self.options.cors_origins
        tell_origin(exchange, origins)
        try:
            try:
                exchange.check_envelope()
                path = exchange.path = versioned(exchange.path)
                if path.startswith(messages.PATH) or exchange.values(VERSION_HEADER):
                    exchange.error_body = messages.error_body
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
                    admin |= path == LIVE or changes_models(exchange.method, path)
                    exchange.caller = scope.get(CALLER) or authenticate(
                        exchange, self.options, admin=admin
                    )
                found = find(exchange)
                route = found.path
                await found.handler(self, exchange)
                status = 200
            except ClientDisconnected:
                raise
            except ApiError as error:
                status = error.status
                await exchange.fail(error)
            except MantaError as error:
                answer = from_backend(error)
                status = answer.status
                await exchange.fail(answer)
            except Exception as error:
                status = 500
                log.error("request %s failed: %s", exchange.request_id, short_traceback(error))
                if exchange.started:
                    raise  # the server closes the connection: a broken answer, not a short one
                await exchange.fail(internal())
        except ClientDisconnected:
            status = 499
        finally:
            if self.options.observe is not None:
                self.options.observe(route, status, time.monotonic() - began)

    async def read(self, exchange: HttpExchange) -> dict[str, Any]:
        """The body as a JSON object; large ones are unpacked and parsed off the event loop. Reads
        once: a second call returns the same object."""
        if exchange.parsed is not None:
            return exchange.parsed
        limit = self.options.max_body_bytes
        data = await exchange.body(limit, self.options.body_timeout_s)
        if exchange.encoding:
            data = await decoded(data, exchange.encoding, limit)
        exchange.body_size = len(data)

        def parse() -> Any:
            exchange.digest = hashlib.blake2b(data, digest_size=16).digest()
            return parse_json(data)

        exchange.parsed = take_object(await in_thread(parse, len(data)))
        return exchange.parsed

    def check_room(self) -> None:
        """Raises ApiError 503 overloaded."""
        if self.in_flight >= self.options.max_in_flight:
            raise ApiError(
                503,
                "overloaded",
                "too many requests are in flight",
                kind=OVERLOADED,
                headers=(("retry-after", "1"),),
            )

    def take(self, exchange: HttpExchange) -> None:
        """Count a request against the limits of its key. Raises ApiError 429."""
        limits = self.options.limits
        if limits is not None and exchange.caller.rule.limited:
            limits.take(exchange.caller, time.monotonic(), time.time())

    def charge(self, exchange: HttpExchange, prompts: Sequence[Sequence[int]]) -> None:
        """Count its prompts; the answer tells what is left. Raises ApiError 429."""
        limits = self.options.limits
        if limits is not None and exchange.caller.rule.limited:
            limits.charge(exchange.caller, sum(map(len, prompts)), time.monotonic())
            exchange.always += limits.headers(exchange.caller)

    def generate(
        self, exchange: HttpExchange, *, chat: bool, turn: Turn | None = None
    ) -> Awaitable[None]:
        """turn: of an API that is read into a chat.

        Not a coroutine itself: each that awaits another one is resumed again for each chunk.
        """
        answer = self._generate(exchange, chat, turn)
        return answer if turn is None else _as_of(turn, answer)

    async def _generate(self, exchange: HttpExchange, chat: bool, turn: Turn | None) -> None:
        self.check_room()
        self.take(exchange)
        # Only now: a body that comes slowly, or never, must not take the place of another request.
        body = await self.read(exchange)
        if turn is not None:
            body = await in_thread(partial(turn.chat, body), exchange.body_size)
            await turn.admit(exchange)
            exchange.ignored += turn.ignored
            chat = turn.is_chat
            if await turn.settle(exchange):
                return
        ids = event_ids(exchange, exchange.caller.id, self.options.event_secret)
        key = key_of(exchange, body, self.options)
        deadline = deadline_of(exchange, body, self.options)
        salt = salt_of(exchange, body, self.options)
        priority = priority_of(exchange, body)
        self.backend.admit(key, asked_model(body, self.backend))
        self.in_flight += 1
        try:
            read = chat_call if chat else completion_call
            if turn is not None and not chat:
                read = partial(completion_call, max_tokens=None, gap=turn.gap)
            call = await read(body, exchange.body_size, self.backend, self.options, exchange.caller)
            ignored = call.ignored
            exchange.ignored += ignored if turn is None else map(turn.name, ignored)
            if call.card.parent is not None:
                call.common.adapter = await self.pin(call.card.id, deadline)
                call.card = self.backend.models().get(call.card.id, call.card)
            check_context(call, body, chat=chat)
            if call.output is not None and call.output.needs_grammar(call.constraint):
                grammar, ignored = await output_grammar_of(call.output, call.constraint, call.card)
                thinking = call.output.thinking_budget
                call.change_params(structured=grammar, thinking=thinking)
                exchange.ignored += ignored if turn is None else map(turn.name, ignored)
            elif call.constraint is not None:
                grammar, ignored = await grammar_of(call.constraint, call.tokenizer, call.card)
                call.change_params(structured=grammar)
                exchange.ignored += ignored if turn is None else map(turn.name, ignored)
            self.charge(exchange, call.prompts)
            common = call.common
            common.request_id, common.owner = exchange.request_id, exchange.caller.id
            common.key, common.deadline, common.trace = key, deadline, exchange.trace
            common.cache_salt, common.priority = salt, priority
            call.timing = exchange.values(b"x-return-timing") == [b"1"]
            if not call.stream:
                ids = None
            await self._answer(exchange, call, chat, ids, turn)
        finally:
            self.in_flight -= 1

    async def pin(self, name: str, deadline: float | None) -> AdapterRecord:
        """The adapter as it is now. Its first request waits here until its files were read."""
        try:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(seconds):
                return await self.backend.adapters.pin(name)
        except TimeoutError:
            message = "the request's deadline has passed"
            raise MantaError(message, code="deadline_exceeded") from None

    async def _answer(
        self,
        exchange: HttpExchange,
        call: OpenAIRequest,
        chat: bool,
        ids: EventIds | None,
        turn: Turn | None,
    ) -> None:
        past: list[RecalledChoice | None] = []
        if ids is not None:
            ids.bind(call)
            if ids.resumed:
                past = await recall(call, ids, self.backend)
        answer: OpenAIResponse | ItemAnswer
        if turn is None:
            answer = OpenAIResponse(call, chat=chat, ids=ids, past=past)
        else:
            answer = turn.answer(call, ids, past)
        generation = start(call, self.backend)
        if (
            turn is not None
            and isinstance(answer, ItemAnswer)
            and await turn.detach(exchange, answer, generation)
        ):
            return
        async with UntilDisconnect(exchange.receive, generation.abort):
            if call.stream:
                await answer.stream(generation, exchange, self.options.keepalive_s)
                return
            body = await answer.collect(generation)
        await exchange.answer(200, body)


async def _as_of(turn: Turn, answer: Awaitable[None]) -> None:
    """Errors are told as the turn's API does."""
    try:
        await answer
    except (ApiError, MantaError) as error:
        raise turn.error(error) from None


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

    exchange = HttpExchange({**scope, "method": "GET"}, _nothing, as_http)
    await exchange.fail(ApiError(400, "websocket_not_supported", "no route takes WebSockets"))


async def _nothing() -> Message:
    await asyncio.Future()
    raise AssertionError
