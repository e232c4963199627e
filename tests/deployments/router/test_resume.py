"""Streams that go on at another router, with real channels and engines that count."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.client import AsyncClient
from deployments.replica import stream_memory
from deployments.replica.stream_memory import StreamMemory
from deployments.router.dispatcher import Dispatcher
from deployments.router.serve import handle_call
from engine.errors import Overloaded
from engine.messages import Delta, EngineRequest
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.api.generation.test_resume import ASKS, JSON, events, told
from tests.deployments.fake_adapters import make_folder, settings
from tests.deployments.fake_backend import FakeBackend, tiny_tokenizer
from tests.deployments.router.fleet import Fleet, until

SECRET = secrets.token_bytes(32)
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 40))


def front(router: Dispatcher) -> Client:
    return Client(build_asgi(router, ApiOptions(event_secret=SECRET)))


async def second(fleet: Fleet) -> Dispatcher:
    router = fleet.new_router()
    router.set_replicas(fleet.published())
    return router


async def cut(client: Client, body: dict[str, Any], count: int, router: Dispatcher) -> Reply:
    """Return what a client has received when its router dies, after `count` events.

    The router tells nobody, so only broken connections show its death.
    """
    reply, gone = Reply(), asyncio.Event()
    headers = ASKS
    payload = json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    task = asyncio.create_task(
        client.request("POST", path, payload, headers, hang_up=gone, reply=reply)
    )
    await until(lambda: len(events(reply)) >= count, 10)
    router.close()
    gone.set()
    await task
    return reply


BODIES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "choices": {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 2},
    "a completion": {**CHAT, "prompt": "hello there", "messages": None},
    "prompts": {**CHAT, "prompt": ["one", "two"], "n": 2, "messages": None},
    "an adapter": {**CHAT, "model": "a"},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("replicas", ["live", "were replaced"])
def test_a_stream_goes_on_at_another_router(kind: str, replicas: str, tmp_path: Any) -> None:
    """Bug: the answer ends with the router that had it. The replicas have the tokens, so they are
    not computed again; where the replicas went, too, they are, and are the same."""

    async def case() -> None:
        body = {name: value for name, value in BODIES[kind].items() if value is not None}
        adapter_settings = settings(tmp_path, paths={"a": str(make_folder(tmp_path / "a"))})
        options = "vocab_size=250,max_model_len=1024"
        async with Fleet(
            2, options=options, tokenizer=tiny_tokenizer(), loras=2, adapters=adapter_settings
        ) as fleet:
            whole = events(await front(fleet.dispatcher).post(path(body), body, headers=ASKS))
            expected = told([data for _, data in whole])
            for count in (3, 12, len(whole) // 2):
                first = await second(fleet)
                await until(
                    lambda first=first: len(first.state().replicas) == len(fleet.replica_servers)
                )
                reply = await cut(front(first), body, count, first)
                begun = [event for event in events(reply) if event[0]]
                assert len(begun) >= count
                if replicas != "live":
                    for name in list(fleet.replica_servers):
                        await fleet.replica_servers.pop(name).stop()
                        await fleet.add_replica(f"{name}x")
                    fleet.publish()
                for engine in fleet.engines.values():
                    engine.requests.clear()
                # A router that has just begun: its channels are not up yet.
                last = begun[-1][0]
                headers = (JSON, (b"last-event-id", last))
                other = await second(fleet)
                rest = await front(other).post(path(body), body, headers=headers)
                assert rest.status == 200, rest.body
                parts = [data for _, data in [*begun, *events(rest)]]
                got = told(parts)
                assert len(got["heads"]) == 1
                assert {**got, "heads": 0} == {**expected, "heads": 0}
                asked = [
                    request for engine in fleet.engines.values() for request in engine.requests
                ]
                given_ = [len(request.token_ids) - request.num_prompt_tokens for request in asked]
                assert all(given_) if replicas == "live" and count > 3 else asked
                assert other.held() == {"requests": 0, "waiting": 0, "choices": 0}
                other.close()

    run(case())


def path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def test_replicas_keep_what_is_asked_for_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: tokens of every request stay for ever, or those of a stream that has just ended are
    gone."""

    def request(id: int, count: int = 0) -> EngineRequest:
        return EngineRequest(id, [5, 5, *range(count)], 2, SamplingParams(), seed=1)

    memory = StreamMemory()
    memory.begin(request(1, 3), "s")
    memory.take_deltas([Delta(1, [7]), Delta(2, [9])], 0.0)
    assert memory.find(["s", "other"], 0.0)[0].token_ids == [0, 1, 2, 7]
    memory.take_deltas([Delta(1, [8], "stop", stop_token=8)], 1.0)
    (record,) = memory.find(["s"], 1.0)
    assert (record.token_ids[-1], record.finish, record.stop_token) == (8, "stop", 8)
    memory.end(1, 1.0)
    memory.begin(request(3), "s")
    assert len(memory.find(["s"], 2.0)) == 2
    memory.end(3, 2.0)
    assert memory.find(["s"], 1.0 + stream_memory.KEEP_SECONDS)[0].token_ids == []
    assert not memory.find(["s"], 2.0 + stream_memory.KEEP_SECONDS)
    assert not memory._streams and not memory._ended and memory._tokens == 0
    monkeypatch.setattr(stream_memory, "KEEP_TOKENS", 1000)
    for number in range(50):
        memory.begin(request(number, 200), f"s{number}")
        memory.end(number, 0.0)
    assert len(memory._ended) == 3 == len(memory._streams) and memory.find(["s49"], 0.0)


class Handle:
    """A fake of Serve's handle, whose routers die after some chunks of each call.

    limits: number of chunks of each call in turn.
    """

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.backend = FakeBackend()
        self.app = build_asgi(self.backend)
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> "Handle":
        self.calls.append(arguments)
        return self

    def cancel(self) -> None:
        """Do nothing, as there is nothing to stop."""

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        limit = self.limits.pop(0) if self.limits else 1 << 20
        async for item in handle_call.stream(self.app, *self.calls[-1]):
            if not limit:
                raise RayActorError
            limit -= 1
            yield item

    def __await__(self) -> Any:
        async def answer() -> dict[str, Any]:
            if self.limits and not self.limits.pop(0):
                raise RayActorError
            return await handle_call.call(self.app, *self.calls[-1])

        return answer().__await__()


def test_the_python_client_goes_on_when_a_router_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: EngineDead `router_lost` in the middle of an answer whose tokens are all known."""

    async def case() -> None:
        handle = Handle([])
        client = AsyncClient("manta", "tiny")
        monkeypatch.setattr(client, "_method", lambda name, stream=False: handle)
        fields: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "n": 2}

        async def read() -> list[tuple[int, str, str | None]]:
            streams = [part async for part in client.stream("hello", **fields)]
            assert not any("event_id" in part.raw for part in streams)
            items = [(part.index, part.text, part.finish_reason) for part in streams]
            return sorted(items, key=lambda one: one[0])  # each choice's in its own order

        expected = await read()
        whole = await client.generate("hello", **fields)
        for limits in ([0], [3, 0, 5], [len(expected) - 1]):
            handle.limits, handle.calls = list(limits), []
            assert await read() == expected
            assert len(handle.calls) == len(limits) + 1
        handle.limits = [0, 0]
        again = await client.generate("hello", **fields)
        assert [c.text for c in again.choices] == [c.text for c in whole.choices]
        # What the service refuses is not tried again before anything has come.
        handle.backend.refuse = Overloaded("full", retry_after=1)
        handle.calls = []
        with pytest.raises(Overloaded):
            await read()
        assert len(handle.calls) == 1

    run(case())
