"""POST /v1/embeddings: embeddings in OpenAI's form. POST /pooling: the model's pooled output in
vLLM's.
"""

from typing import TypeVar

from deployments.api.context import ApiContext
from deployments.api.fields.pooled import EMBEDDINGS, POOLING, Embeddings
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, pooled_call, take_input
from deployments.api.pooling.vector_format import VectorFormat
from engine.errors import no_vectors
from engine.pooling import Vector, as_array

E = TypeVar("E", bound=Embeddings)


async def embeddings(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for embeddings in OpenAI's form. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, EMBEDDINGS) as call:
        if call.pooling.labels:
            raise no_vectors()
        await _answer(exchange, call, "embedding", "embedding")


async def pooling(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for pooled outputs in vLLM's form. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, POOLING) as call:
        own = "classify" if call.pooling.labels else "embed"
        if call.body.task not in (None, own):
            raise invalid(f"task: this model can {own}", "task", "task_not_supported")
        await _answer(exchange, call, "pooling", "data")


async def _answer(exchange: HttpExchange, call: PooledCall[E], kind: str, name: str) -> None:
    """kind: of an item; name: of its vector."""
    body, classes = call.body, call.pooling.labels
    form, size = VectorFormat.of(body), body.dimensions
    if size is not None:
        call.pooling.check_dimensions(size, call.card.vector_size)
    prompts = await take_input(call)
    vectors = await call.vectors(prompts)
    tokens = sum(map(len, prompts))

    def values(one: bytes) -> Vector:
        if classes:
            return call.pooling.probabilities(as_array(one), raw=call.raw)
        return call.vector(one, size)

    if form.binary:
        await form.answer(exchange, call, [values(vector) for vector in vectors])
        return

    def answer() -> bytes:
        data = [
            {"object": kind, "index": i, name: form.written(values(vector))}
            for i, vector in enumerate(vectors)
        ]
        return call.listed(data, tokens)

    await exchange.answer(200, await in_thread(answer, sum(map(len, vectors))))
