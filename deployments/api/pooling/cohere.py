"""POST /v2/embed and /v1/embed: vectors of texts, as Cohere's clients ask for them."""

import base64
from typing import Any

import msgspec
import numpy as np

from deployments.api.body_fields import take_int, take_word
from deployments.api.context import ApiContext
from deployments.api.fields.pooled import (
    COHERE_CUTS,
    COHERE_EMBED,
    COHERE_TYPES,
    INPUT_TYPES,
    MAX_TEXTS,
    UINT31,
)
from deployments.api.http.errors import invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import pooled_call, take_prompts
from deployments.api.pooling.rerank import cohere_meta, joined
from engine.errors import no_vectors
from engine.pooling import Pooling, Vector

EMBED, EMBED_1 = "/v2/embed", "/v1/embed"
# Names that checkpoints give to the prompt of a kind of input, beside the kind's own.
_PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage")}


async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for embeddings in Cohere's form. Raises ApiError, MantaError."""
    older = exchange.path == EMBED_1
    async with pooled_call(context, exchange, COHERE_EMBED, _read) as call:
        body = call.body
        if call.pooling.labels:
            raise no_vectors()
        kinds = _kinds(body)
        size = take_int(body, "output_dimension", 1, UINT31)
        if size is not None:
            call.pooling.check_dimensions(size, call.card.vector_size, "output_dimension")
        most = take_int(body, "max_tokens", 1, UINT31)
        call.limit = min(call.limit, most or call.limit)
        kind = take_word(body, "input_type", INPUT_TYPES)
        texts = _texts(body)
        name = "texts" if body.get("texts") is not None else "inputs"
        asked = {name: texts, "prompt_name": _prompt(kind, call.pooling)}
        prompts = await take_prompts(call, asked, name)
        vectors = [call.vector(one, size) for one in await call.vectors(prompts)]
        tokens = sum(map(len, prompts))

        def answer() -> bytes:
            made: dict[str, Any] = {"id": exchange.request_id, "texts": texts}
            if older and body.get("embedding_types") is None:
                made["embeddings"] = [vector.tolist() for vector in vectors]
                made["response_type"] = "embeddings_floats"
            else:
                written = {kind: [_written(one, kind) for one in vectors] for kind in kinds}
                made |= {"embeddings": written, "response_type": "embeddings_by_type"}
            version = "1" if older else "2"
            made["meta"] = cohere_meta(version, {"input_tokens": tokens}, tokens)
            return msgspec.json.encode(made)

        await exchange.answer(200, await in_thread(answer, 4 * sum(map(len, vectors))))


def _read(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with Cohere's truncation in the fields of all routes.

    Long texts are cut unless the request says otherwise.
    """
    cut = take_word(body, "truncate", COHERE_CUTS) or "END"
    side = "left" if cut == "START" else "right"
    return {**body, "truncate": cut != "NONE", "truncation_side": side}


def _kinds(body: dict[str, Any]) -> list[str]:
    kinds = body.get("embedding_types")
    if kinds is None:
        return ["float"]
    if not isinstance(kinds, list) or not kinds:
        raise wrong_type("embedding_types", "a list that is not empty")
    for i, kind in enumerate(kinds):
        if kind not in COHERE_TYPES:
            raise invalid(
                f"embedding_types[{i}] must be one of {', '.join(COHERE_TYPES)}",
                f"embedding_types[{i}]",
            )
    return list(dict.fromkeys(kinds))


def _texts(body: dict[str, Any]) -> list[str]:
    """Return the texts of `texts`, or of `inputs` whose content is text. Raises ApiError 400."""
    if body.get("images"):
        raise invalid(
            "images: the models served here take text only", "images", "modality_not_supported"
        )
    texts, inputs = body.get("texts"), body.get("inputs")
    if (texts is None) == (inputs is None):
        code = "missing_field" if texts is None else "conflicting_fields"
        name = "texts" if texts is None else "inputs"
        raise invalid("give either texts or inputs", name, code)
    name, items = ("texts", texts) if inputs is None else ("inputs", inputs)
    if not isinstance(items, list):
        raise wrong_type(name, "a list")
    if not 1 <= len(items) <= MAX_TEXTS:
        raise invalid(f"{name} takes 1 to {MAX_TEXTS} texts, got {len(items)}", name)
    found = []
    for i, item in enumerate(items):
        text = item
        if name == "inputs":
            content = item.get("content") if isinstance(item, dict) else None
            text = content if isinstance(content, str) else joined(content)
        if not isinstance(text, str):
            raise wrong_type(f"{name}[{i}]", "text")
        found.append(text)
    return found


def _prompt(kind: str | None, pooling: Pooling) -> str | None:
    """Return the name of the model's prompt for this kind of input; None if it has none."""
    names = () if kind is None else (kind, *_PROMPTS.get(kind, ()))
    own = {name.lower(): name for name in pooling.prompts}
    return next((own[name] for name in names if name in own), None)


def _written(vector: Vector, kind: str) -> Any:
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
