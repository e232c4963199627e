"""Runs a load during which processes are killed: short in tests, long by soak.py."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import linear_regression
from typing import Any

from tests.deployments.on_ray.live import resident_mib
from tests.faults.clients import Said
from tests.faults.cluster import Broken

PROMPTS = 8  # number of different prompts; each has one right answer
FIRST = 2.0  # seconds to the first event within which an answer is good: scaling.ttft


@dataclass
class Record:
    """The record of a request; times are seconds since the load began.

    gap_s: the longest pause between two events, which ended at gap_at_s.
    moves: how often one of its choices moved to another replica.
    """

    prompt: int
    at_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    gap_s: float = 0.0
    gap_at_s: float = 0.0
    moves: int = 0
    error: str = ""  # also set if the answer differs from the right one

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def good(self) -> bool:
        """Whether the answer was right, and its first token in time."""
        return self.ok and self.first_s - self.at_s <= FIRST


@dataclass
class Kill:
    """A kill of a process. streams: number of choices at the victim; None if unknown."""

    at_s: float
    target: str
    alive_before: int
    streams: int | None = None


@dataclass
class Run:
    """The record of a load with kills.

    quiet: seconds without kills, at the beginning.
    replicas: (seconds, number of replicas that a router saw).
    memory: (seconds, MiB of all routers).
    """

    rate: float
    tokens: int
    quiet: float = 0.0
    seconds: float = 0.0
    requests: list[Record] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    replicas: list[tuple[float, int]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def goodput(self, begin: float, end: float) -> float:
        """Return the right answers in time to requests that came in these seconds, per second."""
        return sum(request.good for request in self.requests if begin <= request.at_s < end) / (
            end - begin
        )

    def against_quiet(self) -> dict[str, Any]:
        """Return what the kills cost: choices that moved, and goodput against the quiet time."""
        moved = [request for request in self.requests if request.moves]
        streams = [kill.streams for kill in self.kills if kill.streams is not None]
        last = max(request.at_s for request in self.requests)
        before, rest = self.goodput(0, self.quiet), self.goodput(self.quiet, last)
        slope = 0.0
        if len({at for at, _ in self.memory}) > 1:
            slope = linear_regression(*zip(*self.memory, strict=True)).slope
        return {
            "streams_on_victims": sum(streams),
            "kills_with_known_streams": len(streams),
            "moves": sum(request.moves for request in moved),
            "moved_requests": len(moved),
            "moved_requests_right": sum(request.ok for request in moved),
            "goodput_quiet_per_s": round(before, 3),
            "goodput_with_kills_per_s": round(rest, 3),
            "goodput_share": round(rest / before, 3),
            "routers_mib_per_minute": round(60 * slope, 3),
        }

    def summary(self) -> dict[str, Any]:
        gaps = sorted(self.requests, key=lambda one: one.gap_s)
        firsts = sorted(request.first_s - request.at_s for request in self.requests)
        count = len(gaps)
        return {
            "requests": count,
            "failed": sum(
                request.error != "" and "instead of" not in request.error for request in gaps
            ),
            "different": sum("instead of" in request.error for request in gaps),
            "kills": len(self.kills),
            "seconds": round(self.seconds, 1),
            "requests_per_s": round(self.rate, 2),
            "tokens_each": self.tokens,
            "longest_gap_s": round(gaps[-1].gap_s, 3),
            "p99_gap_s": round(gaps[int(count * 0.99)].gap_s, 3),
            "median_gap_s": round(gaps[count // 2].gap_s, 3),
            "longest_first_event_s": round(firsts[-1], 3),
            "median_first_event_s": round(firsts[count // 2], 3),
            "longest_gaps": [
                {"gap_s": round(request.gap_s, 3), "at_s": round(request.gap_at_s, 2)}
                for request in gaps[-8:]
            ],
            "load_average": round(os.getloadavg()[1], 1),  # shows whether others ran
            "kill_marks": [asdict(kill) for kill in self.kills],
            "errors": [request.error for request in gaps if request.error][:5],
        }


class Load:
    """A load of greedy and seeded requests, with two choices or log-probabilities.

    `learn` sends each request once before any fault; later answers are compared with these answers.
    """

    def __init__(self, broken: Broken, tokens: int) -> None:
        self.broken = broken
        self.tokens = tokens
        self._bodies = [
            {**_body(number, tokens), "model": model}
            for number in range(PROMPTS)
            for model in broken.models
        ]
        self._wanted: list[Said] = []

    async def learn(self) -> None:
        self._wanted = [await self.broken.ask(body) for body in self._bodies]
        assert not any(said.error for said in self._wanted), self._wanted

    async def send_request(self, number: int, began: float) -> Record:
        which = number % len(self._bodies)
        record = Record(which, time.monotonic() - began)
        said = await self.broken.ask(self._bodies[which])
        record.end_s = time.monotonic() - began
        record.first_s = said.first - began if said.first else record.end_s
        record.moves = said.migrations
        record.gap_s, record.gap_at_s = said.gap, said.gap_end - began if said.gap_end else 0.0
        right = self.right(which)
        if said.error:
            record.error = said.error
        elif said.outcome not in right:
            record.error = f"{said.outcome} instead of {right}"
        return record

    def right(self, which: int) -> list[tuple[Any, ...]]:
        """Return the right outcomes for the prompt with this number."""
        return [self._wanted[which].outcome]

    async def capacity(self, seconds: float, at_once: int) -> float:
        """Return the requests/s of `at_once` clients that each send one request after the other."""
        began = time.monotonic()
        numbers, ends = itertools.count(), [0.0]

        async def client() -> None:
            while time.monotonic() - began < seconds:
                ends.append((await self.send_request(next(numbers), began)).end_s)

        await asyncio.gather(*(client() for _ in range(at_once)))
        return (len(ends) - 1) / max(ends)


async def kill_under_load(
    load: Load,
    *,
    rate: float,
    seconds: float,
    kills: int,
    quiet: float = 0.0,
    targets: Sequence[str] = ("engine", "replica"),
    seed: int = 0,
) -> Run:
    """Send requests at a mean rate while processes of `targets`, in turn, are killed.

    quiet: seconds of the same load before the first kill. Kills are at equal intervals; times of
        requests and victims are drawn with the seed.
    """
    broken, order = load.broken, random.Random(seed)
    run = Run(rate, load.tokens, quiet)
    whole = quiet + seconds
    began = time.monotonic()

    async def request(number: int) -> None:
        run.requests.append(await load.send_request(number, began))

    async def arrivals(group: asyncio.TaskGroup) -> None:
        at, number = 0.0, 0
        while (at := at + order.expovariate(rate)) < whole:
            await asyncio.sleep(began + at - time.monotonic())
            group.create_task(request(number))
            number += 1

    async def killer() -> None:
        for number in range(kills):
            target = targets[number % len(targets)]
            due = began + quiet + (number + 0.5) * seconds / kills
            await asyncio.sleep(due - time.monotonic())
            victims = await asyncio.to_thread(broken.find, target)
            victim = random.Random(seed + number).choice(victims)
            streams = await broken.streams_on(victim)
            if await asyncio.to_thread(victim.send, 9):
                at = round(time.monotonic() - began, 2)
                run.kills.append(Kill(at, target, len(victims), streams))

    async def watcher() -> None:
        while (at := round(time.monotonic() - began, 2)) < whole:
            run.replicas.append((at, await broken.seen()))
            routers = await asyncio.to_thread(broken.find, "router")
            run.memory.append((at, sum(resident_mib(router.pid) for router in routers)))
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as group:
        group.create_task(killer())
        group.create_task(watcher())
        group.create_task(arrivals(group))
    run.seconds = time.monotonic() - began
    return run


def _body(number: int, tokens: int) -> dict[str, Any]:
    words = ["the sea", "a river", "old books", "the moon", "bread", "a train", "snow", "tea"]
    content = f"Write about {words[number]} and nothing else."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    ]
    return body | kinds[number % len(kinds)]
