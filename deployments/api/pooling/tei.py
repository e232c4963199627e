"""POST /embed and /predict, GET /info: routes of Text Embeddings Inference (TEI), which answer with
plain lists."""

import msgspec

from deployments.api.context import ApiContext
from deployments.api.fields.pooled import MAX_TEXTS, TEI_EMBED, TEI_PREDICT
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.pooling.pooled import PooledCall, T, pooled_call, take_prompts
from deployments.api.route import NAMES, QUEUES, RouteTable
from deployments.api.served_model import allowed
from deployments.backend import Backend
from deployments.environment import installed_version
from engine.errors import no_vectors
from engine.pooling import as_array

ROUTES = RouteTable(NAMES, QUEUES, texts=True)


def error_object(error: ApiError) -> JsonObject:
    """Return an error in TEI's format, with the additional fields code and param."""
    kind = "Overloaded" if error.status == 503 else "Validation"
    fields = {"error": error.message, "error_type": kind if error.status != 500 else "Backend"}
    return {**fields, "code": error.code, "param": error.param}


def only_model(name: str | None, backend: Backend) -> str | None:
    """Return the model's name in the request; without one, the name of the only pooling model."""
    cards = [card for card in backend.models().values() if card.parent is None and card.pooling]
    return cards[0].id if name is None and len(cards) == 1 else name


@ROUTES.post("/embed", "Vectors of texts alone", TEI_EMBED, None)
async def embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with embeddings in TEI's form. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, TEI_EMBED, only_model) as call:
        size = call.body.dimensions
        call.check_vectors(size)
        prompts = await take_prompts(call, call.body.inputs, "inputs", call.body.prompt_name)
        vectors = await call.vectors(prompts)

        def answer() -> bytes:
            return msgspec.json.encode([call.vector(vector, size).tolist() for vector in vectors])

        await exchange.answer(200, await in_thread(answer, sum(map(len, vectors))))


@ROUTES.post("/predict", "Labels of texts alone", TEI_PREDICT, None)
async def predict(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the labels of a text, a pair, or each item of a list, the most likely label
    first.

    Raises ApiError, MantaError.
    """
    async with pooled_call(context, exchange, TEI_PREDICT, only_model) as call:
        labels = call.labels
        pairs = call.body.inputs

        def work() -> list[list[int]]:
            return [
                _encoded(call, texts, f"inputs[{i}]" if pairs.many else "inputs")
                for i, texts in enumerate(pairs.items)
            ]

        prompts = await in_thread(work, exchange.body_size)
        rankings = []
        for vector in await call.vectors(prompts):
            scores = call.pooling.probabilities(as_array(vector), raw=call.raw).tolist()
            ranked = sorted(zip(scores, labels, strict=True), reverse=True)
            rankings.append([{"score": score, "label": label} for score, label in ranked])
        return rankings if pairs.many else rankings[0]


def _encoded(call: PooledCall[T], texts: list[str], path: str) -> list[int]:
    """Return the token ids of one text, or of a pair. Raises ApiError 400, InvalidRequest."""
    if len(texts) == 1:
        ids = call.encode(texts[0], path)
    else:
        ids = call.encode_pair(texts[0], texts[1], path)
    if not ids:
        raise invalid(f"{path} must not be empty", path)
    return ids


@ROUTES.get("/info", "The model that makes vectors", ("model_id", "model_type"))
async def info(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the only pooling model. Raises InvalidRequest unless there is exactly one."""
    name = only_model(None, context.backend)
    if name is None:
        raise no_vectors()
    card = allowed(context.backend.models()[name], exchange.caller)
    pooling = card.pooling
    assert pooling is not None
    if pooling.labels:
        kind = "reranker" if len(pooling.labels) == 1 else "classifier"
        named = {str(i): label for i, label in enumerate(pooling.labels)}
        numbers = {label: i for i, label in enumerate(pooling.labels)}
        details: JsonObject = {"id2label": named, "label2id": numbers}
    else:
        kind, details = "embedding", {"pooling": pooling.mode}
    return {
        "model_id": card.id,
        "model_sha": None,
        "model_dtype": card.facts.quantization.lower(),
        "model_type": {kind: details},
        "max_concurrent_requests": context.options.max_in_flight,
        "max_input_length": min(card.max_model_len, pooling.max_tokens or card.max_model_len),
        "max_batch_requests": None,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "version": installed_version(),
    }
