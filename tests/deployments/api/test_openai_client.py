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
from deployments.openai_client import async_http_client, http_client
from engine.errors import (
    AdapterError,
    EngineDead,
    MantaError,
    Overloaded,
    RequestFailed,
    context_too_long,
)
from tests.deployments.api.cutter import cutter
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


CUT: tuple[dict[str, Any], ...] = (
    {"messages": MESSAGES, "n": 2, "temperature": 1, "seed": 3, "stream_options": {}},
    {"messages": MESSAGES, "temperature": 1, "seed": 4, "logprobs": True},
    {"prompt": ["one", "two"], "temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 9},
)


def put_together(chunks: list[Any]) -> dict[int, list[Any]]:
    """Return the text, the number of scored tokens and the finish reason of each choice of a
    stream."""
    out: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        of = out.setdefault(choice.index, ["", 0, None])
        chat = hasattr(choice, "delta")
        of[0] += (choice.delta.content or "") if chat else choice.text
        if choice.logprobs:
            of[1] += len(choice.logprobs.content if chat else choice.logprobs.tokens)
        assert of[2] is None
        of[2] = choice.finish_reason
    return out


@pytest.mark.parametrize("fields", CUT, ids=["choices", "logprobs", "prompts"])
def test_a_stream_that_is_cut_goes_on(fields: dict[str, Any], backend: FakeBackend) -> None:
    """Bug: RemoteProtocolError in the middle of an answer when a router or HAProxy dies. Every
    connection is cut after some bytes, the one that goes on too, and some are refused."""
    body: Any = {"model": "tiny", "stream": True, **fields}

    def ask(client: openai.OpenAI) -> dict[int, list[Any]]:
        resource: Any = client.chat if "messages" in fields else client
        return put_together(list(resource.completions.create(**body)))

    async def ask_async(options: Any) -> dict[int, list[Any]]:
        async with openai.AsyncOpenAI(**options, http_client=async_http_client()) as client:
            resource: Any = client.chat if "messages" in fields else client
            return put_together(
                [piece async for piece in await resource.completions.create(**body)]
            )

    with serve(build_asgi(backend)) as port, cutter(port) as edge:
        # Each request has a connection of its own.
        options: Any = {
            "base_url": f"http://127.0.0.1:{edge.port}/v1",
            "api_key": "none",
            "max_retries": 0,
            "default_headers": {"Connection": "close"},
        }
        plain = openai.OpenAI(**options)
        expected = ask(plain)
        edge.limits = [1500]
        with pytest.raises(Exception, match=r"peer|closed|reset|incomplete|Connection"):
            ask(plain)
        client = openai.OpenAI(**options, http_client=http_client())
        for limits in ([700], [1500, 0, 1000], [2000, 260, 1500]):
            edge.limits, before = list(limits), edge.connections
            assert ask(client) == expected, limits
            assert edge.connections == before + 1 + len(limits)
            edge.limits = list(limits)
            assert asyncio.run(ask_async(options)) == expected, limits
            assert edge.connections == before + 2 * (1 + len(limits))
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("none")


def test_an_edge_that_is_away_is_waited_for(backend: FakeBackend) -> None:
    """Bug: while HAProxy comes back it refuses connections, and then says 404 until it knows the
    routers: 362 of 449 requests of a client that asked on were lost."""
    lines = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\nconnection: close\r\n"
    body = b'{"error":{"message":"nothing is served at this path","code":"not_found"}}'
    answer = lines + b"content-length: %d\r\n\r\n" % len(body) + body
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}

    def ask_model(client: Any) -> str:
        return client.chat.completions.create(**fields).choices[0].message.content or ""

    with serve(build_asgi(backend)) as port, cutter(port) as edge:
        options: Any = {
            "base_url": f"http://127.0.0.1:{edge.port}/v1",
            "api_key": "none",
            "max_retries": 0,
            "default_headers": {"Connection": "close"},
        }
        client = openai.OpenAI(**options, http_client=http_client())
        edge.says = [answer]
        with pytest.raises(openai.NotFoundError):  # who has never served is not waited for
            ask_model(client)
        expected = ask_model(client)
        edge.limits, edge.says = [0, 0], [answer, answer]
        assert ask_model(client) == expected and not edge.says and not edge.limits
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(**{**fields, "model": "none"})

        async def case() -> None:
            async with openai.AsyncOpenAI(**options, http_client=async_http_client()) as client:
                await client.chat.completions.create(**fields)
                edge.limits, edge.says = [0], [answer]
                said = await client.chat.completions.create(**fields)
                assert said.choices[0].message.content == expected and not edge.says

        asyncio.run(case())


def test_a_stream_that_cannot_go_on_says_so(backend: FakeBackend) -> None:
    """Bug: attempts without an end, or a short answer that looks whole."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "stream": True}
    with serve(build_asgi(backend)) as port, cutter(port) as edge:
        url = f"http://127.0.0.1:{edge.port}/v1"
        client = openai.OpenAI(
            base_url=url, api_key="none", http_client=http_client(patience=1.0), max_retries=0
        )
        edge.limits = [1500] + [0] * 500
        began = time.monotonic()
        with pytest.raises(Exception, match=r"peer|closed|reset|incomplete|Connection|disconnect"):
            list(client.chat.completions.create(**fields))
        assert 0.9 < time.monotonic() - began < 5
        # The server's own words, once it has any: the secret is another one after a new start.
        edge.limits = [1500]
        with serve(build_asgi(backend)) as other:
            stream = client.chat.completions.create(**fields)
            edge.send_to(other)
            with pytest.raises(openai.APIError, match="this is no id of a stream"):
                list(stream)


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
    assert tokens[-1] == "<|im_end|>"  # listed as a token, and no part of the text
    assert "".join(tokens[:-1]) == final.choices[0].message.content


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
        tool: Any = {"type": "function", "function": {"name": "a name", "parameters": {}}}
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[tool])
    assert tools.value.param == "tools[0].function.name"
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


@pytest.mark.parametrize(
    ("error", "status", "kind", "exception", "tries"),
    [
        (context_too_long(9, 12), 400, "invalid_request_error", openai.BadRequestError, 1),
        (
            AdapterError("add it again", code="adapter_changed"),
            409,
            "invalid_request_error",
            openai.ConflictError,
            1,
        ),
        (
            MantaError("late", code="deadline_exceeded"),
            408,
            "timeout_error",
            openai.APIStatusError,
            1,
        ),
        (MantaError("slow", code="slow_reader"), 408, "timeout_error", openai.APIStatusError, 1),
        (
            RequestFailed("not finite", code="numerical_error"),
            500,
            "server_error",
            openai.InternalServerError,
            1,
        ),
        (Overloaded("full"), 503, "overloaded_error", openai.InternalServerError, 3),
        (
            Overloaded("none", code="no_replica"),
            503,
            "overloaded_error",
            openai.InternalServerError,
            3,
        ),
        (
            Overloaded("your turn", code="rate_limit_exceeded"),
            429,
            "rate_limit_error",
            openai.RateLimitError,
            3,
        ),
        (EngineDead("gone"), 503, "server_error", openai.InternalServerError, 3),
    ],
)
def test_what_is_tried_again_may_be_better_then(
    url: str,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    error: MantaError,
    status: int,
    kind: str,
    exception: type[openai.APIStatusError],
    tries: int,
) -> None:
    """An adapter that has to be added again was asked for three times, since clients repeat every
    409; and a timeout with the type of a faulty request is a BadRequestError to LiteLLM, which
    then does not fall back to another model."""
    asked = []
    monkeypatch.setattr(backend, "refuse", error)
    monkeypatch.setattr(backend, "admit", lambda key, *_: asked.append(key))
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=2, timeout=20)
    monkeypatch.setattr(client, "_calculate_retry_timeout", lambda *_: 0.0)
    with client, pytest.raises(exception) as raised:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert (raised.value.status_code, raised.value.type) == (status, kind)
    assert raised.value.code == error.code and len(asked) == tries


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

            async def stream_and_compare(word: str) -> str:
                text = ""
                fields: Any = {"messages": [{"role": "user", "content": word}], "temperature": 0}
                async for chunk in await client.chat.completions.create(
                    model="tiny", stream=True, **fields
                ):
                    text += chunk.choices[0].delta.content or ""
                whole = await client.chat.completions.create(model="tiny", **fields)
                assert whole.choices[0].message.content == text
                return text

            return await asyncio.gather(*(stream_and_compare(f"word {i % 4}") for i in range(16)))

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
