"""POST /v1/embeddings: the vectors of texts, in OpenAI's shape."""

import base64
from typing import TYPE_CHECKING, Any

from deployments.api.fields.pooled import EMBEDDINGS, FORMATS, UINT31
from deployments.api.generation.fields import take_int
from deployments.api.http.errors import wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, pooled_call, take_prompts
from engine.errors import no_vectors
from engine.pooling import as_array

if TYPE_CHECKING:
    from deployments.api.app import Api


async def embeddings(api: "Api", exchange: HttpExchange) -> None:
    """Raises ApiError, MantaError."""
    async with pooled_call(api, exchange, EMBEDDINGS) as call:
        body = call.body
        if call.pooling.labels:
            raise no_vectors()
        form = body.get("encoding_format")
        if form is not None and form not in FORMATS:
            raise wrong_type("encoding_format", " or ".join(FORMATS))
        dimensions = take_int(body, "dimensions", 1, UINT31)
        if dimensions is not None:
            call.pooling.check_dimensions(dimensions, call.card.vector_size)
        prompts = await take_prompts(call, body, "input")
        vectors = await call.vectors(prompts)
        tokens = sum(map(len, prompts))

        def answer() -> bytes:
            data = [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": _written(call, one, form, dimensions),
                }
                for i, one in enumerate(vectors)
            ]
            return call.listed(data, tokens)

        await exchange.answer(200, await in_thread(answer, sum(map(len, vectors))))


def _written(call: PooledCall, vector: bytes, form: str | None, dimensions: int | None) -> Any:
    values = as_array(vector)
    if dimensions is not None:
        values = call.pooling.cut(values, dimensions)
    if form == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return values.tolist()
