"""The routes of OpenAI's chats and completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.dialects.openai.request import read_chat, read_text
from deployments.api.dialects.openai.response import OpenAIResponse
from deployments.api.fields.generation import CHAT, COMPLETION
from deployments.api.generate import DialectRequest, generate
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import ChatRequest, TextRequest
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import QUEUES, STREAMS, Operation, Route
from deployments.api.stream.event_ids import EventIds
from deployments.backend import RecalledChoice


class OpenAIDialect(DialectRequest):
    """A request to one of OpenAI's routes."""

    names_model_first = True

    def __init__(self, context: ApiContext, *, chat: bool) -> None:
        self._options = context.options
        self._chat = chat

    def read(self, body: Mapping[str, Any]) -> ChatRequest | TextRequest:
        return (read_chat if self._chat else read_text)(body, self._options)

    def answer(
        self, call: GenerationCall, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> OpenAIResponse:
        return OpenAIResponse(call, chat=self._chat, ids=ids, past=past)


async def chat(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a chat. Raises ApiError, MantaError."""
    await generate(context, exchange, OpenAIDialect(context, chat=True))


async def completion(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a completion. Raises ApiError, MantaError."""
    await generate(context, exchange, OpenAIDialect(context, chat=False))


_ANSWER = ("id", "object", "created", "model", "choices")
ROUTES = (
    Route("/v1/chat/completions", chat, post=Operation("A chat", QUEUES, CHAT, _ANSWER, STREAMS)),
    Route(
        "/v1/completions",
        completion,
        post=Operation("Texts, or token ids, continued", QUEUES, COMPLETION, _ANSWER, STREAMS),
    ),
)
