"""CoreEngine: the real scheduling of an engine on a simulated device, behind a real ReplicaServer
in virtual time.

`Speed` determines the seconds of a step from its sampled tokens and prompt tokens. Like the
engine's loop, the class accepts requests only between two calls of `EngineCore.step`. Results are
published at the virtual time at which a device would have computed them.
"""

import time
from collections.abc import Callable
from typing import Any

from deployments.simulation.engine import VOCABULARY, VirtualEngine
from deployments.simulation.speed import Speed
from engine.batch import Batch, StepResult
from engine.errors import MantaError
from engine.messages import Delta, EngineRequest, EngineStats, StepFrame
from engine.scheduling.core import CoreConfig, EngineCore


class Step:
    """A launched step, which ends at the virtual time `end`."""

    def __init__(self, device: "Device", batch: Batch, end: float) -> None:
        self._device, self._end = device, end
        self._result = StepResult(batch.step, [7] * sum(batch.samples))

    def sample(self, masks: Any = None) -> None:
        return None

    def conclude(self) -> None:
        return None

    def ready(self) -> bool:
        return self._device.now >= self._end

    def wait(self) -> StepResult:
        self._device.now = max(self._device.now, self._end)
        return self._result


class Device:
    """A model runner that computes nothing, and whose steps take virtual time, one after the other.

    now: virtual time of the host, which `Step.wait` moves to the end of a step.
    """

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._free = 0.0  # virtual time at which the newest step ends
        self.now = 0.0

    def launch(self, batch: Batch) -> Step:
        speed, samples = self._speed, sum(batch.samples)
        tokens = batch.num_tokens - batch.num_decodes
        seconds = speed.base + speed.sequence * samples + speed.token * tokens
        self._free = max(self.now, self._free) + seconds
        return Step(self, batch, self._free)

    def recover(self) -> bool:
        return True

    def shrink(self, num_blocks: int) -> None:
        return None


class CoreEngine(VirtualEngine):
    """A simulated engine with the real scheduler."""

    def __init__(
        self,
        speed: Speed,
        on_frame: Callable[[StepFrame], None],
        on_error: Callable[[MantaError], None],
    ) -> None:
        super().__init__(speed, on_frame, on_error)
        self._device = Device(speed)
        config = CoreConfig(
            max_num_seqs=speed.max_num_seqs,
            max_num_batched_tokens=speed.chunk,
            max_model_len=speed.context,
            num_blocks=speed.kv_tokens // speed.block,
            block_size=speed.block,
            prefix_caching=speed.prefix_caching,
            async_scheduling=speed.ahead,
            vocab_size=VOCABULARY,
        )
        self.core = EngineCore(config, self._device)
        self._inbox: list[EngineRequest] = []
        self._aborted: list[int] = []

    def submit(self, request: EngineRequest) -> None:
        self._inbox.append(request)
        self._wake()

    def abort(self, ids: list[int]) -> None:
        self._aborted += ids
        self._wake()

    def _wake(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        arrived, self._inbox = self._inbox, []
        aborted, self._aborted = self._aborted, []
        device = self._device
        device.now = self._loop.time()
        clocks = time.perf_counter, time.monotonic_ns
        time.perf_counter = lambda: device.now
        time.monotonic_ns = lambda: int(1e9 * device.now)
        try:
            for request in arrived:
                self.core.add_request(request)
            self.core.abort(aborted)
            if not self.core.has_work():
                return
            if (delay := self.core.launch_delay()) >= 0.001:
                self._timer = self._loop.call_later(delay, self._step)
                return
            deltas = self.core.step()
            stats = self.core.stats()
        finally:
            time.perf_counter, time.monotonic_ns = clocks
        accepted_ids = [request.id for request in arrived]
        self._timer = self._loop.call_at(device.now, self._publish, stats, deltas, accepted_ids)

    def _publish(self, stats: EngineStats, deltas: list[Delta], accepted_ids: list[int]) -> None:
        self._on_frame(StepFrame(stats, deltas, taken=accepted_ids))
        self._step()
