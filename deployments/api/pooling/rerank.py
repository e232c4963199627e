"""POST /v1/rerank, /v2/rerank, /v1/score and /v1/classify: what a sequence classifier says of texts
and of pairs of texts. An embedder scores a pair by the cosine of its two vectors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from deployments.api.fields.pooled import CLASSIFY, MAX_TEXTS, RERANK, SCORE, UINT31
from deployments.api.generation.fields import take_bool, take_int
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.api.pooling.pooled import PooledCall, pooled_call, take_prompts
from engine.pooling import as_array

if TYPE_CHECKING:
    from deployments.api.app import Api


@dataclass(frozen=True, slots=True)
class _Text:
    path: str  # of the field
    text: str


async def rerank(api: "Api", exchange: HttpExchange) -> None:
    """Raises ApiError, MantaError."""
    async with pooled_call(api, exchange, RERANK) as call:
        body = call.body
        query = _texts(body, "query")
        if isinstance(body["query"], list):
            raise wrong_type("query", "a string")
        documents = _texts(body, "documents")
        if not isinstance(body["documents"], list):
            raise wrong_type("documents", "a list of texts")
        top = take_int(body, "top_n", 1, UINT31)
        told = take_bool(body, "return_documents")
        scores, tokens = await _scores(call, query * len(documents), documents)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
        results: list[dict[str, Any]] = []
        for i in order:
            result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
            if told:
                result["document"] = {"text": documents[i].text}
            results.append(result)
        answer = {
            "id": exchange.request_id,
            "model": call.card.id,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        await exchange.answer(200, msgspec.json.encode(answer))


async def score(api: "Api", exchange: HttpExchange) -> None:
    """Raises ApiError, MantaError."""
    async with pooled_call(api, exchange, SCORE) as call:
        body = call.body
        first, second = _texts(body, "text_1"), _texts(body, "text_2")
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise invalid(
                f"text_2 must have as many texts as text_1, or text_1 one: {len(first)} and "
                f"{len(second)}",
                "text_2",
            )
        scores, tokens = await _scores(call, first, second)
        data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
        await exchange.answer(200, _listed(call, data, tokens))


async def classify(api: "Api", exchange: HttpExchange) -> None:
    """Raises ApiError, MantaError."""
    async with pooled_call(api, exchange, CLASSIFY) as call:
        body = call.body
        labels = call.pooling.labels
        if not labels:
            raise _unsupported("this model classifies nothing: its head has no labels", "classify")
        prompts = await take_prompts(call, body, "input")
        data = []
        for i, vector in enumerate(await call.vectors(prompts)):
            probs = call.pooling.probabilities(as_array(vector)).tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(labels)})
        await exchange.answer(200, _listed(call, data, sum(map(len, prompts))))


def _listed(call: PooledCall, data: list[dict[str, Any]], tokens: int) -> bytes:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "model": call.card.id, "data": data, "usage": usage}
    return msgspec.json.encode(answer)


def _unsupported(message: str, what: str) -> ApiError:
    return invalid(message, "model", f"{what}_not_supported")


def _texts(body: dict[str, Any], name: str) -> list[_Text]:
    """A text or a list of them, each a string or an object with one in `text`."""
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
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise wrong_type(path, "a string, or an object with a string in text")
        if not text:
            raise invalid(f"{path} must not be empty", path)
        found.append(_Text(path, text))
    return found


async def _scores(
    call: PooledCall, first: list[_Text], second: list[_Text]
) -> tuple[list[float], int]:
    """Of each pair, and how many tokens were computed. Raises ApiError, MantaError."""
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
    size = call.exchange.body_size
    if pooling.labels:

        def paired() -> list[list[int]]:
            return [
                call.encode_pair(a.text, b.text, b.path) for a, b in zip(first, second, strict=True)
            ]

        prompts = await in_thread(paired, size)
        vectors = await call.vectors(prompts)
        return [pooling.relevance(as_array(v)) for v in vectors], sum(map(len, prompts))

    once = {text.text: text for text in (*first, *second)}

    def single() -> list[list[int]]:
        return [call.encode(each.text, each.path) for each in once.values()]

    prompts = await in_thread(single, size)
    vectors = await call.vectors(prompts)
    unit = {}
    for text, vector in zip(once, vectors, strict=True):
        values = as_array(vector).astype(np.float64)
        unit[text] = values / max(float(np.linalg.norm(values)), 1e-12)
    scores = [float(unit[a.text] @ unit[b.text]) for a, b in zip(first, second, strict=True)]
    return scores, sum(map(len, prompts))
