"""Ollama's /api/chat and /api/generate, read into a chat or a completion, and its routes that would
manage models."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer, Naming, new_number
from deployments.api.agents.turn import Turn
from deployments.api.fields.ollama import PULL
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.answer.merge import failed
from deployments.api.generation.fields import check_names, take_bool
from deployments.api.generation.openai_request import OpenAIRequest
from deployments.api.generation.tenancy import deadline_of, key_of
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.ollama.names import asked_name, served_name
from deployments.api.ollama.request import OllamaRequest, ollama_chat, ollama_generate
from deployments.api.ollama.writer import GenerateWriter, OllamaWriter, loaded
from deployments.api.served_model import asked_model, find_model
from deployments.backend import Generation, GenerationRequest, ModelCard, RecalledChoice
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deployments.api.app import Api

PREFIX = "/api/"
CHAT, TAGS, VERSION = "/api/chat", "/api/tags", "/api/version"
GENERATE, EMBED, EMBEDDINGS = "/api/generate", "/api/embed", "/api/embeddings"
SHOW, RUNNING, PULL_PATH = "/api/show", "/api/ps", "/api/pull"
MANAGED = ("/api/create", "/api/push", "/api/copy")
DELETE = "/api/delete"
LINES = b"application/x-ndjson"


class OllamaTurn(Turn):
    """A request to /api/chat."""

    def __init__(self, api: "Api") -> None:
        super().__init__()
        self._api = api
        self._made = OllamaRequest()
        self._body: dict[str, Any] = {}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self._body = body = {**body, "model": served_name(body.get("model"), self._api.backend)}
        self._made = made = self._read(body, self._api.options.strict)
        self.ignored, self.names, self.is_chat = made.ignored, made.names, made.is_chat
        return made.chat

    def _read(self, body: dict[str, Any], strict: bool) -> OllamaRequest:
        return ollama_chat(body, strict=strict)

    async def settle(self, exchange: HttpExchange) -> bool:
        if not self._made.loads:
            return False
        api = self._api
        card = await find_model(self._body.get("model"), api.backend, exchange.caller)
        await _wake(api, exchange, self._body, card)
        await exchange.answer(200, loaded(card.id, chat=not isinstance(self, GenerateTurn)))
        return True

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        number, _ = new_number(None)
        return _Answer(call, self._writer(call.card.id, Naming.of(call, number)))

    def _writer(self, model: str, naming: Naming) -> OllamaWriter:
        return OllamaWriter(model, naming)


class GenerateTurn(OllamaTurn):
    """A request to /api/generate."""

    def _read(self, body: dict[str, Any], strict: bool) -> OllamaRequest:
        backend = self._api.backend
        name = asked_model(body, backend)
        known = bool(name) and backend.tokenizer(name).chat_template is not None
        return ollama_generate(body, strict=strict, template=known or not name)

    def _writer(self, model: str, naming: Naming) -> OllamaWriter:
        return GenerateWriter(model, naming)


class _Answer(ItemAnswer):
    """Lines of JSON have no place for an event's id, nor for a comment."""

    media_type = LINES

    async def stream(
        self, generation: Generation, exchange: HttpExchange, keepalive: float
    ) -> None:
        await super().stream(generation, exchange, 0)

    def _lines(self) -> bytes:
        new = self.writer.wire.new
        lines = b"".join(msgspec.json.encode(fields) + b"\n" for _, fields in new)
        new.clear()
        return lines


async def chat(api: "Api", exchange: HttpExchange) -> None:
    await api.generate(exchange, chat=True, turn=OllamaTurn(api))


async def generate(api: "Api", exchange: HttpExchange) -> None:
    await api.generate(exchange, chat=True, turn=GenerateTurn(api))


async def pull(api: "Api", exchange: HttpExchange) -> None:
    """Answer that what is served is there already.

    Raises ApiError 400 for anything else, which is not fetched.
    """
    body = await api.read(exchange)
    exchange.ignored += check_names(body, PULL.known, strict=api.options.strict)
    streamed = take_bool(body, "stream", True)
    name = asked_name(body, api.backend)
    try:
        await find_model(name, api.backend, exchange.caller)
    except ApiError as error:
        if error.code != "model_not_found" or error.status != 404:
            raise
        raise _managed(error.message) from None
    kind = LINES if streamed else b"application/json"
    await exchange.answer(200, b'{"status":"success"}' + b"\n" * streamed, kind)


async def refuse(api: "Api", exchange: HttpExchange) -> None:
    """Raises ApiError 400."""
    raise _managed(f"{exchange.path} is not supported")


def _managed(reason: str) -> ApiError:
    return invalid(
        f"{reason}; models are named in Manta's configuration, and changed by `manta models` or "
        "POST and DELETE of /v1/models with an admin's key",
        code="not_supported",
    )


async def _wake(api: "Api", exchange: HttpExchange, body: dict[str, Any], card: ModelCard) -> None:
    """Wait until a model that sleeps has made a token. One that is awake is left alone."""
    changes = api.options.models
    if changes is None or changes.status(card.parent or card.id) == "ready":
        return
    pooled = not card.facts.generates
    params = SamplingParams(max_tokens=0 if pooled else 1, temperature=0.0, pooled=pooled)
    request = GenerationRequest(
        request_id=exchange.request_id,
        model=card.id,
        token_ids=[card.eos_token_ids[0] if card.eos_token_ids else 0],
        params=params,
        seed=0,
        deadline=deadline_of(exchange, body, api.options),
        key=key_of(exchange, body, api.options),
        owner=exchange.caller.id,
        trace=exchange.trace,
    )
    generation = api.backend.generate(request)
    async with UntilDisconnect(exchange.receive, generation.abort):
        while items := await generation.next():
            if (last := items[-1][1]).finish == "error":
                raise failed(last)
