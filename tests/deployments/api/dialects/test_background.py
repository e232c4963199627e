"""/v1/responses with `background`: polled, cancelled, streamed; and streams of kept answers."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from deployments.api.app import Api, build_asgi
from deployments.api.options import ApiOptions
from deployments.api.stream import background
from engine.errors import MantaError
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import CITY, PARIS, backend_with, code_of, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, FakeBackend

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 500}
LATER = {**BODY, "background": True}
TEXT = "<think>\nHm.\n</think>\n\nSo: " + "words " * 20
ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture
def served() -> Iterator[tuple[FakeBackend, Api, openai.OpenAI]]:
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = TEXT
    api = build_asgi(backend, ApiOptions(store_bytes=10**6))
    with serve(api) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            yield backend, api, client


def ended(client: openai.OpenAI, id: str) -> Any:
    until = time.monotonic() + 20
    while (response := client.responses.retrieve(id)).status not in ENDED:
        assert response.status in ("queued", "in_progress") and time.monotonic() < until
        time.sleep(0.02)
    return response


def idle(api: Api) -> None:
    """Wait until nothing is in flight, as an answer is sent before it is counted as ended."""
    until = time.monotonic() + 20
    while api.in_flight:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_an_answer_is_polled_for(served: tuple[FakeBackend, Api, openai.OpenAI]) -> None:
    """An answer that waits for its tokens, is lost when its client leaves, or is another one."""
    backend, api, client = served
    backend.first_pause = 60.0
    first = client.responses.create(**LATER)
    assert (first.status, first.background, first.output) == ("queued", True, [])
    with pytest.raises(openai.BadRequestError) as early:
        client.responses.create(**BODY, previous_response_id=first.id)
    assert early.value.code == "response_not_ended"
    client.responses.cancel(first.id)
    backend.first_pause = 0.0
    first = client.responses.create(**LATER)
    response = ended(client, first.id)
    plain = client.responses.create(**BODY)
    assert response.status == "completed" and response.output_text == plain.output_text != ""
    assert response.usage == plain.usage
    idle(api)
    assert client.responses.cancel(first.id) == response, "it has ended, and says so"
    follow = client.responses.create(**{**LATER, "previous_response_id": first.id})
    assert ended(client, follow.id).status == "completed"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{**LATER, "max_output_tokens": 10**8})
    short = client.responses.create(**{**LATER, "max_output_tokens": 3})
    assert ended(client, short.id).status == "incomplete"
    backend.errors = {2: MantaError("broken", code="engine_error")}
    failed = ended(client, client.responses.create(**LATER).id)
    assert failed.status == "failed" and failed.error


def test_an_answer_is_cancelled_and_deleted(
    served: tuple[FakeBackend, Api, openai.OpenAI],
) -> None:
    """Tokens that nobody reads; a second call that is an error; an answer that comes back."""
    backend, api, client = served
    backend.pause = 0.05
    run = client.responses.create(**LATER)
    time.sleep(0.3)
    first = client.responses.cancel(run.id)
    assert first.status == "cancelled"
    for _ in range(2):
        again = client.responses.cancel(run.id)
        assert (again.status, again.output) == ("cancelled", first.output)
    assert client.responses.retrieve(run.id).status == "cancelled"
    idle(api)
    assert not backend.live
    at_once = client.responses.create(**LATER)
    assert client.responses.cancel(at_once.id).status == "cancelled"
    gone = client.responses.create(**LATER)
    client.responses.delete(gone.id)
    time.sleep(0.1)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    idle(api)
    assert not backend.live
    foreground = client.responses.create(**{**BODY, "max_output_tokens": 2})
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(foreground.id)


def test_a_stream_goes_on_behind_any_event(served: tuple[FakeBackend, Api, openai.OpenAI]) -> None:
    """An event that is lost or told twice where a client comes back, live and afterwards."""
    backend, _, client = served
    backend.pause = 0.01
    stream = client.responses.create(**LATER, stream=True)
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.sequence_number == 9:
            break
    stream.close()
    assert [event.sequence_number for event in seen] == list(range(10))
    assert [event.type for event in seen[:3]] == [
        *("response.created", "response.queued", "response.in_progress")
    ]
    id = seen[0].response.id
    live = list(client.responses.retrieve(id, stream=True, starting_after=9))
    whole = [*seen, *live]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert whole[-1].type == "response.completed"
    assert whole[-1].response == client.responses.retrieve(id)
    assert list(client.responses.retrieve(id, stream=True)) == whole
    assert list(client.responses.retrieve(id, stream=True, starting_after=9)) == live
    assert not list(client.responses.retrieve(id, stream=True, starting_after=10_000))
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(id, stream=True, extra_query={"starting_after": "x"})


@pytest.mark.parametrize("text", [TEXT, written(("weather", PARIS)), ""])
def test_a_kept_answer_is_streamed(
    served: tuple[FakeBackend, Api, openai.OpenAI], text: str
) -> None:
    """`stream` of a query that is passed over without a word; events that add up to another
    answer."""
    backend, _, client = served
    backend.script = text
    stored = client.responses.create(**BODY, tools=[WEATHER])  # type: ignore[call-overload]
    events = list(client.responses.retrieve(stored.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response == stored
    streamed = "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert streamed == stored.output_text
    live = {event.type for event in client.responses.create(**BODY, tools=[WEATHER], stream=True)}  # type: ignore[call-overload]
    assert {event.type for event in events} == live
    half = list(client.responses.retrieve(stored.id, stream=True, starting_after=3))
    assert half == events[4:]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that nothing would keep; runs without a bound; another key's run."""

    async def through() -> None:
        backend = backend_with(TEMPLATES["hermes"])
        backend.first_pause = 0.2
        nowhere = Client(build_asgi(backend))
        off = await nowhere.post(PATH, LATER)
        assert code_of(off) == (400, "not_supported", "background")
        assert "http.store_bytes" in off.json()["error"]["message"]
        client = Client(build_asgi(backend, ApiOptions(store_bytes=10**6)))
        unkept = await client.post(PATH, {**LATER, "store": False})
        assert code_of(unkept) == (400, "conflicting_fields", "background")
        monkeypatch.setattr(background, "MAX_RUNS", 2)
        replies = [await client.post(PATH, LATER) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 503]
        assert replies[2].header("retry-after")
        await asyncio.sleep(0.5)
        assert (await client.post(PATH, LATER)).status == 200

    asyncio.run(through())


def test_compact_is_not_there() -> None:
    """405 for a route of others', which sends one looking for the method."""

    async def through() -> None:
        client = Client(build_asgi(FakeBackend(), ApiOptions(store_bytes=1000)))
        for method in ("POST", "GET"):
            path = "/v1/responses/compact"
            reply = await client.request(method, path, json.dumps(BODY).encode())
            assert code_of(reply) == (404, "not_found", None)
            assert path in reply.json()["error"]["message"]
        reply = await client.request("POST", "/v1/responses/resp_1", b"{}")
        assert reply.status == 405

    asyncio.run(through())
