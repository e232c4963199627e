"""How vectors are written, what activation and cuts change of them, and texts of messages."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.pooling import Pooling, as_array, normalized
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

EMBEDDER = Pooling("mean", (None,), {"query": "query: "}, matryoshka=True, max_tokens=64)
LABELS = Pooling("cls", labels=tuple(f"kind {i}" for i in range(VECTOR)))
RERANKER = Pooling("cls", labels=("relevance",))


def use(backend: FakeBackend, pooling: Pooling) -> None:
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)


def ask(client: Client, path: str, **body: Any) -> Reply:
    return asyncio.run(client.post(path, {"model": MODEL, **body}))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["native", "little", "big"])
def test_types_and_orders_of_bytes(
    client: Client, backend: FakeBackend, dtype: str, order: str
) -> None:
    """Bytes that are not the numbers: another order, or cut where they should be rounded."""
    use(backend, EMBEDDER)
    fields: dict[str, Any] = {"input": ["hello", "sea"], "embed_dtype": dtype}
    plain = ask(client, "/v1/embeddings", **fields).json()["data"]
    whole = [as_array(vector_of(request)) for request in backend.requests]
    want = [torch.from_numpy(vector.copy()).to(getattr(torch, dtype)) for vector in whole]
    for row, tensor in zip(plain, want, strict=True):
        assert row["embedding"] == tensor.float().tolist()
    bits = []
    for tensor in want:
        words = tensor.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
        bits.append((words.byteswap() if order == "big" else words).tobytes())
    packed = ask(client, "/v1/embeddings", **fields, encoding_format="base64", endianness=order)
    assert [base64.b64decode(row["embedding"]) for row in packed.json()["data"]] == bits
    for form in ("bytes", "bytes_only"):
        reply = ask(client, "/pooling", **fields, encoding_format=form, endianness=order)
        assert reply.body == b"".join(bits) and reply.header("content-type") == (
            "application/octet-stream"
        )
        if form == "bytes_only":
            assert reply.header("metadata") is None
            continue
        for row, data in zip(json.loads(reply.header("metadata") or "")["data"], bits, strict=True):
            assert reply.body[row["start"] : row["end"]] == data and row["embed_dtype"] == dtype


@pytest.mark.parametrize(
    ("path", "pooling", "body"),
    [
        ("/v1/embeddings", EMBEDDER, {"input": "a"}),
        ("/pooling", EMBEDDER, {"input": "a"}),
        ("/embed", EMBEDDER, {"inputs": "a"}),
        ("/v1/classify", LABELS, {"input": "a"}),
        ("/pooling", LABELS, {"input": "a"}),
        ("/predict", LABELS, {"inputs": "a"}),
        ("/v1/score", RERANKER, {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", RERANKER, {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", RERANKER, {"query": "a", "documents": ["b"]}),
        ("/rerank", RERANKER, {"query": "a", "texts": ["b"]}),
    ],
)
def test_numbers_before_the_activation(
    client: Client, backend: FakeBackend, path: str, pooling: Pooling, body: dict[str, Any]
) -> None:
    """`use_activation: false` that is only named: a reward model's number after a sigmoid."""
    use(backend, pooling)

    def numbers(value: Any) -> list[float]:
        """Return all numbers of an answer in ascending order, without counts and indices."""
        if isinstance(value, dict):
            named = ("data", "embedding", "probs", "score", "relevance_score", "results")
            return sorted(x for key in named if key in value for x in numbers(value[key]))
        if isinstance(value, list):
            return sorted(x for item in value for x in numbers(item))
        return [value] if isinstance(value, float) else []

    names = ["use_activation"]
    if path in ("/v1/embeddings", "/embed", "/pooling"):
        names.append("normalize")
    if pooling.labels and path != "/predict":
        names += ["activation", "softmax"]
    if path in ("/predict", "/rerank"):
        names.append("raw_scores")
    usual = numbers(ask(client, path, **body).json())
    for name in names:
        off = name == "raw_scores"
        reply = ask(client, path, **body, **{name: off})
        assert reply.status == 200 and reply.header("x-ignored-fields") is None, name
        request = backend.requests[-1]
        assert request.params.unscaled == (not pooling.labels)
        raw = as_array(vector_of(request))
        raw = raw[:1] if pooling is RERANKER else raw
        assert np.allclose(numbers(reply.json()), np.sort(raw))
        same = numbers(ask(client, path, **body, **{name: not off}).json())
        assert np.allclose(same, usual) and not backend.requests[-1].params.unscaled
    if pooling.labels:
        assert not np.allclose(usual, np.sort(raw))
        both = ask(client, path, **body, **dict(zip(names, (True, False), strict=False)))
        assert path in ("/predict", "/rerank") or both.json()["error"]["code"] == (
            "conflicting_fields"
        )


def test_the_engine_leaves_the_last_step_out() -> None:
    """Bug: the flag reaches the engine and changes nothing; or it leaves out a step before."""
    from engine.pooling import PooledText, PoolingHead

    double = lambda x: x * 2  # noqa: E731
    head = PoolingHead(Pooling("mean", (None, None)), 3, (double, normalized))
    part = np.array([3.0, 0.0, 8.0], np.float32)
    vectors = []
    for unscaled in (False, True):
        text = PooledText(head, 2, unscaled=unscaled)
        text.add_chunk(0, part)
        vectors.append(as_array(text.vector()))
    assert np.allclose(vectors[1], part) and np.allclose(vectors[0], normalized(part))
    plain = PoolingHead(Pooling("mean"), 3, (double,))
    text = PooledText(plain, 1, unscaled=True)
    text.add_chunk(0, part)
    assert np.allclose(as_array(text.vector()), part * 2), "a dense layer is no activation"
    assert SamplingParams(max_tokens=0, pooled=True, unscaled=True).unscaled


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v1/classify"])
def test_messages(client: Client, backend: FakeBackend, path: str) -> None:
    """A chat embedder that gets the text without its template, or with an answer begun behind
    it."""
    use(backend, LABELS if path == "/v1/classify" else EMBEDDER)
    messages = [{"role": "user", "content": "the sea"}]
    for fields in ({}, {"add_generation_prompt": True}):
        reply = ask(client, path, messages=messages, **fields)
        assert reply.status == 200, reply.json()
        settings = {"add_generation_prompt": False, **fields}
        ids = backend.tokenizer(MODEL).encode_chat(messages, **settings)
        assert backend.requests[-1].token_ids == ids
        assert reply.json()["usage"]["prompt_tokens"] == len(ids)
    for more, param in (
        ({"input": "a"}, "messages"),
        ({"prompt_name": "query"}, "messages"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "hello " * 400}]}, "messages"),
    ):
        error = ask(client, path, **{"messages": messages, **more}).json()["error"]
        assert error["param"] == param, error
    long = [{"role": "user", "content": "hello " * 400}]
    if path == "/v1/embeddings":
        assert ask(client, path, messages=long, truncate=True).status == 200
        assert len(backend.requests[-1].token_ids) == 64
    assert ask(client, path).json()["error"]["param"] == "input"
    ignored = ask(client, path, input="a", add_generation_prompt=True)
    assert ignored.header("x-ignored-fields") == "add_generation_prompt"


def test_the_beginning_of_a_long_text_is_cut(client: Client, backend: FakeBackend) -> None:
    """`truncation_side` that is only named: the end of a text is lost that was to be kept."""
    use(backend, EMBEDDER)
    encode = backend.tokenizer(MODEL).encode
    long = "the answer is the number of the words " * 30
    for side in ("left", "right"):
        fields: dict[str, Any] = {"truncate_prompt_tokens": 9, "truncation_side": side}
        whole = encode(long)
        expected = whole[-9:] if side == "left" else whole[:9]
        ask(client, "/v1/embeddings", input=long, **fields)
        assert backend.requests[-1].token_ids == expected
        ask(client, "/v1/embeddings", input=whole[:100], **fields)
        ids = whole[:100]
        assert backend.requests[-1].token_ids == (ids[-9:] if side == "left" else ids[:9])
    use(backend, replace(RERANKER, max_tokens=64))
    ask(client, "/v1/score", text_1="a", text_2=long, truncate=True, truncation_side="left")
    first = encode("a")
    assert backend.requests[-1].token_ids == first + encode(long)[-(64 - len(first)) :]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ("/v1/embeddings", {"endianness": "middle"}, "endianness"),
        ("/v1/embeddings", {"truncation_side": "both"}, "truncation_side"),
        ("/v1/embeddings", {"use_activation": 1}, "use_activation"),
        ("/v1/embeddings", {"normalize": True, "use_activation": False}, "use_activation"),
        ("/v1/embeddings", {"input": ["a"] * 200, "encoding_format": "bytes"}, "encoding_format"),
        ("/pooling", {"task": "token_embed"}, "task"),
        ("/pooling", {"task": "classify"}, "task"),
    ],
)
def test_refusals(
    client: Client, backend: FakeBackend, path: str, body: dict[str, Any], param: str
) -> None:
    """A field that changes numbers is taken or refused, and never only named."""
    use(backend, EMBEDDER)
    reply = ask(client, path, **{"input": "a", **body})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)
