"""A host tier for KV blocks that exceed the device's pool, in virtual time.

The workloads of `bench.versus.tiers` run with the engine's scheduling and host tier, on a simulated
device with simulated copies. A `Speed` gives the duration of steps. Copies take their bytes divided
by a rate, separately in each direction. A step waits until blocks that it overwrites are stored, as
on CUDA.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.simulate.routing import RoutingRow
from bench.versus.tiers import BLOCK, SIZES, UNITS, Side, Sizes, longest, measure
from deployments.simulation.core_engine import Device, Step
from deployments.simulation.speed import Speed
from engine.batch import Batch
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.memory.host_plan import HostPlan, Pairs
from engine.scheduling.memory.host_tier import HostTier

_QUEUE_BYTES = 8 << 30  # maximum bytes of waiting stores, as in `CudaCopies`


@dataclass(frozen=True, slots=True)
class TierCase:
    """A device, its host memory and the sizes of the workloads.

    token_bytes: bytes of a token's keys and values.
    rate: bytes per second of copies in one direction.
    host_bytes: size of the host tier.
    """

    speed: Speed
    token_bytes: int
    rate: float
    host_bytes: int
    sizes: Sizes


# Costs on an H200: of a step, of a sequence of 5,000 tokens, and of a prompt token. The last is the
# rate of copies.
CASES = {
    "llama-8b": TierCase(
        Speed("gpu", 0.0043, 0.00024, 0.000024, SIZES.pool, 64, 8192, ahead=True),
        128 << 10,
        50e9,
        90 << 30,
        SIZES,
    ),
    "quick": TierCase(
        Speed("gpu", 0.0043, 0.00024, 0.000024, 8192, 64, 8192, ahead=True),
        128 << 10,
        50e9,
        10 << 30,
        Sizes(8192, 3.0, 1024, 128, 32, 4, 2048),
    ),
}
_LEAST_TOKENS = 256  # fewer cached tokens are computed again instead of loaded, as on CUDA


class Copies:
    """A `HostCopies` in virtual time: copies of each direction run one after the other."""

    def __init__(self, device: "TierDevice", block_bytes: int, rate: float) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self.load_rate = rate
        self.store_seconds = self.load_seconds = 0.0
        self._stores: deque[tuple[float, set[int], set[int]]] = deque()  # end, blocks, slots
        self._loads: deque[tuple[float, int, set[int]]] = deque()  # end, ticket, blocks

    def _take_stored(self) -> None:
        while self._stores and self._stores[0][0] <= self._device.now:
            self._stores.popleft()

    def room(self) -> int:
        self._take_stored()
        queued = sum(len(blocks) for _, blocks, _ in self._stores) * self._block_bytes
        return max(0, _QUEUE_BYTES - queued) // self._block_bytes

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        seconds = len(pairs) * self._block_bytes / self.load_rate
        newest = self._stores[-1][0] if self._stores else 0.0
        end = max(newest, self._device.now) + seconds
        self._stores.append((end, {block for block, _ in pairs}, {slot for _, slot in pairs}))
        self.store_seconds += seconds
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        slots, blocks = {slot for slot, _ in pairs}, {block for _, block in pairs}
        began = max(self._loads[-1][0] if self._loads else 0.0, self._device.now)
        for end, sources, targets in self._stores:
            if not (sources.isdisjoint(blocks) and targets.isdisjoint(slots)):
                began = max(began, end)
        seconds = len(pairs) * self._block_bytes / self.load_rate
        self.load_seconds += seconds
        self._loads.append((began + seconds, ticket, blocks))
        return True

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        while self._loads and self._loads[0][0] <= self._device.now:
            done.append((self._loads.popleft()[1], True))
        return done

    def before(self, batch: Batch) -> float:
        """Return the time at which all stores of blocks that a step overwrites, and all loads of
        blocks that it reads, are finished."""
        blocks = {block for _, _, block in batch.new_blocks}
        copies = [(end, targets) for end, targets, _ in self._stores]
        copies += [(end, targets) for end, _, targets in self._loads]
        return max((end for end, copied in copies if not copied.isdisjoint(blocks)), default=0.0)

    def ending(self) -> dict[int, float]:
        return {ticket: end - self._device.now for end, ticket, _ in self._loads}

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        self._take_stored()
        return all(targets.isdisjoint(slots) for _, _, targets in self._stores)

    def wait(self) -> None:
        ends = [store[0] for store in self._stores] + [load[0] for load in self._loads]
        self._device.now = max([self._device.now, *ends])


class TierDevice(Device):
    """A simulated device whose steps wait for stores of blocks that they overwrite, and for loads
    of blocks that they read."""

    copies: Copies | None = None

    def launch(self, batch: Batch) -> Step:
        if self.copies is not None:
            self._free = max(self._free, self.copies.before(batch))
        return super().launch(batch)


@contextmanager
def clocks_of(device: Device) -> Iterator[None]:
    """Replace the process's clocks by the device's virtual clock within the context."""
    real = time.perf_counter, time.monotonic, time.monotonic_ns, time.sleep

    def sleep(seconds: Any) -> None:
        device.now += seconds

    time.perf_counter = time.monotonic = lambda: device.now
    time.monotonic_ns = lambda: int(1e9 * device.now)
    time.sleep = sleep
    try:
        yield
    finally:
        time.perf_counter, time.monotonic, time.monotonic_ns, time.sleep = real


class TierEngine:
    """An engine in virtual time, with or without a host tier."""

    def __init__(self, case: TierCase, store: str = "") -> None:
        """Set up the engine. store: `host_kv_store`; "" = no host tier."""
        speed, sizes, block_bytes = case.speed, case.sizes, case.token_bytes * BLOCK
        self.device = TierDevice(speed)
        self.tier: HostTier | None = None
        if store:
            self.device.copies = Copies(self.device, block_bytes, case.rate)
            plan = HostPlan(
                case.host_bytes // block_bytes, block_bytes, _LEAST_TOKENS, store == "all"
            )
            self.tier = HostTier(plan, self.device.copies, 1)
        config = CoreConfig(
            max_num_seqs=speed.max_num_seqs,
            max_num_batched_tokens=speed.chunk,
            max_model_len=longest(sizes),
            num_blocks=sizes.pool // BLOCK,
            block_size=BLOCK,
            async_scheduling=speed.ahead,
        )
        self.core = EngineCore(config, self.device, tier=self.tier)
        self._number = 0

    def generate(self, prompts: list[list[int]], tokens: list[int]) -> list[tuple[list[int], int]]:
        """Run requests that arrive together; return (tokens, cached prompt tokens) of each."""
        places: dict[int, int] = {}
        for prompt, count in zip(prompts, tokens, strict=True):
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
            self._number += 1
            places[self._number] = len(places)
            request = EngineRequest(self._number, list(prompt), len(prompt), params, seed=1)
            self.core.add_request(request)
        outputs: list[list[int]] = [[] for _ in prompts]
        cached = [0] * len(prompts)
        while self.core.has_work():
            for delta in self.core.step():
                outputs[places[delta.id]] += delta.token_ids
                cached[places[delta.id]] += max(0, delta.cached)
        return list(zip(outputs, cached, strict=True))

    def copied(self) -> tuple[int, float]:
        """Return the bytes and seconds of loads so far."""
        stats = self.core.stats()
        return stats.host_kv_loaded_bytes, stats.host_kv_load_seconds


def run(case: TierCase, store: str = "") -> dict[str, float]:
    """Run the workloads on a new engine; return {workload: result}. store: see `TierEngine`."""
    engine = TierEngine(case, store)
    with clocks_of(engine.device):
        side = Side(engine.generate, engine.copied if store else None, {})
        return dict(measure(side, case.sizes))


def all_rows(quick: bool = False) -> tuple[list[RoutingRow], list[dict[str, Any]]]:
    """Return a row for each workload and `host_kv_store`, and the results of each run.

    quick: whether to use a small pool.
    """
    name = "quick" if quick else "llama-8b"
    none = run(CASES[name])
    rows: list[RoutingRow] = []
    lines: list[dict[str, Any]] = [{"case": name, "store": "none", **none}]
    for store in ("reused", "all"):
        results = run(CASES[name], store)
        lines.append({"case": name, "store": store, **results})
        for workload, unit in UNITS.items():
            if workload not in none:
                continue  # the rate of copies is an input of the simulation
            ours, peer = results[workload], none[workload]
            ratio = round(ours / peer, 3) if peer else 0.0
            case = f"tiers/{name}/{store}/{workload}"
            rows.append(RoutingRow(case, round(ours, 4), round(peer, 4), unit, ratio))
    return rows, lines
