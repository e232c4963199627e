"""POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /v1/classify: what a sequence classifier says
of texts and of pairs of texts. An embedder scores a pair by the cosine of its two vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from deployments.api.body_fields import take_bool, take_int
from deployments.api.context import ApiContext
from deployments.api.fields.pooled import (
    CLASSIFY,
    FIRST,
    MAX_PARTS,
    MAX_TEXTS,
    RERANK,
    RERANK_TEXTS,
    SCORE,
    SECOND,
    UINT31,
)
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, pooled_call, take_input
from deployments.api.pooling.tei import tei_reader
from engine.pooling import as_array

TEI = "/rerank"  # takes TEI's `texts` as well
COHERE = "/v2/rerank"  # its documents are not repeated, and long ones are cut
_COHERE_TOKENS = 4096  # of a document
_SEARCH = 100  # documents that Cohere counts as one search unit


@dataclass(frozen=True, slots=True)
class _Text:
    path: str  # of the field
    text: str


async def rerank(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with documents, ordered by relevance to a query. Raises ApiError, MantaError."""
    cohere, plain = exchange.path == COHERE, exchange.path == TEI
    fields, read = (RERANK_TEXTS, tei_reader(context.backend)) if plain else (RERANK, None)
    async with pooled_call(context, exchange, fields, read) as call:
        body = call.body
        bare = plain and body.get("texts") is not None  # as TEI asks and is answered
        if bare and body.get("documents") is not None:
            message = "documents and texts exclude each other"
            raise invalid(message, "documents", "conflicting_fields")
        query = _texts(body, "query")
        if isinstance(body["query"], list):
            raise wrong_type("query", "a string")
        if not query[0].text:
            raise invalid("query must not be empty", "query")
        name = "texts" if bare else "documents"
        documents = _texts(body, name)
        if not isinstance(body[name], list):
            raise wrong_type(name, "a list of texts")
        top = take_int(body, "top_n", 1, UINT31)
        told = take_bool(body, "return_documents", not cohere and not bare)
        told |= plain and take_bool(body, "return_text")
        most = take_int(body, "max_tokens_per_doc", 1, UINT31)
        if cohere and most is None:
            most = _COHERE_TOKENS
        if most is not None:
            call.truncate = take_bool(body, "truncate", True)
        scores, tokens = await _scores(call, query * len(documents), documents, most)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
        results: list[dict[str, Any]] = []
        for i in order:
            result: dict[str, Any] = {"index": i}
            result["score" if bare else "relevance_score"] = scores[i]
            if told:
                text = documents[i].text
                result |= {"text": text} if bare else {"document": {"text": text}}
            results.append(result)
        if bare:
            await exchange.answer(200, msgspec.json.encode(results))
            return
        units = {"search_units": -(-len(documents) // _SEARCH)}
        answer = {
            "id": exchange.request_id,
            "model": call.card.id,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": cohere_meta("2" if cohere else "1", units, tokens),
        }
        await exchange.answer(200, msgspec.json.encode(answer))


def cohere_meta(version: str, units: dict[str, int], tokens: int) -> dict[str, Any]:
    """Return the object `meta` of an answer, which Cohere's clients read."""
    return {
        "api_version": {"version": version},
        "billed_units": units,
        "tokens": {"input_tokens": tokens},
    }


async def score(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the scores of pairs of texts. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, SCORE) as call:
        body = call.body
        if body.get("label_token_ids"):
            raise invalid(
                "label_token_ids: scores here are those of rerankers and embedders, not of tokens",
                "label_token_ids",
                "not_supported",
            )
        names = _side(body, FIRST), _side(body, SECOND)
        first, second = (_texts(body, name) for name in names)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise invalid(
                f"{names[1]} must have as many texts as {names[0]}, or {names[0]} one: "
                f"{len(first)} and {len(second)}",
                names[1],
            )
        scores, tokens = await _scores(call, first, second)
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        await exchange.answer(200, call.listed(data, tokens))


async def classify(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the labels of texts. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, CLASSIFY) as call:
        body = call.body
        labels = call.pooling.labels
        if not labels:
            raise _unsupported("this model classifies nothing: its head has no labels", "classify")
        prompts = await take_input(call, body)
        data = []
        for i, vector in enumerate(await call.vectors(prompts)):
            probs = call.pooling.probabilities(as_array(vector), raw=call.raw).tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(labels)})
        await exchange.answer(200, call.listed(data, sum(map(len, prompts))))


def _unsupported(message: str, what: str) -> ApiError:
    return invalid(message, "model", f"{what}_not_supported")


def _side(body: dict[str, Any], names: Sequence[str]) -> str:
    """Return the field that has the texts of one side.

    Raises ApiError 400 if two fields have them.
    """
    found = [name for name in names if body.get(name) is not None]
    if len(found) > 1:
        raise invalid(f"{' and '.join(found)} exclude each other", found[1], "conflicting_fields")
    return found[0] if found else names[0]


def _said(item: Any) -> Any:
    """Return the text of an item, if the item has one."""
    if not isinstance(item, dict):
        return item
    if (parts := item.get("content")) is None or isinstance(parts, str):
        return item.get("text") if parts is None else parts
    return joined(parts)


def joined(parts: Any) -> str | None:
    """Return the text of content in parts; None if some parts are no texts."""
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
        return None
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(parts) else None


def _texts(body: dict[str, Any], name: str) -> list[_Text]:
    """Return the text of a field, or the list of its texts. Raises ApiError 400.

    Each text is a string, or an object with one in `text` or `content`. An empty text is accepted:
    a list of a thousand does not fail for one of them.
    """
    value = body.get(name)
    if value is None:
        raise invalid(f"{name} is required", name, "missing_field")
    many = isinstance(value, list)
    items = value if many else [value]
    if not 1 <= len(items) <= MAX_TEXTS:
        raise invalid(f"{name} takes 1 to {MAX_TEXTS} texts, got {len(items)}", name)
    found = []
    for i, item in enumerate(items):
        path = f"{name}[{i}]" if many else name
        text = _said(item)
        if not isinstance(text, str):
            raise wrong_type(path, "a string, or an object with a string in text or content")
        found.append(_Text(path, text))
    return found


async def _scores(
    call: PooledCall, first: list[_Text], second: list[_Text], most: int | None = None
) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of computed tokens.

    most: the most tokens that are kept of a second text

    Raises ApiError, MantaError.
    """
    pooling = call.pooling
    if len(pooling.labels) > 1:
        raise _unsupported(
            f"this model scores no pairs: its head has {len(pooling.labels)} labels, and a "
            "reranker's has one; /v1/classify has them all",
            "score",
        )
    if pooling.labels and not pooling.pairs:
        raise _unsupported(
            "this model tells the two texts of a pair by the separator between them, and its "
            "tokenizer.json names none",
            "score",
        )
    scored = _pairs if pooling.labels else _cosines
    return await scored(call, first, second, most)


async def _pairs(
    call: PooledCall, first: list[_Text], second: list[_Text], most: int | None
) -> tuple[list[float], int]:
    def paired() -> list[list[int]]:
        return [_pair(call, a, b, most) for a, b in zip(first, second, strict=True)]

    prompts = await in_thread(paired, call.exchange.body_size)
    vectors = await call.vectors(prompts)
    scores = [call.pooling.relevance(as_array(vector), raw=call.raw) for vector in vectors]
    return scores, sum(map(len, prompts))


def _pair(call: PooledCall, first: _Text, second: _Text, most: int | None) -> list[int]:
    ids = call.encode_pair(first.text, second.text, second.path, most)
    if not ids:
        raise invalid(f"{first.path} and {second.path} are both empty", second.path)
    return ids


async def _cosines(
    call: PooledCall, first: list[_Text], second: list[_Text], most: int | None
) -> tuple[list[float], int]:
    """Return the cosine of each pair's embeddings, and the number of computed tokens.

    A text of which the tokenizer makes no token has no direction: its cosine is 0.
    """
    ours = [(text.text, None) for text in first], [(text.text, most) for text in second]
    texts = dict(zip((*ours[0], *ours[1]), (*first, *second), strict=True))

    def single() -> dict[tuple[str, int | None], list[int]]:
        return {key: call.encode(key[0], text.path, key[1]) for key, text in texts.items()}

    encoded = await in_thread(single, call.exchange.body_size)
    prompts = {key: ids for key, ids in encoded.items() if ids}
    vectors = await call.vectors(list(prompts.values()))
    unit = {}
    for key, vector in zip(prompts, vectors, strict=True):
        values = as_array(vector).astype(np.float64)
        unit[key] = values / max(float(np.linalg.norm(values)), 1e-12)
    scores = [
        float(unit[a] @ unit[b]) if a in unit and b in unit else 0.0
        for a, b in zip(*ours, strict=True)
    ]
    return scores, sum(map(len, prompts.values()))
