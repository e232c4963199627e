"""Load with kills in it: F4, short in the tests and long from the command line (soak.py)."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from tests.faults.cluster import Broken

PROMPTS = 8  # different ones; each has one right answer


async def kill_under_load(
    broken: Broken,
    *,
    seconds: float,
    kills: int,
    at_once: int,
    tokens: int,
    targets: Sequence[str] = ("engine", "replica"),
    seed: int = 0,
) -> dict[str, Any]:
    """So many clients, one request after the other, while processes of `targets`, in turn, are
    killed. The moments are spread evenly, the victims drawn from the seed. Requests are greedy,
    seeded, with two choices or log-probabilities; each answer is compared with the one that came
    before any kill. Seconds unless said otherwise.
    """
    order = random.Random(seed)
    asked = [_body(number, tokens) for number in range(PROMPTS)]
    wanted = [await broken.ask(body) for body in asked]
    assert not any(said.error for said in wanted), wanted
    began = time.monotonic()
    report: dict[str, Any] = {"requests": 0, "failed": 0, "different": 0, "kills": 0}
    gaps: list[tuple[float, float]] = []  # and when the request ended
    errors: list[str] = []
    marks: list[dict[str, Any]] = []
    numbers = itertools.count()

    async def client() -> None:
        while time.monotonic() - began < seconds:
            which = next(numbers) % PROMPTS
            said = await broken.ask(asked[which])
            report["requests"] += 1
            gaps.append((said.gap, round(time.monotonic() - began, 2)))
            if said.error:
                report["failed"] += 1
                errors.append(said.error)
            elif said.outcome != wanted[which].outcome:
                report["different"] += 1
                errors.append(f"{said.outcome} instead of {wanted[which].outcome}")

    async def killer() -> None:
        for number in range(kills):
            target = targets[number % len(targets)]
            await asyncio.sleep(began + (number + 0.5) * seconds / kills - time.monotonic())
            victims = await asyncio.to_thread(broken.find, target)
            victim = order.choice(victims)
            await asyncio.to_thread(broken.kill, target, victims.index(victim))
            report["kills"] += 1
            at = round(time.monotonic() - began, 2)
            marks.append({"at_s": at, "target": target, "alive_before": len(victims)})

    async with asyncio.TaskGroup() as group:
        group.create_task(killer())
        for _ in range(at_once):
            group.create_task(client())
    gaps.sort()
    return {
        **report,
        "seconds": round(time.monotonic() - began, 1),
        "at_once": at_once,
        "tokens_each": tokens,
        "longest_gap_s": round(gaps[-1][0], 3),
        "p99_gap_s": round(gaps[int(len(gaps) * 0.99)][0], 3),
        "median_gap_s": round(gaps[len(gaps) // 2][0], 3),
        "longest_gaps": [{"gap_s": round(gap, 3), "ended_at_s": at} for gap, at in gaps[-8:]],
        "load_average": os.getloadavg()[1],  # more than the cores: others were at work
        "kill_marks": marks,
        "errors": errors[:5],
    }


def _body(number: int, tokens: int) -> dict[str, Any]:
    words = ["the sea", "a river", "old books", "the moon", "bread", "a train", "snow", "tea"]
    content = f"Write about {words[number]} and nothing else."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0.8, "seed": 3, "n": 2},
        {"temperature": 0, "logprobs": True, "top_logprobs": 0},
    ]
    return body | kinds[number % len(kinds)]
