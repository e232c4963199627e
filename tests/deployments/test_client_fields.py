"""What the Python clients refuse before anything is sent: no Ray is needed."""

import numpy as np
import pytest
import torch

from deployments import client
from deployments.client import AsyncClient, Client
from engine.errors import InvalidRequest

CHAT = [{"role": "user", "content": "hi"}]


def test_versions_of_a_choice() -> None:
    """A trainer cannot tell which of a choice's tokens old weights made."""
    choice = {"index": 0, "text": "ab", "finish_reason": "length"}
    parts = [{"version": "0", "num_tokens": 3}, {"version": "1", "num_tokens": 2}]
    answer = {
        "id": "cmpl-1",
        "model": "tiny",
        "choices": [{**choice, "weight_versions": parts}, choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 10},
    }
    first, second = client._completion(answer).choices
    assert first.weight_versions == (("0", 3), ("1", 2)) and second.weight_versions is None


@pytest.mark.parametrize(
    ("prompt", "fields", "code", "hint"),
    [
        (CHAT, {"temprature": 3}, "unknown_field", 'did you mean "temperature"?'),
        ("hi", {"max_token": 3}, "unknown_field", 'did you mean "max_tokens"?'),
        ("hi", {"nothing_like_it": None}, "unknown_field", 'unknown field "nothing_like_it"'),
        (CHAT, {"suffix": "x"}, "unknown_field", "suffix"),  # one of completions
        (CHAT, {"chat_template": "x"}, "field_not_allowed", "chat_template"),
    ],
)
async def test_unknown_fields(prompt, fields, code, hint):
    """A misspelt field that vanishes: the answer is a normal one, and not what was asked for."""
    client, other = Client("manta", "tiny"), AsyncClient("manta", "tiny")
    errors = []
    for call in (client.generate, client.chat, lambda *a, **k: next(client.stream(*a, **k))):
        with pytest.raises(InvalidRequest) as caught:
            call(prompt, **fields)
        errors.append(caught.value)
    for call in (other.generate, other.chat, lambda *a, **k: anext(other.stream(*a, **k))):
        with pytest.raises(InvalidRequest) as caught:
            await call(prompt, **fields)
        errors.append(caught.value)
    for error in errors:
        assert error.code == code and error.param == next(iter(fields)), error
        assert hint in error.message, error


def test_arrays_are_prompts() -> None:
    """Bug: ids of NumPy or torch are said to be no prompt, or reach the router as no JSON."""
    for array in (np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int64(6)]):
        body = client._body("tiny", array, {})
        assert body == {"model": "tiny", "prompt": [5, 6]}
        assert {type(token) for token in body["prompt"]} == {int}
    with pytest.raises(InvalidRequest, match="a prompt is a text"):
        client._body("tiny", np.array(5), {})  # type: ignore[arg-type]
