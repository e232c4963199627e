"""Ollama's routes: /api/chat and /api/generate, which become chats or completions, and the routes
that manage models, which are refused."""

from collections.abc import Mapping
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.dialects.ollama import models
from deployments.api.dialects.ollama.models import asked_name, served_name
from deployments.api.dialects.ollama.request import ollama_chat, ollama_generate
from deployments.api.dialects.ollama.writer import GenerateWriter, OllamaWriter
from deployments.api.fields import ollama as fields
from deployments.api.generate import DialectRequest, answers
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import ChatRequest, TextRequest
from deployments.api.generation.tenancy import QueueFields, engine_request, queue_place
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.route import JSON, LINES, NAMES, QUEUES, READS, RouteTable
from deployments.api.served_model import find_model, known_model
from deployments.api.services.server import version
from deployments.api.stream.item_answer import ItemAnswer, Naming, new_number
from deployments.api.stream.merge import failed
from deployments.api.stream.replay import Resumption
from deployments.backend import Generation, ModelCard
from engine.sampling_params import SamplingParams

PREFIX = "/api/"
ROUTES = RouteTable((503,), QUEUES, texts=True)
_LINES = b"application/x-ndjson"


class OllamaDialect(DialectRequest):
    """The dialect of /api/chat: reads a request and writes its answer."""

    writer = OllamaWriter

    def __init__(self) -> None:
        self._body: Mapping[str, Any] = {}

    def read(
        self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]
    ) -> ChatRequest | TextRequest | None:
        name = body.get("model")
        if isinstance(name, str):
            body = {**body, "model": served_name(name, context.backend)}
        self._body = body
        return self._read(context, body, ignored)

    def _read(
        self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]
    ) -> ChatRequest | TextRequest | None:
        return ollama_chat(body, ignored, strict=context.options.strict)

    async def settle(self, context: ApiContext, exchange: HttpExchange) -> None:
        card = await find_model(self._body.get("model"), context.backend, exchange.caller)
        user, seconds = self._body.get("user"), self._body.get("deadline_seconds")
        # Of these values only `user` was not checked by the body's Struct.
        user = user if isinstance(user, str) else None
        queue = QueueFields(user, seconds, self._body.get("priority"))
        await _wake(context, exchange, queue, card)
        await exchange.answer(200, self.writer.loaded(card.id))

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        number, _ = new_number(None)
        return _Answer(call, self.writer(call.card.id, Naming.of(call, number)))


class GenerateDialect(OllamaDialect):
    """The dialect of /api/generate: reads a request and writes its answer."""

    writer = GenerateWriter

    def _read(
        self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]
    ) -> ChatRequest | TextRequest | None:
        backend, strict = context.backend, context.options.strict
        card = known_model(body.get("model"), backend)
        template = card is None or backend.tokenizer(card.id).chat_template is not None
        return ollama_generate(body, ignored, strict=strict, template=template)


class _Answer(ItemAnswer):
    """The answer of Ollama's generating routes, whose stream of JSON lines has no event ids or
    comments."""

    media_type = _LINES

    async def stream(
        self, generation: Generation, exchange: HttpExchange, keepalive: float
    ) -> None:
        await super().stream(generation, exchange, 0)


ROUTES.post(
    "/api/chat",
    "A chat, as Ollama has it",
    fields.CHAT,
    ("model", "created_at", "message", "done"),
    (JSON, LINES),
)(answers(OllamaDialect))
ROUTES.post(
    "/api/generate",
    "A text, as Ollama has it",
    fields.GENERATE,
    ("model", "created_at", "response", "done"),
    (JSON, LINES),
)(answers(GenerateDialect))
ROUTES.post(
    "/api/embed", "Vectors of texts, as Ollama has it", fields.EMBED, ("model", "embeddings")
)(models.embed)
ROUTES.post(
    "/api/embeddings", "The vector of a text, as Ollama had it", fields.EMBEDDINGS, ("embedding",)
)(models.embeddings)
ROUTES.get("/api/tags", "What is served, as Ollama lists it", ("models",))(models.tags)
ROUTES.get("/api/ps", "Which of these are awake", ("models",))(models.running)
ROUTES.post(
    "/api/show",
    "A model, as Ollama tells of it",
    fields.SHOW,
    ("details", "model_info", "capabilities", "template"),
    statuses=(*READS, *NAMES, 503),
)(models.show)


@ROUTES.post(
    "/api/pull",
    "Whether a model is there: none is fetched",
    fields.PULL,
    ("status",),
    (JSON, LINES),
    statuses=(*READS, *NAMES, 503),
)
async def pull(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request to pull a model with success if the model is served.

    Raises ApiError 400 for any other model, as requests cannot download models.
    """
    body = await context.read_as(exchange, fields.PULL)
    streamed = body.stream is not False
    name = asked_name(body, context.backend)
    try:
        await find_model(name, context.backend, exchange.caller)
    except ApiError as error:
        if error.code != "model_not_found" or error.status != 404:
            raise
        raise _managed(error.message) from None
    kind = _LINES if streamed else b"application/json"
    await exchange.answer(200, b'{"status":"success"}' + b"\n" * streamed, kind)


@ROUTES.delete("/api/delete", "Refused", (), statuses=(400,))
@ROUTES.post("/api/copy", "Refused", statuses=(400,))
@ROUTES.post("/api/push", "Refused", statuses=(400,))
@ROUTES.post("/api/create", "Refused", statuses=(400,))
async def refuse(context: ApiContext, exchange: HttpExchange) -> None:
    """Refuse a request to a route that manages models. Raises ApiError 400."""
    raise _managed(f"{exchange.path} is not supported")


ROUTES.get("/api/version", "Of Manta, for Ollama's clients", ("version",), statuses=())(version)


def _managed(reason: str) -> ApiError:
    return invalid(
        f"{reason}; models are named in Manta's configuration, and changed by `manta models` or "
        "POST and DELETE of /v1/models with an admin's key",
        code="not_supported",
    )


async def _wake(
    context: ApiContext, exchange: HttpExchange, queue: QueueFields, card: ModelCard
) -> None:
    """Wake a sleeping model by a one-token request, and wait until that request has ended."""
    changes = context.options.models
    if changes is None or changes.status(card.parent or card.id) == "ready":
        return
    pooled = not card.facts.generates
    params = SamplingParams(max_tokens=0 if pooled else 1, temperature=0.0, pooled=pooled)
    place = queue_place(exchange, queue, context.options)
    ids = [card.eos_token_ids[0] if card.eos_token_ids else 0]
    generation = context.backend.generate(engine_request(exchange, place, card.id, ids, params))
    async with UntilDisconnect(exchange.receive, generation.abort):
        while items := await generation.next():
            if (last := items[-1][1]).finish == "error":
                raise failed(last)
