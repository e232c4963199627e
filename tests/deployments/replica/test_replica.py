"""The server of an engine replica: routers kept apart, nothing left running, faults told."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica.deployment import EngineReplica
from deployments.replica.server import ReplicaServer
from deployments.replica.watchdog import StallLimits
from deployments.router.models.model_settings import DispatchLimits
from deployments.transport.channel import RouterEnd, Submit
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead
from engine.messages import Abort, EngineRequest, Failed, StepFrame
from engine.sampling_params import SamplingParams
from tests.deployments.router.fleet import FAST, PROMPT, Fleet, read, text, until
from tests.engine.process.ranked import children, model_and_adapters
from tests.engine.process.test_process import running


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


class Router:
    """A router's end of a channel, operated by the test."""

    def __init__(self) -> None:
        self.frames: list[StepFrame] = []
        self.failed: Failed | None = None
        self.closed = ""

    async def connect(self, replica_server: ReplicaServer) -> "Router":
        opened = asyncio.get_running_loop().create_future()
        _, self.end = await asyncio.get_running_loop().create_connection(
            lambda: RouterEnd(
                replica_server.secret,
                FAST,
                "test",
                on_open=opened.set_result,
                on_frame=self._take_message,
                on_close=self._close,
            ),
            "127.0.0.1",
            replica_server.port,
        )
        await opened
        return self

    def _take_message(self, _, message) -> None:
        if isinstance(message, Failed):
            self.failed = message
        else:
            self.frames.append(message)

    def _close(self, _, reason: str) -> None:
        self.closed = reason

    def submit(self, id: int, max_tokens: int = 30, prompt: int = len(PROMPT)) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.end.send(Submit(EngineRequest(id, [5] * prompt, prompt, params, seed=1)))

    def tokens(self, id: int) -> list[int]:
        deltas = [delta for frame in self.frames for delta in frame.deltas if delta.id == id]
        return [token for delta in deltas for token in delta.token_ids]

    def finish(self, id: int) -> str:
        ends = [d.finish for f in self.frames for d in f.deltas if d.id == id and d.finish]
        assert len(ends) <= 1
        return ends[0] if ends else ""


def test_two_routers_with_the_same_numbers_never_meet():
    """One user's tokens in another user's answer."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            first, two = (
                await Router().connect(replica_server),
                await Router().connect(replica_server),
            )
            for id in range(5):
                first.submit(id, prompt=10)
                two.submit(id, prompt=20)
            await until(lambda: all(r.finish(id) for r in (first, two) for id in range(5)))
            for id in range(5):
                assert first.tokens(id) == text(10, 30)
                assert two.tokens(id) == text(20, 30)

    run(case())


def test_a_router_that_goes_takes_only_its_own_requests_along():
    """Requests of a dead router that run on for nobody, or the neighbours' killed with them."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            first, two = (
                await Router().connect(replica_server),
                await Router().connect(replica_server),
            )
            for id in range(4):
                first.submit(id, max_tokens=4000)
                two.submit(id, max_tokens=300)
            await until(lambda: replica_server.in_flight == 8)
            first.end.close("test")
            await until(lambda: replica_server.in_flight == 4 and replica_server.stats.running == 4)
            await until(lambda: all(two.finish(id) == "length" for id in range(4)))
            assert two.tokens(3) == text(10, 300)
            assert not fleet.engines["r0"].core.has_work()

    run(case())


def test_numbers_that_are_wrong_end_the_connection_alone():
    """A confused or hostile router that overwrites a running request."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            good = await Router().connect(replica_server)
            good.submit(1, max_tokens=200)
            for id in (-1, 2**40, 7):
                bad = await Router().connect(replica_server)
                bad.submit(id, max_tokens=4000)
                bad.submit(id, max_tokens=4000)
                await until(lambda bad=bad: bool(bad.closed))
            bad = await Router().connect(replica_server)
            bad.end.send(Abort([1, -5, 2**50]))  # not its own: ignored
            await until(lambda: good.finish(1) == "length")
            await until(lambda: replica_server.in_flight == 0)

    run(case())


def test_an_idle_router_hears_of_the_load_that_others_make():
    """A second router that sees an empty replica for a second and sends everything there."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            first, two = (
                await Router().connect(replica_server),
                await Router().connect(replica_server),
            )
            first.submit(1, max_tokens=4000)
            await until(lambda: any(f.stats.running for f in two.frames), seconds=0.5)
            assert not any(frame.deltas for frame in two.frames)

    run(case())


def test_death_of_the_engine_is_told_and_nobody_else_is_let_in():
    """Routers that wait for tokens of a dead engine until a heartbeat runs out."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            router = await Router().connect(replica_server)
            router.submit(1, max_tokens=4000)
            await until(lambda: bool(router.tokens(1)))
            replica_server.check_health()
            fleet.engines["r0"].die()
            await until(lambda: router.failed is not None, seconds=0.2)
            with pytest.raises(EngineDead):
                replica_server.check_health()
            with pytest.raises(OSError):
                await Router().connect(replica_server)

    run(case())


def test_a_replica_without_an_engine_ends_once_its_routers_are_told(
    monkeypatch: pytest.MonkeyPatch,
):
    """Bugs: Serve replaces it after three checks, 4 to 6 s later; its last words are lost."""
    ends: list[tuple[int, bool]] = []

    async def case():
        async with Fleet(0) as fleet:
            server = await fleet.add_replica("r0")
            router = await Router().connect(server)
            monkeypatch.setattr(
                os, "_exit", lambda code: ends.append((code, router.failed is not None))
            )
            replica: Any = SimpleNamespace(_server=server, _drained=False)
            await EngineReplica.check_health(replica)
            assert not ends
            fleet.engines["r0"].die()
            await EngineReplica.check_health(replica)
            assert ends == [(1, True)]

    run(case())


def test_an_engine_that_makes_no_step_is_unhealthy_but_an_idle_one_is_not():
    """A hung engine that passes health checks for ever; a quiet night that restarts replicas."""

    async def case():
        async with Fleet(0, stall=StallLimits(tick=0.02, silent=0.2)) as fleet:
            replica_server = await fleet.add_replica("r0")
            router = await Router().connect(replica_server)
            await asyncio.sleep(0.3)
            replica_server.check_health()  # idle for longer than the limit
            router.submit(1, max_tokens=400)
            await until(lambda: router.finish(1) == "length")
            replica_server.check_health()
            await asyncio.sleep(0.3)
            router.submit(2, max_tokens=4000)
            await until(lambda: bool(router.tokens(2)))
            replica_server.check_health()
            fleet.engines["r0"].stuck = True
            await until(lambda: router.failed is not None, seconds=2)
            with pytest.raises(EngineDead) as caught:
                replica_server.check_health()
            assert caught.value.code == router.failed.code == "engine_stalled"

    run(case())


def test_a_real_engine_process_behind_a_replica_server_and_its_sudden_end():
    """A replica server that only works with the tests' engine; a killed process that nobody
    notices."""

    async def case():
        replica_server = ReplicaServer(FAST, StallLimits())
        await replica_server.start(EngineConfig(model="fake:step_seconds=0.002"), "127.0.0.1")
        try:
            router = await Router().connect(replica_server)
            router.submit(1)
            await until(lambda: router.finish(1) == "length")
            assert router.tokens(1) == text(10, 30)
            router.submit(2, max_tokens=4000)
            await until(lambda: bool(router.tokens(2)))
            began = time.monotonic()
            os.kill(replica_server._engine.pid, signal.SIGKILL)
            await until(lambda: router.failed is not None)
            assert time.monotonic() - began < 0.5
        finally:
            await replica_server.stop()

    run(case())


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_a_real_engine_process_that_is_stuck(how):
    """A stopped process, or a step that never ends in one that lives, that holds its streams
    until somebody looks."""

    async def case():
        stall = StallLimits(tick=0.5, silent=1.5, hung=2.0)
        replica_server = ReplicaServer(FAST, stall)
        options = "step_seconds=0.002" + (",hang_step=20" if how == "hung" else "")
        await replica_server.start(EngineConfig(model=f"fake:{options}"), "127.0.0.1")
        try:
            router = await Router().connect(replica_server)
            await asyncio.sleep(0.6)  # the process is not taken for stuck while it idles
            router.submit(1, max_tokens=4000)
            await until(lambda: bool(router.tokens(1)))
            began = time.monotonic()
            if how == "stopped":
                os.kill(replica_server._engine.pid, signal.SIGSTOP)
            await until(lambda: router.failed is not None, seconds=6)
            assert 1.0 < time.monotonic() - began < 4
            assert router.failed.code == "engine_stalled"
            assert ("no sign of life" in router.failed.message) == (how == "stopped")
        finally:
            os.kill(replica_server._engine.pid, signal.SIGKILL)
            await replica_server.stop()

    run(case())


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks on the CPU need two cores")
def test_a_rank_that_is_stopped(tmp_path):
    """Bugs: the first rank gives signs of life while it waits for another one for ever, and seems
    to compute; the other, which takes no signal but one, stays behind with its memory."""
    folder = model_and_adapters(tmp_path)["model"]
    parts = {"tensor_parallel": 2, "num_threads": 1, "num_blocks": 64, "max_num_seqs": 1}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **parts)

    async def case():
        replica_server = ReplicaServer(FAST, StallLimits(tick=0.5, silent=20.0, hung=2.0))
        await replica_server.start(config, "127.0.0.1")
        engine = replica_server._engine.pid
        (rank,) = children(engine)
        try:
            router = await Router().connect(replica_server)
            for id in range(40):
                router.submit(id, max_tokens=400)
            await until(lambda: bool(router.tokens(0)))
            os.kill(rank, signal.SIGSTOP)
            await until(lambda: router.failed is not None, seconds=20)
            assert router.failed.code == "engine_stalled"
            assert "a step in which nothing moves" in router.failed.message
        finally:
            await replica_server.stop()
        await until(lambda: not running(rank) and not running(engine), seconds=5)

    asyncio.run(asyncio.wait_for(case(), 150))


def test_a_poisoned_device_ends_its_engine_and_the_requests_move():
    """A step raises and the device is lost with it: the process goes on with a context that is
    gone, or nobody hears of its end; real processes, and a router's dispatcher."""

    async def case():
        async with Fleet(1, limits=DispatchLimits(wait_seconds=5, channel=FAST)) as fleet:
            lost = ReplicaServer(FAST, StallLimits())
            model = "fake:vocab_size=1000,step_seconds=0.005,fail_step=40"
            await lost.start(EngineConfig(model=model), "127.0.0.1")
            fleet.replica_servers["r1"] = lost
            fleet.publish()
            await until(lambda: fleet.connected() == 2)
            entries = [fleet.generate(max_tokens=120, n=2) for _ in range(6)]
            await until(lambda: lost.in_flight >= 4)
            await until(lambda: lost.failed is not None)
            began = time.monotonic()
            assert lost.failed.code == "engine_error"
            with pytest.raises(EngineDead):
                lost.check_health()
            for tokens in await asyncio.gather(*map(read, entries)):
                assert tokens == {0: text(len(PROMPT), 120), 1: text(len(PROMPT), 120)}
            assert fleet.dispatcher.metrics.migrations.values[()] >= 4
            assert time.monotonic() - began < 2

    run(case())


def test_a_start_that_fails_says_why():
    """A replica that is up without an engine, or an error without its cause."""

    async def case():
        replica_server = ReplicaServer(FAST, StallLimits())
        with pytest.raises(ConfigError, match="told not to start"):
            await replica_server.start(EngineConfig(model="fake:fail_start=true"), "127.0.0.1")
        await replica_server.stop()

    run(case())


def test_each_router_is_told_which_of_its_requests_the_figures_count():
    """A router that hears of another's requests, or of its own twice or never: its bookings end too
    early or not at all, and a replica is given its rows twice or looks full for ever."""

    async def case():
        async with Fleet(0) as fleet:
            replica_server = await fleet.add_replica("r0")
            first, other = (
                await Router().connect(replica_server),
                await Router().connect(replica_server),
            )
            for id in range(3):
                first.submit(id, max_tokens=4)
                other.submit(id + 1, max_tokens=400)  # the other's numbers are its own
            await until(lambda: len([id for f in other.frames for id in f.taken]) == 3)
            await until(lambda: first.finish(2) != "")
            assert sorted(id for frame in first.frames for id in frame.taken) == [0, 1, 2]
            assert sorted(id for frame in other.frames for id in frame.taken) == [1, 2, 3]
            for frame in first.frames + other.frames:
                assert frame.stats.running >= len(frame.taken)
            fleet.engines["r0"].pace = 0.5  # a long step begins
            await asyncio.sleep(0.05)
            seen = len(first.frames)
            first.submit(7)
            await asyncio.sleep(0.3)
            assert len(first.frames) > seen, "beats, with the old figures"
            assert not any(frame.taken for frame in first.frames[seen:])
            await until(lambda: 7 in [id for frame in first.frames for id in frame.taken])

    run(case())
