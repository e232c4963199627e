"""ROUTES: every path that is served, by whom, and what /openapi.json tells of it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from deployments.api import adapters, invocations, models
from deployments.api.agents import infill, liteqwen, messages, responses
from deployments.api.batches import routes as batches
from deployments.api.fields import agents, generation, others, pooled
from deployments.api.fields import liteqwen as lq
from deployments.api.fields import ollama as ollama_fields
from deployments.api.fields.infill import INFILL
from deployments.api.fields.schema import BOOLEAN, TEXT, Body, Schema, integer, one_of
from deployments.api.http.errors import (
    INVALID,
    NOT_FOUND,
    OVERLOADED,
    ApiError,
    did_you_mean,
    shown,
)
from deployments.api.http.exchange import HttpExchange
from deployments.api.ollama import embed as ollama_embed
from deployments.api.ollama import models as ollama_models
from deployments.api.ollama import routes as ollama
from deployments.api.openapi.document import document
from deployments.api.openapi.page import HEADERS, page
from deployments.api.page import routes as web
from deployments.api.page.live import LIVE, live
from deployments.api.pooling import cohere, tei
from deployments.api.pooling.embeddings import embeddings, pooling
from deployments.api.pooling.rerank import classify, rerank, score
from deployments.api.requests_route import REQUESTS, explain_request
from deployments.api.served_model import find_model
from deployments.api.tokenize_routes import detokenize, tokenize
from deployments.backend import DRAINING
from deployments.environment import installed_version

if TYPE_CHECKING:
    from deployments.api.app import Api

Handler = Callable[["Api", HttpExchange], Awaitable[None]]

# Statuses that an operation may end with, beside 200 and those of every one.
READS = (400, 408, 413, 415)  # it reads a body
NAMES = (403, 404)  # it names something
QUEUES = (*READS, *NAMES, 409, 422, 429, 499, 503)  # it is work for a replica

JSON, EVENTS, LINES, PLAIN, HTML, BYTES, ANY = (
    "application/json",
    "text/event-stream",
    "application/x-ndjson",
    "text/plain",
    "text/html",
    "application/octet-stream",
    "*/*",
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a route.

    answer: keys that the JSON of a 200 always has; None: it is no object, or not always.
    kinds: media types that it may have.
    form: the schema of a multipart body, in the place of one in JSON.
    texts: `error` of a failure is its message, and what is an object elsewhere stands beside it.
    """

    summary: str
    statuses: tuple[int, ...] = ()
    body: Body | None = None
    answer: tuple[str, ...] | None = ()
    kinds: tuple[str, ...] = (JSON,)
    query: Mapping[str, Schema] = field(default_factory=dict)
    form: Schema | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A served path, with an operation for each of its methods.

    path: the URL's path; {id} stands for one part without a slash, {name} for anything not empty
    """

    path: str
    handler: Handler
    get: Operation | None = None
    post: Operation | None = None
    delete: Operation | None = None
    open: bool = False  # needs no key

    @property
    def operations(self) -> dict[str, Operation]:
        """The operations of the route, by method."""
        named = {"GET": self.get, "HEAD": self.get, "POST": self.post, "DELETE": self.delete}
        return {method: one for method, one in named.items() if one is not None}


def _chat(api: "Api", exchange: HttpExchange) -> Awaitable[None]:
    return api.generate(exchange, chat=True)


def _completions(api: "Api", exchange: HttpExchange) -> Awaitable[None]:
    return api.generate(exchange, chat=False)


async def _invocations(api: "Api", exchange: HttpExchange) -> None:
    exchange.path = await invocations.route_of(api, exchange)
    await EXACT[exchange.path].handler(api, exchange)


async def _tokenize(api: "Api", exchange: HttpExchange) -> None:
    body = await api.read(exchange)
    card = await find_model(body.get("model"), api.backend, exchange.caller)
    await exchange.answer(200, await tokenize(exchange, body, card, api.backend, api.options))


async def _detokenize(api: "Api", exchange: HttpExchange) -> None:
    body = await api.read(exchange)
    card = await find_model(body.get("model"), api.backend, exchange.caller)
    await exchange.answer(200, await detokenize(exchange, body, card, api.backend, api.options))


async def _request(api: "Api", exchange: HttpExchange) -> None:
    await explain_request(exchange, api.options)


async def _health(api: "Api", exchange: HttpExchange) -> None:
    await exchange.answer(200, b'{"status":"ok"}')


async def _ready(api: "Api", exchange: HttpExchange) -> None:
    if not api.backend.ready():
        code, message = "not_ready", "no engine replica can take requests yet"
        if api.backend.state().draining:
            code, message = "draining", DRAINING
        raise ApiError(503, code, message, kind=OVERLOADED, headers=(("retry-after", "1"),))
    await exchange.answer(200, b'{"status":"ready"}')


async def _version(api: "Api", exchange: HttpExchange) -> None:
    await exchange.answer(200, msgspec.json.encode({"version": installed_version()}))


async def _root(api: "Api", exchange: HttpExchange) -> None:
    """Answer with the text that Ollama's clients look for before they ask anything.

    A browser is sent to the page.
    """
    if api.options.page and any(b"text/html" in one for one in exchange.values(b"accept")):
        place = (("location", exchange.root + web.PAGE),)
        await exchange.answer(307, b"", b"text/plain; charset=utf-8", place)
        return
    await exchange.answer(200, b"Ollama is running", b"text/plain; charset=utf-8")


async def _metrics(api: "Api", exchange: HttpExchange) -> None:
    text = await api.options.metrics() if api.options.metrics is not None else ""
    await exchange.answer(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")


async def _openapi(api: "Api", exchange: HttpExchange) -> None:
    told = document(ROUTES, api.options, exchange.root)
    await exchange.answer(200, msgspec.json.encode(told))


async def _docs(api: "Api", exchange: HttpExchange) -> None:
    text = page(ROUTES, strict=api.options.strict, root=exchange.root)
    await exchange.answer(200, text, b"text/html; charset=utf-8", HEADERS)


_CHAT = ("id", "object", "created", "model", "choices")
_LIST = ("object", "data")
_FILE = ("id", "object", "bytes", "filename", "purpose")
_BATCH = ("id", "object", "endpoint", "status", "input_file_id", "request_counts")
_RESPONSE = ("id", "object", "created_at", "status", "model", "output", "usage")
_MODEL = ("id", "object", "owned_by", "max_model_len")
_STREAMS = (JSON, EVENTS)
_LITEQWEN = ("response", "history", "code", "logits", "flag")
_GONE = ("id", "object", "deleted")
_ADAPTER = ("id", "object", "path", "source")
_ADAPTERS = (503, *NAMES)
_PAGES: Mapping[str, Schema] = {"after": TEXT}


def _generation(summary: str, body: Body, answer: tuple[str, ...]) -> Operation:
    return Operation(summary, QUEUES, body, answer, _STREAMS)


def _pooled(summary: str, body: Body, answer: tuple[str, ...]) -> Operation:
    return Operation(summary, QUEUES, body, answer)


_VECTORS = (*_LIST, "id", "created", "model", "usage")
_COHERE = _pooled(
    "Vectors of texts, as Cohere has it",
    pooled.COHERE_EMBED,
    ("id", "embeddings", "texts", "meta", "response_type"),
)
_RERANK = _pooled("Order documents", pooled.RERANK, ("id", "model", "results", "usage"))
_SCORE = _pooled("Scores of pairs of texts", pooled.SCORE, (*_LIST, "model", "usage"))
_CLASSIFY = _pooled("Labels of texts", pooled.CLASSIFY, (*_LIST, "model", "usage"))
_COUNTS = (*READS, *NAMES, 422)
ROUTES: tuple[Route, ...] = (
    Route("/v1/chat/completions", _chat, post=_generation("A chat", generation.CHAT, _CHAT)),
    Route(
        "/v1/completions",
        _completions,
        post=_generation("Texts, or token ids, continued", generation.COMPLETION, _CHAT),
    ),
    Route(
        responses.PATH,
        responses.create,
        post=_generation("A chat in items", agents.RESPONSES, _RESPONSE),
    ),
    Route(
        f"{responses.PATH}/input_tokens",
        responses.count,
        post=Operation(
            "Tokens of the prompt of a response", QUEUES, agents.RESPONSES, ("input_tokens",)
        ),
    ),
    Route(
        messages.PATH,
        messages.create,
        post=_generation(
            "A chat in blocks",
            agents.MESSAGES,
            ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        ),
    ),
    Route(
        f"{messages.PATH}/count_tokens",
        messages.count,
        post=Operation(
            "Tokens of the prompt of a message", QUEUES, agents.COUNTED, ("input_tokens",)
        ),
    ),
    Route(
        infill.PATH,
        infill.infill,
        post=_generation("What stands between two texts", INFILL, ("content", "stop")),
    ),
    Route(
        "/chat",
        liteqwen.chat,
        post=Operation("A chat, as liteqwen has it", QUEUES, lq.CHAT, _LITEQWEN),
    ),
    Route(
        "/stream_chat_post",
        liteqwen.stream_chat,
        post=Operation("The same as events", QUEUES, lq.CHAT, kinds=(EVENTS,)),
    ),
    Route(
        "/stop_generate",
        liteqwen.stop,
        post=Operation("End a request by its id", (*READS, *NAMES), lq.STOP, ("stopped",)),
    ),
    Route(
        ollama.CHAT,
        ollama.chat,
        post=Operation(
            "A chat, as Ollama has it",
            QUEUES,
            ollama_fields.CHAT,
            ("model", "created_at", "message", "done"),
            (JSON, LINES),
            texts=True,
        ),
    ),
    Route(
        ollama.GENERATE,
        ollama.generate,
        post=Operation(
            "A text, as Ollama has it",
            QUEUES,
            ollama_fields.GENERATE,
            ("model", "created_at", "response", "done"),
            (JSON, LINES),
            texts=True,
        ),
    ),
    Route(
        ollama.EMBED,
        ollama_embed.embed,
        post=Operation(
            "Vectors of texts, as Ollama has it",
            QUEUES,
            ollama_fields.EMBED,
            ("model", "embeddings"),
            texts=True,
        ),
    ),
    Route(
        ollama.EMBEDDINGS,
        ollama_embed.embeddings,
        post=Operation(
            "The vector of a text, as Ollama had it",
            QUEUES,
            ollama_fields.EMBEDDINGS,
            ("embedding",),
            texts=True,
        ),
    ),
    Route(
        ollama.TAGS,
        ollama_models.tags,
        get=Operation("What is served, as Ollama lists it", (503,), answer=("models",), texts=True),
    ),
    Route(
        ollama.RUNNING,
        ollama_models.running,
        get=Operation("Which of these are awake", (503,), answer=("models",), texts=True),
    ),
    Route(
        ollama.SHOW,
        ollama_models.show,
        post=Operation(
            "A model, as Ollama tells of it",
            (*READS, *NAMES, 503),
            ollama_fields.SHOW,
            ("details", "model_info", "capabilities", "template"),
            texts=True,
        ),
    ),
    Route(
        ollama.PULL_PATH,
        ollama.pull,
        post=Operation(
            "Whether a model is there: none is fetched",
            (*READS, *NAMES, 503),
            ollama_fields.PULL,
            ("status",),
            (JSON, LINES),
            texts=True,
        ),
    ),
    *(
        Route(path, ollama.refuse, post=Operation("Refused", (400,), texts=True))
        for path in ollama.MANAGED
    ),
    Route(ollama.DELETE, ollama.refuse, delete=Operation("Refused", (400,), texts=True)),
    Route(
        ollama.VERSION,
        _version,
        get=Operation("Of Manta, for Ollama's clients", answer=("version",), texts=True),
    ),
    Route(
        models.PATH,
        models.models,
        get=Operation("What is served", (503,), answer=_LIST),
        post=Operation(
            "A model, added or changed", (*READS, *NAMES, 503), others.MODEL, ("id", "status")
        ),
    ),
    Route(
        "/v1/embeddings",
        embeddings,
        post=Operation("Vectors of texts", QUEUES, pooled.EMBEDDINGS, _VECTORS, (JSON, BYTES)),
    ),
    Route(
        batches.FILES,
        batches.files,
        get=Operation(
            "Files of batches",
            (400, 404),
            answer=(*_LIST, "has_more"),
            query={**_PAGES, "purpose": TEXT, "limit": integer(1, 10_000)},
        ),
        post=Operation("A new file", (*READS, 404), answer=_FILE, form=others.FILE),
    ),
    Route(
        batches.BATCHES,
        batches.batches,
        get=Operation(
            "Batches",
            (400, 404),
            answer=(*_LIST, "has_more"),
            query={**_PAGES, "limit": integer(1, 100)},
        ),
        post=Operation("A new batch", (*READS, 404, 429), others.BATCH, _BATCH),
    ),
    Route(
        "/pooling",
        pooling,
        post=Operation(
            "What a model makes of texts", QUEUES, pooled.POOLING, _VECTORS, (JSON, BYTES)
        ),
    ),
    Route("/v1/rerank", rerank, post=_RERANK),
    Route("/v2/rerank", rerank, post=_RERANK),
    Route(
        "/rerank",
        rerank,
        post=Operation("Order documents, or TEI's texts", QUEUES, pooled.RERANK_TEXTS, None),
    ),
    Route(cohere.EMBED, cohere.embed, post=_COHERE),
    Route(cohere.EMBED_1, cohere.embed, post=_COHERE),
    Route(
        tei.EMBED,
        tei.embed,
        post=Operation("Vectors of texts alone", QUEUES, pooled.TEI_EMBED, None, texts=True),
    ),
    Route(
        tei.PREDICT,
        tei.predict,
        post=Operation("Labels of texts alone", QUEUES, pooled.TEI_PREDICT, None, texts=True),
    ),
    Route(
        tei.INFO,
        tei.info,
        get=Operation(
            "The model that makes vectors", NAMES, answer=("model_id", "model_type"), texts=True
        ),
    ),
    Route("/v1/score", score, post=_SCORE),
    Route("/score", score, post=_SCORE),
    Route("/v1/classify", classify, post=_CLASSIFY),
    Route("/classify", classify, post=_CLASSIFY),
    Route(
        adapters.PATH,
        adapters.adapters,
        get=Operation(
            "Adapters, all or of one model", _ADAPTERS, answer=_LIST, query={"model": TEXT}
        ),
        post=Operation(
            "An adapter, added or read again",
            (*READS, *NAMES, 409, 422, 503),
            others.ADAPTER,
            _ADAPTER,
        ),
    ),
    Route(
        adapters.LOAD,
        adapters.load_lora,
        post=Operation(
            "An adapter, added as vLLM has it",
            (*READS, *NAMES, 409, 422, 503),
            others.LOAD_LORA,
            kinds=(PLAIN,),
        ),
    ),
    Route(
        adapters.UNLOAD,
        adapters.unload_lora,
        post=Operation(
            "An adapter, taken away as vLLM has it",
            (*READS, *NAMES, 409, 422, 503),
            others.UNLOAD_LORA,
            kinds=(PLAIN,),
        ),
    ),
    Route(
        "/tokenize",
        _tokenize,
        post=Operation(
            "Token ids of a text or a chat",
            _COUNTS,
            others.TOKENIZE,
            ("count", "max_model_len", "tokens"),
        ),
    ),
    Route(
        "/detokenize",
        _detokenize,
        post=Operation("The text of token ids", _COUNTS, others.DETOKENIZE, ("prompt",)),
    ),
    Route(
        "/",
        _root,
        get=Operation("That a server is here, in Ollama's words", (307,), kinds=(PLAIN,)),
        open=True,
    ),
    Route(
        "/health", _health, get=Operation("Whether the router lives", answer=("status",)), open=True
    ),
    Route(
        "/ready",
        _ready,
        get=Operation("Whether a replica can take requests", (503,), answer=("status",)),
        open=True,
    ),
    Route(
        "/ping",
        _ready,
        get=Operation("The same, as SageMaker asks", (503,), answer=("status",)),
        open=True,
    ),
    Route(
        invocations.PATH,
        _invocations,
        post=Operation(
            "What the body is for, as SageMaker asks", QUEUES, Body({}), None, (JSON, EVENTS)
        ),
    ),
    Route("/metrics", _metrics, get=Operation("Prometheus text", kinds=(PLAIN,))),
    Route(
        LIVE,
        live,
        get=Operation("What routers know now", NAMES, answer=("object", "key_names", "routers")),
    ),
    Route("/version", _version, get=Operation("Of Manta", answer=("version",))),
    Route("/openapi.json", _openapi, get=Operation("This document", answer=("openapi",))),
    Route("/docs", _docs, get=Operation("This document as a page", kinds=(HTML,))),
    Route(
        web.PAGE,
        web.page,
        get=Operation("A page to talk to it and look into it", (404,), kinds=(HTML,)),
        open=True,
    ),
    Route(
        f"{web.FILES}{{name}}",
        web.page,
        get=Operation("Its scripts and styles", (404,), kinds=(ANY,)),
        open=True,
    ),
    Route(
        f"{responses.PATH}/{{id}}",
        responses.one,
        get=Operation(
            "An answer that was kept, or is made in the background",
            (400, *NAMES),
            answer=_RESPONSE,
            kinds=_STREAMS,
            query={"stream": BOOLEAN, "starting_after": integer(0, 10**9 - 1)},
        ),
        delete=Operation("Forget it", NAMES, answer=_GONE),
    ),
    Route(
        f"{responses.PATH}/{{id}}/cancel",
        responses.one,
        post=Operation("End one in the background", (400, *NAMES), answer=_RESPONSE),
    ),
    Route(
        f"{responses.PATH}/{{id}}/input_items",
        responses.one,
        get=Operation(
            "What it answered",
            (400, *NAMES),
            answer=(*_LIST, "has_more"),
            query={**_PAGES, "limit": integer(1, 100), "order": one_of("asc", "desc")},
        ),
    ),
    Route(
        f"{batches.FILES}/{{id}}",
        batches.one_file,
        get=Operation("A file", NAMES, answer=_FILE),
        delete=Operation("Delete it", (400, *NAMES), answer=_GONE),
    ),
    Route(
        f"{batches.FILES}/{{id}}/content",
        batches.one_file,
        get=Operation("Its bytes", NAMES, kinds=(BYTES,)),
    ),
    Route(
        f"{batches.BATCHES}/{{id}}",
        batches.one_batch,
        get=Operation("A batch", NAMES, answer=_BATCH),
    ),
    Route(
        f"{batches.BATCHES}/{{id}}/cancel",
        batches.one_batch,
        post=Operation("Stop it", (400, *NAMES), answer=_BATCH),
    ),
    Route(
        f"{models.PATH}/{{name}}",
        models.one_model,
        get=Operation("A model", _ADAPTERS, answer=_MODEL),
        delete=Operation("Take it away", (400, *_ADAPTERS), answer=_GONE),
    ),
    Route(
        f"{REQUESTS}{{id}}",
        _request,
        get=Operation("What became of a request", NAMES, answer=("id", "object", "parts")),
    ),
    Route(
        f"{adapters.PATH}/{{name}}",
        adapters.one_adapter,
        get=Operation("An adapter", _ADAPTERS, answer=_ADAPTER),
        delete=Operation(
            "Take it away", (*_ADAPTERS, 400, 409, 422), answer=_GONE, query={"model": TEXT}
        ),
    ),
)
EXACT: Mapping[str, Route] = {route.path: route for route in ROUTES if "{" not in route.path}
OPEN = frozenset(route.path for route in ROUTES if route.open)


def _pattern(path: str) -> re.Pattern[str]:
    """Compile a path: {name}, of a model or an adapter, may have slashes, {id} may not."""
    return re.compile(path.replace("{id}", "[^/]+").replace("{name}", ".+"), re.DOTALL)


_PATTERNS = [(_pattern(route.path), route) for route in ROUTES if "{" in route.path]


# Routes of OpenAI's that are not there, and that a pattern would take for an id.
_ELSEWHERE = frozenset({f"{responses.PATH}/compact"})


def _route(path: str) -> Route | None:
    return EXACT.get(path) or next((r for p, r in _PATTERNS if p.fullmatch(path)), None)


def versioned(path: str) -> str:
    """Return the path with /v1 before it, if it is no route without /v1.

    Clients are given base URLs without /v1, or with two of them. The function is called once,
    before any check of the path.
    """
    if path.startswith("/v1/v1/"):
        path = path[3:]
    if path.startswith("/v1/") or _route(path) is not None or _route(f"/v1{path}") is None:
        return path
    return f"/v1{path}"


def find(exchange: HttpExchange) -> Route:
    """Return the route of an exact path: nothing is normalised, so nothing passes a check by that.

    Raises ApiError 404, 405.
    """
    path = exchange.path
    route = _route(path)
    if route is None or path in _ELSEWHERE:
        raise ApiError(
            404,
            "not_found",
            f"there is no {shown(path)}{_near(path)}; served: {', '.join(EXACT)}",
            kind=NOT_FOUND,
        )
    methods = route.operations.keys()
    if exchange.method not in methods:
        raise ApiError(
            405,
            "method_not_allowed",
            f"{route.path} takes {' or '.join(methods)}",
            kind=INVALID,
            headers=(("allow", ", ".join(methods)),),
        )
    return route


def _near(path: str) -> str:
    """Return a hint at the route that was meant, if that is hardly in doubt; "" otherwise.

    The path then differs from a route in its slashes, in what stands before it, or by a slip of the
    pen. Routes that other servers have are not near.
    """
    plain = path.rstrip("/")
    for route in EXACT:
        tail = route.removeprefix("/v1")
        if plain.endswith(tail) and plain[: -len(tail)].strip("/") in ("", "v1", "v1/v1", "api/v1"):
            return f', did you mean "{route}"?'
    return did_you_mean(plain, EXACT, 0.9)
