"""The routing cases: fleets, workloads, policies, and rows of results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import fmean as mean

from bench.simulate.fleet.cluster import RoutingOutcome, RoutingPolicy, run
from bench.simulate.fleet.replica import Job
from bench.simulate.fleet.speeds import CPU, GPU, SLOW
from bench.simulate.fleet.workload import Mix, ideal_hits, jobs
from bench.simulate.policies import MantaRouting, OurSlots, PrefixTree, RoundRobin, TwoChoices
from deployments.simulation.speed import Speed

LOAD = 0.8  # share of the fleet's capacity
SEED = 1
# Several seeds, because with exponent 2 a single seed gives between 4.9 and 5.9 times fewer loads.
ADAPTER_SEEDS = (1, 2, 3, 4)
_ROUTERS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet and a workload. seconds: simulated time; its first third is a warm-up."""

    name: str
    speeds: tuple[Speed, ...]
    mix: Mix
    seconds: float
    rate: float  # requests per second


@dataclass(frozen=True, slots=True)
class RoutingRow:
    case: str
    ours: float
    peer: float
    unit: str
    ratio: float
    note: str = ""


def fleet(kind: str, count: int) -> tuple[Speed, ...]:
    """Return the replicas' speeds.

    kind: "mixed": a quarter of CPUs, a tenth of slow GPUs; "slow": a tenth of slow GPUs; "gpu":
        equal GPUs.
    """
    slow = 0 if kind == "gpu" else max(1, count // 10)
    cpu = count // 4 if kind == "mixed" else 0
    return (GPU,) * (count - slow - cpu) + (SLOW,) * slow + (CPU,) * cpu


def mix(kind: str, count: int) -> Mix:
    if kind == "mixed":
        return Mix(0.4, 0.3, groups=4 * count, burst=2.0, adapters=4 * count, adapted=0.2)
    return Mix(0.4, 0.3, groups=4 * count)


def capacity(speeds: Sequence[Speed], work: Sequence[Job]) -> float:
    """Return the maximum requests/s of a fleet, with full batches and all possible cache hits."""
    count = len(work)
    computed = (sum(job.prompt for job in work) - ideal_hits(work)) / count
    output = sum(job.output for job in work) / count
    length = sum(job.prompt + job.output for job in work) / count
    total = 0.0
    for speed in speeds:
        batch = min(speed.max_num_seqs, speed.kv_tokens / length)
        total += 1 / (computed * speed.token + output * (speed.base / batch + speed.sequence))
    return total


def make_case(kind: str, count: int, seconds: float) -> Case:
    speeds, wanted = fleet(kind, count), mix(kind, count)
    rate = LOAD * capacity(speeds, jobs(wanted, 200, 60, 1, seed=7))
    return Case(f"{kind}/{count}", speeds, wanted, seconds, rate)


def outcome(
    case: Case, policy: RoutingPolicy, routers: int = _ROUTERS, seed: int = SEED
) -> RoutingOutcome:
    work = jobs(case.mix, case.rate, case.seconds, routers, seed)
    return run(case.speeds, policy, work, routers=routers, warm_up=case.seconds / 3, seed=seed)


def peers() -> list[RoutingPolicy]:
    return [
        RoundRobin(),
        TwoChoices(),
        PrefixTree("prefix-tree (sglang)", 0.5, (64, 1.5)),
        PrefixTree("prefix-tree (ray-llm)", 0.1, None),
    ]


def compare(case: Case) -> tuple[list[RoutingRow], list[RoutingOutcome]]:
    """Simulate a case with all policies; return (rows of the table, outcomes by policy).

    Rows compare p99 and p50 of the time to first token with the best peer, and the hit rate with
    the ideal.
    """
    outcomes = [outcome(case, policy) for policy in [MantaRouting(), *peers()]]
    ours, others = outcomes[0], outcomes[1:]
    rows = []
    for name, share in (("p99_ttft", 0.99), ("p50_ttft", 0.5)):
        best = min(others, key=lambda one: one.ttft(share))
        rows.append(
            RoutingRow(
                f"{case.name}/{name}",
                round(ours.ttft(share), 4),
                round(best.ttft(share), 4),
                "s",
                round(ours.ttft(share) / best.ttft(share), 3),
                best.policy,
            )
        )
    ideal = _ideal(case)
    hits = ours.hit_rate()
    rows.append(
        RoutingRow(
            f"{case.name}/prefix_hit_rate",
            round(hits, 4),
            round(ideal, 4),
            "share",
            round(hits / ideal, 3),
            "one cache without limits",
        )
    )
    return rows, outcomes


def _ideal(case: Case) -> float:
    """Return the hit rate after the warm-up of a cache that contains all earlier prompts."""
    work = jobs(case.mix, case.rate, case.seconds, _ROUTERS, SEED)
    before = [job for job in work if job.arrival < case.seconds / 3]
    after = work[len(before) :]
    return (ideal_hits(work) - ideal_hits(before)) / sum(job.prompt for job in after)


def adapters(zipf: float, seconds: float = 240.0) -> tuple[list[RoutingRow], list[RoutingOutcome]]:
    """Simulate 200 adapters over 4 replicas of 16 slots; return (rows, outcomes).

    Peers route by load alone, with LRU slots and with Manta's slots. Values are means over
    ADAPTER_SEEDS.
    """
    case = Case(f"adapters-zipf-{zipf:g}/4", (GPU,) * 4, Mix(adapters=200, zipf=zipf), seconds, 50)
    policies = (MantaRouting, TwoChoices, OurSlots)
    outcomes = [[outcome(case, policy(), 2, seed) for seed in ADAPTER_SEEDS] for policy in policies]
    ours, *others = outcomes
    least = mean(
        _fewest_loads(jobs(case.mix, case.rate, case.seconds, 2, seed), 64, case.seconds / 3)
        for seed in ADAPTER_SEEDS
    )
    rows = []
    for name, other in zip(("adapter_loads", "adapter_loads_our_slots"), others, strict=True):
        fewer = [b.loads / a.loads for a, b in zip(ours, other, strict=True)]
        remark = f"{other[0].policy}: {min(fewer):.2f} to {max(fewer):.2f} times ours, by seed"
        best = f"{least:g} with all 64 slots in one place and the future known"
        note = remark if rows else f"{remark}; {best}"
        mine, theirs = (mean(run.loads for run in some) for some in (ours, other))
        rows.append(
            RoutingRow(f"{case.name}/{name}", mine, theirs, "loads", round(mine / theirs, 3), note)
        )
    late, later = (mean(run.ttft(0.99) for run in some) for some in (ours, others[0]))
    rows.append(
        RoutingRow(
            f"{case.name}/p99_ttft",
            round(late, 4),
            round(later, 4),
            "s",
            round(late / later, 3),
            others[0][0].policy,
        )
    )
    return rows, [run for some in outcomes for run in some]


def _fewest_loads(work: Sequence[Job], slots: int, since: float) -> int:
    """Return the minimum number of adapter loads, by Belady's rule.

    The rule evicts the adapter whose next use is furthest in the future.
    """
    following: list[int] = [0] * len(work)
    last: dict[str, int] = {}
    for at in range(len(work) - 1, -1, -1):
        following[at] = last.get(work[at].adapter, len(work))
        last[work[at].adapter] = at
    held: dict[str, int] = {}
    latest: list[tuple[int, str]] = []
    loads = 0
    for at, job in enumerate(work):
        if job.adapter not in held:
            loads += job.arrival >= since
            while len(held) >= slots:
                wanted, victim = heappop(latest)
                if held.get(victim) == -wanted:
                    del held[victim]
        held[job.adapter] = following[at]
        heappush(latest, (-following[at], job.adapter))
    return loads


CASES = (
    ("mixed", 4, 60.0),
    ("mixed", 64, 9.0),
    ("mixed", 1000, 4.5),
    ("slow", 64, 9.0),
    ("gpu", 64, 9.0),
)


def all_rows(quick: bool = False) -> Iterator[tuple[list[RoutingRow], list[RoutingOutcome]]]:
    """Simulate the routing policies on each fleet and workload; yield (rows, outcomes) of each.

    Adapters whose popularity follows Zipf's law come last.
    quick: whether to simulate only the fleet of four replicas.
    """
    for kind, count, seconds in CASES:
        if not quick or count == 4:
            yield compare(make_case(kind, count, seconds))
    for zipf in (1.0, 1.5, 2.0, 2.5):
        yield adapters(zipf)
