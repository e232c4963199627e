"""GET /v1/requests/{id}: the answer of its router or of any other one, to its owner alone."""

import asyncio
import hashlib
import json
import logging
import sys
from typing import Any, get_args

import pytest

from deployments.adapters.record_store import AdapterRecord
from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.backend import GenerationRequest
from deployments.router.request_trace import RequestTrace, RequestTraces
from deployments.routing.decision import Reason, RoutingDecision
from engine.messages import Delta
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.router.fleet import Fleet, read, until

KEYS = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two", b"root"))
ADMIN = frozenset({hashlib.sha256(b"root").digest()})


def trace(id: str = "a", owner: str = "", arrived: float = 100.0, **more: Any) -> RequestTrace:
    request = GenerationRequest(
        id, "m", [1] * 12, SamplingParams(n=2, max_tokens=8), seed=1, owner=owner, **more
    )
    return RequestTrace(request, arrived)


def test_a_request_is_told_step_by_step() -> None:
    """Times that do not add up, or are given as zero before they are known."""
    request_trace = trace(adapter=AdapterRecord(name="legal", path="/legal", revision="abc"))
    body = request_trace.to_json("router-1", 100.5)
    assert body["state"] == "waiting" and body["timing_ms"]["queue"] == 500.0
    assert body["timing_ms"]["first_token"] is body["timing_ms"]["decode"] is None
    assert body["adapter"] == {"name": "legal", "revision": "abc", "loaded": False, "load_ms": None}
    request_trace.sent(RoutingDecision("gpu/1", "adapter", 0.25, cached=4), 101.0, 0)
    request_trace.begun(Delta(1, [7], cached=4, queued_us=200_000, adapter_us=150_000), 101.5)
    request_trace.begun(Delta(2, [7], cached=8, queued_us=100_000, adapter_us=0), 101.6)
    request_trace.moves("gpu/1", "lost: gone", 102.0)
    request_trace.sent(RoutingDecision("cpu/2", "only", 1.0), 102.5, 5)
    for accepted in (3, 1, 3):
        request_trace.drafted(accepted)
    request_trace.finish += ["stop", "length"]
    request_trace.ends(13, "", 104.0)
    body = request_trace.to_json("router-1", 999.0)
    assert body["state"] == "finished" and body["output_tokens"] == 13
    assert body["accepted_runs"] == [{"tokens": 1, "steps": 1}, {"tokens": 3, "steps": 2}]
    assert body["timing_ms"] == {
        "queue": 1000.0,
        "engine_queue": 200.0,
        "prefill": 300.0,
        "first_token": 1500.0,
        "decode": 2500.0,
        "total": 4000.0,
    }
    assert body["adapter"]["load_ms"] == 150.0 and body["adapter"]["loaded"]
    assert [(r["replica"], r["emitted_tokens"]) for r in body["route"]] == [
        ("gpu/1", 0),
        ("cpu/2", 5),
    ]
    assert body["route"][0]["expected_ms"] == 250.0 and body["route"][0]["why"]
    assert body["moves"] == [{"at_ms": 2000.0, "from": "gpu/1", "why": "lost: gone"}]
    json.dumps(body)


def test_each_reason_of_a_decision_has_a_text() -> None:
    """Bug: a request that pulls its prefix cannot be looked at, for want of a text."""
    for reason in get_args(Reason):
        request_trace = trace()
        request_trace.sent(RoutingDecision("gpu/1", reason, 0.25), 101.0, 0)
        (decision,) = request_trace.to_json("router-1", 102.0)["route"]
        assert decision["reason"] == reason and len(decision["why"]) > 10


def test_memory_is_bounded() -> None:
    """Every request that was ever served; a request that moves for ever; prompts kept whole."""
    traces = RequestTraces(kept=3)
    for number in range(10):
        traces.add(trace(str(number), arrived=number))
    assert [len(list(traces.find(str(n), None))) for n in range(10)] == [0] * 7 + [1] * 3
    request_trace = trace()
    for number in range(1000):
        request_trace.sent(RoutingDecision("r", "load", 0.1), number, 0)
        request_trace.moves("r", "lost", number)
    body = request_trace.to_json("", 1.0)
    assert len(body["route"]) == len(body["moves"]) == 32
    held = [getattr(request_trace, name) for name in RequestTrace.__slots__]
    assert sum(map(sys.getsizeof, held)) < 4096


def test_an_id_means_nothing_without_its_key() -> None:
    """The caller chooses the id: somebody else's request of the same one."""
    traces = RequestTraces()
    traces.add(trace("x", owner="k1", arrived=1.0))
    traces.add(trace("x", owner="k2", arrived=2.0))
    running = [trace("x", owner="k1", arrived=0.5)]
    assert [s.arrived for s in traces.find("x", "k1", running)] == [0.5, 1.0]
    assert [s.arrived for s in traces.find("x", "k2", running)] == [2.0]
    assert not list(traces.find("x", "", running))
    assert len(list(traces.find("x", None, running))) == 3


def test_the_router_keeps_the_story_of_each_request() -> None:
    """A trace that is written only when all goes well."""

    async def case() -> None:
        async with Fleet(2) as fleet:
            inflight = fleet.generate(n=2)
            other = fleet.generate(max_tokens=2000)
            await until(lambda: bool(inflight.choices[1].emitted))
            explain = fleet.dispatcher.requests.explain
            first, _ = explain("q", "")
            assert first["state"] == "running"
            assert first["output_tokens"] == inflight.output_tokens > 0
            lost = first["route"][0]["replica"]
            fleet.engines[lost].die()
            await read(inflight)
            other.abort()
            first, second = explain("q", None)
            assert first["state"] == second["state"] == "finished"
            assert first["finish_reasons"] == ["length"] * 2 and first["output_tokens"] == 100
            assert second["finish_reasons"] == ["abort"]
            assert {move["from"] for move in first["moves"]} == {lost}
            assert {place["replica"] for place in first["route"]} == {"r0", "r1"}
            assert first["route"][-1]["emitted_tokens"] > 0
            timing = first["timing_ms"]
            parts = timing["queue"] + (timing["engine_queue"] or 0.0) + timing["prefill"]
            assert parts == pytest.approx(timing["first_token"], abs=0.01)
            assert first["router"] == fleet.dispatcher.name
            assert not explain("other", None)

    asyncio.run(case())


def test_lines_of_a_request_carry_its_id(caplog: pytest.LogCaptureFixture) -> None:
    """A stream that moved and nobody can say which."""

    async def case() -> None:
        async with Fleet(2) as fleet:
            inflight = fleet.generate()
            await until(lambda: bool(inflight.choices[0].emitted))
            fleet.engines[inflight.choices[0].place].die()
            await read(inflight)

    with caplog.at_level(logging.DEBUG, "manta"):
        asyncio.run(case())
    about = [(r.name, r.message) for r in caplog.records if getattr(r, "request_id", "") == "q"]
    assert {name for name, _ in about} == {"manta.router", "manta.replica"}
    moves = [text for _, text in about if text.startswith("moves from")]
    assert len(moves) == 1
    assert sum("finished:" in text and "replicas=" in text for _, text in about) == 1


# -- over HTTP


class Routers:
    """A stand-in for all routers, which records the questions and answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    async def explain(self, id: str, owner: str | None) -> list[dict[str, Any]]:
        self.asked.append((id, owner))
        return [{"state": "finished"}] if id == "known" else []


def ask(path: str, options: ApiOptions, key: bytes | None = None, method: str = "GET") -> Reply:
    headers = [(b"authorization", b"bearer  " + key)] if key is not None else []
    app = build_asgi(FakeBackend(), options)
    return asyncio.run(Client(app).request(method, path, headers=headers))


def test_the_route_answers_and_refuses_like_the_others() -> None:
    """An id that is no id, in a lookup or in an error; a route without a key."""
    routers = Routers()
    options = ApiOptions(explain=routers.explain)
    reply = ask("/v1/requests/known", options)
    assert reply.status == 200
    assert reply.json() == {"id": "known", "object": "request", "parts": [{"state": "finished"}]}
    assert routers.asked == [("known", "")]
    for path in ("/v1/requests/none", "/v1/requests/a%2fb", "/v1/requests/" + "x" * 129):
        reply = ask(path, options)
        assert reply.status == 404 and reply.json()["error"]["code"] == "request_not_found"
    assert ask("/v1/requests/", options).status == 404
    assert ask("/v1/requests/known", options, method="POST").status == 405
    assert ask("/v1/requests/known", ApiOptions()).status == 404
    guarded = ApiOptions(explain=routers.explain, api_keys=KEYS, admin_keys=ADMIN)
    assert ask("/v1/requests/known", guarded).status == 401
    assert ask("/v1/requests/known", guarded, b"three").status == 401


def test_only_the_same_key_may_ask() -> None:
    """Request ids come from clients and stand in logs; what they stand for is the key's."""
    routers = Routers()
    options = ApiOptions(explain=routers.explain, api_keys=KEYS, admin_keys=ADMIN)
    for key in (b"one", b"two", b"root"):
        ask("/v1/requests/known", options, key)
    owners = [owner for _, owner in routers.asked]
    assert len(set(owners)) == 3 and owners[2] is None
    backend = FakeBackend()
    client = Client(build_asgi(backend, options))
    headers = ((b"content-type", b"application/json"), (b"authorization", b"Bearer one"))
    body = json.dumps({**COMPLETION, "user": "somebody"}).encode()
    asyncio.run(client.request("POST", "/v1/completions", body, headers))
    assert backend.requests[0].owner == owners[0]
