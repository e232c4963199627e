"""The scaling cases: demand over time, policies, and rows of results.

Work flows through a first-come-first-served queue in ticks of one second. Work arrives with Poisson
noise, and n ready replicas do n seconds of work per second. A request waits for the backlog at its
arrival divided by the current capacity, plus `FIRST`. Replicas cost money from the scaling decision
on.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.simulate.pictures import Line, Panel, svg
from bench.simulate.routing import SEED, RoutingRow
from deployments.scaling.decide import (
    Demand,
    PoolModel,
    PoolState,
    ScalingHistory,
    ServiceObjective,
    decide,
)

GPU = PoolModel(
    prompt_rate=35_600, output_rate=18_000, start_seconds=45, price=1.0, minimum=0, maximum=80
)
CPU = PoolModel(
    prompt_rate=900, output_rate=250, start_seconds=10, price=0.04, minimum=0, maximum=20
)
PROMISE = ServiceObjective()
FIRST = 0.25  # seconds to the first token with no queue
PROMPT, OUTPUT = 500, 200  # computed tokens of a request
_POINTS = 240  # points of a line in a picture
LATENCY = 5.0  # seconds of a request, for policies that count requests in flight

# Maps a second to the load: the number of GPU replicas that it occupies.
Shape = Callable[[float], float]


def step(t: float) -> float:
    """Return the load at second t in occupied GPU replicas: 2, after 15 minutes 20."""
    return 2.0 if t < 900 else 20.0


def daily(t: float) -> float:
    """Return the load at second t in occupied GPU replicas, for a day compressed to four hours.

    It is a cosine between 3 at night and 30 in the afternoon.
    """
    return 16.5 - 13.5 * math.cos(2 * math.pi * t / 14_400)


def flash(t: float) -> float:
    """Return the load at second t in occupied GPU replicas.

    After half an hour at 6 it rises to 30 within two minutes, stays for ten, and falls back within
    five.
    """
    if t < 1800:
        return 6.0
    up, down = (t - 1800) / 120, (t - 1800 - 720) / 300
    return 6 + 24 * min(1.0, up) - 24 * min(1.0, max(0.0, down))


def leak(t: float) -> float:
    """Return the load at second t in occupied GPU replicas.

    It is 8 and grows by 5 every half hour.
    """
    return 8 + t / 360


def quiet(t: float) -> float:
    """Return the load at second t in occupied GPU replicas.

    It is 0, then 0.03, which a CPU replica can serve, 4 for an hour, 0.03 again, and 0.
    """
    if t < 600 or t > 7200:
        return 0.0
    return 0.03 if t < 2400 or t > 6000 else 4.0


CASES: dict[str, tuple[Shape, float]] = {
    "step": (step, 3600),
    "daily": (daily, 14_400),
    "flash": (flash, 5400),
    "leak": (leak, 7200),
    "quiet": (quiet, 9000),
}


@dataclass(slots=True)
class ScalingRun:
    """The cost and the latencies of one policy on one demand.

    cost: GPU replica hours; CPU replica hours count by their price.
    in_time: share of requests within the target.
    turns: number of changes between growth and shrinking of the GPU count.
    minutes: for each minute, the requests that arrived, and those within the target.
    """

    case: str
    policy: str
    cost: float = 0.0
    in_time: float = 1.0
    turns: int = 0
    worst: float = 0.0
    at: list[tuple[float, float, int, int, float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    minutes: dict[int, list[float]] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "policy": self.policy,
            "cost_gpu_hours": round(self.cost, 3),
            "slo_kept": round(self.in_time, 4),
            "changes_of_direction": self.turns,
            "longest_wait_s": round(self.worst, 1),
            "most_gpus": max(gpus for _, _, gpus, _, _ in self.at),
        }


class ScalingPolicy:
    """A policy whose target(now, ...) returns the wanted number of replicas every second."""

    name = ""

    def target(
        self, demand: Demand, seen: Mapping[str, PoolState], in_flight: float
    ) -> tuple[dict[str, int], str]:
        raise NotImplementedError


class MantaScaling(ScalingPolicy):
    name = "manta"

    def __init__(self) -> None:
        self.history = ScalingHistory()

    def target(
        self, demand: Demand, seen: Mapping[str, PoolState], in_flight: float
    ) -> tuple[dict[str, int], str]:
        plan = decide({"gpu": GPU, "cpu": CPU}, seen, demand, self.history, PROMISE)
        self.history = plan.history
        return plan.targets, "; ".join(
            f"{k} {plan.targets[k]}: {v}" for k, v in plan.reasons.items()
        )


class ServeDefault(ScalingPolicy):
    """Ray Serve's policy: requests in flight, averaged over 30 s, divided by a target.

    It scales up after 30 s (from zero immediately) and down after 600 s. The target is the best
    possible one: a replica's requests in flight at the utilisation that Manta allows.
    """

    name = "serve"

    def __init__(self) -> None:
        per_second = 1 / GPU.work(PROMPT, OUTPUT)
        self.target_requests = PROMISE.busy * per_second * LATENCY
        self.past: deque[float] = deque(maxlen=30)
        self.since: tuple[int, float] = (0, 0.0)  # wanted direction (1 up, -1 down), and since when

    def target(
        self, demand: Demand, seen: Mapping[str, PoolState], in_flight: float
    ) -> tuple[dict[str, int], str]:
        self.past.append(in_flight)
        mean = sum(self.past) / len(self.past)
        have = seen["gpu"].ready + seen["gpu"].starting
        wanted = min(math.ceil(mean / self.target_requests), GPU.maximum)
        if not have and in_flight:
            return {"gpu": max(wanted, 1), "cpu": 0}, ""
        direction = (wanted > have) - (wanted < have)
        if direction != self.since[0]:
            self.since = (direction, demand.now)
        delay = 30 if direction > 0 else 600
        if direction and demand.now - self.since[1] >= delay:
            return {"gpu": wanted, "cpu": 0}, ""
        return {"gpu": have, "cpu": 0}, ""


class Clairvoyant(ScalingPolicy):
    """A policy that knows the future demand.

    It starts replicas in time, stops them immediately, and plans for 97 % utilisation.
    """

    name = "clairvoyant"

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def target(
        self, demand: Demand, seen: Mapping[str, PoolState], in_flight: float
    ) -> tuple[dict[str, int], str]:
        coming = max(self.shape(demand.now + ahead) for ahead in range(0, 47, 2))
        cpus = coming * GPU.work(1, 1) and coming / 0.97 * _CPU_SHARE
        if cpus <= 20:
            return {"gpu": 0, "cpu": math.ceil(cpus)}, ""
        return {"gpu": max(1, math.ceil(coming / 0.97)), "cpu": 0}, ""


_CPU_SHARE = CPU.work(PROMPT, OUTPUT) / GPU.work(PROMPT, OUTPUT)  # CPU replicas per GPU replica


def simulate(case: str, policy: ScalingPolicy) -> ScalingRun:
    shape, seconds = CASES[case]
    dice = Random(SEED)
    run = ScalingRun(case, policy.name)
    per_request = GPU.work(PROMPT, OUTPUT)
    pools = {"gpu": GPU, "cpu": CPU}
    speed = {"gpu": 1.0, "cpu": 1 / _CPU_SHARE}
    first = max(1, math.ceil(shape(0) / 0.92)) if shape(0) else 0
    ready = {"gpu": first, "cpu": 0}
    starting: dict[str, list[float]] = {"gpu": [], "cpu": []}
    queue: deque[list[float]] = deque()  # [second of arrival, remaining work, requests]
    backlog = served = in_time = 0.0
    way, last_way = 0, 0
    arrived: deque[int] = deque(maxlen=2)
    for tick in range(int(seconds)):
        now = float(tick)
        count = _poisson(dice, shape(now) / per_request)
        if count:
            queue.append([now, count * per_request, count])
            run.minutes.setdefault(tick // 60, [0.0, 0.0])[0] += count
            backlog += count * per_request
        for name, times in starting.items():
            ready[name] += sum(when <= now for when in times)
            starting[name] = [when for when in times if when > now]
        capacity = sum(ready[name] * speed[name] for name in pools)
        work = min(capacity, backlog)
        busy = work / capacity if capacity else 0.0
        backlog -= work
        while queue and work > 1e-12:
            head = queue[0]
            part = min(head[1], work)
            share = head[2] * part / head[1]
            # Within a second, work waits for earlier work of the same second.
            wait = max(0.0, now - head[0]) + FIRST
            served += share
            if wait <= PROMISE.ttft:
                in_time += share
                run.minutes[int(head[0]) // 60][1] += share
            run.worst = max(run.worst, wait)
            head[1] -= part
            head[2] -= share
            work -= part
            if head[1] <= 1e-9:
                queue.popleft()
        waiting = sum(requests for _, _, requests in queue)
        in_flight = waiting + count * LATENCY
        seen = {
            name: PoolState(ready[name], len(starting[name]), min(1.0, 0.75 * busy))
            for name in pools
        }
        arrived.append(count)
        rate = sum(arrived) / len(arrived)
        demand = Demand(now, rate * PROMPT, rate * OUTPUT, waiting * PROMPT, int(waiting))
        targets, reason = policy.target(demand, seen, in_flight)
        for name, wanted in targets.items():
            have = ready[name] + len(starting[name])
            if name == "gpu" and wanted != have:
                way = 1 if wanted > have else -1
                run.turns += last_way != 0 and way != last_way
                last_way = way
                run.reasons.append(f"{now:.0f} s: {have} -> {wanted}: {reason}")
            if wanted > have:
                late = now + pools[name].start_seconds
                starting[name] += [late] * (wanted - have)
            while wanted < have:
                if starting[name]:
                    starting[name].pop()
                else:
                    ready[name] -= 1
                have -= 1
        run.cost += sum(
            (ready[name] + len(starting[name])) * pools[name].price / 3600 for name in pools
        )
        if tick % 10 == 0:
            run.at.append((now, shape(now), ready["gpu"], ready["cpu"], waiting))
    served += sum(requests for _, _, requests in queue)
    run.in_time = in_time / served if served else 1.0
    return run


def _poisson(dice: Random, mean: float) -> int:
    if mean <= 0:
        return 0
    if mean > 30:
        return max(0, round(dice.gauss(mean, math.sqrt(mean))))
    limit, count, product = math.exp(-mean), 0, dice.random()
    while product > limit:
        count += 1
        product *= dice.random()
    return count


def compare(case: str) -> tuple[list[RoutingRow], list[ScalingRun]]:
    """Simulate a case with all policies; return (rows of the table, runs).

    Rows compare Manta's policy: the share of requests answered within the latency target, with
    Serve's default policy; GPU hours and changes of direction, with the clairvoyant policy.
    """
    ours = simulate(case, MantaScaling())
    default = simulate(case, ServeDefault())
    best = simulate(case, Clairvoyant(CASES[case][0]))
    rows = [
        RoutingRow(
            f"{case}/slo_kept",
            round(ours.in_time, 4),
            round(default.in_time, 4),
            "share",
            round(ours.in_time / max(1e-9, default.in_time), 3),
            "Serve's target_ongoing_requests",
        ),
        RoutingRow(
            f"{case}/cost",
            round(ours.cost, 3),
            round(best.cost, 3),
            "GPU h",
            round(ours.cost / best.cost, 3),
            f"clairvoyant, which keeps {best.in_time:.4f}; Serve's {default.cost:.3f}",
        ),
        RoutingRow(
            f"{case}/changes_of_direction",
            ours.turns,
            best.turns,
            "",
            round(ours.turns / max(1, best.turns), 3),
            f"clairvoyant; Serve's {default.turns}",
        ),
    ]
    return rows, [ours, default, best]


def all_rows() -> Iterator[tuple[list[RoutingRow], list[ScalingRun]]]:
    """Simulate the scaling policies on each demand of CASES; yield (rows, runs) of each."""
    for case in CASES:
        yield compare(case)


def picture(case: str, runs: list[ScalingRun]) -> str:
    """Return an SVG of load and replicas, waiting requests, and the share within the target."""
    every = max(1, len(runs[0].at) // _POINTS)
    load = [(now / 60, work) for now, work, _, _, _ in runs[0].at[::every]]
    counts = [Line("work", load, colour=2)]
    waits, in_time = [], []
    for number, run in enumerate(runs):
        colour = (0, 1, 3)[number]
        points = [(now / 60, float(gpus)) for now, _, gpus, _, _ in run.at[::every]]
        counts.append(Line(run.policy, points, steps=True, colour=colour))
        waits.append(
            Line(
                run.policy,
                [(now / 60, wait) for now, _, _, _, wait in run.at[::every]],
                colour=colour,
            )
        )
        shares = [(minute, 100 * good / all) for minute, (all, good) in sorted(run.minutes.items())]
        in_time.append(Line(run.policy, shares, colour=colour))
    panels = [
        Panel("GPU replicas ready", "minutes", counts, height=230),
        Panel("requests that wait", "minutes", waits, height=170),
        Panel("promise kept, % of a minute's requests", "minutes", in_time, height=170),
    ]
    if any(cpus for _, _, _, cpus, _ in runs[0].at):
        cpus = [(now / 60, float(cpus)) for now, _, _, cpus, _ in runs[0].at]
        panels.insert(
            1, Panel("CPU replicas ready", "minutes", [Line("manta", cpus, True)], height=150)
        )
    return svg(f"scaling: {case}", panels)
