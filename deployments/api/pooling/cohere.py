"""POST /v2/embed and /v1/embed: embeddings in the form of Cohere's clients."""

import base64
from typing import Any

import msgspec
import numpy as np

from deployments.api.context import ApiContext
from deployments.api.fields.pooled import COHERE_EMBED, CohereEmbed, CohereType, TextInput
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import pooled_call, take_prompts
from deployments.api.pooling.rerank import cohere_meta
from deployments.api.route import QUEUES, RouteTable
from engine.errors import no_vectors
from engine.pooling import Pooling, Vector

ROUTES = RouteTable(reads=QUEUES)
EMBED_1 = "/v1/embed"
_OPERATION = (
    "Vectors of texts, as Cohere has it",
    COHERE_EMBED,
    ("id", "embeddings", "texts", "meta", "response_type"),
)
# Cohere's `input_type` -> further names of a checkpoint's prompt for such inputs.
_PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage")}


@ROUTES.post(EMBED_1, *_OPERATION)
@ROUTES.post("/v2/embed", *_OPERATION)
async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for embeddings in Cohere's form. Raises ApiError, MantaError."""
    older = exchange.path == EMBED_1
    async with pooled_call(context, exchange, COHERE_EMBED) as call:
        body = call.body
        if call.pooling.labels:
            raise no_vectors()
        kinds: list[CohereType] = list(dict.fromkeys(body.embedding_types or ["float"]))
        size = body.output_dimension
        if size is not None:
            call.pooling.check_dimensions(size, call.card.vector_size, "output_dimension")
        call.limit = min(call.limit, body.max_tokens or call.limit)
        name, texts = _texts(body)
        prompt_name = _prompt(body.input_type, call.pooling)
        prompts = await take_prompts(call, TextInput(texts, True), name, prompt_name)
        vectors = [call.vector(vector, size) for vector in await call.vectors(prompts)]
        tokens = sum(map(len, prompts))

        def answer() -> bytes:
            response: JsonObject = {"id": exchange.request_id, "texts": texts}
            if older and body.embedding_types is None:
                response["embeddings"] = [vector.tolist() for vector in vectors]
                response["response_type"] = "embeddings_floats"
            else:
                written = {kind: [_written(vector, kind) for vector in vectors] for kind in kinds}
                response |= {"embeddings": written, "response_type": "embeddings_by_type"}
            version = "1" if older else "2"
            response["meta"] = cohere_meta(version, {"input_tokens": tokens}, tokens)
            return msgspec.json.encode(response)

        await exchange.answer(200, await in_thread(answer, 4 * sum(map(len, vectors))))


def _texts(body: CohereEmbed) -> tuple[str, list[str]]:
    """Return the name of the field that has the texts, and the texts. Raises ApiError 400."""
    if body.texts is not None and body.inputs is None:
        return "texts", body.texts
    if body.inputs is not None and body.texts is None:
        return "inputs", [item.text for item in body.inputs]
    name, code = (
        ("texts", "missing_field") if body.texts is None else ("inputs", "conflicting_fields")
    )
    raise invalid("give either texts or inputs", name, code)


def _prompt(kind: str | None, pooling: Pooling) -> str | None:
    """Return the name of the model's prompt for this kind of input; None if it has none."""
    names = () if kind is None else (kind, *_PROMPTS.get(kind, ()))
    own = {name.lower(): name for name in pooling.prompts}
    return next((own[name] for name in names if name in own), None)


def _written(vector: Vector, kind: CohereType) -> Any:
    """Return an embedding as JSON has it in one of Cohere's types.

    binary and ubinary have a bit for each element, which is set if the element is above 0; binary
    is signed.
    """
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    bits = np.packbits(vector > 0)
    return (bits.astype(np.int16) - 128 if kind == "binary" else bits).tolist()
