"""Ollama's /api/embed and the older /api/embeddings: embeddings of texts."""

import time

import msgspec

from deployments.api.context import ApiContext
from deployments.api.dialects.ollama.names import served_name
from deployments.api.fields.ollama import EMBED, EMBEDDINGS
from deployments.api.fields.pooled import TextInput
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, T, pooled_call, take_prompts
from engine.errors import no_vectors
from engine.pooling import Vector, as_array, normalized


async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer /api/embed with vectors of length 1. Raises ApiError, MantaError."""
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


async def embeddings(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer /api/embeddings with one vector, not rescaled. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, EMBEDDINGS, served_name) as call:
        prompt = TextInput([call.body.prompt] if call.body.prompt else [], False)
        vectors, _ = await _vectors(call, prompt, "prompt")
        vector: list[float] = vectors[0].tolist() if vectors else []
        await exchange.answer_json({"embedding": vector})


async def _vectors(
    call: PooledCall[T], texts: TextInput, name: str, size: int | None = None
) -> tuple[list[Vector], int]:
    """Compute each text's vector and count the tokens. An empty input has no vector."""
    pooling = call.pooling
    if pooling.labels:
        raise no_vectors()
    if size is not None:
        pooling.check_dimensions(size, call.card.vector_size)
    if not texts.items:
        return [], 0
    prompts = await take_prompts(call, texts, name)
    vectors = [as_array(vector) for vector in await call.vectors(prompts)]
    if size is not None:
        vectors = [pooling.cut(vector, size) for vector in vectors]
    return vectors, sum(map(len, prompts))
