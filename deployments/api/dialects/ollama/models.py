"""Ollama's /api/tags, /api/ps and /api/show: the served models, the models with a replica awake,
and one model's details; /api/embed and the older /api/embeddings: embeddings."""

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from deployments.api.context import ApiContext
from deployments.api.fields.ollama import EMBED, EMBEDDINGS, SHOW, Show
from deployments.api.fields.pooled import TextInput
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.output.detect import template_output
from deployments.api.pooling.pooled import PooledCall, T, pooled_call, take_prompts
from deployments.api.served_model import find_model
from deployments.backend import Backend, ModelCard
from engine.pooling import Vector, as_array, normalized
from engine.text.infill import FillMarks
from engine.text.tokenizer import Tokenizer

_LATEST = ":latest"  # the tag that Ollama's clients append to a name without one


def served_name(name: Any, backend: Backend) -> Any:
    """Return a model's name without the tag `:latest`, unless a served model's name includes the
    tag."""
    if isinstance(name, str) and name.endswith(_LATEST) and name not in backend.models():
        return name.removesuffix(_LATEST)
    return name


def asked_name(body: Show, backend: Backend) -> str | None:
    """Return the model's name from the field `model` or, for older clients, `name`."""
    return served_name(body.name if body.model is None else body.model, backend)


_NEVER = "9999-12-31T23:59:59Z"  # `expires_at`, as models are never unloaded


async def tags(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with all models that the caller's key may use."""
    cards = await _cards(context, exchange)
    return {"models": [await _tag(card) for card in cards]}


async def running(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the models that have a replica awake."""
    changes = context.options.models
    models = []
    for card in await _cards(context, exchange):
        if changes is None or changes.status(card.parent or card.id) == "ready":
            more = {"expires_at": _NEVER, "context_length": card.max_model_len}
            models.append({**await _tag(card), **more})
    return {"models": models}


async def show(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the details of one model. Raises ApiError 400, 404."""
    body = await context.read_as(exchange, SHOW)
    card = await find_model(asked_name(body, context.backend), context.backend, exchange.caller)
    tokenizer = context.backend.tokenizer(card.id)
    template = tokenizer.chat_template
    source = "" if template is None else template.sources["default"]
    parameters = _parameters(tokenizer)
    count = await asyncio.to_thread(card.facts.parameters)
    return {
        "modelfile": _modelfile(card.id, source, parameters),
        "parameters": "\n".join(parameters),
        "template": source,
        "details": _details(card, count),
        "model_info": _info(card, count),
        "capabilities": _capabilities(card, tokenizer),
        "modified_at": _modified(card),
    }


async def _cards(context: ApiContext, exchange: HttpExchange) -> list[ModelCard]:
    await context.backend.adapters.refresh()
    may_use = exchange.caller.may_use
    return [card for card in context.backend.models().values() if may_use(card.id)]


async def _tag(card: ModelCard) -> JsonObject:
    """Return a model's entry in /api/tags. The digest is of its name and creation time, as routers
    do not know the digest of its files."""
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
    """Return the object `details` of a model. count: number of parameters; 0: unknown."""
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
    """Format a number of parameters as Ollama does; "" for 0 (unknown)."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count else ""


def _info(card: ModelCard, count: int) -> JsonObject:
    """Return the model's dimensions as {GGUF metadata key: value}. count: number of parameters."""
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
    """Return the model's default sampling parameters as lines of a Modelfile."""
    lines = [f"{name} {value}" for name, value in sorted(tokenizer.sampling_defaults.items())]
    stops = (tokenizer.token_text(token) for token in tokenizer.eos_token_ids)
    return [*lines, *(f'stop "{text}"' for text in stops)]


def _modelfile(name: str, template: str, parameters: list[str]) -> str:
    lines = [f"FROM {name}", f'TEMPLATE """{template}"""', *(f"PARAMETER {p}" for p in parameters)]
    return "\n".join(lines) + "\n"


async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer /api/embed with normalized embeddings. Raises ApiError, MantaError."""
    began = time.monotonic_ns()
    async with pooled_call(context, exchange, EMBED, served_name) as call:
        vectors, tokens = await _vectors(call, call.body.input, "input", call.body.dimensions)

        def answer() -> bytes:
            response = {
                "model": call.card.id,
                "embeddings": [normalized(vector).tolist() for vector in vectors],
                "total_duration": time.monotonic_ns() - began,
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }
            return msgspec.json.encode(response)

        await exchange.answer(200, await in_thread(answer, 4 * sum(map(len, vectors))))


async def embeddings(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer /api/embeddings with one embedding, not normalized. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, EMBEDDINGS, served_name) as call:
        prompt = TextInput([call.body.prompt] if call.body.prompt else [], False)
        vectors, _ = await _vectors(call, prompt, "prompt")
        vector: list[float] = vectors[0].tolist() if vectors else []
        return {"embedding": vector}


async def _vectors(
    call: PooledCall[T], texts: TextInput, name: str, size: int | None = None
) -> tuple[list[Vector], int]:
    """Return the embedding of each text, and the number of tokens; ([], 0) for an empty input.

    name: the field of the texts, for errors
    size: the number of dimensions; None: the model's
    """
    call.check_vectors(size)
    if not texts.items:
        return [], 0
    prompts = await take_prompts(call, texts, name)
    vectors = [as_array(vector) for vector in await call.vectors(prompts)]
    if size is not None:
        vectors = [call.pooling.cut(vector, size) for vector in vectors]
    return vectors, sum(map(len, prompts))
