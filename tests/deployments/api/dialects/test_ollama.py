"""Ollama's routes: chats, texts, vectors, what is told of models, and what is refused."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.checkpoints.facts import ModelFacts
from engine.pooling import Pooling, as_array
from tests.deployments.api.asgi import CHAT, Client, Reply
from tests.deployments.api.output.test_tools import TOOLS, backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend, vector_of

GREEDY = {"temperature": 0, "num_predict": 32}
TURN = [{"role": "user", "content": "hello"}]
FACTS = ModelFacts(
    "llama", True, "Q4_K", "gguf", 4_700_000_000, {"block_count": 32}, lambda: 8_030_000_000
)
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 1}}}


def ask(client: Client, **body: Any) -> Reply:
    sent = {"model": MODEL, "messages": TURN, "options": GREEDY, "stream": False, **body}
    return asyncio.run(client.post("/api/chat", sent))


def lines(reply: Reply) -> list[Any]:
    assert reply.header("content-type") == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().splitlines()]


def rendered(backend: FakeBackend, **fields: Any) -> list[int]:
    """Return the prompt that /v1/chat/completions makes of the same chat."""
    asyncio.run(Client(build_asgi(backend)).chat(**fields))
    return backend.requests.pop().token_ids


def test_the_answer_is_that_of_a_chat(client: Client, backend: FakeBackend) -> None:
    """Bug: another prompt than the template's, other counts, or a stream whose pieces are not the
    answer."""
    same = asyncio.run(client.chat(**CHAT)).json()
    whole = ask(client).json()
    assert whole["message"] == {
        "role": "assistant",
        "content": same["choices"][0]["message"]["content"],
    }
    assert backend.requests[0].token_ids == backend.requests[1].token_ids
    counts = [whole["prompt_eval_count"], whole["eval_count"]]
    assert counts == [same["usage"]["prompt_tokens"], same["usage"]["completion_tokens"]]
    assert (whole["done"], whole["done_reason"]) == (True, same["choices"][0]["finish_reason"])
    assert whole["total_duration"] >= whole["prompt_eval_duration"] >= 0
    pieces = lines(ask(client, stream=None))
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["eval_count"] == whole["eval_count"] and "eval_count" not in pieces[0]


def test_options(client: Client, backend: FakeBackend) -> None:
    """Bug: an option that reaches nothing, or -1 taken for a number of tokens."""
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repeat_penalty": 1.1,
        "num_predict": 5,
    }
    more = {"seed": 3, "stop": ["x"], "num_ctx": 4096}
    reply = ask(client, options=options | more, keep_alive="5m")
    assert reply.header("x-ignored-fields") == "keep_alive, options.num_ctx"
    request = backend.requests.pop()
    params, renamed = request.params, {"repeat_penalty": "repetition_penalty"}
    renamed["num_predict"] = "max_tokens"
    for name, value in options.items():
        assert getattr(params, renamed.get(name, name)) == value, name
    assert (request.seed, list(params.stop)) == (3, ["x"])
    assert ask(client, options={"num_predict": -1}).status == 200
    assert backend.requests.pop().params.max_tokens is None, "as far as the context reaches"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"options": {"repeat_penalty": "x"}}, "options.repeat_penalty"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "nothing"}}, "format#/type"),
        ({"think": "hard"}, "think"),
        ({"messages": {}}, "messages"),
    ],
)
def test_errors_are_texts_that_name_the_field(client: Client, body: Any, param: str) -> None:
    """Bug: an object where Ollama's clients show a text; the name of a field that was not sent."""
    reply = ask(client, **body)
    answer = reply.json()
    assert reply.status == 400 and answer["param"] == param
    assert isinstance(answer["error"], str) and param.partition("#")[0] in answer["error"]


def test_an_unknown_model(client: Client) -> None:
    """Bug: `name:latest`, which clients make of a name without a tag, is not found."""
    assert ask(client, model=f"{MODEL}:latest").status == 200
    gone = ask(client, model="other:latest")
    assert gone.status == 404 and "other" in gone.json()["error"]


def test_tags(client: Client, backend: FakeBackend) -> None:
    """Bug: a list without what a client shows of each model, or asks for it by."""
    backend.cards[MODEL] = replace(backend.cards[MODEL], facts=FACTS)
    (model,) = asyncio.run(client.request("GET", "/api/tags")).json()["models"]
    assert model["name"] == model["model"] == MODEL and len(model["digest"]) == 64
    assert model["modified_at"].endswith("Z") and model["size"] == 4_700_000_000
    assert model["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "8.0B",
        "quantization_level": "Q4_K",
    }
    (awake,) = asyncio.run(client.request("GET", "/api/ps")).json()["models"]
    assert {key: awake[key] for key in model} == model
    assert awake["context_length"] == 256 and awake["expires_at"]
    assert "version" in asyncio.run(client.request("GET", "/api/version")).json()


def test_running_models_are_those_that_are_awake(backend: FakeBackend) -> None:
    """Bug: a model that sleeps is said to be loaded."""

    class Asleep:
        def status(self, model: str) -> str:
            return "sleeping"

    client = Client(build_asgi(backend, ApiOptions(models=Asleep())))  # type: ignore[arg-type]
    assert asyncio.run(client.request("GET", "/api/ps")).json() == {"models": []}
    assert ask(client, messages=[], priority=3).json()["done_reason"] == "load"
    (woken,) = backend.requests
    assert woken.params.max_tokens == 1, "an empty chat wakes it"
    assert woken.priority == 3


@pytest.mark.parametrize("name", ["model", "name"])
def test_show(name: str) -> None:
    """Bug: a client that asks what a model can do is told nothing, and offers no tools."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.cards[MODEL] = replace(backend.cards[MODEL], facts=FACTS)
    client = Client(build_asgi(backend))
    reply = asyncio.run(client.post("/api/show", {name: f"{MODEL}:latest"}))
    shown = reply.json()
    assert reply.status == 200, shown
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["details"]["parameter_size"] == "8.0B" and shown["template"]
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 8_030_000_000,
        "llama.context_length": backend.cards[MODEL].max_model_len,
        "llama.block_count": 32,
    }
    assert shown["template"] in shown["modelfile"] and 'stop "<|im_end|>"' in shown["parameters"]
    assert shown["modified_at"].endswith("Z")
    gone = asyncio.run(client.post("/api/show", {name: "other"}))
    assert gone.status == 404 and "other" in gone.json()["error"]
    backend.cards[MODEL] = replace(
        backend.cards[MODEL],
        pooling=Pooling("mean"),
        facts=replace(FACTS, generates=False, parameters=lambda: 0),
    )
    embedder = asyncio.run(client.post("/api/show", {name: MODEL})).json()
    assert embedder["capabilities"] == ["embedding"]
    assert embedder["details"]["parameter_size"] == ""


def generate(client: Client, **body: Any) -> Reply:
    sent = {"model": MODEL, "prompt": "hello", "options": GREEDY, "stream": False, **body}
    return asyncio.run(client.post("/api/generate", sent))


def test_a_text_is_that_of_a_chat(client: Client, backend: FakeBackend) -> None:
    """Bug: a prompt that the template never saw, or a text under another key than `response`."""
    same = asyncio.run(client.chat(**CHAT)).json()
    whole = generate(client).json()
    assert whole["response"] == same["choices"][0]["message"]["content"] and "message" not in whole
    assert backend.requests[0].token_ids == backend.requests[1].token_ids
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    counts = [whole["prompt_eval_count"], whole["eval_count"]]
    assert counts == [same["usage"]["prompt_tokens"], same["usage"]["completion_tokens"]]
    pieces = lines(generate(client, stream=None))
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    backend.requests.clear()
    generate(client, system="Be brief.", options={"num_predict": 3, "seed": 7})
    request = backend.requests.pop()
    assert (request.params.max_tokens, request.seed) == (3, 7)
    messages = [{"role": "system", "content": "Be brief."}, *TURN]
    assert request.token_ids == rendered(backend, messages=messages)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for raw in (False, True):
        assert generate(client, format=schema, raw=raw).status == 200
        assert backend.requests.pop().params.structured is not None


def test_a_raw_text_is_a_completion(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a prompt that has its own marks is put into the template; 16 tokens where nothing is
    said, as OpenAI's completions have it."""
    text = "<|im_start|>user\nhello<|im_end|>"
    assert generate(client, prompt=text, raw=True, options={}).status == 200
    request = backend.requests.pop()
    assert request.token_ids == backend.tokenizer(MODEL).encode(text)
    assert request.params.max_tokens is None
    monkeypatch.setattr(backend._tokenizer, "chat_template", None)
    assert generate(client, prompt=text).status == 200
    assert backend.requests.pop().token_ids == backend.tokenizer(MODEL).encode(text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"system": ["x"]}, "system"),
        ({"raw": True, "system": "x"}, "system"),
        ({"context": [1, 2]}, "context"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"raw": True, "options": {"num_predict": 2**31}}, "options.num_predict"),
        ({"format": "xml"}, "format"),
        ({"think": "hard"}, "think"),
        ({"prompt": "hello " * 400}, "prompt"),
        ({"prompt": "hello " * 400, "raw": True}, "prompt"),
    ],
)
def test_what_a_text_cannot_be_asked_with(client: Client, body: Any, param: str) -> None:
    """Bug: a field that changes the text is passed over, or an error names one that was not
    sent."""
    reply = generate(client, **body)
    answer = reply.json()
    assert reply.status == 400 and answer["param"] == param, answer
    assert isinstance(answer["error"], str) and param in answer["error"]


@pytest.mark.parametrize("path", ["chat", "generate"])
@pytest.mark.parametrize("empty", [{}, {"stream": True}, {"keep_alive": "5m"}])
def test_an_empty_request_loads_the_model(
    client: Client, backend: FakeBackend, path: str, empty: Any
) -> None:
    """Bug: the request by which clients load a model is refused as one without a prompt."""
    for fields in ({}, {"messages": []} if path == "chat" else {"prompt": ""}):
        body = {"model": f"{MODEL}:latest", **fields, **empty}
        reply = asyncio.run(client.post(f"/api/{path}", body))
        answer = json.loads(reply.body)
        assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "load", MODEL), (
            answer
        )
        want = {"role": "assistant", "content": ""} if path == "chat" else ""
        assert answer["message" if path == "chat" else "response"] == want
        assert not backend.requests
        gone = asyncio.run(client.post(f"/api/{path}", {**body, "model": "other"}))
        assert gone.status == 404


def test_a_final_message_of_the_assistant_is_continued(
    client: Client, backend: FakeBackend
) -> None:
    """Bug: the beginning of an answer is taken for a whole one, and a new turn follows it."""
    begun = [*TURN, {"role": "assistant", "content": "It is"}]
    assert ask(client, messages=begun).status == 200
    prompt = backend.requests.pop().token_ids
    text = backend.tokenizer(MODEL).decode(prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is")
    assert prompt == rendered(
        backend, messages=begun, continue_final_message=True, add_generation_prompt=False
    )
    assert ask(client, messages=[*TURN, {"role": "assistant", "content": ""}]).status == 200
    assert backend.requests.pop().token_ids == rendered(backend, messages=TURN)


@pytest.fixture
def embedder() -> FakeBackend:
    backend = FakeBackend()
    pooling = Pooling("mean", matryoshka=True, max_tokens=64)
    backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)
    return backend


def test_vectors(embedder: FakeBackend) -> None:
    """Bug: a list's vectors in another order, another length than 1, or a long text refused."""
    client = Client(build_asgi(embedder))

    def embed(**body: Any) -> Reply:
        return asyncio.run(client.post("/api/embed", {"model": f"{MODEL}:latest", **body}))

    single, two = embed(input="sea").json(), embed(input=["sea", "sky"]).json()
    assert single["embeddings"] == two["embeddings"][:1] and len(two["embeddings"]) == 2
    assert (
        single["model"] == MODEL
        and single["prompt_eval_count"] > 0
        and single["total_duration"] > 0
    )
    assert np.allclose(np.linalg.norm(two["embeddings"], axis=1), 1)
    cut = np.array(embed(input="sea", dimensions=4).json()["embeddings"][0])
    whole = np.array(single["embeddings"][0][:4])
    assert np.allclose(cut, whole / np.linalg.norm(whole))
    long = "the answer is the number of the words " * 30
    assert embed(input=long).status == 200 and len(embedder.requests[-1].token_ids) == 64
    refused = embed(input=["a", long], truncate=False)
    assert (refused.status, refused.json()["param"]) == (400, "input[1]")
    for empty in ("", []):
        assert embed(input=empty).json()["embeddings"] == []
    older = asyncio.run(client.post("/api/embeddings", {"model": MODEL, "prompt": "sea"}))
    embedder.requests.clear()
    embed(input="sea")
    assert older.json() == {"embedding": as_array(vector_of(embedder.requests[0])).tolist()}
    none = asyncio.run(client.post("/api/embeddings", {"model": MODEL, "prompt": ""}))
    assert none.json() == {"embedding": []}
    wrong = embed(input={"a": 1})
    assert (wrong.status, wrong.json()["param"]) == (400, "input")
    assert isinstance(wrong.json()["error"], str)


def test_routes_that_manage_models(client: Client) -> None:
    """Bug: a pull of what is served fails; another one ends in a shape that its client cannot
    show."""
    for name in ("model", "name"):
        there = asyncio.run(client.post("/api/pull", {name: f"{MODEL}:latest"}))
        assert [json.loads(line) for line in there.body.splitlines()] == [{"status": "success"}]
        whole = asyncio.run(client.post("/api/pull", {name: MODEL, "stream": False}))
        assert whole.json() == {"status": "success"}
    for method, path, body in (
        ("POST", "/api/pull", {"model": "other"}),
        ("POST", "/api/create", {"model": "x", "from": MODEL}),
        ("POST", "/api/push", {"model": MODEL}),
        ("POST", "/api/copy", {"source": MODEL, "destination": "x"}),
        ("DELETE", "/api/delete", {"model": MODEL}),
    ):
        reply = asyncio.run(client.request(method, path, json.dumps(body).encode()))
        answer = reply.json()
        assert reply.status == 400 and isinstance(answer["error"], str), path
        assert answer["code"] == "not_supported" and "configuration" in answer["error"]
    blobs = asyncio.run(client.request("POST", "/api/blobs/sha256:00"))
    assert blobs.status == 404 and isinstance(blobs.json()["error"], str)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_thinking(streamed: bool) -> None:
    """Bug: arguments as a text, a call in pieces, thoughts in the content."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    call = ("weather", {"city": "Paris", "days": 1})
    backend.script = "hm\n</think>\n\nSo:\n" + written(call, ("now", {}))
    reply = ask(client, tools=TOOLS, think=True, stream=streamed, options={"num_predict": 1000})
    parts = [piece["message"] for piece in (lines(reply) if streamed else [reply.json()])]
    assert "".join(part["content"] for part in parts) == "So:"
    assert "".join(part.get("thinking", "") for part in parts) == "hm"
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    parsed = [(item["function"]["name"], item["function"]["arguments"]) for item in calls]
    assert parsed == [call, ("now", {})]
    assert [item["function"]["index"] for item in calls] == [0, 1]
    assert len({item["id"] for item in calls}) == 2
    backend.script = written(call)[:-20]
    cut = ask(client, tools=TOOLS, stream=streamed)
    parts = [piece["message"] for piece in (lines(cut) if streamed else [cut.json()])]
    assert not any("tool_calls" in part for part in parts), "half a call must not be run"


def test_results_find_their_calls() -> None:
    """Bug: two results of two functions that change places; a history that is refused as it has
    no ids."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    now = {"function": {"name": "now", "arguments": {}}}
    asked = {"role": "assistant", "tool_calls": [CALL, now], "thinking": "hm"}
    results = [
        {"role": "tool", "tool_name": "now", "content": "noon"},
        {"role": "tool", "content": "sun"},
    ]
    reply = ask(client, messages=[*TURN, asked, *results], tools=TOOLS)
    assert reply.status == 200, reply.body
    function = CALL["function"]
    calls = [
        {"id": "a", "type": "function", "function": {**function, "arguments": json.dumps(PARIS)}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages = [
        *TURN,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    assert backend.requests.pop().token_ids == rendered(backend, messages=messages, tools=TOOLS)
    extra = ask(client, messages=[*TURN, asked, *results, results[1]], tools=TOOLS)
    assert extra.status == 400 and extra.json()["param"] == "messages[4]"


def test_format(client: Client, backend: FakeBackend) -> None:
    """Bug: a schema that limits nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for format in ("json", schema):
        assert ask(client, format=format).status == 200
        assert backend.requests.pop().params.structured is not None


def test_its_own_client() -> None:
    """A loop of a tool, whole and streamed, through the `ollama` package, where it is installed."""
    ollama = pytest.importorskip("ollama", reason="pip install ollama")
    backend = backend_with(TEMPLATES["hermes"])
    with serve(build_asgi(backend)) as port:
        client = ollama.Client(host=f"http://127.0.0.1:{port}")
        assert [model.model for model in client.list().models] == [MODEL]
        for stream in (False, True):
            backend.script = "hm\n</think>\n\n" + written(("now", {}))
            asked = client.chat(MODEL, TURN, tools=TOOLS, think=True, stream=stream)
            messages = [piece.message for piece in asked] if stream else [asked.message]
            (call,) = [call for message in messages for call in message.tool_calls or []]
            assert (call.function.name, call.function.arguments) == ("now", {})
            history = [*TURN, {"role": "assistant", "tool_calls": [call.model_dump()]}]
            history += [{"role": "tool", "tool_name": "now", "content": "noon"}]
            backend.script = "It is noon."
            final = client.chat(MODEL, history, tools=TOOLS)
            assert (final.message.content, final.done_reason) == ("It is noon.", "stop")
        backend.script = "It is noon."
        text = client.generate(MODEL, "Time?")
        assert (text.response, text.done_reason) == ("It is noon.", "stop")
        pieces = client.generate(MODEL, "Time?", stream=True)
        assert "".join(piece.response for piece in pieces) == "It is noon."
        assert client.generate(MODEL).done_reason == client.chat(MODEL).done_reason == "load"
        assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
        assert [model.model for model in client.ps().models] == [MODEL]
        assert client.pull(MODEL).status == "success"
        with pytest.raises(ollama.ResponseError, match="configuration"):
            client.delete(MODEL)
        pooling = Pooling("mean", (None,))
        backend.cards[MODEL] = replace(backend.cards[MODEL], pooling=pooling, vector_size=VECTOR)
        assert len(client.embed(MODEL, ["a", "b"]).embeddings) == 2
        assert len(client.embeddings(MODEL, "a").embedding) == VECTOR
        with pytest.raises(ollama.ResponseError, match="none") as failure:
            client.chat("none", TURN)
        assert failure.value.status_code == 404


PARIS = CALL["function"]["arguments"]
