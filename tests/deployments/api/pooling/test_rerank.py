"""/v1/rerank, /v2/rerank, /v1/score, /v1/classify: orders, pairs, and what is refused."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.pooling import Pooling, as_array
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

RERANKER = Pooling("cls", labels=("relevance",), max_tokens=64)
POOLED = Pooling("mean", (None,))
LABELS = tuple(f"kind {i}" for i in range(VECTOR))
DOCUMENTS = [f"the answer is {number}" for number in range(9)]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def use(backend: FakeBackend, pooling: Pooling) -> None:
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)


def ask(client: Client, path: str, **body: Any) -> Reply:
    return asyncio.run(client.post(path, {"model": MODEL, **body}))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank(client: Client, backend: FakeBackend, path: str) -> None:
    """An index of the sorted list instead of the caller's; a document with another's score."""
    use(backend, RERANKER)
    documents: list[Any] = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    reply = ask(client, path, query="the sea", documents=documents, top_n=4, return_documents=True)
    assert reply.status == 200, reply.json()
    encode = backend.tokenizer(MODEL).backend.encode
    pairs = [encode("the sea", document).ids for document in DOCUMENTS]
    assert [request.token_ids for request in backend.requests] == pairs
    scores = [RERANKER.relevance(as_array(vector_of(scored))) for scored in backend.requests]
    best = sorted(range(9), key=lambda i: -scores[i])[:4]
    results = reply.json()["results"]
    assert [result["index"] for result in results] == best
    for result in results:
        assert result["relevance_score"] == scores[result["index"]]
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert reply.json()["usage"]["total_tokens"] == sum(map(len, pairs))
    assert client.app.in_flight == 0 and not backend.live


def test_score_of_pairs_and_of_vectors(client: Client, backend: FakeBackend) -> None:
    """One against all, or pair by pair; an embedder's score is the cosine."""
    use(backend, RERANKER)
    single = ask(client, "/v1/score", text_1=DOCUMENTS[0], text_2=DOCUMENTS).json()["data"]
    pairs = ask(client, "/v1/score", text_1=[DOCUMENTS[0]] * 9, text_2=DOCUMENTS).json()["data"]
    assert single == pairs and [row["index"] for row in single] == list(range(9))
    use(backend, Pooling("mean", (None,)))
    backend.requests.clear()
    cosine = ask(client, "/v1/score", text_1="the sea", text_2=["the sea", "a"]).json()["data"]
    first, second = (as_array(vector_of(request)) for request in backend.requests)
    assert [row["score"] for row in cosine] == pytest.approx([1.0, float(first @ second)])


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classify(client: Client, backend: FakeBackend, path: str) -> None:
    """Bug: a softmax of another text, or a label of another number."""
    use(backend, Pooling("cls", labels=LABELS))
    data = ask(client, path, input=DOCUMENTS).json()["data"]
    for row, request in zip(data, backend.requests, strict=True):
        logits = as_array(vector_of(request))
        want = np.exp(logits) / np.exp(logits).sum()
        assert row["probs"] == pytest.approx(want.tolist())
        assert (row["label"], row["num_classes"]) == (LABELS[int(want.argmax())], VECTOR)


def test_a_pair_that_is_too_long(client: Client, backend: FakeBackend) -> None:
    """The query cut in the place of the document, or a pair cut though nobody asked for it."""
    use(backend, RERANKER)
    long = "the answer is the number of the words " * 20
    refused = ask(client, "/v1/rerank", query="the sea", documents=["a", long])
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents[1]")
    cut = ask(client, "/v1/rerank", query="the sea", documents=[long], truncate=True)
    assert cut.status == 200, cut.json()
    whole = backend.tokenizer(MODEL).backend.encode("the sea", long).ids
    assert backend.requests[-1].token_ids == whole[:64]
    alone = ask(client, "/v1/rerank", query=long, documents=["a"], truncate=True)
    assert alone.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "told"), [("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)]
)
def test_documents_are_repeated_as_each_dialect_has_it(
    client: Client, backend: FakeBackend, path: str, told: bool
) -> None:
    """Jina's clients read `result["document"]["text"]` of every answer; Cohere's have no such
    field."""
    use(backend, RERANKER)
    answer = ask(client, path, query="a", documents=["b", {"text": "c"}]).json()
    for result in answer["results"]:
        want = {"text": ["b", "c"][result["index"]]} if told else None
        assert result.get("document") == want and ("document" in result) == told
    assert answer["id"] and answer["meta"]["api_version"]["version"] in ("1", "2")
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    other = ask(client, path, query="a", documents=["b"], return_documents=not told).json()
    assert ("document" in other["results"][0]) == (not told)


@pytest.mark.parametrize("path", ["score", "v1/score", "classify", "v1/classify", "v1/embeddings"])
def test_lists_have_an_id_and_a_time(client: Client, backend: FakeBackend, path: str) -> None:
    """Typed clients refuse an answer without `id` and `created`."""
    if path.endswith("embeddings"):
        use(backend, Pooling("mean", (None,)))
    else:
        use(backend, RERANKER if path.endswith("score") else Pooling("cls", labels=LABELS))
    body = {"text_1": "a", "text_2": "b"} if path.endswith("score") else {"input": "a"}
    begun = time.time()
    first, second = (ask(client, f"/{path}", **body).json() for _ in range(2))
    assert isinstance(first["id"], str) and first["id"] and first["id"] != second["id"]
    assert int(begun) <= first["created"] <= time.time() and first["object"] == "list"


@pytest.mark.parametrize("pooling", [RERANKER, POOLED])
def test_an_empty_document_is_a_document(
    client: Client, backend: FakeBackend, pooling: Pooling
) -> None:
    """One empty chunk among a thousand ends the rerank of all of them."""
    use(backend, pooling)
    documents: list[Any] = ["b", "", {"text": ""}, "c"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        reply = ask(client, path, query="a", documents=documents)
        assert reply.status == 200, reply.json()
        scores = {result["index"]: result["relevance_score"] for result in reply.json()["results"]}
        assert sorted(scores) == [0, 1, 2, 3] and scores[1] == scores[2]
    data = ask(client, "/score", text_1="a", text_2=documents).json()["data"]
    assert {row["index"]: row["score"] for row in data} == scores
    if not pooling.labels:
        assert scores[1] == 0
        both = ask(client, "/score", text_1="", text_2="").json()["data"]
        assert [row["score"] for row in both] == [0]


@pytest.mark.parametrize("pooling", [RERANKER, replace(POOLED, max_tokens=64)])
def test_long_documents_are_cut_as_cohere_does(
    client: Client, backend: FakeBackend, pooling: Pooling
) -> None:
    """`max_tokens_per_doc` that is only named: a long document ends the rerank with 400."""
    use(backend, pooling)
    long = "the answer is the number of the words " * 20
    encode = backend.tokenizer(MODEL).encode
    query, whole = encode("the sea"), encode(long)

    def asked(path: str, **fields: Any) -> list[int]:
        reply = ask(client, path, query="the sea", documents=[long], **fields)
        assert reply.status == 200 and reply.header("x-ignored-fields") is None, reply.json()
        return backend.requests[-1].token_ids

    before = query if pooling.labels else []
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        assert asked(path, max_tokens_per_doc=9) == before + whole[:9]
        assert asked(path, max_tokens_per_doc=4096) == (before + whole)[:64]
    assert asked("/v2/rerank") == (before + whole)[:64], "Cohere cuts at 4,096 by itself"
    for path, fields in (("/v1/rerank", {}), ("/v2/rerank", {"truncate": False})):
        refused = ask(client, path, query="the sea", documents=["a", long], **fields)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["param"] == "documents[1]"
    short = ask(client, "/v1/rerank", query="a", documents=[long], max_tokens_per_doc=0)
    assert short.json()["error"]["param"] == "max_tokens_per_doc"


@pytest.mark.parametrize(
    ("path", "pooling", "body", "param", "code"),
    [
        ("rerank", RERANKER, {"documents": ["a"]}, "query", "missing_field"),
        ("rerank", RERANKER, {"query": "a"}, "documents", "missing_field"),
        ("rerank", RERANKER, {"query": ["a"], "documents": ["a"]}, "query", "invalid_type"),
        ("rerank", RERANKER, {"query": "a", "documents": "a"}, "documents", "invalid_type"),
        ("rerank", RERANKER, {"query": "a", "documents": []}, "documents", "invalid_value"),
        ("rerank", RERANKER, {"query": "a", "documents": [1]}, "documents[0]", "invalid_type"),
        ("rerank", RERANKER, {"query": "", "documents": ["a"]}, "query", "invalid_value"),
        ("score", RERANKER, {"text_1": "", "text_2": ["a", ""]}, "text_2[1]", "invalid_value"),
        ("rerank", RERANKER, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", None),
        ("score", RERANKER, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2", "invalid_value"),
        ("classify", Pooling("cls"), {"input": "a"}, "model", "classify_not_supported"),
        (
            "score",
            Pooling("cls", labels=LABELS),
            {"text_1": "a", "text_2": "b"},
            "model",
            "score_not_supported",
        ),
        (
            "score",
            replace(RERANKER, pairs=False),
            {"text_1": "a", "text_2": "b"},
            "model",
            "score_not_supported",
        ),
        ("embeddings", RERANKER, {"input": "a"}, "model", "embeddings_not_supported"),
    ],
)
def test_refusals(
    client: Client,
    backend: FakeBackend,
    path: str,
    pooling: Pooling,
    body: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    """Each names its field, and nothing is run."""
    use(backend, pooling)
    reply = ask(client, f"/v1/{path}", **body)
    error = reply.json()["error"]
    assert reply.status == 400 and error["param"] == param, error
    assert code is None or error["code"] == code
    assert not backend.requests
