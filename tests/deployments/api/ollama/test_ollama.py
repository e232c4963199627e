"""Ollama's /api/chat, /api/tags and /api/version."""

import asyncio
import json
from typing import Any

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import CHAT, Client, Reply
from tests.deployments.api.server import serve
from tests.deployments.api.tools.test_tools import TOOLS, backend_with, written
from tests.deployments.api.tools.tool_templates import TEMPLATES
from tests.deployments.fake_backend import MODEL, FakeBackend

GREEDY = {"temperature": 0, "num_predict": 32}
TURN = [{"role": "user", "content": "hello"}]
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 1}}}


def ask(client: Client, **body: Any) -> Reply:
    sent = {"model": MODEL, "messages": TURN, "options": GREEDY, "stream": False, **body}
    return asyncio.run(client.post("/api/chat", sent))


def lines(reply: Reply) -> list[Any]:
    assert reply.header("content-type") == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.decode().splitlines()]


def rendered(backend: FakeBackend, **fields: Any) -> list[int]:
    """The prompt of the same chat over /v1/chat/completions."""
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
    told = lines(ask(client, stream=None))
    assert "".join(one["message"]["content"] for one in told) == whole["message"]["content"]
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["eval_count"] == whole["eval_count"] and "eval_count" not in told[0]


def test_options(client: Client, backend: FakeBackend) -> None:
    """Bug: an option that reaches nothing, or -1 taken for a number of tokens."""
    given = {
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
    reply = ask(client, options=given | more, keep_alive="5m")
    assert reply.header("x-ignored-fields") == "keep_alive, options.num_ctx"
    request = backend.requests.pop()
    params, renamed = request.params, {"repeat_penalty": "repetition_penalty"}
    renamed["num_predict"] = "max_tokens"
    for name, value in given.items():
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
        ({"messages": None}, "messages"),
    ],
)
def test_errors_are_texts_that_name_the_field(client: Client, body: Any, param: str) -> None:
    """Bug: an object where Ollama's clients show a text; the name of a field that was not sent."""
    reply = ask(client, **body)
    told = reply.json()
    assert reply.status == 400 and told["param"] == param
    assert isinstance(told["error"], str) and param.partition("#")[0] in told["error"]


def test_an_unknown_model(client: Client) -> None:
    """Bug: `name:latest`, which clients make of a name without a tag, is not found."""
    assert ask(client, model=f"{MODEL}:latest").status == 200
    gone = ask(client, model="other:latest")
    assert gone.status == 404 and "other" in gone.json()["error"]


def test_tags(client: Client) -> None:
    """Bug: a list without what a client shows of each model, or asks for it by."""
    (one,) = asyncio.run(client.request("GET", "/api/tags")).json()["models"]
    assert one["name"] == one["model"] == MODEL and len(one["digest"]) == 64
    assert one["modified_at"].endswith("Z")
    assert "version" in asyncio.run(client.request("GET", "/api/version")).json()


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_thinking(streamed: bool) -> None:
    """Bug: arguments as a text, a call in pieces, thoughts in the content."""
    backend = backend_with(TEMPLATES["hermes"])
    client = Client(build_asgi(backend))
    call = ("weather", {"city": "Paris", "days": 1})
    backend.script = "hm\n</think>\n\nSo:\n" + written(call, ("now", {}))
    reply = ask(client, tools=TOOLS, think=True, stream=streamed, options={"num_predict": 1000})
    parts = [one["message"] for one in (lines(reply) if streamed else [reply.json()])]
    assert "".join(one["content"] for one in parts) == "So:"
    assert "".join(one.get("thinking", "") for one in parts) == "hm"
    calls = [call for one in parts for call in one.get("tool_calls", [])]
    found = [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
    assert found == [call, ("now", {})]
    assert [one["function"]["index"] for one in calls] == [0, 1]
    assert len({one["id"] for one in calls}) == 2
    backend.script = written(call)[:-20]
    cut = ask(client, tools=TOOLS, stream=streamed)
    parts = [one["message"] for one in (lines(cut) if streamed else [cut.json()])]
    assert not any("tool_calls" in one for one in parts), "half a call must not be run"


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
        assert [one.model for one in client.list().models] == [MODEL]
        for stream in (False, True):
            backend.script = "hm\n</think>\n\n" + written(("now", {}))
            asked = client.chat(MODEL, TURN, tools=TOOLS, think=True, stream=stream)
            said = [one.message for one in asked] if stream else [asked.message]
            (call,) = [call for one in said for call in one.tool_calls or []]
            assert (call.function.name, call.function.arguments) == ("now", {})
            history = [*TURN, {"role": "assistant", "tool_calls": [call.model_dump()]}]
            history += [{"role": "tool", "tool_name": "now", "content": "noon"}]
            backend.script = "It is noon."
            told = client.chat(MODEL, history, tools=TOOLS)
            assert (told.message.content, told.done_reason) == ("It is noon.", "stop")
        with pytest.raises(ollama.ResponseError, match="none") as failure:
            client.chat("none", TURN)
        assert failure.value.status_code == 404


PARIS = CALL["function"]["arguments"]
