"""generate: one generation request, from its body to the end of its answer, in any dialect."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.generation.openai_request import (
    OpenAIRequest,
    chat_call,
    check_context,
    completion_call,
)
from deployments.api.generation.tenancy import deadline_of, key_of, priority_of, salt_of
from deployments.api.http.errors import ApiError, from_backend
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.off_loop import in_thread
from deployments.api.output.grammars import grammar_of, output_grammar_of
from deployments.api.renaming import Renaming
from deployments.api.served_model import asked_model
from deployments.api.stream.event_ids import EventIds, event_ids
from deployments.api.stream.item_answer import ItemAnswer
from deployments.api.stream.merge import start
from deployments.api.stream.openai_response import OpenAIResponse
from deployments.api.stream.replay import recall
from deployments.backend import Generation, RecalledChoice
from engine.errors import MantaError
from engine.text.infill import Gap


class DialectRequest(ABC):
    """One request that is read into a chat and answered in items.

    ignored: the fields without effect, once the body was read
    names: the names of the chat's fields in the request, once the body was read
    is_chat: whether the body was read into a chat, and not into a completion
    gap: the gap that the completion fills, where its body does not name one
    """

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.names: Renaming | None = None
        self.is_chat = True
        self.gap: Gap | None = None

    @abstractmethod
    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the chat, and set `names`. Raises ApiError.

        A large body is read in a thread.
        """

    async def admit(self, exchange: HttpExchange) -> None:
        """Check what has to be allowed before the request is queued. Raises ApiError."""
        return

    async def settle(self, exchange: HttpExchange) -> bool:
        """Whether the request needed no generation, and has been answered."""
        return False

    @abstractmethod
    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer: ...

    async def detach(
        self, exchange: HttpExchange, answer: ItemAnswer, generation: Generation
    ) -> bool:
        """Whether the answer continues without the connection, which has been answered then."""
        return False

    def name(self, path: str) -> str:
        """Return the request's name of a chat field."""
        return path if self.names is None else self.names.name(path)

    def error(self, error: ApiError | MantaError) -> ApiError:
        """Return the error with the names of the request's own fields."""
        if self.names is not None:
            return self.names.error(error)
        return error if isinstance(error, ApiError) else from_backend(error)


def generate(
    context: ApiContext,
    exchange: HttpExchange,
    *,
    chat: bool,
    request: DialectRequest | None = None,
) -> Awaitable[None]:
    """Answer a generation request. Raises ApiError, MantaError.

    This is no coroutine itself: each coroutine that awaits another one is resumed for each chunk.

    chat: whether the body is a chat, and not a completion
    request: the request of an API that is read into a chat; None: the body is OpenAI's own
    """
    answer = _generate(context, exchange, chat, request)
    return answer if request is None else _with_own_names(request, answer)


async def _generate(
    context: ApiContext, exchange: HttpExchange, chat: bool, request: DialectRequest | None
) -> None:
    context.check_room()
    context.count_request(exchange)
    # Only now: a body that comes slowly, or never, must not take the place of another request.
    body = await context.read(exchange)
    if request is not None:
        body = await in_thread(partial(request.chat, body), exchange.body_size)
        await request.admit(exchange)
        exchange.ignored += request.ignored
        chat = request.is_chat
        if await request.settle(exchange):
            return
    backend, options = context.backend, context.options
    ids = event_ids(exchange, exchange.caller.id, options.event_secret)
    key = key_of(exchange, body, options)
    deadline = deadline_of(exchange, body, options)
    salt = salt_of(exchange, body, options)
    priority = priority_of(exchange, body)
    backend.admit(key, asked_model(body, backend))
    context.counter.in_flight += 1
    try:
        read = chat_call if chat else completion_call
        if request is not None and not chat:
            read = partial(completion_call, max_tokens=None, gap=request.gap)
        call = await read(body, exchange.body_size, backend, options, exchange.caller)
        ignored = call.ignored
        exchange.ignored += ignored if request is None else map(request.name, ignored)
        if call.card.parent is not None:
            call.common.adapter = await context.pin(call.card.id, deadline)
            call.card = backend.models().get(call.card.id, call.card)
        check_context(call, body, chat=chat)
        if call.output is not None and call.output.needs_grammar(call.constraint):
            grammar, ignored = await output_grammar_of(call.output, call.constraint, call.card)
            call.change_params(structured=grammar, thinking=call.output.thinking_budget)
            exchange.ignored += ignored if request is None else map(request.name, ignored)
        elif call.constraint is not None:
            grammar, ignored = await grammar_of(call.constraint, call.tokenizer, call.card)
            call.change_params(structured=grammar)
            exchange.ignored += ignored if request is None else map(request.name, ignored)
        context.charge(exchange, call.prompts)
        common = call.common
        common.request_id, common.owner = exchange.request_id, exchange.caller.id
        common.key, common.deadline, common.trace = key, deadline, exchange.trace
        common.cache_salt, common.priority = salt, priority
        call.timing = exchange.values(b"x-return-timing") == [b"1"]
        if not call.stream:
            ids = None
        await _answer(context, exchange, call, chat, ids, request)
    finally:
        context.counter.in_flight -= 1


async def _answer(
    context: ApiContext,
    exchange: HttpExchange,
    call: OpenAIRequest,
    chat: bool,
    ids: EventIds | None,
    request: DialectRequest | None,
) -> None:
    past: list[RecalledChoice | None] = []
    if ids is not None:
        ids.bind(call)
        if ids.resumed:
            past = await recall(call, ids, context.backend)
    answer: OpenAIResponse | ItemAnswer
    if request is None:
        answer = OpenAIResponse(call, chat=chat, ids=ids, past=past)
    else:
        answer = request.answer(call, ids, past)
    generation = start(call, context.backend)
    if (
        request is not None
        and isinstance(answer, ItemAnswer)
        and await request.detach(exchange, answer, generation)
    ):
        return
    async with UntilDisconnect(exchange.receive, generation.abort):
        if call.stream:
            await answer.stream(generation, exchange, context.options.keepalive_s)
            return
        body = await answer.collect(generation)
    await exchange.answer(200, body)


async def _with_own_names(request: DialectRequest, answer: Awaitable[None]) -> None:
    try:
        await answer
    except (ApiError, MantaError) as error:
        raise request.error(error) from None
