"""/v1/embeddings: OpenAI's bodies and answers, what is refused, and lists that take turns."""

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.app import build_asgi
from deployments.api.pooling import pooled
from engine.errors import Overloaded
from engine.pooling import Pooling, as_array
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

POOLING = Pooling(
    "mean", (None,), {"query": "query: "}, matryoshka=True, dimensions=(2, 4), max_tokens=64
)


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend()
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=POOLING, vector_size=VECTOR)
    return backend


def ask(client: Client, **body: Any) -> Reply:
    return asyncio.run(client.post("/v1/embeddings", {"model": MODEL, **body}))


def rows(reply: Reply) -> list[list[float]]:
    answer = reply.json()
    assert reply.status == 200, answer
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    for index, row in enumerate(answer["data"]):
        assert (row["object"], row["index"]) == ("embedding", index)
    return [row["embedding"] for row in answer["data"]]


def test_texts_and_ids(client: Client, backend: FakeBackend) -> None:
    """Vectors in another order than their texts: a search that finds the neighbour."""
    tokenizer = backend.tokenizer(MODEL)
    texts = [f"the answer {number}" for number in range(300)]
    reply = ask(client, input=texts)
    vectors = rows(reply)
    asked = [request.token_ids for request in backend.requests]
    assert asked == [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert vectors == [as_array(vector_of(request)).tolist() for request in backend.requests]
    tokens = sum(map(len, asked))
    assert reply.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert rows(ask(client, input=asked[:2])) == vectors[:2]
    assert rows(ask(client, input=asked[0])) == vectors[:1]
    assert rows(ask(client, input=texts[0])) == vectors[:1]
    assert not backend.live and client.app.in_flight == 0


def test_shapes(client: Client) -> None:
    """base64 that is not what float says; a cut vector that is not of length 1."""
    (whole,) = rows(ask(client, input="hello"))
    (packed,) = rows(ask(client, input="hello", encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == whole
    (cut,) = rows(ask(client, input="hello", dimensions=4))
    want = np.array(whole[:4]) / np.linalg.norm(whole[:4])
    assert np.allclose(cut, want) and len(whole) == VECTOR


def test_prompts_and_truncation(client: Client, backend: FakeBackend) -> None:
    """A query without its prompt, or a text that is cut though nobody asked for it."""
    tokenizer = backend.tokenizer(MODEL)
    rows(ask(client, input="the sea", prompt_name="query"))
    assert backend.requests[-1].token_ids == tokenizer.encode("query: the sea")
    long = "the answer is the number of the words " * 30
    refused = ask(client, input=["a", long])
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert refused.json()["error"]["param"] == "input[1]"
    for fields, limit in (
        ({"truncate": True}, 64),
        ({"truncate_prompt_tokens": -1}, 64),
        ({"truncate_prompt_tokens": 9}, 9),
    ):
        rows(ask(client, input=long, **fields))
        assert backend.requests[-1].token_ids == tokenizer.encode(long)[:limit]
    rows(ask(client, input=[[5] * 70], truncate=True))
    assert len(backend.requests[-1].token_ids) == 64


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_field"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a", 1]}, "input[1]", "invalid_type"),
        ({"input": [[5], "a"]}, "input[1]", "invalid_type"),
        ({"input": [[]]}, "input[0]", "invalid_value"),
        ({"input": [5, 9999]}, "input[1]", "token_out_of_range"),
        ({"input": {"a": 1}}, "input", "invalid_type"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "dimensions": 3}, "dimensions", "invalid_value"),
        ({"input": "a", "prompt_name": "other"}, "prompt_name", "invalid_value"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
    ],
)
def test_refusals(client: Client, body: dict[str, Any], param: str, code: str) -> None:
    """Each names its field, and nothing is run."""
    reply = ask(client, **body)
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert reply.status == (404 if code == "model_not_found" else 400)


def test_a_model_without_pooling() -> None:
    """Vectors of a chat model, which look like vectors and mean nothing."""
    client = Client(build_asgi(FakeBackend()))
    reply = ask(client, input="a")
    assert (reply.status, reply.json()["error"]["code"]) == (400, "embeddings_not_supported")


def test_a_list_waits_for_its_own_texts(client: Client, backend: FakeBackend) -> None:
    """A list of 2,048 is more than the service would queue at once. What it has no room for is
    asked again when a text of the same list is done; a list that gets nothing in is told."""
    generate, refused = backend.generate, [0]
    most = [0]

    def crowded(request: Any) -> Any:
        if len(backend.live) >= 5:
            refused[0] += 1
            raise Overloaded("too much work is waiting")
        most[0] = max(most[0], len(backend.live) + 1)
        return generate(request)

    backend.generate = crowded  # type: ignore[method-assign]
    backend.first_pause = 0.001
    assert len(rows(ask(client, input=["a"] * 60))) == 60
    assert most[0] == 5 and 0 < refused[0] < 60
    backend.refuse = Overloaded("too much work is waiting", retry_after=7)
    reply = ask(client, input=["a"] * 60)
    assert (reply.status, reply.header("retry-after")) == (503, "7")
    assert client.app.in_flight == 0


def test_one_failure_ends_the_list(client: Client, backend: FakeBackend) -> None:
    """Texts of an answer that nobody will read go on at the engines."""
    from engine.messages import Delta

    backend.script = [Delta(0, [], "error", error="numerical_error: not finite")]
    reply = ask(client, input=["a"] * 600)
    assert (reply.status, reply.json()["error"]["code"]) == (500, "numerical_error")
    assert len(backend.requests) <= pooled.FIRST_WINDOW and not backend.live


def test_hang_up(client: Client, backend: FakeBackend) -> None:
    """A client that leaves: its texts stop."""

    async def work() -> None:
        backend.first_pause = 5
        gone = asyncio.Event()
        body = b'{"model": "tiny", "input": ["a", "b", "c"]}'
        task = asyncio.create_task(client.request("POST", "/v1/embeddings", body, hang_up=gone))
        while len(backend.live) < 3:
            await asyncio.sleep(0.001)
        gone.set()
        await task
        assert not backend.live and len(backend.aborts) == 3

    asyncio.run(work())


def test_openai_client(backend: FakeBackend) -> None:
    """The official client asks for base64 by itself, and makes floats of it."""
    openai = pytest.importorskip("openai")
    with serve(build_asgi(backend)) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
        response = client.embeddings.create(model=MODEL, input=["hello", "sea"], dimensions=2)
        assert [len(row.embedding) for row in response.data] == [2, 2]
        want = POOLING.cut(as_array(vector_of(backend.requests[0])), 2)
        assert np.allclose(response.data[0].embedding, want)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, input="")
