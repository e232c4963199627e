"""The routes about the server: health, readiness, version, metrics, and traces of requests."""

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.page.routes import PAGE
from deployments.api.route import NAMES, PLAIN, RouteTable
from deployments.backend import DRAINING
from deployments.environment import installed_version

PROBES, ABOUT, REQUESTS = RouteTable(), RouteTable(), RouteTable()
_PREFIX = "/v1/requests/"


@PROBES.get(
    "/", "That a server is here, in Ollama's words", statuses=(307,), kinds=(PLAIN,), open=True
)
async def root(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer GET / with the text that Ollama's clients expect before their first request.

    Browsers are redirected to the web page.
    """
    if context.options.page and any(
        b"text/html" in kind for kind in exchange.headers.get(b"accept", [])
    ):
        place = (("location", exchange.root + PAGE),)
        await exchange.answer(307, b"", b"text/plain; charset=utf-8", place)
        return
    await exchange.answer(200, b"Ollama is running", b"text/plain; charset=utf-8")


@PROBES.get("/health", "Whether the router lives", ("status",), open=True)
async def health(context: ApiContext, exchange: HttpExchange) -> object:
    return {"status": "ok"}


@PROBES.get("/ping", "The same, as SageMaker asks", ("status",), statuses=(503,), open=True)
@PROBES.get(
    "/ready", "Whether a replica can take requests", ("status",), statuses=(503,), open=True
)
async def ready(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer 200 if a replica accepts requests. Raises ApiError 503 otherwise."""
    if not context.backend.ready():
        raise unready(context)
    return {"status": "ready"}


def unready(context: ApiContext) -> ApiError:
    """Return the error of a router that takes no requests: it starts or drains."""
    code, message = "not_ready", "no engine replica can take requests yet"
    if context.backend.state().draining:
        code, message = "draining", DRAINING
    return ApiError(503, code, message, retry_after=1)


@ABOUT.get("/metrics", "Prometheus text", kinds=(PLAIN,))
async def metrics(context: ApiContext, exchange: HttpExchange) -> None:
    text = await context.options.metrics() if context.options.metrics is not None else ""
    await exchange.answer(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")


@ABOUT.get("/version", "Of Manta", ("version",))
async def version(context: ApiContext, exchange: HttpExchange) -> object:
    return {"version": installed_version()}


@REQUESTS.get(
    f"{_PREFIX}{{id}}", "What became of a request", ("id", "object", "parts"), statuses=NAMES
)
async def explain_request(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the routers' traces of the requests with an id.

    Raises ApiError 404 if the request was never accepted, ended too long ago, or belongs to another
    key.
    """
    id = exchange.path[len(_PREFIX) :]
    explain, prompts = context.options.explain, []
    # Only ids in the form that Manta accepts can exist.
    if explain is not None and request_id([id.encode("utf-8", "replace")]) == id:
        # An admin key may ask about all requests, any other key about its own.
        caller = exchange.caller
        prompts = await explain(id, None if caller.admin else caller.id)
    if not prompts:
        raise ApiError(
            404, "request_not_found", "no request of this id and key was accepted lately"
        )
    return {"id": id, "object": "request", "parts": prompts}
