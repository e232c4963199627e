"""Ollama's /api/embed and the older /api/embeddings: vectors of texts."""

import time
from typing import Any

import msgspec

from deployments.api.body_fields import take_bool, take_int
from deployments.api.context import ApiContext
from deployments.api.dialects.ollama.names import served_name
from deployments.api.fields.ollama import EMBED, EMBEDDINGS
from deployments.api.fields.pooled import UINT31
from deployments.api.http.errors import wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, pooled_call, take_prompts
from engine.errors import no_vectors
from engine.pooling import Vector, as_array, normalized


async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Vectors have the length 1. Raises ApiError, MantaError."""
    began = time.monotonic_ns()
    async with pooled_call(context, exchange, EMBED, _reader(context)) as call:
        size = take_int(call.body, "dimensions", 1, UINT31)
        vectors, tokens = await _vectors(call, "input", size)

        def answer() -> bytes:
            made = {
                "model": call.card.id,
                "embeddings": [normalized(vector).tolist() for vector in vectors],
                "total_duration": time.monotonic_ns() - began,
                "load_duration": 0,
                "prompt_eval_count": tokens,
            }
            return msgspec.json.encode(made)

        await exchange.answer(200, await in_thread(answer, 4 * sum(map(len, vectors))))


async def embeddings(context: ApiContext, exchange: HttpExchange) -> None:
    """One vector, as the model makes it. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, EMBEDDINGS, _reader(context)) as call:
        if not isinstance(call.body.get("prompt"), str | None):
            raise wrong_type("prompt", "a string")
        vectors, _ = await _vectors(call, "prompt", None)
        one: list[float] = vectors[0].tolist() if vectors else []
        await exchange.answer(200, msgspec.json.encode({"embedding": one}))


async def _vectors(call: PooledCall, name: str, size: int | None) -> tuple[list[Vector], int]:
    """Compute each text's vector and count the tokens. An empty input has no vector."""
    pooling = call.pooling
    if pooling.labels:
        raise no_vectors()
    if size is not None:
        pooling.check_dimensions(size, call.card.vector_size)
    if call.body.get(name) in ("", []):
        return [], 0
    prompts = await take_prompts(call, call.body, name)
    found = [as_array(vector) for vector in await call.vectors(prompts)]
    if size is not None:
        found = [pooling.cut(vector, size) for vector in found]
    return found, sum(map(len, prompts))


def _reader(context: ApiContext) -> Any:
    def read(body: dict[str, Any]) -> dict[str, Any]:
        """A long text is cut unless the request says otherwise."""
        cut = take_bool(body, "truncate", True)
        return {**body, "model": served_name(body.get("model"), context.backend), "truncate": cut}

    return read
