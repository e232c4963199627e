"""Fields of generations that clients of other servers send."""

from asyncio import run
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.app import build_asgi
from tests.deployments.api.asgi import CHAT, COMPLETION, Client
from tests.deployments.fake_backend import MODEL, FakeBackend


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_words_are_banned_as_they_are_written(
    backend: FakeBackend, client: Client, path: str
) -> None:
    """A word that comes behind a space all the same, or a list that takes another's place."""
    fields: dict[str, Any] = {
        "bad_words": ["hello", " answer"],
        "suppress_tokens": [7],
        "bad_words_ids": [[8, 9]],
    }
    body = CHAT if "chat" in path else COMPLETION
    reply = run(client.post(path, {**body, **fields}))
    assert reply.status == 200, reply.body
    banned = [list(ids) for ids in backend.requests[-1].params.bad_words_ids]
    assert [7] in banned and [8, 9] in banned
    tokenizer = backend.tokenizer(MODEL)
    for text in ("hello", " hello", "answer", " answer"):
        assert tokenizer.encode(text, add_special_tokens=False) in banned
    ids = tokenizer.encode("x\nhello", add_special_tokens=False)
    assert any(ids[-len(sequence) :] == sequence for sequence in banned)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"bad_words": ["a", " "]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"suppress_tokens": [10**6]}, "suppress_tokens"),
        ({"suppress_tokens": ["5"]}, "suppress_tokens"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream_options": {"continuous_usage_stats": 1}, "stream": True}, "stream_options"),
    ],
)
def test_a_wrong_value_is_refused(client: Client, fields: dict[str, Any], param: str) -> None:
    """A limit that is dropped, or one that fails at the engine."""
    error = run(client.chat(**fields)).json()["error"]
    assert error["param"].split(".")[0] == param


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_prompt_is_cut(backend: FakeBackend, client: Client, side: str | None) -> None:
    """A prompt that is refused though it was to be cut, or cut at the wrong end."""
    cut = {"truncate_prompt_tokens": 5, "truncation_side": side}
    tokenizer = backend.tokenizer(MODEL)
    text = " ".join(f"word {i}" for i in range(1000))  # more than the context has
    whole = tokenizer.encode(text)
    reply = run(client.completion(prompt=text, echo=True, **cut))
    assert reply.status == 200, reply.body
    ids = backend.requests[-1].token_ids
    assert ids == (whole[:5] if side == "right" else whole[-5:])
    assert reply.json()["usage"]["prompt_tokens"] == 5
    assert reply.json()["choices"][0]["text"].startswith(tokenizer.decode(ids))
    run(client.completion(prompt=list(range(3, 40)) * 30, **cut))
    assert backend.requests[-1].token_ids == (
        [3, 4, 5, 6, 7] if side == "right" else [*range(35, 40)]
    )
    run(client.chat(messages=[{"role": "user", "content": text}], **cut))
    assert len(backend.requests[-1].token_ids) == 5
    context = backend.cards[MODEL].max_model_len
    for most in (-1, context):
        fields = {"truncate_prompt_tokens": most, "max_tokens": 9}
        assert run(client.completion(prompt=text, **fields)).status == 200
        assert len(backend.requests[-1].token_ids) == context - 9


def test_each_event_tells_the_usage(client: Client) -> None:
    """A meter that reads 0 until the end, or that counts otherwise than the end does."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for post in (client.chat, client.completion):
        events = run(post(stream=True, n=2, stream_options=options)).events()[:-1]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[0] <= 1 and len(set(counts)) > 3
        assert counts[-1] == run(post(n=2)).json()["usage"]["completion_tokens"]
        assert all(event["usage"]["prompt_tokens"] > 0 for event in events)
        assert events[-1]["choices"] == []
        alone = {"continuous_usage_stats": True}
        events = run(post(stream=True, stream_options=alone)).events()[:-1]
        assert all(event["usage"] and event["choices"] for event in events)


def test_tokens_are_named_by_their_ids(backend: FakeBackend, client: Client) -> None:
    """Two tokens of one text that cannot be told apart."""
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    chat = run(client.chat(logprobs=True, top_logprobs=2, **named)).json()["choices"][0]
    names = [f"token_id:{token}" for token in chat["token_ids"]]
    content = chat["logprobs"]["content"]
    assert [item["token"] for item in content] == names
    assert all(top["token"].startswith("token_id:") for i in content for top in i["top_logprobs"])
    text = run(client.completion(logprobs=2, echo=True, **named)).json()["choices"][0]
    both = [*text["prompt_token_ids"], *text["token_ids"]]
    assert text["logprobs"]["tokens"] == [f"token_id:{token}" for token in both]
    assert all(name.startswith("token_id:") for name in text["logprobs"]["top_logprobs"][-1])
    events = run(client.chat(stream=True, logprobs=True, **named)).events()[:-1]
    streamed = [
        item["token"]
        for event in events
        for choice in event["choices"]
        for item in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == names


def test_a_fingerprint_in_each_answer(backend: FakeBackend, client: Client) -> None:
    """Logs that cannot tell which weights have answered."""
    backend.cards[MODEL] = replace(backend.cards[MODEL], fingerprint="fp_1")
    assert run(client.chat()).json()["system_fingerprint"] == "fp_1"
    events = run(client.completion(stream=True)).events()[:-1]
    assert {event["system_fingerprint"] for event in events} == {"fp_1"}


def test_invocations_answer_as_the_route_that_is_meant(backend: FakeBackend) -> None:
    """SageMaker has one route for everything."""
    client = Client(build_asgi(backend))
    chat = run(client.post("/invocations", CHAT)).json()
    assert chat["object"] == "chat.completion"
    text = run(client.post("/invocations", COMPLETION)).json()
    assert text["object"] == "text_completion"
    stream = run(client.post("/invocations", {**CHAT, "stream": True})).events()
    assert stream[-1] == "[DONE]"
    for body in (
        {"input": "a"},
        {"query": "a", "documents": ["b"]},
        {"text_1": "a", "text_2": "b"},
    ):
        error = run(client.post("/invocations", body)).json()["error"]
        assert error["code"].endswith("_not_supported"), error  # of the route that was meant
    reply = run(client.post("/invocations", {"question": "a"}))
    assert reply.status == 400 and "messages (a chat)" in reply.json()["error"]["message"]


# What lmdeploy 0.15's APIClient sends with every chat, and with every completion.
_LMDEPLOY: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 40,
    "n": 1,
    "stop": None,
    "stream": False,
    "max_completion_tokens": 16,
    "user": None,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream_options": None,
    "kwargs": {},
}
_LMDEPLOY_CHAT: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": 0,
    "max_tokens": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": None,
    "min_p": 0.0,
    "logit_bias": None,
}


def test_defaults_of_lmdeploys_client(backend: FakeBackend, client: Client) -> None:
    """A client of another server whose defaults alone are a 400."""
    fields = {**_LMDEPLOY, **_LMDEPLOY_CHAT}
    chat = run(client.post("/v1/chat/completions", {**CHAT, **fields}))
    assert chat.status == 200 and chat.json()["choices"][0]["message"]["content"], chat.body
    assert (backend.requests[-1].params.top_k, backend.requests[-1].params.max_tokens) == (40, 16)
    fields = {**_LMDEPLOY, "suffix": None, "max_tokens": 16}
    text = run(client.post("/v1/completions", {**COMPLETION, **fields}))
    assert text.status == 200 and text.json()["choices"][0]["text"], text.body
    streamed = run(client.post("/v1/completions", {**COMPLETION, **fields, "stream": True}))
    assert streamed.events()[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "body", "verbatim"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, True),
        ("/v1/completions", {"prompt": [[5, 6], [7]]}, True),
        ("/v1/completions", {"prompt": "five"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "five"}]}, False),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {}}, True),
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {}}, True),
    ],
)
def test_token_ids_are_taken_as_they_are(
    backend: FakeBackend, client: Client, path: str, body: dict[str, Any], verbatim: bool
) -> None:
    """A rollout that goes on after a sampled image token is refused, for want of a picture."""
    model = {} if path == "/generate" else {"model": MODEL}
    reply = run(client.post(path, {**model, **body}))
    assert reply.status == 200, reply.body
    assert {request.verbatim for request in backend.requests} == {verbatim}
