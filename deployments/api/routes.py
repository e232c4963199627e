"""ROUTES: all served routes, from the tables of the dialects and services. locate: finds a path's
route."""

import re
from collections.abc import Mapping

from deployments.api import tokenize_routes
from deployments.api.context import ApiContext
from deployments.api.dialects import infill, liteqwen
from deployments.api.dialects.anthropic import routes as anthropic
from deployments.api.dialects.ollama import routes as ollama
from deployments.api.dialects.openai import routes as openai
from deployments.api.dialects.responses import routes as responses
from deployments.api.fields.pooled import FIRST
from deployments.api.fields.schema import Body
from deployments.api.http.errors import ApiError, did_you_mean, invalid, shown
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.openapi.document import document
from deployments.api.openapi.page import HEADERS, page
from deployments.api.page import routes as web
from deployments.api.pooling import embeddings, rerank, tei
from deployments.api.route import EVENTS, HTML, JSON, QUEUES, Route, RouteTable
from deployments.api.served_model import find_model
from deployments.api.services import adapters, batches, models, server
from deployments.api.trainers import sglang, vllm
from deployments.backend import ModelCard

_INVOKED = (
    "messages (a chat), prompt (a completion), input (vectors or labels), query and documents "
    f"(a ranking) or {FIRST[0]} (a score)"
)


_INVOCATIONS, _DOCUMENTS = RouteTable(reads=QUEUES), RouteTable()


@_INVOCATIONS.post(
    "/invocations", "What the body is for, as SageMaker asks", Body({}), None, (JSON, EVENTS)
)
async def _invoke(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer SageMaker's route /invocations, by the handler of the route that fits the body's
    fields.

    Raises ApiError 400 if no route takes the body, 404 for a model that is not served.
    """
    body = await context.read(exchange)
    card = await find_model(body.get("model"), context.backend, exchange.caller)
    path = _invoked(body, card)
    if path is None:
        raise invalid(f"the body has none of {_INVOKED}", code="missing_field")
    exchange.path = path
    return await EXACT[path].operations["POST"].handler(context, exchange)


def _invoked(body: JsonObject, card: ModelCard) -> str | None:
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


@_DOCUMENTS.get("/openapi.json", "This document", ("openapi",))
async def _openapi(context: ApiContext, exchange: HttpExchange) -> object:
    return document(ROUTES, context.options, exchange.root)


@_DOCUMENTS.get("/docs", "This document as a page", kinds=(HTML,))
async def _docs(context: ApiContext, exchange: HttpExchange) -> None:
    text = page(ROUTES, strict=context.options.strict, root=exchange.root)
    await exchange.answer(200, text, b"text/html; charset=utf-8", HEADERS)


ROUTES: tuple[Route, ...] = (
    *openai.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *infill.ROUTES,
    *liteqwen.ROUTES,
    *ollama.ROUTES,
    *models.ROUTES,
    *embeddings.EMBEDDINGS_ROUTES,
    *batches.ROUTES,
    *embeddings.POOLING_ROUTES,
    *rerank.RANKINGS,
    *embeddings.COHERE_ROUTES,
    *tei.ROUTES,
    *rerank.LABELS,
    *adapters.ROUTES,
    *tokenize_routes.ROUTES,
    *vllm.ROLLOUTS,
    *vllm.ROUTES,
    *sglang.ROLLOUTS,
    *sglang.ROUTES,
    *vllm.SKYRL_ROLLOUTS,
    *vllm.SKYRL_ROUTES,
    *server.PROBES,
    *_INVOCATIONS,
    *server.ABOUT,
    *_DOCUMENTS,
    *web.ROUTES,
    *server.REQUESTS,
)
EXACT: Mapping[str, Route] = {route.path: route for route in ROUTES if "{" not in route.path}


def _pattern(path: str) -> re.Pattern[str]:
    """Return a regular expression for a route's path: {name} (of a model or adapter) may contain
    slashes, {id} may not."""
    return re.compile(path.replace("{id}", "[^/]+").replace("{name}", ".+"), re.DOTALL)


_PATTERNS = [(_pattern(route.path), route) for route in ROUTES if "{" in route.path]


# Unsupported routes of OpenAI whose last part a pattern would match as an id.
_ELSEWHERE = frozenset({f"{responses.PATH}/compact"})


def _with_name(path: str) -> Route | None:
    """Return the route of a path with a variable part (a model's or adapter's name, or an id); None
    if there is no such route.
    """
    return next((r for p, r in _PATTERNS if p.fullmatch(path)), None)


def locate(path: str) -> tuple[str, Route | None]:
    """Return a request's normalised path, and its route; None if there is no route.

    A missing /v1 is added and a doubled one is removed, because clients are configured with such
    base URLs. The path is not normalised otherwise, so that no spelling of a path evades a check.
    """
    if path.startswith("/v1/v1/"):
        path = path[3:]
    if (route := EXACT.get(path) or _with_name(path)) is None and not path.startswith("/v1/"):
        longer = f"/v1{path}"
        if (route := EXACT.get(longer) or _with_name(longer)) is not None:
            path = longer
    return path, None if path in _ELSEWHERE else route


def refusal(path: str, route: Route | None) -> ApiError:
    """Return the error for a path without a route, or for a method that the route does not
    support."""
    if route is None:
        message = f"there is no {shown(path)}{_near(path)}; served: {', '.join(EXACT)}"
        return ApiError(404, "not_found", message)
    methods = route.operations.keys()
    return ApiError(
        405,
        "method_not_allowed",
        f"{route.path} takes {' or '.join(methods)}",
        headers=(("allow", ", ".join(methods)),),
    )


def _near(path: str) -> str:
    """Return an error text's hint at the route that the client probably meant; "" if no route is
    similar.

    A path is similar if it differs in slashes, in the prefix, or by a typing error. Known routes of
    other servers are never similar.
    """
    plain = path.rstrip("/")
    for route in EXACT:
        tail = route.removeprefix("/v1")
        if plain.endswith(tail) and plain[: -len(tail)].strip("/") in ("", "v1", "v1/v1", "api/v1"):
            return f', did you mean "{route}"?'
    return did_you_mean(plain, EXACT, 0.9)
