"""The routes about the server itself: health, readiness, version, metrics, and requests it had."""

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.page.routes import PAGE
from deployments.api.route import NAMES, PLAIN, Operation, Route
from deployments.backend import DRAINING
from deployments.environment import installed_version


async def root(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the text that Ollama's clients look for before they ask anything.

    A browser is sent to the page.
    """
    if context.options.page and any(
        b"text/html" in kind for kind in exchange.headers.get(b"accept", [])
    ):
        place = (("location", exchange.root + PAGE),)
        await exchange.answer(307, b"", b"text/plain; charset=utf-8", place)
        return
    await exchange.answer(200, b"Ollama is running", b"text/plain; charset=utf-8")


async def health(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer that the router lives."""
    await exchange.answer(200, b'{"status":"ok"}')


async def ready(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer that a replica can take requests. Raises ApiError 503."""
    if not context.backend.ready():
        code, message = "not_ready", "no engine replica can take requests yet"
        if context.backend.state().draining:
            code, message = "draining", DRAINING
        raise ApiError(503, code, message, retry_after=1)
    await exchange.answer(200, b'{"status":"ready"}')


async def version(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with Manta's version."""
    await exchange.answer_json({"version": installed_version()})


async def metrics(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the metrics as Prometheus text."""
    text = await context.options.metrics() if context.options.metrics is not None else ""
    await exchange.answer(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")


PROBES = (
    Route(
        "/",
        root,
        get=Operation("That a server is here, in Ollama's words", (307,), kinds=(PLAIN,)),
        open=True,
    ),
    Route(
        "/health", health, get=Operation("Whether the router lives", answer=("status",)), open=True
    ),
    Route(
        "/ready",
        ready,
        get=Operation("Whether a replica can take requests", (503,), answer=("status",)),
        open=True,
    ),
    Route(
        "/ping",
        ready,
        get=Operation("The same, as SageMaker asks", (503,), answer=("status",)),
        open=True,
    ),
)
METRICS = Route("/metrics", metrics, get=Operation("Prometheus text", kinds=(PLAIN,)))
VERSION = Route("/version", version, get=Operation("Of Manta", answer=("version",)))


_PREFIX = "/v1/requests/"


async def explain_request(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with what routers know of a request.

    Raises ApiError 404: the request was never accepted here, is forgotten, or is another key's.
    """
    id = exchange.path[len(_PREFIX) :]
    explain, prompts = context.options.explain, []
    # Accept only an id that Manta could have issued.
    if explain is not None and request_id([id.encode("utf-8", "replace")]) == id:
        # An admin key may ask about all requests, any other key about its own.
        caller = exchange.caller
        prompts = await explain(id, None if caller.admin else caller.id)
    if not prompts:
        raise ApiError(
            404, "request_not_found", "no request of this id and key was accepted lately"
        )
    body = {"id": id, "object": "request", "parts": prompts}
    await exchange.answer_json(body)


REQUESTS = Route(
    f"{_PREFIX}{{id}}",
    explain_request,
    get=Operation("What became of a request", NAMES, answer=("id", "object", "parts")),
)
