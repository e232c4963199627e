"""OpenAI's `prediction`: from the body to the engine's message, and back in usage."""

import asyncio
from typing import Any

import pytest

from deployments.api.stream.merge import PredictionMatch
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend


def run(work: Any) -> Any:
    return asyncio.run(work)


def expects(content: Any, kind: Any = "content") -> dict[str, Any]:
    return {"type": kind, "content": content}


PARTS = [{"type": "text", "text": "one two "}, {"type": "text", "text": "three four"}]


@pytest.mark.parametrize("content", ["one two three four", PARTS])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_right(
    backend: FakeBackend, client: Client, stream: bool, content: Any
) -> None:
    """Bug: `prediction` was ignored, and clients that pay by it saw no figures."""
    backend.script = "one two three five"
    asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = run(client.chat(prediction=expects(content), **asked))
    usage = (reply.events()[-2] if stream else reply.json())["usage"]
    tokenizer = backend.tokenizer("tiny")
    expected = tokenizer.encode("one two three four", add_special_tokens=False)
    common = tokenizer.encode("one two three f", add_special_tokens=False)
    assert backend.requests[-1].prediction == expected
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == len(common)
    assert details["rejected_prediction_tokens"] == len(expected) - len(common)
    assert reply.header("x-ignored-fields") is None


def test_none_without_a_prediction(backend: FakeBackend, client: Client) -> None:
    """Usage with fields in it that nobody asked for."""
    assert "completion_tokens_details" not in run(client.chat()).json()["usage"]
    assert backend.requests[-1].speculate
    run(client.chat(speculation=False))
    assert not backend.requests[-1].speculate
    run(client.completion(speculation=False))
    assert not backend.requests[-1].speculate


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("text", "prediction"),
        (expects("x", "tokens"), "prediction.type"),
        (expects(None), "prediction.content"),
        (expects([]), "prediction.content"),
        (expects([{"type": "image_url", "image_url": {"url": "x"}}]), "prediction.content[0].type"),
        (expects([{"type": "text", "text": 3}]), "prediction.content[0].text"),
    ],
)
def test_bad_predictions_are_named(client: Client, value: Any, param: str) -> None:
    """A prediction in a wrong form was dropped, and the answer was slow without a reason."""
    reply = run(client.chat(prediction=value))
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param


def test_a_long_prediction_is_cut_to_the_context(backend: FakeBackend, client: Client) -> None:
    """A prediction is a hint: one longer than the context is no reason to refuse the request."""
    reply = run(client.chat(prediction=expects("word " * 5000)))
    assert reply.status == 200
    most = backend.cards["tiny"].max_model_len
    assert 0 < len(backend.requests[-1].prediction) <= most


def test_matches_go_on_after_a_change() -> None:
    """An edit in the middle ended the count, though the rest of the answer was as predicted."""
    match = PredictionMatch([1, 2, 3, 4, 5, 6, 7, 8])
    match.feed([1, 2, 99])
    assert (match.accepted, match.rejected) == (2, 6)
    match.feed([4, 5])  # the pair is where the match begins again
    match.feed([6, 7, 8, 0])
    assert (match.accepted, match.rejected) == (5, 3)
    match.feed([1, 2, 3, 4, 5, 6, 7, 8] * 3)
    assert match.rejected == 0  # and never below
