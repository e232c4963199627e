"""SimEngine: a SimReplica in place of an engine process, behind a real ReplicaServer.

Like the engine's loop it accepts requests only between two steps. A frame has the state at the end
of its step, without later arrivals.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from bench.simulate.fleet.replica import Job, SimReplica, Speed
from engine.config.engine_config import EngineConfig
from engine.errors import MantaError
from engine.messages import AdapterInfo, Delta, EngineRequest, Pulse, Ready, StepFrame

CONTEXT, VOCABULARY, BLOCK = 32768, 1000, 16


class VirtualEngine:
    """The part of an engine that replica/server.py uses, on a timer of virtual time.

    It does not support aborts, as simulated clients never leave, nor adapters.
    """

    alive = True
    pid = 0
    pulse = Pulse("step")

    def __init__(
        self, speed: Speed, on_frame: Callable[[StepFrame], None], _: Callable[[MantaError], None]
    ) -> None:
        self._speed = speed
        self._on_frame = on_frame
        self._pulses = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None

    @property
    def pulses(self) -> int:
        """A liveness counter that grows at each read."""
        self._pulses += 1
        return self._pulses

    async def start(self, config: EngineConfig) -> Ready:
        blocks = self._speed.kv_tokens // BLOCK
        return Ready(CONTEXT, VOCABULARY, BLOCK, blocks, [2], {}, "", self._speed.chunk)

    def abort(self, ids: list[int]) -> None:
        return None

    async def add_adapter(self, name: str, folder: str, **_: Any) -> AdapterInfo:
        raise NotImplementedError

    async def remove_adapter(self, name: str, revision: str = "") -> AdapterInfo:
        raise NotImplementedError

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class SimEngine(VirtualEngine):
    """A simulated engine, whose scheduling is simulated as well."""

    def __init__(
        self,
        speed: Speed,
        on_frame: Callable[[StepFrame], None],
        on_error: Callable[[MantaError], None],
    ) -> None:
        super().__init__(speed, on_frame, on_error)
        self.replica = SimReplica(0, speed, 1)
        self.most_waiting = 0  # most requests beyond its rows in any frame
        self._inbox: list[Job] = []

    def submit(self, request: EngineRequest) -> None:
        job = Job(self._loop.time(), len(request.token_ids), request.params.max_tokens or 1)
        job.number = request.id
        self._inbox.append(job)
        if self._timer is None:
            self._timer = self._loop.call_soon(self._begin)
        elif self.replica.steps > 1:
            self._timer.cancel()
            at = self.replica.interrupt(self._loop.time())
            self._timer = self._loop.call_at(at, self._finish)

    def _begin(self) -> None:
        for job in self._inbox:
            self.replica.submit(job)
        self._inbox.clear()
        at = self.replica.begin(self._loop.time())
        self._timer = self._loop.call_at(at, self._finish) if at else None

    def _finish(self) -> None:
        replica, now = self.replica, self._loop.time()
        running = [job for _, job in replica.decoding]
        begun = [job for job, length in replica.chunk if length == job.left]
        ended = set(replica.finish(now))
        deltas = [self._delta(job, replica.steps, job in ended) for job in running]
        for job in begun:
            delta = self._delta(job, 1, job in ended)
            delta.cached, delta.queued_us = job.cached, int(1e6 * (now - job.arrival))
            deltas.append(delta)
        stats = replica.stats()
        here = stats.running + stats.waiting + len(self._inbox)
        beyond = here - self._speed.max_num_seqs
        self.most_waiting = max(self.most_waiting, beyond)
        taken = replica.taken[0]
        replica.taken[0] = []
        self._on_frame(StepFrame(stats, deltas, taken=taken))
        self._begin()

    def _delta(self, job: Job, tokens: int, ends: bool) -> Delta:
        return Delta(job.number, [7] * tokens, "length" if ends else "")
