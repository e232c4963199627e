"""POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /v1/classify: rankings, scores and labels.

A sequence classifier classifies texts and scores pairs of texts. An embedding model scores a pair
by the cosine of its two embeddings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from deployments.api.context import ApiContext
from deployments.api.fields import pooled as fields
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.pooling.pooled import PooledCall, T, pooled_call, take_input
from deployments.api.pooling.tei import only_model
from deployments.api.route import LIST, QUEUES, RouteTable
from engine.pooling import as_array

# Cohere's route answers without the documents' texts, and truncates long documents.
COHERE = "/v2/rerank"
_RERANK = ("Order documents", fields.RERANK, ("id", "model", "results", "usage"))
_SCORE = ("Scores of pairs of texts", fields.SCORE, (*LIST, "model", "usage"))
_CLASSIFY = ("Labels of texts", fields.CLASSIFY, (*LIST, "model", "usage"))
RANKINGS, LABELS = RouteTable(reads=QUEUES), RouteTable(reads=QUEUES)
_COHERE_TOKENS = 4096  # default maximum tokens of a document
_SEARCH = 100  # number of documents that Cohere counts as one search unit


R = TypeVar("R", bound=fields.Reranked)


@dataclass(frozen=True, slots=True)
class _Text:
    path: str  # path of the text in the request, for errors
    text: str


@RANKINGS.post(COHERE, *_RERANK)
@RANKINGS.post("/v1/rerank", *_RERANK)
async def rerank(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with documents, ordered by relevance to a query. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, fields.RERANK) as call:
        cohere, body = exchange.path == COHERE, call.body
        documents = _located(body.documents, "documents")
        most = body.max_tokens_per_doc or (_COHERE_TOKENS if cohere else None)
        shown = not cohere if body.return_documents is None else body.return_documents
        scores, tokens = await _relevances(call, documents, most)
        return _ranking(call, scores, documents if shown else None, tokens, cohere=cohere)


@RANKINGS.post("/rerank", "Order documents, or TEI's texts", fields.RERANK_TEXTS, None)
async def rerank_texts(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer /rerank: a ranking of `documents` in the form of /v1/rerank, or of `texts` in TEI's
    form.

    Raises ApiError, MantaError.
    """
    async with pooled_call(context, exchange, fields.RERANK_TEXTS, only_model) as call:
        body = call.body
        if body.texts is not None and body.documents is not None:
            message = "documents and texts exclude each other"
            raise invalid(message, "documents", "conflicting_fields")
        bare = body.texts is not None
        name = "texts" if bare else "documents"
        documents = _located(body.texts or body.documents, name)
        shown = body.return_documents is not False if not bare else bool(body.return_documents)
        shown |= bool(body.return_text)
        scores, tokens = await _relevances(call, documents, body.max_tokens_per_doc)
        if not bare:
            return _ranking(call, scores, documents if shown else None, tokens)
        return [
            {"index": i, "score": scores[i], **({"text": documents[i].text} if shown else {})}
            for i in _order(call, scores)
        ]


async def _relevances(
    call: PooledCall[R], documents: list[_Text], most: int | None
) -> tuple[list[float], int]:
    """Return the score of each document, and the number of computed tokens.

    most: maximum tokens of a document; None: only the sum of query and document is limited
    """
    if most is not None:
        call.truncate = call.body.truncate is not False
    query = [_Text("query", call.body.query.text)]
    return await _scores(call, query * len(documents), documents, most)


def _order(call: PooledCall[R], scores: list[float]) -> list[int]:
    """Return the indices of the documents, at most top_n, with the best score first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[: call.body.top_n]


def _ranking(
    call: PooledCall[R],
    scores: list[float],
    documents: list[_Text] | None,
    tokens: int,
    *,
    cohere: bool = False,
) -> JsonObject:
    """Return the JSON answer with a ranking.

    documents: texts to repeat in the answer; None: none
    tokens: number of computed tokens
    cohere: whether `meta` states version 2 of Cohere's API instead of 1
    """
    results = [
        {
            "index": i,
            "relevance_score": scores[i],
            **({} if documents is None else {"document": {"text": documents[i].text}}),
        }
        for i in _order(call, scores)
    ]
    units = {"search_units": -(-len(scores) // _SEARCH)}
    return {
        "id": call.exchange.request_id,
        "model": call.card.id,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": cohere_meta("2" if cohere else "1", units, tokens),
    }


def cohere_meta(version: str, units: dict[str, int], tokens: int) -> JsonObject:
    """Return the object `meta` that Cohere's clients read in answers. units: billed units by
    kind."""
    return {
        "api_version": {"version": version},
        "billed_units": units,
        "tokens": {"input_tokens": tokens},
    }


@LABELS.post("/score", *_SCORE)
@LABELS.post("/v1/score", *_SCORE)
async def score(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the scores of pairs of texts. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, fields.SCORE) as call:
        first_name, first = _side(call.body, fields.FIRST)
        second_name, second = _side(call.body, fields.SECOND)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise invalid(
                f"{second_name} must have as many texts as {first_name}, or {first_name} one: "
                f"{len(first)} and {len(second)}",
                second_name,
            )
        scores, tokens = await _scores(call, first, second)
        data = [{"index": i, "object": "score", "score": number} for i, number in enumerate(scores)]
        await exchange.answer(200, call.listed(data, tokens))


@LABELS.post("/classify", *_CLASSIFY)
@LABELS.post("/v1/classify", *_CLASSIFY)
async def classify(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the labels of texts. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, fields.CLASSIFY) as call:
        labels = call.labels
        prompts = await take_input(call)
        data = []
        for i, vector in enumerate(await call.vectors(prompts)):
            probs = call.pooling.probabilities(as_array(vector), raw=call.raw).tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(labels)})
        await exchange.answer(200, call.listed(data, sum(map(len, prompts))))


def _scores_no_pairs(message: str) -> ApiError:
    return invalid(f"this model {message}", "model", "score_not_supported")


def _side(body: fields.Score, names: Sequence[str]) -> tuple[str, list[_Text]]:
    """Return the name of the field with the first or second texts of pairs, and the texts.

    names: the alternative names of the field

    Raises ApiError 400 if the body has two of these fields or none.
    """
    sides: dict[str, fields.Documents] = {
        name: documents for name in names if (documents := getattr(body, name)) is not None
    }
    if len(sides) > 1:
        name = list(sides)[1]
        raise invalid(f"{' and '.join(sides)} exclude each other", name, "conflicting_fields")
    name = next(iter(sides), names[0])
    return name, _located(sides.get(name), name)


def _located(documents: fields.Documents | None, name: str) -> list[_Text]:
    """Return the documents of a field, each with its path. Raises ApiError 400 missing_field."""
    if documents is None:
        raise invalid(f"{name} is required", name, "missing_field")
    return [
        _Text(f"{name}[{i}]" if documents.many else name, text)
        for i, text in enumerate(documents.texts)
    ]


async def _scores(
    call: PooledCall[T], first: list[_Text], second: list[_Text], most: int | None = None
) -> tuple[list[float], int]:
    """Return the score of each pair, and the number of computed tokens.

    most: maximum tokens, to which second texts are truncated; None: no maximum

    Raises ApiError, MantaError.
    """
    pooling = call.pooling
    if len(pooling.labels) > 1:
        raise _scores_no_pairs(
            f"scores no pairs: its head has {len(pooling.labels)} labels, and a reranker's has "
            "one; /v1/classify has them all"
        )
    if pooling.labels and not pooling.pairs:
        raise _scores_no_pairs(
            "tells the two texts of a pair by the separator between them, and its tokenizer.json "
            "names none"
        )
    scored = _pairs if pooling.labels else _cosines
    return await scored(call, first, second, most)


async def _pairs(
    call: PooledCall[T], first: list[_Text], second: list[_Text], most: int | None
) -> tuple[list[float], int]:
    def paired() -> list[list[int]]:
        pairs = []
        for a, b in zip(first, second, strict=True):
            if not (ids := call.encode_pair(a.text, b.text, b.path, most)):
                raise invalid(f"{a.path} and {b.path} are both empty", b.path)
            pairs.append(ids)
        return pairs

    prompts = await in_thread(paired, call.exchange.body_size)
    vectors = await call.vectors(prompts)
    scores = [call.pooling.relevance(as_array(vector), raw=call.raw) for vector in vectors]
    return scores, sum(map(len, prompts))


async def _cosines(
    call: PooledCall[T], first: list[_Text], second: list[_Text], most: int | None
) -> tuple[list[float], int]:
    """Return the cosine of each pair's embeddings, and the number of computed tokens.

    The cosine is 0 for a text without tokens.
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
