"""The routes under /v1/messages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.api.context import ApiContext
from deployments.api.dialects.anthropic.request import messages_request
from deployments.api.dialects.anthropic.writer import MessagesWriter, error_body
from deployments.api.fields.agents import COUNTED, MESSAGES
from deployments.api.generate import DialectRequest, generate
from deployments.api.generation.openai_request import OpenAIRequest, chat_call
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.route import QUEUES, STREAMS, Operation, Route
from deployments.api.stream.event_ids import EventIds
from deployments.api.stream.item_answer import ItemAnswer, Naming, new_number
from deployments.backend import RecalledChoice
from engine.errors import MantaError

__all__ = ["PATH", "MessagesDialect", "count", "create", "error_body"]

PATH = "/v1/messages"


class MessagesDialect(DialectRequest):
    def __init__(self, *, strict: bool, counts: bool = False) -> None:
        super().__init__()
        self._strict, self._counts = strict, counts

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        request = messages_request(body, strict=self._strict, counts=self._counts)
        self.ignored, self.names = request.ignored, request.names
        return request.chat

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        number, _ = new_number(ids)
        return ItemAnswer(call, MessagesWriter(call, Naming.of(call, number)), ids=ids, past=past)


async def create(context: ApiContext, exchange: HttpExchange) -> None:
    await generate(
        context, exchange, chat=True, request=MessagesDialect(strict=context.options.strict)
    )


async def count(context: ApiContext, exchange: HttpExchange) -> None:
    """Tokens of the prompt that a request would have: clients compact by it."""
    body = await context.read(exchange)
    turn = MessagesDialect(strict=context.options.strict, counts=True)
    chat = await in_thread(lambda: turn.chat(body), exchange.body_size)
    try:
        call = await chat_call(
            chat, exchange.body_size, context.backend, context.options, exchange.caller
        )
    except (ApiError, MantaError) as error:
        raise turn.error(error) from None
    exchange.ignored += turn.ignored
    await exchange.answer(200, msgspec.json.encode({"input_tokens": len(call.prompts[0])}))


_ANSWER = ("id", "type", "role", "model", "content", "stop_reason", "usage")
ROUTES = (
    Route(PATH, create, post=Operation("A chat in blocks", QUEUES, MESSAGES, _ANSWER, STREAMS)),
    Route(
        f"{PATH}/count_tokens",
        count,
        post=Operation("Tokens of the prompt of a message", QUEUES, COUNTED, ("input_tokens",)),
    ),
)
