"""Overload: far more requests than run at once, from two keys with two priorities each."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.deployments.on_ray.live import Live
from tests.faults.abuse.report import BODY, STEP, Report, leaves_nothing, percentile, resident
from tests.faults.clients import Said, ask

TTFT = 2.0  # seconds, as promised: scaling.ttft
WAIT = 2 * TTFT  # the same in an overload
SENT = (0.8, 0.2)  # by each key
PRIORITIES = (0, 2)  # half of it each; the higher number is the less urgent


@dataclass
class Asked:
    """A request. at: when it came. seconds: time until all of its answer was there."""

    at: float
    key: int
    priority: int
    said: Said
    seconds: float

    @property
    def first(self) -> float:
        """The seconds to the first event."""
        return self.said.first - self.at

    @property
    def good(self) -> bool:
        """Whether the answer is whole, and for an urgent request also in time."""
        in_time = self.priority or self.first <= WAIT
        return bool(self.said.status == 200 and not self.said.error and in_time)

    @property
    def code(self) -> str:
        """The error code of a refusal."""
        _, _, body = self.said.error.partition(": ")
        return str(json.loads(body)["error"]["code"])

    def line(self, phase: str, began: float) -> dict[str, Any]:
        line: dict[str, Any] = {"kind": phase, "at_s": round(self.at - began, 2)}
        line |= {"key": self.key, "priority": self.priority, "status": self.said.status}
        line |= {"s": round(self.seconds, 4)}
        if self.said.status == 200:
            return line | {"first_s": round(self.first, 3)}
        return line | {"retry_after": self.said.headers.get("retry-after")}


async def overload(
    live: Live, report: Report, rows: int, seconds: float, headers: Sequence[str]
) -> None:
    """Send ten times the load of two keys, and report answers, refusals and pauses.

    The load goes on from phase to phase, whatever becomes of it. Answers are counted by the
    engines' steps, because clients, routers and engines share cores, also with other programs.
    rows: requests that run at once, at all replicas. headers: for each key, the header that names
        it.
    """
    order = random.Random(22)
    output = 80  # tokens
    capacity = rows / (output * STEP)  # requests a second, if steps took no longer
    asked: dict[str, list[Asked]] = {}
    windows: dict[str, tuple[float, float, int]] = {}  # from, to, steps

    async def send_request(phase: str) -> None:
        key = order.random() >= SENT[0]
        priority = order.choice(PRIORITIES)
        body = {**BODY, "max_tokens": output, "priority": priority}
        at = time.monotonic()
        said = await ask(live.port, body, header=headers[key])
        item = Asked(at, int(key), priority, said, time.monotonic() - at)
        asked.setdefault(phase, []).append(item)

    async def steps() -> tuple[float, int]:
        stats = await asyncio.to_thread(live.replica_stats)
        return time.monotonic(), sum(item["step"] for item in stats.values())

    async def window(phase: str, seconds: float) -> None:
        await asyncio.sleep(0.25 * seconds)  # until its queue is what it will be
        began, before = await steps()
        seen = [(began, before)]
        while seen[-1][0] < began + 0.7 * seconds:
            await asyncio.sleep(STEP)
            seen.append(await steps())
        # Answers end in rounds, and of two seconds and a half one may hold one round or two.
        a_round = output * len(live.replica_stats())
        whole = (seen[-1][1] - before) // a_round * a_round
        end, after = next(item for item in seen if item[1] >= before + whole)
        windows[phase] = (began, end, after - before)

    phases = (
        ("learn", 1.5, max(2.0, seconds / 10)),  # how quick the engines are
        ("1.5 times", 1.5, max(5.0, seconds / 3)),
        ("10 times", 10.0, seconds),
        ("after", 0.5, 6.0),
    )
    async with leaves_nothing(live, report, "overload", 20 * rows):
        began = due = time.monotonic()
        end: dict[str, float] = {}
        async with asyncio.TaskGroup() as group:
            for phase, times, lasts in phases:
                end[phase] = due + lasts
                group.create_task(window(phase, lasts))
                while due < end[phase]:
                    group.create_task(send_request(phase))
                    due += order.expovariate(times * capacity)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                if phase == "10 times":
                    largest = max((await asyncio.to_thread(resident, live)).values())
    for phase, items in asked.items():
        report.lines += [item.line(phase, began) for item in items]

    everything = [item for items in asked.values() for item in items]

    def good(phase: str) -> float:
        """Return the good answers per step of a phase."""
        since, until, count = windows[phase]
        return sum(item.good and since <= item.at + item.seconds < until for item in everything) / (
            count
        )

    flood = asked["10 times"]
    refused = [item for item in flood if item.said.status in (429, 503)]
    served = [item for item in flood if item.said.status == 200]
    lost = [item.said.error for item in flood if item.said.status not in (200, 429, 503)]
    for error, times in Counter(lost).items():
        print(f"overload: {times} times: {error}", file=sys.stderr)
    late = sorted(item.seconds for item in refused)
    waits = [int(item.said.headers.get("retry-after") or 0) for item in refused]
    codes = Counter(item.code for item in refused)
    assert set(codes) <= {"overloaded", "rate_limit_exceeded"}, codes
    report.add_row("overload/requests", len(flood), "")
    report.add_row("overload/refused", len(refused) / len(flood), "share", least=0.7)
    report.add_row("overload/neither an answer nor a refusal", len(lost), "", most=0)
    for code, times in codes.items():
        report.add_row(f"overload/{code}", times, "")
    report.add_row("overload/refused after, p50", 1e3 * percentile(late, 0.5), "ms")
    report.add_row("overload/refused after, p99", 1e3 * percentile(late, 0.99), "ms", most=50)
    report.add_row("overload/Retry-After, least", min(waits), "s", least=1)
    report.add_row("overload/Retry-After, different ones", len(set(waits)), "", least=2)
    report.add_row(
        "overload/broken answers", sum(bool(item.said.error) for item in served), "", most=0
    )
    ratio = good("10 times") / good("1.5 times")
    report.add_row("overload/good answers a step, of those at 1.5 times", ratio, "x", least=0.9)
    of_all = good("10 times") / (rows / output / len(live.replica_stats()))
    report.add_row("overload/good answers a step, of all that fit", of_all, "x")
    let_in = []
    for number, priority in enumerate(PRIORITIES):
        mine = [item for item in flood if item.priority == priority]
        first = sorted(item.first for item in mine if item.said.status == 200)
        let_in.append(len(first) / len(mine))
        report.add_row(f"overload/priority {priority}, let in", let_in[-1], "share")
        if not first:
            continue  # refused to the last, as the less urgent may be
        report.add_row(
            f"overload/priority {priority}, first token p50", percentile(first, 0.5), "s"
        )
        bound = {} if number else {"most": WAIT}
        report.add_row(
            f"overload/priority {priority}, first token p99", percentile(first, 0.99), "s", **bound
        )
    ratio = let_in[0] / max(let_in[1], 1e-3)
    report.add_row("overload/let in, urgent of others", ratio, "x", least=1.0)
    share = sum(item.key for item in served) / len(served)
    # In a short one what came before it counts: the queue is too short to put all in order.
    least = 0.35 if seconds > 30 else 0.25
    report.add_row(
        "overload/served, share of the key that sends a fifth", share, "share", least=least
    )
    slow = [item for item in asked["after"] if item.said.status != 200 or item.first > TTFT]
    back = max((item.at for item in slow), default=end["10 times"]) - end["10 times"]
    report.add_row("overload/as usual after", back, "s", most=5)
    report.add_row("overload/largest process at its end", largest, "MiB")
