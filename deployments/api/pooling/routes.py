"""The routes of embedding models, as OpenAI, vLLM, Cohere and TEI have them."""

from deployments.api.fields import pooled as fields
from deployments.api.pooling import cohere, tei
from deployments.api.pooling.embeddings import embeddings, pooling
from deployments.api.pooling.rerank import classify, rerank, rerank_texts, score
from deployments.api.route import BYTES, JSON, LIST, NAMES, QUEUES, Operation, Route

_VECTORS = (*LIST, "id", "created", "model", "usage")
_COHERE = Operation(
    "Vectors of texts, as Cohere has it",
    QUEUES,
    fields.COHERE_EMBED,
    ("id", "embeddings", "texts", "meta", "response_type"),
)
_RERANK = Operation("Order documents", QUEUES, fields.RERANK, ("id", "model", "results", "usage"))
_SCORE = Operation("Scores of pairs of texts", QUEUES, fields.SCORE, (*LIST, "model", "usage"))
_CLASSIFY = Operation("Labels of texts", QUEUES, fields.CLASSIFY, (*LIST, "model", "usage"))
EMBEDDINGS = Route(
    "/v1/embeddings",
    embeddings,
    post=Operation("Vectors of texts", QUEUES, fields.EMBEDDINGS, _VECTORS, (JSON, BYTES)),
)
ROUTES = (
    Route(
        "/pooling",
        pooling,
        post=Operation(
            "What a model makes of texts", QUEUES, fields.POOLING, _VECTORS, (JSON, BYTES)
        ),
    ),
    Route("/v1/rerank", rerank, post=_RERANK),
    Route("/v2/rerank", rerank, post=_RERANK),
    Route(
        "/rerank",
        rerank_texts,
        post=Operation("Order documents, or TEI's texts", QUEUES, fields.RERANK_TEXTS, None),
    ),
    Route(cohere.EMBED, cohere.embed, post=_COHERE),
    Route(cohere.EMBED_1, cohere.embed, post=_COHERE),
    Route(
        tei.EMBED,
        tei.embed,
        post=Operation("Vectors of texts alone", QUEUES, fields.TEI_EMBED, None, texts=True),
    ),
    Route(
        tei.PREDICT,
        tei.predict,
        post=Operation("Labels of texts alone", QUEUES, fields.TEI_PREDICT, None, texts=True),
    ),
    Route(
        tei.INFO,
        tei.info,
        get=Operation(
            "The model that makes vectors", NAMES, answer=("model_id", "model_type"), texts=True
        ),
    ),
    Route("/v1/score", score, post=_SCORE),
    Route("/score", score, post=_SCORE),
    Route("/v1/classify", classify, post=_CLASSIFY),
    Route("/classify", classify, post=_CLASSIFY),
)
