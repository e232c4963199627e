"""The routes under /v1/messages."""

from collections.abc import Mapping
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.dialects.anthropic.request import messages_request
from deployments.api.dialects.anthropic.writer import MessagesWriter, error_object
from deployments.api.fields.anthropic import COUNTED, MESSAGES
from deployments.api.generate import DialectRequest, answers, count_prompt
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import ChatRequest
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import QUEUES, STREAMS, RouteTable
from deployments.api.stream.item_answer import ItemAnswer, Naming, new_number
from deployments.api.stream.replay import Resumption

__all__ = ["PATH", "MessagesDialect", "count", "error_object"]

PATH = "/v1/messages"


class MessagesDialect(DialectRequest):
    """The dialect of /v1/messages: reads a request and writes its answer. counts: whether only the
    tokens of the prompt are counted."""

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> ChatRequest:
        return messages_request(body, ignored, context.options, counts=self._counts)

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        number, _ = new_number(resumed.ids)
        return ItemAnswer(call, MessagesWriter(call, Naming.of(call, number)), resumed)


ROUTES = RouteTable(reads=QUEUES)
ROUTES.post(
    PATH,
    "A chat in blocks",
    MESSAGES,
    ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    STREAMS,
)(answers(MessagesDialect))


@ROUTES.post(
    f"{PATH}/count_tokens", "Tokens of the prompt of a message", COUNTED, ("input_tokens",)
)
async def count(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the number of tokens of a request's prompt.

    Clients decide by this number when to compact a conversation.
    """
    return {"input_tokens": await count_prompt(context, exchange, MessagesDialect(counts=True))}
