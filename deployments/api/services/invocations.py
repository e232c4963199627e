"""invocations: SageMaker's one route, whose body says which of the other routes it is for."""

from typing import Any

from deployments.api.context import ApiContext
from deployments.api.fields.pooled import FIRST
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.served_model import find_model
from deployments.backend import ModelCard

PATH = "/invocations"
_ROUTES = (
    "messages (a chat), prompt (a completion), input (vectors or labels), query and documents "
    f"(a ranking) or {FIRST[0]} (a score)"
)


async def route_of(context: ApiContext, exchange: HttpExchange) -> str:
    """Read the body and return the path of the route that takes it.

    Raises ApiError 400 if no route does, 404 for a model that is not served.
    """
    body = await context.read(exchange)
    card = await find_model(body.get("model"), context.backend, exchange.caller)
    path = _path(body, card)
    if path is None:
        raise invalid(f"the body has none of {_ROUTES}", code="missing_field")
    return path


def _path(body: dict[str, Any], card: ModelCard) -> str | None:
    names = {name for name, value in body.items() if value is not None}
    if names & {"messages", "input"} and (card.pooling is not None or "input" in names):
        labels = card.pooling is not None and card.pooling.labels
        return "/v1/classify" if labels else "/v1/embeddings"
    if "messages" in names:
        return "/v1/chat/completions"
    if "prompt" in names:
        return "/v1/completions"
    if {"query", "documents"} <= names:
        return "/v1/rerank"
    if names & set(FIRST):
        return "/v1/score"
    return None
