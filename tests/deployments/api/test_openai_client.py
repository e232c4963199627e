"""The official client drives everything it can: whole and streamed, sync and async, 1.x and 3.x."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from engine.errors import EngineDead, MantaError
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import FakeBackend

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture(scope="module")
def url(backend: FakeBackend) -> Iterator[str]:
    with serve(build_asgi(backend, ApiOptions(max_body_bytes=100_000))) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    """A field of the answer that the client's models do not accept."""
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, n=2, user="me", store=False
    )
    assert [c.index for c in answer.choices] == [0, 1]
    assert (answer.choices[0].message.content or "").startswith("the answer is ")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=MESSAGES,
        metadata={"a": "b"},
        service_tier="auto",
        extra_headers={"X-Request-Id": "mine"},
    )
    assert set(raw.headers["x-ignored-fields"].split(", ")) == {"metadata", "service_tier"}
    assert raw.headers["x-request-id"] == "mine"


def test_chat_stream(client: openai.OpenAI) -> None:
    """Chunks that the client cannot read, or that do not add up to the whole answer."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    text, usage, finish = "", None, None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert (text, finish, usage) == (whole.choices[0].message.content, "stop", whole.usage)


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    """The client's accumulator is stricter than its iterator: roles, indices, logprobs."""
    if not hasattr(client.chat.completions, "stream"):
        pytest.skip("this client keeps it under .beta")
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, temperature=0
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].logprobs and final.choices[0].logprobs.content
    tokens = [item.token for item in final.choices[0].logprobs.content]
    assert "".join(tokens) == final.choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    """Lists of prompts, ids, echo and legacy logprobs through the client's models."""
    fields: Any = {"model": "tiny", "temperature": 0}
    answer = client.completions.create(
        prompt=["one", "two"], echo=True, logprobs=2, max_tokens=5, seed=3, stop=["zz"], **fields
    )
    assert [c.text[:3] for c in answer.choices] == ["one", "two"]
    logprobs = answer.choices[1].logprobs
    assert logprobs and logprobs.tokens and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == answer.choices[1].text
    assert len(logprobs.text_offset) == len(logprobs.top_logprobs) == len(logprobs.tokens)
    ids = client.completions.create(prompt=[75, 76, 77], max_tokens=4, **fields)
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(
            prompt=[75, 76, 77], max_tokens=4, stream=True, **fields
        )
    )
    assert text == ids.choices[0].text and ids.choices[0].finish_reason == "length"


def test_extensions(client: openai.OpenAI, backend: FakeBackend) -> None:
    """What the client sends through extra_body reaches the sampler."""
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        logit_bias={"5": -100},
        max_completion_tokens=7,
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 3},
    )
    params = backend.requests[-1].params
    assert (params.top_k, params.min_p, params.ignore_eos, params.min_tokens) == (5, 0.1, True, 3)
    assert (params.logit_bias, params.max_tokens) == ({5: -100}, 7)


def test_models(client: openai.OpenAI) -> None:
    """The list and one."""
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, backend: FakeBackend) -> None:
    """An error body that the client cannot read leaves its user with a bare status."""
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert bad.value.code == "invalid_value" and bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as tools:
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])
    assert tools.value.code == "not_supported"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="a" * 200_000)
    assert large.value.status_code == 413 and large.value.code == "body_too_large"
    backend.errors = {2: EngineDead("the engine is gone")}
    try:
        with pytest.raises(openai.APIError) as late:
            for _ in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                pass
        assert late.value.code == "engine_dead"
    finally:
        backend.errors = {}


def test_what_came_too_late_is_not_done_again(url: str, backend: FakeBackend) -> None:
    """The client tries every 408 again unless it is told not to: a request that had no time left
    was computed three times."""
    before = len(backend.requests)
    backend.errors = {2: MantaError("the request's deadline has passed", code="deadline_exceeded")}
    try:
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=2, timeout=20) as client,
            pytest.raises(openai.APIStatusError) as late,
        ):
            client.chat.completions.create(model="tiny", messages=MESSAGES)
    finally:
        backend.errors = {}
    assert (late.value.status_code, late.value.code) == (408, "deadline_exceeded")
    assert len(backend.requests) == before + 1


def test_leaving_a_stream(client: openai.OpenAI, backend: FakeBackend) -> None:
    """A `break` in the caller's loop must free the request, not wait for its end."""
    backend.pause = 0.01
    try:
        fields: Any = {"model": "tiny", "messages": MESSAGES, "stream": True}
        with client.chat.completions.create(
            **fields, max_tokens=200, extra_body={"ignore_eos": True}
        ) as stream:
            for _ in stream:
                break
        began = time.monotonic()
        while backend.live:
            assert time.monotonic() - began < 2
            time.sleep(0.002)
        assert time.monotonic() - began < 0.3
    finally:
        backend.pause = 0.0


def test_async(url: str) -> None:
    """Many at once through the async client: each its own answer."""

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(word: str) -> str:
                text = ""
                fields: Any = {"messages": [{"role": "user", "content": word}], "temperature": 0}
                async for chunk in await client.chat.completions.create(
                    model="tiny", stream=True, **fields
                ):
                    text += chunk.choices[0].delta.content or ""
                whole = await client.chat.completions.create(model="tiny", **fields)
                assert whole.choices[0].message.content == text
                return text

            return await asyncio.gather(*(one(f"word {i % 4}") for i in range(16)))

    assert len(set(asyncio.run(work()))) == 4


def test_keys(backend: FakeBackend) -> None:
    """api_key of the client against the digests of the server."""
    keys = frozenset({hashlib.sha256(b"secret").digest()})
    with serve(build_asgi(backend, ApiOptions(api_keys=keys))) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            assert client.models.retrieve("tiny").id == "tiny"
        with (
            openai.OpenAI(base_url=url, api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as error,
        ):
            client.models.list()
        assert error.value.code == "invalid_api_key"
