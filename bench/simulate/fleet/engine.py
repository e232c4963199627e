"""SimEngine: a SimReplica that replaces an engine process behind a real ReplicaServer.

Like the engine's loop, it accepts requests only between two steps. A frame has the state at the end
of a step, without later arrivals.
"""

from collections.abc import Callable

from bench.simulate.fleet.replica import Job, SimReplica
from deployments.simulation.engine import VirtualEngine
from deployments.simulation.speed import Speed
from engine.errors import MantaError
from engine.messages import Delta, EngineRequest, StepFrame


class SimEngine(VirtualEngine):
    """A simulated engine with the interface of an engine process; scheduling is simulated, too."""

    def __init__(
        self,
        speed: Speed,
        on_frame: Callable[[StepFrame], None],
        on_error: Callable[[MantaError], None],
    ) -> None:
        super().__init__(speed, on_frame, on_error)
        self.replica = SimReplica(0, speed, 1)
        self.most_waiting = 0  # maximum number of requests beyond its slots in any frame
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
        requests = replica.taken[0]
        replica.taken[0] = []
        self._on_frame(StepFrame(stats, deltas, taken=requests))
        self._begin()

    def _delta(self, job: Job, tokens: int, ends: bool) -> Delta:
        return Delta(job.number, [7] * tokens, "length" if ends else "")
