"""The routes of OpenAI's chats and completions."""

from collections.abc import Awaitable

from deployments.api.context import ApiContext
from deployments.api.fields.generation import CHAT, COMPLETION
from deployments.api.generate import generate
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import QUEUES, STREAMS, Operation, Route

_ANSWER = ("id", "object", "created", "model", "choices")


def chat(context: ApiContext, exchange: HttpExchange) -> Awaitable[None]:
    """Answer a chat. Raises ApiError, MantaError."""
    return generate(context, exchange, chat=True)


def completion(context: ApiContext, exchange: HttpExchange) -> Awaitable[None]:
    """Answer a completion. Raises ApiError, MantaError."""
    return generate(context, exchange, chat=False)


ROUTES = (
    Route("/v1/chat/completions", chat, post=Operation("A chat", QUEUES, CHAT, _ANSWER, STREAMS)),
    Route(
        "/v1/completions",
        completion,
        post=Operation("Texts, or token ids, continued", QUEUES, COMPLETION, _ANSWER, STREAMS),
    ),
)
