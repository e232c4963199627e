"""Processes are killed or stopped while KV blocks go from one to the other. Without Ray, as the
moment has to be exact."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from deployments.replica.server import ReplicaServer
from deployments.router.models.model_settings import DispatchLimits
from engine.process.client import EngineClient
from tests.deployments.router.fleet import FAST, Fleet, read, until
from tests.deployments.router.test_moves import LONGER, PROMPT, MovingEngine, MovingFleet
from tests.engine.test_memory import config_of

FIELDS: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9}


class ProcessFleet(Fleet):
    """A fleet of engine processes with a random model, whose KV blocks move."""

    folder = Path()

    async def add_replica(self, name: str) -> ReplicaServer:
        server = ReplicaServer(FAST, self._stall, EngineClient)
        fixed = {"dtype": "float32", "deterministic": True, "block_size": 4, "num_threads": 1}
        more: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 1200, "kv_moves": True}
        await server.start(config_of(self.folder, LONGER, **fixed, **more), "127.0.0.1")
        self.replica_servers[name] = server
        return server


async def whole_text(folder: Path, prompt: list[int]) -> dict[int, list[int]]:
    MovingEngine.folder = folder
    async with MovingFleet(1) as fleet:
        return await asyncio.wait_for(read(fleet.generate(prompt=prompt, **FIELDS)), 60)


async def leave(fleet: ProcessFleet, name: str) -> int:
    """Let a replica refuse new requests, and stop its engine; return the engine's process."""
    server = fleet.replica_servers[name]
    server.refuse_new()
    await until(lambda: fleet.dispatcher.state().replicas[name].draining, 10)
    os.kill(server.engine_pid, signal.SIGSTOP)
    return server.engine_pid


async def in_a_pull(fleet: ProcessFleet, prompt: list[int]) -> tuple[Any, "asyncio.Task[Any]"]:
    """Begin a request whose prefix is at a replica that has stopped."""
    entry = fleet.generate(prompt=prompt, **FIELDS)
    reading = asyncio.create_task(read(entry))
    await until(lambda: bool(entry.choices[0].place), 10)
    await asyncio.sleep(0.3)
    assert not entry.choices[0].emitted
    return entry, reading


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "receiver", "leaves"])
async def test_a_process_is_lost_in_the_middle_of_a_move(tmp_path: Path, how: str) -> None:
    """Bugs: a request hangs with a source that is dead or stopped; it is lost with the replica
    that pulls; its text changes."""
    ProcessFleet.folder = tmp_path
    prompt = [*PROMPT, 3, 2, 1]
    whole = await whole_text(tmp_path, prompt)
    limits = DispatchLimits(wait_seconds=60, channel=FAST)
    async with ProcessFleet(2, limits=limits) as fleet:
        first = fleet.generate(prompt=PROMPT, **FIELDS)
        await asyncio.wait_for(read(first), 60)
        (holder,) = first.replicas
        (other,) = fleet.replica_servers.keys() - {holder}
        pid = await leave(fleet, holder)
        entry, reading = await in_a_pull(fleet, prompt)
        assert entry.replicas == [other]
        try:
            if how == "killed":
                os.kill(pid, signal.SIGKILL)
            elif how == "receiver":
                os.kill(fleet.replica_servers[other].engine_pid, signal.SIGKILL)
                await until(lambda: not entry.choices[0].place or entry.migrations > 0, 10)
                await fleet.add_replica("r2")
                fleet.publish("r2", holder)
            elif how == "leaves":
                os.kill(pid, signal.SIGCONT)
            assert await asyncio.wait_for(reading, 60) == whole
        finally:
            if how != "killed":
                os.kill(pid, signal.SIGCONT)
        if how != "receiver":
            stats = fleet.replica_servers[other].stats
            moved = stats.moved_tokens >= 690
            assert (stats.failed_moves, moved) == ((0, True) if how == "leaves" else (1, False))
