"""Sends ten times the requests that real engines can serve, over HTTP, for a minute.

    python -m tests.faults.flood                    # the default model, 2 replicas of 64 rows
    python -m tests.faults.flood --lengths mixed

The client has the first core; HAProxy, routers and engines share the others, so that the client's
CPU time does not slow the service. With --engines-alone the engines have the other cores, and
everything else shares the client's core: then answering the many refusals takes no time from the
engines.

First, as many users as there are rows each send one request after the other, which measures the
capacity. Then requests arrive as a Poisson process at a multiple of that rate. The figures, with
their bounds, go to FOLDER/faults-flood-<date>; exit status 1 if one is out of its bounds. Figures
are invalid if the machine runs other work.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from deployments.checkpoints.resolve import resolve_model
from tests.deployments.on_ray.live import NAME, REPLICAS, Live, live_server
from tests.faults.abuse.report import Report, percentile
from tests.faults.clients import Said, ask

TTFT = 2.0  # bound on the time to the first token in seconds, scaling.ttft
WAIT = 2 * TTFT  # the bound under overload
WORDS = ("the", "sea", "is", "wide", "and", "cold", "but", "we", "go", "on", "to", "see", "far")
# name -> ((minimum, maximum) of prompt words, (minimum, maximum) of output tokens)
LENGTHS = {"alike": ((20, 20), (32, 32)), "mixed": ((5, 45), (8, 80))}


@dataclass
class Asked:
    """A request and its answer. at, end: monotonic seconds of its arrival and its end."""

    at: float
    said: Said
    end: float

    @property
    def first(self) -> float:
        """The seconds to the first token."""
        return self.said.first - self.at

    @property
    def whole(self) -> bool:
        return self.said.status == 200 and not self.said.error

    @property
    def good(self) -> bool:
        return self.whole and self.first <= WAIT


class Client:
    def __init__(self, port: int, lengths: str) -> None:
        self._port = port
        self._words, self._tokens = LENGTHS[lengths]
        self._dice = random.Random(13)

    async def ask(self, asked: list[Asked]) -> Asked:
        dice = self._dice
        words = dice.choices(WORDS, k=dice.randint(*self._words))
        body = {"model": NAME, "prompt": " ".join(words), "ignore_eos": True, "temperature": 0}
        body["max_tokens"] = dice.randint(*self._tokens)
        at = time.monotonic()
        said = await ask(self._port, body)
        asked_one = Asked(at, said, time.monotonic())
        asked.append(asked_one)
        return asked_one

    async def closed(self, users: int, seconds: float) -> list[Asked]:
        """Run users in a closed loop: each sends its next request after an answer, or a little
        after a refusal."""
        asked: list[Asked] = []
        end = time.monotonic() + seconds

        async def user() -> None:
            while time.monotonic() < end:
                if not (await self.ask(asked)).whole:
                    await asyncio.sleep(0.5)

        await asyncio.gather(*(user() for _ in range(users)))
        return asked

    async def open(self, rate: float, seconds: float) -> list[Asked]:
        """Send Poisson arrivals at a mean rate for some seconds; return all requests."""
        asked: list[Asked] = []
        due = time.monotonic()
        end = due + seconds
        async with asyncio.TaskGroup() as group:
            while (due := due + self._dice.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self.ask(asked))
        return asked


async def most_beyond(live: Live, rows: int, found: list[int]) -> None:
    """Append to `found`, twice a second, the maximum number of requests in an engine beyond its
    rows."""
    while True:
        stats = await asyncio.to_thread(live.replica_stats)
        found.append(
            max(stats_of["running"] + stats_of["waiting"] for stats_of in stats.values()) - rows
        )
        await asyncio.sleep(0.5)


def rate(asked: list[Asked], since: float, until: float, *, good: bool) -> float:
    """Return the number of answers per second that ended in [since, until). good: whether to count
    only those within TTFT."""
    count = sum((item.good if good else item.whole) and since <= item.end < until for item in asked)
    return count / (until - since)


def leave_to_engines(live: Live, cores: set[int]) -> None:
    """Move all threads of the engines to these cores."""
    for stats in live.replica_stats().values():
        for thread in Path(f"/proc/{stats['engine_pid']}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


async def flood(live: Live, report: Report, options: argparse.Namespace) -> None:
    client, rows = Client(live.port, options.lengths), options.rows
    beyond: list[int] = []
    # Run in both parts, because calls of replicas through Ray take CPU time from the engines.
    watch = asyncio.create_task(most_beyond(live, rows, beyond))
    began = time.monotonic() + options.warm_up
    calm = await client.closed(REPLICAS * rows, options.warm_up + options.seconds / 2)
    # Without its beginning: users who begin together have no answer for as long as one takes.
    capacity = rate(calm, began, began + options.seconds / 2, good=False)
    assert capacity, f"no user got an answer: {Counter(item.said.error for item in calm)}"
    began = time.monotonic()
    asked = await client.open(options.times * capacity, options.warm_up + options.seconds)
    watch.cancel()
    report.lines += [
        {
            "at_s": round(item.at - began, 3),
            "status": item.said.status,
            "first_s": round(item.first, 3) if item.whole else None,
            "s": round(item.end - item.at, 3),
            "retry_after": item.said.headers.get("retry-after"),
        }
        for item in asked
    ]
    refused = [item for item in asked if item.said.status in (429, 503)]
    lost = [item for item in asked if not item.whole and item.said.status not in (429, 503)]
    first = sorted(item.first for item in asked if item.whole)
    late = sorted(item.end - item.at for item in refused)
    let_in = Counter(int((item.at - began) // 5) for item in asked if item.said.status == 200)
    stretches = [let_in[part] for part in range(int((options.warm_up + options.seconds) // 5))]
    for error, times in Counter(item.said.error for item in lost).items():
        print(f"{times} times: {error}", file=sys.stderr)
    print(f"let in, by stretches of 5 s: {stretches}", file=sys.stderr)
    # Without its beginning here, too: the flood finds empty engines.
    counted = began + options.warm_up
    held = rate(asked, counted, counted + options.seconds, good=True)
    whole = rate(asked, counted, counted + options.seconds, good=False)
    report.add_row("flood/a closed loop's answers", capacity, "1/s")
    report.add_row("flood/requests", len(asked), "")
    report.add_row("flood/answers, of a closed loop's", whole / capacity, "x", least=0.95)
    report.add_row("flood/first token within the promise, of a closed loop's", held / capacity, "x")
    report.add_row("flood/first token p50", percentile(first, 0.5), "s")
    report.add_row("flood/first token p99", percentile(first, 0.99), "s", most=2 * WAIT)
    report.add_row("flood/refused", len(refused) / len(asked), "share", least=0.5)
    if late:
        report.add_row("flood/refused after, p50", 1e3 * percentile(late, 0.5), "ms")
        report.add_row("flood/refused after, p99", 1e3 * percentile(late, 0.99), "ms", most=500)
    without = sum("retry-after" not in item.said.headers for item in refused)
    report.add_row("flood/refusals without Retry-After", without, "", most=0)
    report.add_row("flood/neither an answer nor a refusal", len(lost), "", most=0)
    report.add_row("flood/let in within 5 s, least", min(stretches[1:]), "")
    report.add_row("flood/let in within 5 s, most", max(stretches[1:]), "")
    report.add_row("flood/in an engine beyond its rows, most", max(beyond), "", most=rows // 8 + 4)


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults.flood", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="as in a configuration")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="of each of the two replicas")
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds not counted in each")
    parser.add_argument("--lengths", default="alike", choices=LENGTHS)
    parser.add_argument("--engines-alone", action="store_true", help="on all cores but the first")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    model = resolve_model(options.model, progress=lambda what, done, total: None)
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:]) or set(cores)
    # Processes that are started from here on inherit the core.
    os.sched_setaffinity(0, {cores[0]} if options.engines_alone else others)
    report = Report()
    engine = {"max_num_seqs": options.rows, "dtype": options.dtype, "num_threads": 1}
    with live_server(Path(model), engine=engine, scaling={"ttft": TTFT}) as live:
        os.sched_setaffinity(0, {cores[0]})
        if options.engines_alone:
            leave_to_engines(live, others)
        asyncio.run(flood(live, report, options))
    config = {
        **{name: value for name, value in vars(options).items() if name != "out"},
        "routers": 2,
        "promise": WAIT,
        "replicas": REPLICAS,
        "cores of the server": len(others),
    }
    return report.finish(options.out, "faults-flood", **config)


if __name__ == "__main__":
    sys.exit(main())
