"""Roles: separate prefill and decode replicas, against replicas that do both.

This is a discrete-event simulation with the simulator's replicas. Moving a prompt's KV blocks to
another replica takes their bytes divided by the network's rate; at the other replica they count as
cached. Each case has one workload. It is simulated at one rate of arrival, and with all requests at
once, which gives the tokens/s of saturated replicas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from bench.simulate.fleet.replica import Job, SimReplica
from bench.simulate.fleet.speeds import GPU
from bench.simulate.routing import SEED, RoutingRow
from deployments.routing.prefix_index import HASH_BYTES, STRIDE
from deployments.simulation.speed import Speed

TOKEN_BYTES = 131_072  # bytes of a token's keys and values of an 8B model in bfloat16
LOAD = 0.7  # load as a share of the maximum tokens/s of replicas that do both
REQUESTS = 400
# (replicas, prompt, output, bytes/s of the network)
CASES = (
    (2, 8192, 256, 1e9),
    (2, 8192, 256, 10e9),
    (2, 1024, 256, 10e9),
    (8, 8192, 256, 10e9),
    (8, 2048, 1024, 10e9),
)


@dataclass(frozen=True, slots=True)
class RolesOutcome:
    """The latencies and the rate of a simulated run.

    gap: 99th percentile of the seconds between two tokens of a stream.
    first: mean seconds to the first token.
    rate: tokens/s of prompts and outputs.
    """

    gap: float
    first: float
    rate: float


def run(
    speed: Speed, prefills: int, decodes: int, work: list[tuple[float, int, int]], network: float
) -> RolesOutcome:
    """Simulate one fleet.

    prefills: number of replicas that compute prompts for the others; 0: all replicas do both.
    work: (arrival, prompt tokens, output tokens) of each request.
    """
    dice, order = Random(SEED), count()
    replicas = [SimReplica(index, speed, 1) for index in range(prefills + decodes)]
    # (time, tie, replica, job that arrives, version of the replica's step)
    events: list[tuple[float, int, int, Job | None, int]] = []
    outputs: dict[int, tuple[Job, int]] = {}  # job's number -> first job, its output tokens
    gaps: list[tuple[float, int]] = []
    firsts: list[float] = []
    for arrival, prompt, output in work:
        names = [dice.randbytes(HASH_BYTES) for _ in range(prompt // STRIDE)]
        job = Job(arrival, prompt, 1 if prefills else output, names)
        outputs[job.number] = job, output
        heappush(events, (arrival, next(order), -1, job, 0))
    now = 0.0

    def begin(replica: SimReplica) -> None:
        if at := replica.begin(now):
            end_at(replica, at)

    def end_at(replica: SimReplica, at: float) -> None:
        replica.version += 1
        heappush(events, (at, next(order), replica.index, None, replica.version))

    def place(job: Job, among: list[SimReplica]) -> None:
        replica = min(among, key=lambda r: r.waiting_tokens * speed.token + r.running * speed.base)
        replica.submit(job)
        if not replica.busy:
            begin(replica)
        elif replica.steps > 1:
            end_at(replica, replica.interrupt(now))

    while events:
        now, _, index, arrived, version = heappop(events)
        if arrived is not None and index < 0:
            place(arrived, replicas[:prefills] if prefills else replicas)
            continue
        if arrived is not None:
            target = min(replicas[prefills:], key=lambda r: r.running + len(r.waiting))
            target._keep(arrived.prefix_hashes)
            place(arrived, [target])
            continue
        replica = replicas[index]
        if version != replica.version:
            continue
        running = [job for _, job in replica.decoding]
        begun = [job for job, length in replica.chunk if length == job.left]
        gaps.append((replica.seconds, replica.steps * len(running)))
        ended = replica.finish(now)
        for job in begun:
            first, output = outputs[job.number]
            if first is job:
                firsts.append(now - job.arrival)
            else:
                gaps.append((now - first.end, 1))
        for job in ended:
            first, output = outputs[job.number]
            if prefills and first is job and output > 1:
                later = Job(job.arrival, job.prompt + 1, output - 1, job.prefix_hashes)
                outputs[later.number] = job, output
                at = now + job.prompt * TOKEN_BYTES / network
                heappush(events, (at, next(order), prefills, later, 0))
        begin(replica)
    gaps.sort()
    excess, gap = 0.01 * sum(weight for _, weight in gaps), 0.0
    for gap, weight in reversed(gaps):  # noqa: B007
        excess -= weight
        if excess <= 0:
            break
    tokens = sum(prompt + output for _, prompt, output in work)
    return RolesOutcome(gap, sum(firsts) / len(firsts), tokens / now)


def best_split(
    speed: Speed, replicas: int, prompt: int, output: int, network: float
) -> tuple[int, RolesOutcome]:
    """Return the best number of prefill replicas, and the outcome with saturated replicas."""
    work = [(0.0, prompt, output)] * REQUESTS
    runs = [(n, run(speed, n, replicas - n, work, network)) for n in range(1, replicas)]
    return max(runs, key=lambda one: one[1].rate)


def all_rows() -> Iterator[RoutingRow]:
    """Yield three rows for each case.

    They are the tokens/s of saturated replicas and, at one rate of arrival, the p99 of the time
    between tokens and the mean time to first token.
    """
    for replicas, prompt, output, network in CASES:
        name = f"{replicas} x 8B, {prompt} in, {output} out, {network / 1e9:g} GB/s"
        full = run(GPU, 0, replicas, [(0.0, prompt, output)] * REQUESTS, network)
        prefills, apart_full = best_split(GPU, replicas, prompt, output, network)
        rate = LOAD * min(full.rate, apart_full.rate) / (prompt + output)
        dice, at = Random(SEED), 0.0
        work = []
        for _ in range(REQUESTS):
            at += dice.expovariate(rate)
            work.append((at, prompt, output))
        together = run(GPU, 0, replicas, work, network)
        apart = run(GPU, prefills, replicas - prefills, work, network)
        note = f"{prefills} of {replicas} for prompts"
        for what, ours, peer, unit in (
            ("tokens/s when full", apart_full.rate, full.rate, "tokens/s"),
            ("p99 between tokens", apart.gap, together.gap, "s"),
            ("mean first token", apart.first, together.first, "s"),
        ):
            ratio = round(ours / peer, 3)
            yield RoutingRow(f"{name}: {what}", round(ours, 4), round(peer, 4), unit, ratio, note)
