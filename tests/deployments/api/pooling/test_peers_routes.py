"""Cohere's /v2/embed, TEI's routes, and the names that others have for the sides of a score."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.app import build_asgi
from engine.pooling import Pooling, as_array
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

EMBEDDER = Pooling(
    "mean", (None,), {"query": "query: ", "passage": "text: "}, matryoshka=True, max_tokens=64
)
LABELS = Pooling("cls", labels=tuple(f"kind {i}" for i in range(VECTOR)))
RERANKER = Pooling("cls", labels=("relevance",), max_tokens=64)
LONG = "the answer is the number of the words " * 30


def use(backend: FakeBackend, pooling: Pooling) -> None:
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)


def ask(client: Client, path: str, **body: Any) -> Reply:
    return asyncio.run(client.post(path, body))


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_cohere_embed(client: Client, backend: FakeBackend, path: str) -> None:
    """Vectors in another shape or of another prompt than Cohere's clients ask for."""
    use(backend, EMBEDDER)
    texts = ["the sea", "sky"]
    kinds = ["float", "base64", "binary", "ubinary"]
    body = {"model": MODEL, "texts": texts, "input_type": "search_query"}
    answer = ask(client, path, **body, embedding_types=kinds).json()
    encode = backend.tokenizer(MODEL).encode
    want = [encode(f"query: {text}") for text in texts]
    assert [request.token_ids for request in backend.requests] == want
    whole = [as_array(vector_of(request)) for request in backend.requests]
    assert (
        answer["response_type"] == "embeddings_by_type"
        and answer["texts"] == texts
        and answer["id"]
    )
    embeddings = answer["embeddings"]
    assert embeddings["float"] == [vector.tolist() for vector in whole]
    assert [base64.b64decode(data) for data in embeddings["base64"]] == [v.tobytes() for v in whole]
    bits = [int("".join("01"[int(x > 0)] for x in vector), 2) for vector in whole]
    assert embeddings["ubinary"] == [[number] for number in bits]
    assert embeddings["binary"] == [[number - 128] for number in bits]
    tokens = sum(map(len, want))
    assert answer["meta"]["billed_units"] == {"input_tokens": tokens}
    assert answer["meta"]["api_version"]["version"] == path[2]
    plain = ask(client, path, **body).json()
    floats = plain["embeddings"] if path == "/v1/embed" else plain["embeddings"]["float"]
    assert floats == embeddings["float"]
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    more = {"inputs": inputs, "input_type": "search_document", "output_dimension": 4}
    cut = ask(client, path, model=MODEL, **more, embedding_types=["float"]).json()
    assert backend.requests[-1].token_ids == encode("text: sky")
    assert [len(row) for row in cut["embeddings"]["float"]] == [4, 4]


def test_cohere_cuts(client: Client, backend: FakeBackend) -> None:
    """A long text that ends the request, or loses the end that was to be kept."""
    use(backend, EMBEDDER)
    whole = backend.tokenizer(MODEL).encode(LONG)
    for fields, expected in (
        ({}, whole[:64]),
        ({"truncate": "END", "max_tokens": 9}, whole[:9]),
        ({"truncate": "START"}, whole[-64:]),
        ({"truncate": "START", "max_tokens": 9}, whole[-9:]),
    ):
        assert ask(client, "/v2/embed", model=MODEL, texts=[LONG], **fields).status == 200
        assert backend.requests[-1].token_ids == expected
    refused = ask(client, "/v2/embed", model=MODEL, texts=["a", LONG], truncate="NONE").json()
    assert refused["error"]["param"] == "texts[1]"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", 1]}, "texts[1]"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a"], "inputs": [{"content": "a"}]}, "inputs"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0]"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "output_dimension": 99}, "output_dimension"),
    ],
)
def test_cohere_refusals(
    client: Client, backend: FakeBackend, body: dict[str, Any], param: str
) -> None:
    """Bug: what Cohere's clients ask for is passed over, or an error names another field."""
    use(backend, EMBEDDER)
    reply = ask(client, "/v2/embed", model=MODEL, **body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
    assert not backend.requests


def test_tei_embed(client: Client, backend: FakeBackend) -> None:
    """A list alone is what its clients read; there is no field for a model's name."""
    use(backend, replace(EMBEDDER, steps=()))
    vectors = ask(client, "/embed", inputs=["the sea", "sky"]).json()
    whole = [as_array(vector_of(request)) for request in backend.requests]
    assert np.allclose(vectors, whole), "these are of length 1 already"
    assert ask(client, "/embed", inputs="the sea").json() == vectors[:1]
    ask(client, "/embed", inputs="sea", prompt_name="query")
    encode = backend.tokenizer(MODEL).encode
    assert backend.requests[-1].token_ids == encode("query: sea")
    for direction, expected in (("Left", encode(LONG)[-64:]), ("Right", encode(LONG)[:64])):
        ask(client, "/embed", inputs=LONG, truncate=True, truncation_direction=direction)
        assert backend.requests[-1].token_ids == expected
    refused = ask(client, "/embed", inputs=LONG).json()
    assert isinstance(refused["error"], str) and refused["error_type"] == "Validation"
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "inputs")
    cut = np.array(ask(client, "/embed", inputs="the sea", dimensions=4).json()[0])
    assert len(cut) == 4 and np.allclose(np.linalg.norm(cut), 1)
    info = asyncio.run(client.request("GET", "/info")).json()
    assert info["model_id"] == MODEL and info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == 64


def test_tei_rerank(client: Client, backend: FakeBackend) -> None:
    """`texts` in the place of `documents`, and a bare list, an empty text among them."""
    use(backend, RERANKER)
    texts = ["b", "", "c", "d"]
    results = ask(client, "/rerank", query="a", texts=texts, return_text=True).json()
    scores = {result["index"]: result["score"] for result in results}
    assert [result["score"] for result in results] == sorted(scores.values(), reverse=True)
    assert all(result["text"] == texts[result["index"]] for result in results) and len(results) == 4
    same = ask(client, "/rerank", model=MODEL, query="a", documents=texts).json()["results"]
    assert {result["index"]: result["relevance_score"] for result in same} == scores
    assert set(ask(client, "/rerank", query="a", texts=["b"]).json()[0]) == {"index", "score"}
    for body, param in (
        ({"query": "a", "texts": "b"}, "texts"),
        ({"query": "", "texts": ["b"]}, "query"),
        ({"query": "a", "texts": ["b"], "documents": ["b"]}, "documents"),
        ({"query": "a"}, "documents"),
    ):
        assert ask(client, "/rerank", **body).json()["error"]["param"] == param
    backend.cards["other"] = replace(backend.cards[MODEL], id="other")
    unclear = ask(client, "/rerank", query="a", texts=["b"])
    assert unclear.json()["error"]["param"] == "model", "one of two is not chosen"


def test_tei_predict(client: Client, backend: FakeBackend) -> None:
    """One text, a pair, and a batch of either, the likeliest label first."""
    use(backend, LABELS)
    labels = ask(client, "/predict", inputs="a").json()
    assert [label["score"] for label in labels] == sorted(
        (e["score"] for e in labels), reverse=True
    )
    row = ask(client, "/v1/classify", model=MODEL, input="a").json()["data"][0]
    assert labels[0]["label"] == row["label"] and len(labels) == VECTOR
    pair = ask(client, "/predict", inputs=["a", "b"]).json()
    assert backend.requests[-1].token_ids == backend.tokenizer(MODEL).backend.encode("a", "b").ids
    assert ask(client, "/predict", inputs=[["a"], ["a", "b"]]).json() == [labels, pair]
    for inputs, param in ((None, "inputs"), ([["a"], []], "inputs[1]"), ("", "inputs")):
        refusal = ask(client, "/predict", inputs=inputs).json()
        assert refusal["param"] == param and isinstance(refusal["error"], str)
    use(backend, EMBEDDER)
    assert ask(client, "/predict", inputs="a").json()["code"] == "classify_not_supported"


@pytest.mark.parametrize("first", ["text_1", "queries", "data_1"])
@pytest.mark.parametrize("second", ["text_2", "documents", "items", "data_2"])
def test_names_of_the_sides_of_a_score(
    client: Client, backend: FakeBackend, first: str, second: str
) -> None:
    """vLLM's newer names of the same two lists."""
    use(backend, RERANKER)

    def score(**body: Any) -> Any:
        return ask(client, "/score", model=MODEL, **body).json()

    parts = {"content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}
    want = score(text_1="a", text_2=["bc", "d"])["data"]
    assert score(**{first: "a", second: [parts, {"text": "d"}]})["data"] == want
    assert score(**{first: ["a", "a"], second: [{"content": "bc"}, "d"]})["data"] == want
    assert score(**{first: ["a", "b"], second: ["c"]})["error"]["param"] == second
    assert score(**{first: "a"})["error"]["param"] == "text_2"
    other = "text_1" if first != "text_1" else "queries"
    both = score(**{first: "a", other: "a", second: "b"})["error"]
    assert both["code"] == "conflicting_fields"
    tokens = score(**{first: "a", second: "b"}, label_token_ids=[1])["error"]
    assert tokens["param"] == "label_token_ids"


def test_its_own_client(backend: FakeBackend) -> None:
    """The `cohere` package, where it is installed: what it makes of vectors and of a rerank."""
    cohere = pytest.importorskip("cohere", reason="pip install cohere")
    with serve(build_asgi(backend)) as port:
        use(backend, EMBEDDER)
        for client in (
            cohere.ClientV2("none", base_url=f"http://127.0.0.1:{port}"),
            cohere.Client("none", base_url=f"http://127.0.0.1:{port}"),
        ):
            use(backend, EMBEDDER)
            asked: Any = {"model": MODEL, "texts": ["a", "b"], "input_type": "search_query"}
            response = client.embed(**asked, embedding_types=["float", "ubinary"])
            assert len(response.embeddings.float_) == 2 and len(response.embeddings.ubinary[0]) == 1
            assert response.meta.billed_units.input_tokens > 0
            use(backend, RERANKER)
            documents: Any = {"documents": ["b", "c", ""]}
            if isinstance(client, cohere.ClientV2):
                documents = {"documents": ["b", LONG, ""], "max_tokens_per_doc": 20}
            ranked = client.rerank(model=MODEL, query="a", top_n=2, **documents)
            assert len(ranked.results) == 2 and ranked.id
            assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score
            assert ranked.meta.billed_units.search_units == 1
