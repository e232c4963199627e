"""A replica is killed, and others of its machine have its KV blocks, in a folder in memory. Without
Ray, as the moment has to be exact."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.replica.server import ReplicaServer
from deployments.router.models.model_settings import DispatchLimits
from engine.process.client import EngineClient
from tests.deployments.router.fleet import FAST, Fleet, read, until
from tests.deployments.router.test_moves import PROMPT
from tests.engine.test_host_kv import PLAIN
from tests.engine.test_memory import config_of

MODEL = {**PLAIN, "max_position_embeddings": 2048}

# So many tokens take longer than a writer of low priority needs for the prompt.
LENGTH = 1000
FIELDS: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.9
}  # fmt: skip


class SharingFleet(Fleet):
    """A fleet of engine processes with a random model, whose KV blocks are in one folder."""

    folder = Path()
    memory = Path()

    async def add_replica(self, name: str) -> ReplicaServer:
        server = ReplicaServer(FAST, self._stall, EngineClient)
        fixed = {"dtype": "float32", "deterministic": True, "block_size": 4, "num_threads": 1}
        more: dict[str, Any] = {
            "max_model_len": 2048,
            "num_blocks": 1000,
            "host_kv_bytes": 1 << 24,
            "host_kv_store": "all",
            "disk_kv_bytes": 1 << 26,
            "disk_kv_folder": str(self.memory),
        }
        self._ready = await server.start(
            config_of(self.folder, MODEL, **fixed, **more), "127.0.0.1"
        )
        self.replica_servers[name] = server
        return server


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="manta-test-") as folder:
        yield Path(folder) / "kv"


@pytest.mark.slow
@pytest.mark.parametrize("successor", [False, True], ids=["neighbour", "successor"])
async def test_a_killed_replicas_blocks_are_loaded(
    tmp_path: Path, memory: Path, successor: bool
) -> None:
    """Bugs: the prompt of a killed replica's stream is computed again; its text changes; what was
    in memory stays there when all replicas have ended."""
    SharingFleet.folder, SharingFleet.memory = tmp_path, memory
    limits = DispatchLimits(wait_seconds=60, channel=FAST)
    async with SharingFleet(1, limits=limits) as fleet:
        whole = await asyncio.wait_for(read(fleet.generate(**FIELDS)), 60)
    assert not list(memory.glob("kv-*")), "the last replica has ended"
    async with SharingFleet(1 if successor else 2, limits=limits) as fleet:
        entry = fleet.generate(**FIELDS)
        reading = asyncio.create_task(read(entry))
        await until(lambda: len(entry.choices[0].emitted) >= 20, 60)
        await until(lambda: len(list(memory.glob("kv-*/??/*.0"))) >= len(PROMPT) // 4, 10)
        assert len(entry.choices[0].emitted) < LENGTH, "its blocks are there while it runs"
        killed, known = entry.choices[0].place, len(PROMPT) + len(entry.choices[0].emitted)
        os.kill(fleet.replica_servers[killed].engine_pid, signal.SIGKILL)
        if successor:
            await fleet.add_replica("r2")
            fleet.publish("r2")
        assert await asyncio.wait_for(reading, 60) == whole
        assert entry.migrations == 1
        stats = fleet.replica_servers[_other(fleet, killed)].stats
        assert stats.disk_kv_read_tokens >= len(PROMPT) - 4, "all full blocks of the prompt"
        assert stats.prompt_tokens <= known - stats.disk_kv_read_tokens + 20


def _other(fleet: SharingFleet, killed: str) -> str:
    (name,) = fleet.replica_servers.keys() - {killed}
    return name
