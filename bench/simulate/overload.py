"""Overload of real routers and replica servers in virtual time, with simulated slow engines.

Connections are in memory, and the engines' steps are as long as a CPU's. All code between a request
and its engine is the service's: admission, queue, routing, channel, replica server. So the
service's behaviour with engines that are busy for seconds is simulated quickly and reproducibly.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from bench.simulate.fleet.engine import SimEngine
from bench.simulate.routing import RoutingRow
from deployments.backend import GenerationRequest
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.simulation import virtual_time
from deployments.simulation.service import Service
from deployments.simulation.speed import Speed
from engine.errors import Overloaded
from engine.sampling_params import SamplingParams

PROMISE = 2.0  # target seconds to the first token: scaling.ttft
WAIT = 2 * PROMISE  # accepted seconds to the first token in an overload

# The default model on one core per engine: twice the costs that `calibrate` measured on two cores.
CORE = Speed("cpu", 0.021, 0.0010, 0.0023, 60_000, 64, 512)
# Two engines on one core: a step of a full batch takes 0.17 s, and a request of 32 tokens 6 s.
HALF = Speed("cpu", 0.042, 0.0020, 0.0046, 60_000, 64, 512)
# A core half as fast: a request of 32 tokens takes 25 s.
QUARTER = HALF.slower(2)


@dataclass(slots=True)
class Asked:
    """The times of one request in monotonic seconds; -1 stands for never.

    at: arrival. sent: when it was sent to a replica. first: first token.
    retry_after: the Retry-After seconds, if the request was refused.
    """

    at: float
    sent: float = -1.0
    first: float = -1.0
    end: float = -1.0
    retry_after: float = -1.0


@dataclass
class Found:
    """The requests and waiting times of a run.

    asked: requests by arrival.
    most_waiting: maximum number of requests waiting in an engine.
    began: monotonic seconds, from which other times are counted.
    """

    asked: list[Asked] = field(default_factory=list)
    most_waiting: int = 0
    began: float = 0.0

    def good(self, since: float, until: float, wait: float = WAIT) -> float:
        """Return the good answers per second that ended in [since, until).

        An answer is good if its first token came within `wait` seconds.
        """
        count = sum(
            since <= request.end - self.began < until and request.first - request.at <= wait
            for request in self.asked
            if request.end >= 0
        )
        return count / (until - since)

    def first(self, share: float, since: float = 0.0) -> float:
        """Return a quantile of the seconds to the first token of admitted requests.

        share: the quantile, such as 0.99. since: requests that arrived earlier are left out.
        """
        waits = sorted(
            request.first - request.at
            for request in self.asked
            if request.first >= 0 and request.at - self.began >= since
        )
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    def let_in(self) -> list[int]:
        """Return the number of admitted requests in each 5 s."""
        counts: dict[int, int] = {}
        for request in self.asked:
            part = int((request.at - self.began) // 5)
            counts[part] = counts.get(part, 0) + (request.retry_after < 0)
        return [counts.get(part, 0) for part in range(max(counts, default=-1) + 1)]


Lengths = Callable[[Random], tuple[int, int]]  # prompt, output tokens


def alike(dice: Random) -> tuple[int, int]:
    """Return equal lengths, so that all requests of a batch end and are replaced together."""
    return 24, 32


def mixed(dice: Random) -> tuple[int, int]:
    return dice.randrange(8, 60), dice.randrange(8, 80)


def chats(dice: Random) -> tuple[int, int]:
    """Draw (prompt tokens, output tokens) of a request that occupies a slot for about 25 s."""
    return dice.randrange(20, 100), dice.randrange(50, 350)


async def _ask(router: Dispatcher, prompt: int, output: int, asked: Asked) -> None:
    loop = asyncio.get_running_loop()
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    try:
        router.admit("", 0)
        inflight = router.generate(GenerationRequest("q", "m", [5] * prompt, params, seed=1))
        while items := await inflight.next():
            if asked.first < 0:
                asked.first = loop.time()
                asked.sent = inflight.placed
            if items[-1][1].finish:
                asked.end = loop.time()
    except Overloaded as refusal:
        asked.retry_after = refusal.retry_after or 0.0


async def _run(
    speeds: Sequence[Speed],
    routers: int,
    lengths: Lengths,
    seconds: float,
    rate: float,
    users: int,
) -> Found:
    limits = DispatchLimits(admission=AdmissionLimits(queue_seconds=0.75 * PROMISE))
    service = Service(speeds, routers, limits, SimEngine)
    await service.start()
    loop, dice, results = asyncio.get_running_loop(), Random(1), Found()
    for number, router in enumerate(service.routers):
        router.random.seed(1 + number)
    results.began = loop.time()
    end = results.began + seconds
    tasks: set[asyncio.Task[None]] = set()

    async def user(number: int) -> None:
        while loop.time() < end:
            asked = Asked(loop.time())
            results.asked.append(asked)
            await _ask(service.routers[number % routers], *lengths(dice), asked)
            if asked.retry_after >= 0:
                await asyncio.sleep(asked.retry_after)

    if users:
        await asyncio.gather(*(user(number) for number in range(users)))
    else:
        due = results.began
        while (due := due + dice.expovariate(rate)) < end:
            await asyncio.sleep(due - loop.time())
            asked = Asked(loop.time())
            results.asked.append(asked)
            router = dice.choice(service.routers)
            task = loop.create_task(_ask(router, *lengths(dice), asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    results.most_waiting = max(engine.most_waiting for engine in service.engines)
    await service.stop()
    return results


def closed(speeds: Sequence[Speed], lengths: Lengths, *, seconds: float = 40.0) -> Found:
    """Run a closed loop through two routers, with as many users as the engines have slots."""
    users = sum(speed.max_num_seqs for speed in speeds)
    return virtual_time.run(_run(speeds, 2, lengths, seconds, 0.0, users))


def open_loop(
    speeds: Sequence[Speed],
    lengths: Lengths,
    rate: float,
    *,
    routers: int = 2,
    seconds: float = 60.0,
) -> Found:
    """Run Poisson arrivals at `rate` per second, independent of answers and refusals."""
    return virtual_time.run(_run(speeds, routers, lengths, seconds, rate, 0))


CASES = {
    "alike": (alike, CORE),
    "mixed": (mixed, CORE),
    "alike, half a core": (alike, HALF),
    "mixed, half a core": (mixed, HALF),
    "alike, a quarter of a core": (alike, QUARTER),
    "mixed, a quarter of a core": (mixed, QUARTER),
    "chats": (chats, CORE),
}


def case(name: str) -> tuple[float, Found, float]:
    """Measure a closed loop, and a flood of ten times the loop's rate.

    Returns the loop's answers per second, the run of the flood, and the number of the flood's first
    seconds that are not measured. The latter are two rounds of the batch, since the flood starts
    with empty engines.
    """
    lengths, speed = CASES[name]
    speeds = (speed, speed)
    begin = 2 * 2 * speed.max_num_seqs / closed(speeds, lengths).good(10, 40, float("inf"))
    capacity = closed(speeds, lengths, seconds=begin + 60).good(begin, begin + 60, float("inf"))
    return capacity, open_loop(speeds, lengths, 10 * capacity, seconds=begin + 60), begin


def rows() -> list[RoutingRow]:
    """Measure each case: a minute of a flood of ten times a closed loop's rate; return the rows."""
    rows = []
    for name in CASES:
        capacity, flood, begin = case(name)
        good, late = flood.good(begin, begin + 60), flood.first(0.99, begin)
        let_in = flood.let_in()[int(begin // 5) + 1 : -1]
        row = f"overload/{name}"
        rows += [
            RoutingRow(
                f"{row}/good_answers",
                round(good, 2),
                round(capacity, 2),
                "1/s",
                round(good / capacity, 3),
                f"a closed loop; first token within {WAIT:g} s",
            ),
            RoutingRow(
                f"{row}/p99_ttft",
                round(late, 3),
                2 * WAIT,
                "s",
                round(late / (2 * WAIT), 3),
                "twice what is promised in an overload",
            ),
            RoutingRow(
                f"{row}/let_in_5_s, least and most",
                min(let_in),
                max(let_in),
                "",
                round(min(let_in) / max(let_in), 3),
                "after the beginning",
            ),
            RoutingRow(
                f"{row}/waiting_in_an_engine",
                flood.most_waiting,
                CORE.max_num_seqs,
                "",
                round(flood.most_waiting / CORE.max_num_seqs, 3),
                "at most; its rows",
            ),
        ]
    return rows
