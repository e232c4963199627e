"""Seeded workloads: shared prefixes, conversations, plain prompts, adapters, bursts."""

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from bench.simulate.fleet.replica import Job
from deployments.routing.prefix_index import STRIDE


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of requests; lengths are medians in tokens.

    shared: share of requests that begin with one of `groups` shared prefixes.
    chat: share of requests that continue a conversation; the rest is plain.
    adapters: number of adapters, 0 for none. A share `adapted` of requests has one, drawn by Zipf
    with exponent `zipf`.
    burst: factor of the rate during a fifth of the time, with the same mean.
    """

    shared: float = 0.0
    chat: float = 0.0
    groups: int = 32
    prefix: int = 1024
    plain: int = 600
    tail: int = 150
    output: int = 150
    think: float = 4.0
    adapters: int = 0
    adapted: float = 1.0
    zipf: float = 1.0
    burst: float = 1.0


_PERIOD = 5.0  # seconds between the starts of two bursts


def jobs(mix: Mix, rate: float, seconds: float, routers: int, seed: int) -> list[Job]:
    """Draw requests with Poisson arrivals of mean `rate` per second, in order of arrival."""
    return sorted(_jobs(mix, rate, seconds, routers, Random(seed)), key=lambda job: job.arrival)


def _jobs(mix: Mix, rate: float, seconds: float, routers: int, dice: Random) -> Iterator[Job]:
    new = iter(_random_hashes(dice))
    prefixes = [_take_hashes(new, _length(dice, mix.prefix) // STRIDE) for _ in range(mix.groups)]
    group_sums = _zipf(mix.groups, 1.0)
    adapter_sums = _zipf(mix.adapters, mix.zipf) if mix.adapters else []
    turns = 4  # turns (requests) per conversation
    # Each start of a conversation gives several requests, so starts are rarer than requests.
    starts = rate * (1 - mix.chat + mix.chat / turns)
    chat = mix.chat / turns / (1 - mix.chat + mix.chat / turns)
    quiet = (1 - mix.burst / 5) / 0.8  # rate outside bursts, for a mean of 1
    now = 0.0
    top = max(mix.burst, quiet)
    while True:
        now += dice.expovariate(starts * top)
        if now >= seconds:
            return
        factor = mix.burst if now % _PERIOD < _PERIOD / 5 else quiet
        if dice.random() * top > factor:
            continue
        adapter = ""
        if adapter_sums and dice.random() < mix.adapted:
            adapter = f"a{bisect(adapter_sums, dice.random() * adapter_sums[-1])}"
        kind = dice.random()
        if kind < chat:
            yield from _conversation(mix, now, seconds, turns, routers, adapter, new, dice)
            continue
        head: list[bytes] = []
        tail = _length(dice, mix.plain)
        if kind < chat + mix.shared * rate / starts:
            head = prefixes[bisect(group_sums, dice.random() * group_sums[-1])]
            tail = _length(dice, mix.tail)
            if adapter:
                head = [_rooted(prefix_hash, adapter) for prefix_hash in head]
        yield _job(now, head, tail, _length(dice, mix.output), routers, adapter, new, dice)


def _conversation(
    mix: Mix,
    now: float,
    seconds: float,
    turns: int,
    routers: int,
    adapter: str,
    new: Iterator[bytes],
    dice: Random,
) -> Iterator[Job]:
    head: list[bytes] = []
    for _ in range(turns):
        tail, output = _length(dice, mix.tail * 2), _length(dice, mix.output)
        job = _job(now, head, tail, output, routers, adapter, new, dice)
        if now < seconds:
            yield job
        head = job.full_prefix_hashes
        now += output * 0.015 + dice.uniform(0.5, 1.5) * mix.think


def _job(
    now: float,
    head: list[bytes],
    tail: int,
    output: int,
    routers: int,
    adapter: str,
    new: Iterator[bytes],
    dice: Random,
) -> Job:
    prompt = len(head) * STRIDE + max(1, tail)
    prefix_hashes = head + _take_hashes(new, (prompt - 1) // STRIDE - len(head))
    full = prefix_hashes + _take_hashes(new, (prompt + output) // STRIDE - len(prefix_hashes))
    return Job(now, prompt, output, prefix_hashes, full, adapter, dice.randrange(routers))


def ideal_hits(work: list[Job]) -> int:
    """Return the number of prompt tokens that a single unlimited cache would hit."""
    seen: set[bytes] = set()
    hits = 0
    for job in work:
        for prefix_hash in job.prefix_hashes:
            if prefix_hash not in seen:
                break
            hits += STRIDE
        seen.update(job.full_prefix_hashes)
    return hits


def _length(dice: Random, median: int) -> int:
    return max(4, min(int(median * math.exp(dice.gauss(0, 0.7))), 8192))


def _random_hashes(dice: Random) -> Iterator[bytes]:
    while True:
        yield dice.getrandbits(64).to_bytes(8, "little")


def _take_hashes(new: Iterator[bytes], count: int) -> list[bytes]:
    return [next(new) for _ in range(count)]


def _rooted(prefix_hash: bytes, adapter: str) -> bytes:
    """Return a prefix hash that also depends on the adapter."""
    mark = int.from_bytes(adapter.encode()[:8], "little") * 0x9E3779B97F4A7C15 % 2**64
    return (int.from_bytes(prefix_hash, "little") ^ mark).to_bytes(8, "little")


def _zipf(count: int, s: float) -> list[float]:
    return list(accumulate(1 / (rank + 1) ** s for rank in range(count)))
