"""`limits.max_tokens`: the longest answer, in each dialect of generations."""

import asyncio
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import MAX_MODEL_LEN, MODEL, FakeBackend

MOST = 9
TURNS = [{"role": "user", "content": "hello"}]
# path, body, the field for the answer's length, which the body sets at this path or leaves out
DIALECTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": TURNS}, "max_tokens"),
    ("/v1/chat/completions", {"messages": TURNS}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
    ("/v1/completions", {"prompt": ["hello", "there you are"]}, "max_tokens"),
    ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
    ("/api/chat", {"messages": TURNS}, "options.num_predict"),
    ("/api/generate", {"prompt": "hello"}, "options.num_predict"),
    ("/chat", {"query": "hello"}, "gen_kwargs.max_new_tokens"),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}},
     "sampling_params.max_tokens"),
    ("/generate", {"input_ids": [5]}, "sampling_params.max_new_tokens"),
]  # fmt: skip
MESSAGES = ("/v1/messages", {"messages": TURNS}, "max_tokens")


def with_length(body: dict[str, Any], field: str, tokens: int) -> dict[str, Any]:
    outer, _, inner = field.rpartition(".")
    if not outer:
        return {"model": MODEL, **body, field: tokens}
    return {"model": MODEL, **body, outer: {**body.get(outer, {}), inner: tokens}}


def limited(backend: FakeBackend, most: int | None = MOST) -> Client:
    return Client(build_asgi(backend, ApiOptions(max_tokens=most)))


@pytest.mark.parametrize(("path", "body", "field"), [*DIALECTS, MESSAGES])
def test_more_is_refused(backend: FakeBackend, path: str, body: dict[str, Any], field: str) -> None:
    """Bugs: a dialect whose requests run as long as they like; an error that names another
    dialect's field, or only the context."""
    client = limited(backend)
    for asked in (MOST + 1, 10 * MAX_MODEL_LEN):
        reply = asyncio.run(client.post(path, with_length(body, field, asked)))
        text = reply.body.decode()
        assert reply.status == 400 and not backend.requests, text
        assert f"{field} is {asked}, and at most {MOST} here (limits.max_tokens)" in text
    reply = asyncio.run(client.post(path, with_length(body, field, MOST)))
    assert reply.status == 200, reply.body
    assert {request.params.max_tokens for request in backend.requests} == {MOST}


@pytest.mark.parametrize(("path", "body", "field"), DIALECTS)
def test_the_default_is_at_most_the_limit(
    backend: FakeBackend, path: str, body: dict[str, Any], field: str
) -> None:
    """Bugs: a request that sets no length runs to the context's end; one whose default is longer
    is refused, or whose prompt leaves less room than the limit; one without a limit gets one."""
    plain = {"model": MODEL, **body}
    reply = asyncio.run(limited(backend).post(path, plain))
    assert reply.status == 200, reply.body
    assert {request.params.max_tokens for request in backend.requests} == {MOST}
    room = MAX_MODEL_LEN - max(len(request.token_ids) for request in backend.requests)
    backend.requests.clear()
    assert asyncio.run(limited(backend, 10 * MAX_MODEL_LEN).post(path, plain)).status == 200
    default = 16 if path == "/v1/completions" else room
    assert {request.params.max_tokens for request in backend.requests} == {default}
    backend.requests.clear()
    assert asyncio.run(limited(backend, None).post(path, plain)).status == 200
    unlimited = {"/v1/completions": 16, "/chat": room}.get(path)
    assert {request.params.max_tokens for request in backend.requests} == {unlimited}


def test_a_least_length_beyond_the_limit(backend: FakeBackend) -> None:
    """A min_tokens that the limit contradicts would end as an error of the server."""
    reply = asyncio.run(limited(backend).chat(max_tokens=None, min_tokens=MOST + 1))
    assert reply.status == 400 and "min_tokens" in reply.body.decode()
    assert asyncio.run(limited(backend).chat(max_tokens=None, min_tokens=MOST)).status == 200


def test_scores_of_a_prompt_are_no_answer(backend: FakeBackend) -> None:
    """`max_tokens: 0` with echo asks for less than any limit."""
    reply = asyncio.run(limited(backend, 1).completion(max_tokens=0, echo=True, logprobs=0))
    assert reply.status == 200, reply.body
