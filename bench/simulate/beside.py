"""Batch work beside interactive requests, in virtual time.

Routers, replica server and scheduler are the service's code; a `Speed` gives the duration of the
device's steps. Interactive requests arrive as a Poisson process, at a share of the rate of a
saturated engine. Rows of a dataset, sent as by Ray Data's Serve stage, always outnumber the
engine's slots. The same arrivals are simulated without rows and with rows, with several seeds:

p99_ttft: 99th percentile of the interactive requests' time to first token, over the requests of all
    seeds, with rows and without. The note has the mean and the worst ratio of a seed.
idle_used: output tokens/s of the rows, divided by their tokens/s without interactive requests times
    the idle share of the engine: the mean of all seeds. The note has the minimum over seeds.
"""

import asyncio
import math
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random
from statistics import mean
from typing import Any

from bench.simulate.routing import RoutingRow
from deployments.backend import GenerationRequest
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.simulation import virtual_time
from deployments.simulation.core_engine import CoreEngine
from deployments.simulation.service import Service
from deployments.simulation.speed import Speed
from engine.errors import Overloaded
from engine.messages import BATCH_PRIORITY
from engine.sampling_params import SamplingParams

SEEDS = (1, 2, 3, 4, 5)
LOADS = (0.3, 0.6, 0.9)


@dataclass(frozen=True, slots=True)
class BesideCase:
    """An engine and the median lengths of its requests, in tokens.

    seconds: virtual seconds of a run; the first fifth is not measured.
    """

    speed: Speed
    prompt: int
    output: int
    row_prompt: int
    row_output: int
    seconds: float


# Costs of a step, a sequence and a prompt token, as measured by `calibrate`.
CASES = {
    "default": BesideCase(
        Speed("cpu", 0.0108, 0.00051, 0.00116, 60_000, 64, 512), 100, 30, 60, 20, 160.0
    ),
    "llama-8b": BesideCase(
        Speed("gpu", 0.0043, 0.00005, 0.00002, 780_000, 256, 2048, ahead=True),
        600,
        150,
        300,
        100,
        20.0,
    ),
}


@dataclass
class BesideRun:
    """The figures of a run of interactive requests, with or without rows of a dataset.

    seconds: virtual seconds of the measured part of the run.
    firsts: seconds to the first token of each interactive request in the measured part.
    answers: interactive requests that ended in the measured part. refused: refused requests.
    rows, row_tokens: rows of the dataset that ended in the measured part, and their output tokens.
    preemptions: number of preemptions in the whole run.
    """

    seconds: float
    firsts: list[float] = field(default_factory=list)
    answers: int = 0
    row_tokens: int = 0
    rows: int = 0
    refused: int = 0
    preemptions: int = 0

    @property
    def p99(self) -> float:
        return p99(self.firsts)


def p99(firsts: Iterable[float]) -> float:
    ordered = sorted(firsts)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


def _length(dice: Random, median: int) -> int:
    return max(4, min(int(median * math.exp(dice.gauss(0, 0.7))), 8192))


class _Load:
    """The sender of a run's interactive requests and rows to one router."""

    def __init__(self, router: Dispatcher, case: BesideCase, outcome: BesideRun) -> None:
        self._router, self._case, self._outcome = router, case, outcome
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._counts_from = self.began + 0.2 * case.seconds
        self.end = self.began + case.seconds
        self._number = 0

    def _counts(self) -> bool:
        return self._counts_from <= self._loop.time() < self.end

    def _request(self, prompt: int, output: int, **fields: Any) -> GenerationRequest:
        self._number += 1  # makes each prompt unique, so that no two share a block
        ids = [3 + self._number % 991, 3 + self._number // 991 % 991] + [5] * (prompt - 2)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        return GenerationRequest(f"q{self._number}", "m", ids, params, seed=1, **fields)

    async def ask(self, prompt: int, output: int) -> None:
        """Send an interactive request."""
        at, first, counts = self._loop.time(), 0.0, self._counts()
        try:
            self._router.admit("", 0)
            inflight = self._router.generate(self._request(prompt, output))
            while await inflight.next():
                if not first and counts:
                    first = self._loop.time() - at
                    self._outcome.firsts.append(first)
        except Overloaded as refusal:
            self._outcome.refused += counts
            await asyncio.sleep(refusal.retry_after or 1.0)  # the user then sends the next request
            return
        self._outcome.answers += self._counts()

    async def user(self, dice: Random) -> None:
        """Send one user's interactive requests, one after the other."""
        while self._loop.time() < self.end:
            await self.ask(_length(dice, self._case.prompt), _length(dice, self._case.output))

    async def rows(self, dice: Random) -> None:
        """Send a dataset's rows one after the other, as `router.serve.ray_data` does."""
        while self._loop.time() < self.end:
            prompt = _length(dice, self._case.row_prompt)
            output = _length(dice, self._case.row_output)
            place = {"key": "ray-data", "priority": BATCH_PRIORITY}
            while self._loop.time() < self.end:
                try:
                    self._router.admit("ray-data", BATCH_PRIORITY)
                    inflight = self._router.generate(self._request(prompt, output, **place))
                    while items := await inflight.next():
                        if self._counts():
                            self._outcome.row_tokens += sum(
                                len(item.token_ids) for _, item in items
                            )
                    self._outcome.rows += self._counts()
                    break
                except Overloaded as refusal:
                    wait = max(1.0, refusal.retry_after or 1.0)
                    await asyncio.sleep(min(wait, 60.0) * (1 + dice.random() / 4))


async def _run(case: BesideCase, rate: float, users: int, rows: int, seed: int) -> BesideRun:
    service = Service([case.speed], 1, DispatchLimits(), CoreEngine)
    await service.start()
    (router,) = service.routers
    router.random.seed(seed)
    outcome = BesideRun(0.8 * case.seconds)
    load = _Load(router, case, outcome)
    tasks = [
        asyncio.create_task(load.user(Random(10_000 * seed + number))) for number in range(users)
    ]
    tasks += [
        asyncio.create_task(load.rows(Random(10_000 * seed + 1000 + number)))
        for number in range(rows)
    ]
    dice, loop, due = Random(seed), asyncio.get_running_loop(), load.began
    while rate and (due := due + dice.expovariate(rate)) < load.end:
        lengths = _length(dice, case.prompt), _length(dice, case.output)
        await asyncio.sleep(due - loop.time())
        tasks.append(loop.create_task(load.ask(*lengths)))
    await asyncio.sleep(load.end - loop.time())
    outcome.preemptions = service.engines[0].core.scheduler.counters.preemptions
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await service.stop()
    return outcome


def run(
    case: BesideCase, rate: float = 0.0, users: int = 0, rows: int = 0, seed: int = 1
) -> BesideRun:
    """Simulate a case and return its figures.

    rate: interactive requests per second.
    users: interactive users, each of whom sends a request once the previous one is answered.
    rows: number of a dataset's rows in flight.
    """
    return virtual_time.run(_run(case, rate, users, rows, seed))


def measure(name: str, seed: int) -> dict[str, BesideRun]:
    """Return {name: run} of a case: saturated by each kind of request; each load without and with
    rows."""
    case = CASES[name]
    slots = case.speed.max_num_seqs
    full = run(case, users=slots, seed=seed)
    runs = {"full": full, "rows alone": run(case, rows=3 * slots, seed=seed)}
    for load in LOADS:
        rate = load * full.answers / full.seconds
        runs[f"{load:g}/without"] = run(case, rate, seed=seed)
        runs[f"{load:g}/with"] = run(case, rate, rows=3 * slots, seed=seed)
    return runs


def all_rows(quick: bool = False) -> tuple[list[RoutingRow], list[dict[str, Any]]]:
    """Measure interactive requests with and without a dataset's rows, at each load.

    Returns (two rows of the table for each case and load, a line for each run).
    quick: whether to run only the case "default" with one seed.
    """
    names, seeds = (["default"], SEEDS[:1]) if quick else (list(CASES), SEEDS)
    pairs = [(name, seed) for name in names for seed in seeds]
    with ProcessPoolExecutor(min(len(pairs), len(os.sched_getaffinity(0)))) as pool:
        runs = dict(zip(pairs, pool.map(measure, *zip(*pairs, strict=True)), strict=True))
    rows: list[RoutingRow] = []
    for name in names:
        for load in LOADS:
            rows += _rows_of(f"beside/{name}/{load:g}", load, [runs[name, seed] for seed in seeds])
    lines = [
        _line(f"{name}/{case}", seed, outcome)
        for (name, seed), outcomes in runs.items()
        for case, outcome in outcomes.items()
    ]
    return rows, lines


def _rows_of(name: str, load: float, runs: list[dict[str, BesideRun]]) -> list[RoutingRow]:
    """Return the table's two rows of a load. runs: {name: run} by seed."""
    pairs = [(run[f"{load:g}/without"], run[f"{load:g}/with"]) for run in runs]
    without = p99(first for alone, _ in pairs for first in alone.firsts)
    beside = p99(first for _, both in pairs for first in both.firsts)
    ratios = [both.p99 / alone.p99 for alone, both in pairs]
    count = sum(len(both.firsts) for _, both in pairs)
    refused = [sum(pair[i].refused for pair in pairs) for i in (0, 1)]
    note = f"{count} requests; ratio of a seed: mean {mean(ratios):.3f}, worst {max(ratios):.3f}; "
    note += f"{refused[1]} refused, {refused[0]} without"
    first = RoutingRow(
        f"{name}/p99_ttft",
        round(beside, 4),
        round(without, 4),
        "s",
        round(beside / without, 3),
        note,
    )
    tokens = [both.row_tokens / both.seconds for _, both in pairs]
    idle = [(1 - load) * run["rows alone"].row_tokens / run["rows alone"].seconds for run in runs]
    used = [of / most for of, most in zip(tokens, idle, strict=True)]
    note = (
        f"least of a seed {min(used):.3f}; {sum(both.preemptions for _, both in pairs)} preemptions"
    )
    second = RoutingRow(
        f"{name}/idle_used",
        round(mean(tokens), 1),
        round(mean(idle), 1),
        "tokens/s",
        round(mean(used), 3),
        note,
    )
    return [first, second]


def _line(name: str, seed: int, outcome: BesideRun) -> dict[str, Any]:
    return {
        "case": name,
        "seed": seed,
        "seconds": outcome.seconds,
        "answers": outcome.answers,
        "refused": outcome.refused,
        "row_tokens": outcome.row_tokens,
        "rows": outcome.rows,
        "preemptions": outcome.preemptions,
        "first_s": [round(first, 4) for first in outcome.firsts],
    }
