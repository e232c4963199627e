"""A client's calls for vectors, rankings, tokens and adapters, against the routes that answer."""

import asyncio
import inspect
from collections.abc import Coroutine, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, RayError

from deployments.api.app import build_asgi
from deployments.client import AsyncClient, Client
from deployments.model_calls import AsyncModelCalls, Embeddings, ModelCalls
from deployments.resumable_stream import ResumableStream
from deployments.router.serve import handle_call
from engine.errors import EngineDead, InvalidRequest, Overloaded
from engine.messages import AdapterInfo
from engine.pooling import Pooling, as_array
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

POOLING = Pooling(
    "mean", (None,), {"query": "query: "}, matryoshka=True, dimensions=(4,), max_tokens=64
)
CHAT = [{"role": "user", "content": "the answer"}]


class Response:
    """Serve's response of a call, whose answer the app gives without Ray."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call

    def __await__(self) -> Generator[Any, None, Any]:
        return self._call.__await__()

    def result(self) -> Any:
        return asyncio.run(self._call)


class Handle:
    """A handle of a router's method `control`, which fails at first with the errors of `failures`.

    sent: the arguments of all calls.
    """

    def __init__(self, backend: FakeBackend) -> None:
        self._app = build_asgi(backend)
        self.failures: list[RayError] = []
        self.sent: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> Response:
        self.sent.append(arguments)
        return Response(self._answer(*arguments))

    async def _answer(self, *arguments: Any) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop()
        return await handle_call.control(self._app, *arguments)


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend()
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=POOLING, vector_size=VECTOR)
    backend.readers["/adapters/legal"] = AdapterInfo("legal", "r1", "lora", 8, 1, ["q_proj"])
    return backend


@pytest.fixture
def handle(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Return the handle that all clients of the test have."""
    handle = Handle(backend)
    monkeypatch.setattr(Client, "_method", lambda self, name: handle)
    monkeypatch.setattr(AsyncClient, "_method", lambda self, name: handle)
    monkeypatch.setattr(ResumableStream, "pause", lambda self: 0.0)
    return handle


def both(name: str, *arguments: Any, model: str = MODEL, **fields: Any) -> Any:
    """Return the result of a method of both clients, which have to agree."""
    first = getattr(Client("manta", model), name)(*arguments, **fields)

    async def call() -> Any:
        return await getattr(AsyncClient("manta", model), name)(*arguments, **fields)

    second = asyncio.run(call())
    if hasattr(first, "raw"):  # which has the request's id
        assert replace(first, raw={}) == replace(second, raw={})
    else:
        assert first == second
    if isinstance(first, Embeddings):
        assert all(map(np.array_equal, first.vectors, second.vectors))
    return first


def test_vectors(handle: Handle, backend: FakeBackend) -> None:
    """Vectors of other texts, or rounded ones; ids of arrays that are no JSON."""
    texts = ["the sea", "the land"]
    embeddings = both("embed", texts)
    assert (embeddings.model, len(embeddings.vectors)) == (MODEL, 2)
    ids = [request.token_ids for request in backend.requests[:2]]
    assert embeddings.prompt_tokens == sum(map(len, ids))
    for vector, request in zip(embeddings.vectors, backend.requests, strict=False):
        assert vector.dtype == np.float32
        assert (vector == as_array(vector_of(request))).all()
    for same in (ids, [np.array(part) for part in ids], [torch.tensor(part) for part in ids]):
        again = both("embed", same).vectors
        assert all((a == b).all() for a, b in zip(again, embeddings.vectors, strict=True))
    (single,) = both("embed", "the sea").vectors
    assert (single == embeddings.vectors[0]).all()
    (named,) = both("embed", "the sea", prompt_name="query", dimensions=4).vectors
    assert named.shape == (4,) and not (named == embeddings.vectors[0][:4]).all()
    assert len(both("embed", CHAT).vectors) == 1
    with pytest.raises(InvalidRequest, match="maximum context length"):
        both("embed", "the sea " * 99)
    assert len(both("embed", "the sea " * 99, truncate=True).vectors) == 1


def test_rankings(handle: Handle) -> None:
    """Indices of the sorted list instead of the caller's; texts beside others' scores."""
    documents = ["the answer is 1", {"text": "the answer is 2"}, "the answer is 3"]
    ranking = both("rerank", "the sea", documents)
    assert ranking.prompt_tokens > 0 and ranking.model == MODEL
    scores = [ranked.score for ranked in ranking.documents]
    assert scores == sorted(scores, reverse=True)
    assert sorted(ranked.index for ranked in ranking.documents) == [0, 1, 2]
    for ranked in ranking.documents:
        assert ranked.text == f"the answer is {ranked.index + 1}"
    best = both("rerank", "the sea", documents, top_n=1, return_documents=False)
    assert [ranked.index for ranked in best.documents] == [ranking.documents[0].index]
    assert best.documents[0].text is None
    with pytest.raises(InvalidRequest, match="list of texts"):
        both("rerank", "the sea", "the answer")


def test_tokens(handle: Handle, backend: FakeBackend) -> None:
    """A chat without its template, or ids that come back as another text."""
    tokens = both("tokenize", "the answer", return_token_strs=True)
    tokenizer = backend.tokenizer(MODEL)
    assert list(tokens.ids) == tokenizer.encode("the answer", add_special_tokens=True)
    assert tokens.texts is not None and len(tokens.texts) == len(tokens.ids)
    assert tokens.max_model_len == backend.cards[MODEL].max_model_len
    chat = both("tokenize", CHAT)
    assert chat.texts is None and len(chat.ids) > len(tokens.ids)
    for ids in (tokens.ids, np.array(tokens.ids), torch.tensor(tokens.ids)):
        assert both("detokenize", ids) == "the answer"


@pytest.mark.parametrize("model", [MODEL, ""])
def test_adapters(handle: Handle, model: str) -> None:
    """An adapter that cannot be taken away, or errors whose class hides what is wrong."""
    assert both("adapters", model=model) == ()
    loaded = both("load_adapter", "legal", "/adapters/legal")
    assert (loaded.name, loaded.model, loaded.path) == ("legal", MODEL, "/adapters/legal")
    assert both("load_adapter", "legal").path == "/adapters/legal"  # read again
    client = Client("manta", model)
    assert client.adapters() == both("adapters") == (client.load_adapter("legal"),)
    client.unload_adapter("legal")
    assert client.adapters() == ()
    for call in (client.unload_adapter, client.load_adapter):
        with pytest.raises(InvalidRequest) as refused:
            call("legal")
        assert refused.value.code == "adapter_not_found"


def test_unknown_fields_are_refused(handle: Handle) -> None:
    """A misspelt field that vanishes, or one that changes the form of the answer."""
    for name, arguments, field in (
        ("embed", ["x"], "dimension"),
        ("embed", ["x"], "encoding_format"),
        ("rerank", ["x", ["y"]], "topn"),
        ("tokenize", ["x"], "add_special_token"),
        ("detokenize", [[1]], "skip_special"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            both(name, *arguments, **{field: 2})
        assert refused.value.param == field
    assert not handle.sent


def test_another_router_answers(
    handle: Handle, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that dies with its router, or a change of adapters that is made twice."""
    handle.failures = [ActorDiedError(), ActorDiedError()]
    assert Client("manta", MODEL).detokenize([40]) and len(handle.sent) == 3
    handle.failures = [ActorDiedError()]
    assert asyncio.run(AsyncClient("manta", MODEL).adapters()) == ()
    for name, arguments in (("load_adapter", ["legal"]), ("unload_adapter", ["legal"])):
        handle.failures, handle.sent = [ActorDiedError()], []
        with pytest.raises(EngineDead, match="router did not answer"):
            getattr(Client("manta", MODEL), name)(*arguments)
        assert len(handle.sent) == 1
    monkeypatch.setattr(ResumableStream, "pause", lambda self: None)  # patience is at its end
    handle.failures = [ActorDiedError()]
    with pytest.raises(EngineDead, match="router did not answer"):
        Client("manta", MODEL).tokenize("the sea")
    backend.refuse = Overloaded("full", retry_after=3)
    with pytest.raises(Overloaded) as refused:
        Client("manta", MODEL).embed("the sea")
    assert refused.value.retry_after == 3


def test_both_clients_have_the_same_calls() -> None:
    """A call that only one of the two clients has, or with other fields."""
    assert issubclass(Client, ModelCalls) and issubclass(AsyncClient, AsyncModelCalls)
    first, second = (
        {name: str(inspect.signature(call)) for name, call in vars(calls).items() if callable(call)}
        for calls in (ModelCalls, AsyncModelCalls)
    )
    assert first == second and len(first) == 8
