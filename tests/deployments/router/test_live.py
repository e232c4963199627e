"""GET /v1/live: a router's view of itself."""

import asyncio
import hashlib
import time
from typing import Any

import msgspec
import pytest

from deployments.api.app import build_asgi
from deployments.api.caller import KeyRule
from deployments.api.options import ApiOptions
from deployments.router.live_view import ApplicationView
from deployments.router.models.models_backend import ModelsBackend
from engine.errors import Overloaded
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.router.fleet import Fleet, read, until

USER, ADMIN = (hashlib.sha256(key).digest() for key in (b"user", b"admin"))
MOST = 0.01  # of a second a look: 1 % of a router at a look a second


async def test_a_look_tells_what_runs_and_why_it_is_there() -> None:
    """Bug: the view shows another batch than the replicas have, or a choice without its reason."""
    async with Fleet(2, rows=4) as fleet:
        running = [fleet.generate(max_tokens=400) for _ in range(3)]
        await until(lambda: all(inflight.trace.first for inflight in running))
        view = fleet.dispatcher.live()
        assert view["in_flight"] == 3 and view["queued"] == 0 and not view["queues"]
        assert {inflight["name"] for inflight in view["replicas"]} == {"r0", "r1"}
        assert sum(inflight["ours"] for inflight in view["replicas"]) == 3
        assert all(
            inflight["available"] and inflight["cost"]["wait_ms"] >= 0
            for inflight in view["replicas"]
        )
        for replica in fleet.dispatcher.replicas.values():
            for _ in range(4):
                replica.state.steps.observe(50, 50, 0, 50 * 0.012)
        steps = [replica["steps"] for replica in fleet.dispatcher.live()["replicas"]]
        assert [sum(cost.values()) for cost in steps] == pytest.approx([12.0, 12.0], rel=0.2)
        for inflight in view["requests"]:
            assert inflight["state"] == "running" and inflight["output_tokens"] > 0
            assert inflight["replicas"] in (["r0"], ["r1"]) and inflight["first_token_ms"] > 0
        for inflight in view["choices"]:
            assert inflight["replica"] in ("r0", "r1") and inflight["expected_ms"] is not None
            assert inflight["reason"] and inflight["first_token_ms"] > 0
        ages = [inflight["ago_s"] for inflight in view["choices"]]
        assert len(ages) == 3 and ages == sorted(ages)
        assert [inflight["kind"] for inflight in view["events"]] == ["joined", "joined"]
        msgspec.json.encode(view)  # neither inf nor a number of numpy's
        for inflight in running:
            inflight.abort()


async def test_a_look_tells_what_an_idle_replica_has_room_for() -> None:
    """Bug: "0 of ? rows" and "KV blocks 0 of 0" until the first request."""
    async with Fleet(1, rows=4) as fleet:
        (replica,) = fleet.dispatcher.live()["replicas"]
        stats = replica["stats"]
        assert stats["rows"] == 4 and 0 < stats["total_blocks"] == stats["free_blocks"]
        assert not stats["running"] and not stats["step"] and replica["available"]


async def test_a_look_tells_what_a_death_did() -> None:
    """Bug: a replica was killed, its requests went on elsewhere, and nobody could see it."""
    async with Fleet(2) as fleet:
        inflight = fleet.generate(max_tokens=200)
        await until(lambda: inflight.trace.first > 0)
        dead = inflight.choices[0].place
        fleet.engines[dead].die()
        assert len((await read(inflight))[0]) == 200
        view = fleet.dispatcher.live()
        assert view["in_flight"] == 0 and not view["requests"]
        items = {(event["kind"], event["replica"], event["request"]) for event in view["events"]}
        assert ("lost", dead, None) in items and ("moved", dead, "q") in items
        after, before = view["choices"]
        assert before["replica"] == dead != after["replica"] and after["emitted_tokens"] > 0
        assert after["first_token_ms"] is None, "its first token came from the other one"


async def test_queues_by_key() -> None:
    """Bug: a key that fills the queue cannot be told from one that waits behind it."""
    async with Fleet(1, rows=8) as fleet:
        running = [fleet.generate(max_tokens=30) for _ in range(8)]
        await until(lambda: all(inflight.trace.first for inflight in running))
        for _ in range(20):  # until the first that is not taken
            try:
                running.append(fleet.generate(max_tokens=30))
            except Overloaded:
                break
        view = fleet.dispatcher.live()
        (queue,) = view["queues"]
        assert queue["key"] == "" and queue["requests"] == view["queued"] > 0
        assert queue["tokens"] == view["queued_tokens"] > 0
        for inflight in running:
            inflight.abort()
        assert not fleet.dispatcher.live()["queues"]


async def test_a_look_is_bounded() -> None:
    """Bug: a look walks over all that is in flight and holds up the streams for it."""
    async with Fleet(4, rows=2000) as fleet:
        for engine in fleet.engines.values():
            engine.pace = 60.0  # nothing moves meanwhile
        running = [fleet.generate(max_tokens=50) for _ in range(1500)]
        took = []
        for _ in range(5):
            began = time.process_time()
            body = msgspec.json.encode(fleet.dispatcher.live())
            took.append(time.process_time() - began)
        assert min(took) <= MOST and len(body) < 150_000
        for inflight in running:
            inflight.abort()


async def test_all_routers_are_asked_once() -> None:
    """Bug: ten people who look ask every router ten times; a router that is asked twice is shown
    twice."""
    asked = 0

    async def others() -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return [{"router": "b", "models": []}, {"router": "a", "models": ["old"]}]

    view = ApplicationView(lambda: {"router": "a", "models": []}, others)
    results = await asyncio.gather(*(view.routers() for _ in range(10)))
    assert asked == 1
    assert all(result == [{"router": r, "models": []} for r in "ab"] for result in results)


async def test_who_may_look() -> None:
    """Bug: a key sees the requests of all others; the names of keys are told to any."""

    async def look() -> list[dict[str, Any]]:
        return [{"router": "a", "models": []}]

    def client(**more: Any) -> Client:
        return Client(build_asgi(FakeBackend(), ApiOptions(page=True, live=look, **more)))

    async def status(client: Client, key: bytes = b"") -> int:
        headers = [(b"authorization", b"Bearer " + key)] if key else []
        return (await client.request("GET", "/v1/live", headers=headers)).status

    assert await status(client()) == 200
    keyed = client(
        api_keys=frozenset({USER}),
        admin_keys=frozenset({ADMIN}),
        rules={USER: KeyRule("team")},
    )
    assert await status(keyed) == 401 and await status(keyed, b"user") == 403
    assert await status(keyed, b"admin") == 200
    reply = await keyed.request("GET", "/v1/live", headers=[(b"x-api-key", b"admin")])
    assert reply.json()["key_names"] == {USER.hex()[:32]: "team"}
    assert await status(client(api_keys=frozenset({USER})), b"user") == 403
    off = Client(build_asgi(FakeBackend(), ApiOptions(live=look)))
    assert await status(off) == 404


async def test_a_front_tells_of_its_models() -> None:
    """Bug: of two models one is missing, or their replicas are mixed."""
    async with Fleet(1) as fleet:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0.0)
        view = front.live()
        assert view["router"] == "router"
        assert [(model["model"], len(model["replicas"])) for model in view["models"]] == [("m", 1)]
