"""KV blocks that move between replicas: when a router names a source, and that texts stay equal."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deployments.routing.fleet import Fleet as RoutingFleet
from deployments.routing.route import route
from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.messages import Answer, EngineStats, KVSource, Ready
from tests.deployments.router.fleet import Fleet, LocalEngine, read, until
from tests.deployments.router.test_routing import FAST, choose, prompt, see, sent, stats
from tests.engine.test_host_kv import PLAIN
from tests.engine.test_memory import config_of

LONG = prompt(1, 40)  # 2,570 tokens
LONGER = {**PLAIN, "max_position_embeddings": 1024}
PROMPT = [(7 * at) % 190 for at in range(700)]


def moving(**replicas: EngineStats) -> RoutingFleet:
    """Return a fleet of replicas with 10 kB of KV per token.

    At 1 GB/s a token moves in 10 us, while computing one takes 30 us.
    """
    fleet = RoutingFleet()
    for name, figures in replicas.items():
        state = fleet.add_replica(name, "gpu", step_tokens=512, kv_token_bytes=10_000)
        state.steps.cost = FAST
        state.opened(1, 0.0)
        see(fleet, name, figures)
    return fleet


def test_source_is_named_where_it_pays() -> None:
    """Bugs: a prefix is computed while another replica has it; it is moved though its holder is
    idle, or though computing is faster."""
    fleet = moving(a=stats(), b=stats())
    decision = route(LONG, fleet, Random(0), 0.0, among=["a"])
    assert decision is not None and decision.source == ""
    sent(fleet, decision, LONG)
    see(fleet, "a", stats(), taken=range(1000))
    assert choose(fleet, LONG) == {"a": 100}, "its holder is idle"
    see(fleet, "a", stats(waiting_tokens=100_000))
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None
    assert (decision.replica, decision.source, decision.reason) == ("b", "a", "move")
    assert decision.cached == 40 * 64
    # a slow network
    see(fleet, "b", stats(moves=9, moved_bytes=10_000_000, move_seconds=10.0))
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None and (decision.replica, decision.source) == ("b", "")
    # a network that fails
    see(fleet, "b", stats(moves=90, failed_moves=90))
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None and decision.source == ""


def test_tiers_are_weighed() -> None:
    """Bugs: a prefix in host memory counts as much as one on the device, or nothing; a slow host
    tier counts as a fast one; a block is to move that is in host memory alone."""
    fleet = moving(a=stats(), b=stats())
    for name in ("a", "b"):
        decision = route(LONG, fleet, Random(0), 0.0, among=[name])
        assert decision is not None
        sent(fleet, decision, LONG)
        see(fleet, name, stats(), taken=range(10_000))
    assert min(choose(fleet, LONG).values()) > 20, "both have it on the device"
    fleet.lower_prefix(fleet.replicas["a"], LONG.prefix_hashes[10:])
    assert choose(fleet, LONG) == {"b": 100}
    fleet.remove_prefix(fleet.replicas["b"], LONG.prefix_hashes)
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None
    assert (decision.replica, decision.cached, decision.source) == ("a", 2560, ""), "a host hit"
    busy = stats(waiting_tokens=100_000)
    see(fleet, "a", busy)
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None
    assert (decision.replica, decision.source, decision.cached) == ("b", "a", 640), "and computes"
    before = decision.seconds
    slow = stats(host_kv_loaded_tokens=100_000, host_kv_wait_seconds=10.0)
    see(fleet, "a", stats())
    fast = route(LONG, fleet, Random(0), 0.0, among=["a"])
    see(fleet, "a", slow)
    late = route(LONG, fleet, Random(0), 0.0, among=["a"])
    assert fast is not None and late is not None and fast.seconds < late.seconds < before + 1
    sent(fleet, late, LONG)
    assert not fleet.index.lowered(LONG.prefix_hashes), "it is loaded"


def test_draining_replica_is_a_source() -> None:
    """Bug: what a replica that leaves has in its cache is computed again."""
    fleet = moving(a=stats(), b=stats(), c=stats())
    decision = route(LONG, fleet, Random(0), 0.0, among=["a"])
    assert decision is not None
    sent(fleet, decision, LONG)
    see(fleet, "a", stats(draining=True))
    decision = route(LONG, fleet, Random(0), 0.0)
    assert decision is not None and decision.replica != "a" and decision.source == "a"


class MovingEngine(LocalEngine):
    """A LocalEngine with a random model, whose KV blocks move."""

    folder = Path()

    async def start(self, config: EngineConfig) -> Ready:
        fixed = {"dtype": "float32", "deterministic": True, "block_size": 4, "num_threads": 1}
        more: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 1200, "kv_moves": True}
        self.core, ready = build(config_of(self.folder, LONGER, **fixed, **more))  # type: ignore[assignment]
        loop = asyncio.get_running_loop()
        self.core.on_loaded(lambda: loop.call_soon_threadsafe(self._wake))
        self.alive = True
        return ready

    async def serve_kv(self, host: str) -> tuple[KVSource, float]:
        self.core.serve_kv(host, 1)
        (answer,) = self.core.answers()
        assert isinstance(answer, Answer)
        port, secret, token_bytes = answer.message.split()
        return KVSource(host, int(port), secret), float(token_bytes)


class MovingFleet(Fleet):
    kv_moves = True

    def _engine(self, name: str) -> Callable[..., LocalEngine]:
        def make(*callbacks: Any) -> LocalEngine:
            self.engines[name] = MovingEngine(*callbacks)
            return self.engines[name]

        return make

    def moved(self) -> int:
        return sum(engine.core.stats().moved_tokens for engine in self.engines.values())


async def test_drained_stream_takes_its_blocks_along(tmp_path: Path) -> None:
    """Bugs: a long stream is computed again when its replica leaves; its text changes."""
    MovingEngine.folder = tmp_path
    fields: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0.9
    }  # fmt: skip
    async with MovingFleet(1) as fleet:
        whole = await asyncio.wait_for(read(fleet.generate(**fields)), 60)
    async with MovingFleet(2) as fleet:
        entry = fleet.generate(**fields)
        reading = asyncio.create_task(read(entry))
        await until(lambda: len(entry.choices[0].emitted) >= 20, 30)
        leaving = fleet.replica_servers[entry.choices[0].place]
        drained = asyncio.create_task(leaving.drain(0.0))
        assert await asyncio.wait_for(reading, 60) == whole
        assert entry.migrations == 1
        await drained
        stayed = [e for n, e in fleet.engines.items() if fleet.replica_servers[n] is not leaving]
        figures = stayed[0].core.stats()
        assert figures.moved_tokens >= 700 and figures.failed_moves == 0
        assert figures.prompt_tokens < 100


class RolesFleet(MovingFleet):
    """A fleet whose first replica computes prompts, and whose others go on with them."""

    roles = ("prefill", "decode", "decode")

    def published(self, *names: str) -> dict[str, dict[str, Any]]:
        published = super().published(*names)
        for name, metadata in published.items():
            metadata["role"] = self.roles[int(name[1:])]
        return published


ROLES: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0.9
}  # fmt: skip


async def whole_text(folder: Path, **fields: Any) -> dict[int, list[int]]:
    MovingEngine.folder = folder
    async with MovingFleet(1) as fleet:
        return await asyncio.wait_for(read(fleet.generate(**(ROLES | fields))), 60)


async def test_roles(tmp_path: Path) -> None:
    """Bugs: the decoding replica computes the prompt again; a choice is lost on its way; the text
    is another one; a conversation's next turn goes to the replica for prompts though its last one
    is in a cache."""
    whole = await whole_text(tmp_path, n=2)
    async with RolesFleet(3) as fleet:
        entry = fleet.generate(**ROLES, n=2)
        assert await asyncio.wait_for(read(entry), 60) == whole
        assert entry.replicas[0] == "r0" and set(entry.replicas[1:]) <= {"r1", "r2"}
        assert entry.migrations == 0
        reasons = {decision.replica: decision.reason for _, decision, _ in entry.trace._decisions}
        assert {reasons[name] for name in entry.replicas[1:]} == {"handover"}
        assert fleet.engines["r0"].core.stats().output_tokens == 2
        assert fleet.moved() >= 700
        assert fleet.engines[entry.replicas[1]].core.stats().prompt_tokens < 100
        next_turn = [*PROMPT, *whole[0], 1, 2]
        entry = fleet.generate(prompt=next_turn, max_tokens=3, ignore_eos=True, temperature=0.9)
        await asyncio.wait_for(read(entry), 60)
        assert entry.replicas[0] in ("r1", "r2"), "it has all but a few tokens"


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["prefill", "prefill after it", "decode", "decode alone"])
async def test_replicas_with_roles_are_killed(tmp_path: Path, killed: str) -> None:
    """Bugs: a prompt is lost with the replica that computes it; a stream is lost with the one that
    goes on; a pull from a dead replica is waited for."""
    whole = await whole_text(tmp_path)
    async with RolesFleet(2 if killed == "decode alone" else 3) as fleet:
        entry = fleet.generate(**ROLES)
        reading = asyncio.create_task(read(entry))
        (choice,) = entry.choices
        if killed == "prefill":
            await until(lambda: fleet.load()["r0"] > 0)
            fleet.engines["r0"].die()
        elif killed == "prefill after it":
            await until(lambda: choice.place in ("r1", "r2"), 30)
            core = fleet.engines["r0"].core
            core.close()  # its port
            fleet.engines["r0"].die()
        else:
            await until(lambda: len(choice.emitted) > 12, 30)
            fleet.engines[choice.place].die()
        assert await asyncio.wait_for(reading, 60) == whole
        assert not fleet.dispatcher.requests


@pytest.mark.slow
async def test_lease_that_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the answer of a source that has given up its blocks ends the request."""
    whole = await whole_text(tmp_path)
    async with RolesFleet(3) as fleet:
        source = fleet.engines["r0"].core

        def forgets(*arguments: Any) -> None:
            source.reset_prefix_cache()

        monkeypatch.setattr(source._moves, "keep", forgets)
        assert await asyncio.wait_for(read(fleet.generate(**ROLES)), 60) == whole
        assert fleet.moved() == 0
        assert sum(e.core.stats().failed_moves for e in fleet.engines.values()) == 1


async def test_router_hears_of_evictions(tmp_path: Path) -> None:
    """Bug: a prompt goes to a replica that has evicted its prefix, as the router goes on
    guessing."""
    MovingEngine.folder = tmp_path
    async with MovingFleet(1) as fleet:
        await asyncio.wait_for(read(fleet.generate(prompt=PROMPT, max_tokens=2)), 60)
        index = fleet.dispatcher.replicas.fleet.index
        assert len(index) == 699 // 64
        engine = fleet.engines["r0"]
        engine.core.reset_prefix_cache()
        await asyncio.wait_for(read(fleet.generate(prompt=[1, 2, 3], max_tokens=2)), 60)
        await until(lambda: len(index) == 0)
