"""Replicas whose engines sleep: when, and that nobody loses an answer by it."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.replica import sleep as replica_sleep
from deployments.replica.device_lease import DeviceLease
from deployments.replica.server import ReplicaServer
from deployments.replica.sleep import SleepSettings
from deployments.replica.watchdog import StallLimits
from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.messages import Control
from tests.deployments.replica.test_replica import Router, run
from tests.deployments.router.fleet import FAST, LocalEngine, text, until

QUICK = SleepSettings(idle_seconds=0.2, wait_seconds=5.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(replica_sleep, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(replica_sleep, "_YIELD_SECONDS", 0.05)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class Replica:
    """A replica server whose engine is in this process, with a connected router."""

    async def start(self, settings: SleepSettings = QUICK, options: str = "") -> "Replica":
        def make(*callbacks) -> LocalEngine:
            self.engine = LocalEngine(*callbacks)
            return self.engine

        self.server = ReplicaServer(FAST, StallLimits(), make, sleep=settings)
        await self.server.start(EngineConfig(model=f"fake:{options}"), "127.0.0.1")
        self.router = await Router().connect(self.server)
        return self

    @property
    def asleep(self) -> bool:
        """Whether the replica sleeps, as its stats tell routers."""
        return self.server.stats.asleep

    async def ask(self, id: int, max_tokens: int = 30) -> None:
        self.router.submit(id, max_tokens=max_tokens)
        await until(lambda: self.router.finish(id), 10)
        assert self.router.tokens(id) == text(10, max_tokens)


async def beside_another(settings: SleepSettings) -> tuple[Replica, DeviceLease]:
    """Return a sleeping replica for which a request waits, and the lease of another that has the
    device."""
    replica = await Replica().start(settings)
    await until(lambda: replica.asleep)
    other = DeviceLease("")
    assert await other.acquire(1.0)
    replica.router.submit(1)
    return replica, other


def test_it_sleeps_and_a_request_wakes_it() -> None:
    """Bug: memory that is never given back; a request to a sleeping engine that nobody answers."""

    async def case() -> None:
        replica = await Replica().start()
        for id in range(3):
            await until(lambda: replica.asleep and replica.router.frames[-1].stats.asleep)
            stats = replica.router.frames[-1].stats
            assert stats.asleep and not stats.running
            await replica.ask(id)
            assert not replica.asleep and replica.server.stats.wakes == id + 1
        await replica.server.stop()

    run(case())


def test_it_does_not_sleep_while_it_works() -> None:
    """Bug: a long answer that is cut off, or held up, because no new request came."""

    async def case() -> None:
        replica = await Replica().start()
        await replica.ask(1, max_tokens=300)  # 0.6 s
        assert replica.server.stats.wakes == 0
        await replica.server.stop()

    run(case())


def test_two_models_share_a_device_by_turns() -> None:
    """Bug: both are awake, and the second finds no memory; or one never has its turn."""
    settings = SleepSettings(idle_seconds=60.0, wait_seconds=20.0, takes_turns=True)

    async def case() -> None:
        started = await Replica().start(settings)
        two = await Replica().start(settings)  # which waits until the first sleeps
        assert started.asleep and not two.asleep
        both = []

        async def watch() -> None:
            while True:
                states = [case.engine.core.stats().asleep for case in (started, two)]
                both.append(not any(states))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        for id in range(6):
            await (started, two)[id % 2].ask(id)
        await asyncio.gather(
            *(replica.ask(10 + id) for id in range(4) for replica in (started, two))
        )
        watching.cancel()
        assert not any(both) and len(both) > 20
        assert started.server.stats.wakes >= 3 and two.server.stats.wakes >= 3
        for replica in (started, two):
            await replica.server.stop()

    run(case())


def test_a_model_that_always_has_work_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a model that is asked without a pause keeps the device for ever."""
    monkeypatch.setattr(replica_sleep, "_LEASE_SECONDS", 0.3)
    settings = SleepSettings(idle_seconds=60.0, wait_seconds=20.0, takes_turns=True)

    async def case() -> None:
        started = await Replica().start(settings)
        starting = asyncio.create_task(Replica().start(settings))
        answered = 0

        async def load(first: int) -> None:
            nonlocal answered
            for id in range(first, first + 100):
                await started.ask(id)
                answered += 1
                if starting.done() and two_done.is_set():
                    return

        two_done = asyncio.Event()
        loads = [asyncio.create_task(load(first)) for first in (0, 1000, 2000)]
        two = await starting
        for id in range(2):
            await two.ask(id)
            await asyncio.sleep(0.5)  # which is the other's
        two_done.set()
        await asyncio.gather(*loads)
        assert answered > 10 and two.server.stats.wakes >= 1
        for case in (started, two):
            await case.server.stop()

    run(case())


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a client that waits for a device which others keep, without an end or a word."""
    settings = SleepSettings(idle_seconds=0.1, wait_seconds=0.3, takes_turns=True)

    async def case() -> None:
        replica, other = await beside_another(settings)
        await until(lambda: replica.router.finish(1))
        (error,) = [d.error for f in replica.router.frames for d in f.deltas if d.id == 1]
        assert error.startswith("device_busy: the model sleeps") and replica.asleep
        assert replica.server.in_flight == 0
        replica.router.submit(2)
        await asyncio.sleep(0.1)
        other.release()
        await until(lambda: replica.router.finish(2) == "length")
        await replica.server.stop()
        assert await other.acquire(0.0), "a server that has stopped leaves the device"
        other.close()

    run(case())


def test_an_engine_that_dies_in_its_sleep_is_told_and_leaves_the_device() -> None:
    """Bug: nobody notices that a sleeping engine was killed, and its requests wait for ever."""
    settings = SleepSettings(idle_seconds=0.1, wait_seconds=5.0, takes_turns=True)

    async def case() -> None:
        replica = await Replica().start(settings)
        await until(lambda: replica.asleep)
        replica.engine.die()
        await until(lambda: replica.router.failed is not None)
        with pytest.raises(MantaError):
            replica.server.check_health()
        await replica.server.stop()
        other = DeviceLease("")
        assert await other.acquire(0.0)
        other.close()

    run(case())


def test_a_request_that_is_taken_back_while_it_is_held_is_gone() -> None:
    """Bug: a client that went away keeps its place, or its number, for ever."""
    settings = SleepSettings(idle_seconds=0.1, wait_seconds=5.0, takes_turns=True)

    async def case() -> None:
        replica, other = await beside_another(settings)
        await until(lambda: replica.server.in_flight == 1)
        replica.router.end.close("test")
        await until(lambda: replica.server.in_flight == 0)
        other.release()
        router = replica.router = await Router().connect(replica.server)
        await replica.ask(1)
        assert [request.id & 0xFFFF for request in replica.engine.requests] == [1] and router
        await replica.server.stop()
        other.close()

    run(case())


def test_a_replica_that_is_to_stop_gives_held_requests_back() -> None:
    """Bug: an update while a model sleeps loses the request that just came."""
    settings = SleepSettings(idle_seconds=0.1, wait_seconds=30.0, takes_turns=True)

    async def case() -> None:
        replica, other = await beside_another(settings)
        await until(lambda: replica.server.in_flight == 1)
        await replica.server.drain(0.1)
        (error,) = [d.error for f in replica.router.frames for d in f.deltas if d.id == 1]
        assert error.startswith("draining"), "the router goes on with it elsewhere"
        assert not replica.engine.requests
        await replica.server.stop()
        other.close()

    run(case())


def test_a_killed_holder_leaves_the_turn(tmp_path: Path) -> None:
    """Bug: after a SIGKILL no replica on the machine ever wakes again."""

    async def case() -> None:
        code = (
            "import asyncio, sys, pathlib\n"
            "from deployments.replica.device_lease import DeviceLease\n"
            "async def main():\n"
            f"    turn = DeviceLease('0', pathlib.Path({str(tmp_path)!r}))\n"
            "    print(await turn.acquire(1.0), flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())\n"
        )

        holder = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        assert holder.stdout is not None and await holder.stdout.readline() == b"True\n"
        turn = DeviceLease("0", tmp_path)
        assert not await turn.acquire(0.1)
        holder.kill()
        await holder.wait()
        assert await turn.acquire(1.0)
        turn.close()

    run(case())


def test_a_trainer_decides_while_it_lets_the_engine_sleep() -> None:
    """A request, or an idle time, wakes an engine whose device a trainer uses; or the engine never
    sleeps by itself again."""

    async def body() -> None:
        replica = await Replica().start()
        orders, answers = iter(range(1, 100)), []

        async def order(what: str, tags: list[str] | None = None, argument: str = "") -> None:
            control = Control(what, next(orders), argument, tags=tags or [])
            sent: Any = SimpleNamespace(send=answers.append)
            await replica.server._carry_out(sent, control)
            assert answers.pop().code == ""

        await until(lambda: replica.asleep)
        await order("pause", argument="keep")
        await order("sleep")
        replica.router.submit(1, max_tokens=5)
        await asyncio.sleep(0.3)
        assert replica.asleep and replica.engine.core.stats().wakes == 0
        await order("wake", ["weights"])
        await asyncio.sleep(0.1)
        assert replica.asleep
        await order("wake")
        await order("resume")
        await until(lambda: replica.router.finish(1), 10)
        await until(lambda: replica.asleep)
        await replica.ask(2)
        await replica.server.stop()

    run(body())
