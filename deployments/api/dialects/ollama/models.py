"""Ollama's /api/tags, /api/ps and /api/show: what is served, what is loaded, and one model."""

import asyncio
import hashlib
from datetime import UTC, datetime

from deployments.api.context import ApiContext
from deployments.api.dialects.ollama.names import asked_name
from deployments.api.fields.ollama import SHOW
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.output.detect import template_output
from deployments.api.served_model import find_model
from deployments.backend import ModelCard
from engine.text.infill import FillMarks
from engine.text.tokenizer import Tokenizer

_NEVER = "9999-12-31T23:59:59Z"  # the time at which an unused model would be unloaded


async def tags(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with all models that the key may use."""
    cards = await _cards(context, exchange)
    await exchange.answer_json({"models": [await _tag(card) for card in cards]})


async def running(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the models that have a replica awake."""
    changes = context.options.models
    models = []
    for card in await _cards(context, exchange):
        if changes is None or changes.status(card.parent or card.id) == "ready":
            more = {"expires_at": _NEVER, "context_length": card.max_model_len}
            models.append({**await _tag(card), **more})
    await exchange.answer_json({"models": models})


async def show(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with what is known of one model. Raises ApiError 400, 404."""
    body = await context.read_as(exchange, SHOW)
    card = await find_model(asked_name(body, context.backend), context.backend, exchange.caller)
    tokenizer = context.backend.tokenizer(card.id)
    template = tokenizer.chat_template
    source = "" if template is None else template.sources["default"]
    parameters = _parameters(tokenizer)
    count = await asyncio.to_thread(card.facts.parameters)
    answer = {
        "modelfile": _modelfile(card.id, source, parameters),
        "parameters": "\n".join(parameters),
        "template": source,
        "details": _details(card, count),
        "model_info": _info(card, count),
        "capabilities": _capabilities(card, tokenizer),
        "modified_at": _modified(card),
    }
    await exchange.answer_json(answer)


async def _cards(context: ApiContext, exchange: HttpExchange) -> list[ModelCard]:
    await context.backend.adapters.refresh()
    may_use = exchange.caller.may_use
    return [card for card in context.backend.models().values() if may_use(card.id)]


async def _tag(card: ModelCard) -> JsonObject:
    """Return a model as /api/tags lists it. Its digest is of the name and its time, as the files'
    own is not known here."""
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": _modified(card),
        "size": card.facts.size_bytes,
        "digest": hashlib.sha256(f"{card.id}\n{card.created}".encode()).hexdigest(),
        "details": _details(card, await asyncio.to_thread(card.facts.parameters)),
    }


def _modified(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")


def _details(card: ModelCard, count: int) -> JsonObject:
    """Return the object `details` of a model. count: number of parameters."""
    facts = card.facts
    return {
        "parent_model": card.parent or "",
        "format": facts.format,
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _human(count),
        "quantization_level": facts.quantization,
    }


def _human(count: int) -> str:
    """Format a number of parameters as Ollama does; "" if it is not known."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count else ""


def _info(card: ModelCard, count: int) -> JsonObject:
    """Return the model's sizes under the names of GGUF's metadata."""
    family = card.facts.family or "unknown"
    facts: JsonObject = {"general.architecture": family}
    if count:
        facts["general.parameter_count"] = count
    facts[f"{family}.context_length"] = card.max_model_len
    for name, value in card.facts.sizes.items():
        facts[f"{family}.{name}"] = value
    return facts


def _capabilities(card: ModelCard, tokenizer: Tokenizer) -> list[str]:
    capabilities = []
    if card.facts.generates:
        capabilities.append("completion")
        known = template_output(tokenizer)
        capabilities += ["vision"] if card.images is not None else []
        capabilities += ["tools"] if known.calls is not None else []
        capabilities += ["thinking"] if known.reasoning is not None else []
        capabilities += ["insert"] if FillMarks.of(tokenizer) is not None else []
    if card.pooling is not None and not card.pooling.labels:
        capabilities.append("embedding")
    return capabilities


def _parameters(tokenizer: Tokenizer) -> list[str]:
    """Return a Modelfile's lines: the sampling parameters that hold where a request has none."""
    lines = [f"{name} {value}" for name, value in sorted(tokenizer.sampling_defaults.items())]
    stops = (tokenizer.token_text(token) for token in tokenizer.eos_token_ids)
    return [*lines, *(f'stop "{text}"' for text in stops)]


def _modelfile(name: str, template: str, parameters: list[str]) -> str:
    lines = [f"FROM {name}", f'TEMPLATE """{template}"""', *(f"PARAMETER {p}" for p in parameters)]
    return "\n".join(lines) + "\n"
