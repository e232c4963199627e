"""The routes under /v1/messages."""

from collections.abc import Mapping
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.dialects.anthropic.request import messages_request
from deployments.api.dialects.anthropic.writer import MessagesWriter, error_body
from deployments.api.fields.anthropic import COUNTED, MESSAGES
from deployments.api.generate import DialectRequest, answers, count_prompt
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import ChatRequest
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import QUEUES, STREAMS, Operation, Route
from deployments.api.stream.item_answer import ItemAnswer, Naming, new_number
from deployments.api.stream.replay import Resumption

__all__ = ["PATH", "MessagesDialect", "count", "error_body"]

PATH = "/v1/messages"


class MessagesDialect(DialectRequest):
    """A request to /v1/messages. counts: whether only the tokens of its prompt are counted."""

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts

    def read(self, context: ApiContext, body: Mapping[str, Any]) -> ChatRequest:
        return messages_request(body, context.options, counts=self._counts)

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        number, _ = new_number(resumed.ids)
        return ItemAnswer(call, MessagesWriter(call, Naming.of(call, number)), resumed)


async def count(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the number of tokens of a request's prompt, by which clients decide to
    compact."""
    tokens = await count_prompt(context, exchange, MessagesDialect(counts=True))
    await exchange.answer_json({"input_tokens": tokens})


_ANSWER = ("id", "type", "role", "model", "content", "stop_reason", "usage")
ROUTES = (
    Route(
        PATH,
        answers(MessagesDialect),
        post=Operation("A chat in blocks", QUEUES, MESSAGES, _ANSWER, STREAMS),
    ),
    Route(
        f"{PATH}/count_tokens",
        count,
        post=Operation("Tokens of the prompt of a message", QUEUES, COUNTED, ("input_tokens",)),
    ),
)
