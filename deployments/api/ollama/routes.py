"""The routes of Ollama: /api/chat, read into a chat, and /api/tags, which lists what is served."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer, Naming, new_number
from deployments.api.agents.turn import Turn
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest
from deployments.api.http.exchange import HttpExchange
from deployments.api.ollama.request import ollama_chat
from deployments.api.ollama.writer import OllamaWriter
from deployments.backend import Generation, ModelCard, RecalledChoice

if TYPE_CHECKING:
    from deployments.api.app import Api

CHAT, TAGS, VERSION = "/api/chat", "/api/tags", "/api/version"
PATHS = frozenset({CHAT, TAGS, VERSION})
_LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


class OllamaTurn(Turn):
    def __init__(self, api: "Api") -> None:
        super().__init__()
        self._api = api

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        made = ollama_chat(body, strict=self._api.options.strict)
        self.ignored, self.names = made.ignored, made.names
        name, served = made.chat.get("model"), self._api.backend.models()
        if isinstance(name, str) and name.endswith(_LATEST) and name not in served:
            made.chat["model"] = name.removesuffix(_LATEST)
        return made.chat

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        number, _ = new_number(None)
        return _Answer(call, OllamaWriter(call.card.id, Naming.of(call, number)))


class _Answer(ItemAnswer):
    """Lines of JSON have no place for an event's id, nor for a comment."""

    media_type = b"application/x-ndjson"

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


async def tags(api: "Api", exchange: HttpExchange) -> None:
    await api.backend.adapters.refresh()
    may_use = exchange.caller.may_use
    cards = [_tag(card) for card in api.backend.models().values() if may_use(card.id)]
    await exchange.answer(200, msgspec.json.encode({"models": cards}))


def _tag(card: ModelCard) -> dict[str, Any]:
    """digest: of the name and its time, as the files' own is not known here."""
    digest = hashlib.sha256(f"{card.id}\n{card.created}".encode()).hexdigest()
    modified = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": modified,
        "digest": digest,
        "details": {"parent_model": card.parent or ""},
    }
