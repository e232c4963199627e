"""Runs the default model in float32 on three replicas with 20 kills in 10 minutes, and reports.

    python -m tests.faults.soak
    python -m tests.faults.soak --models 2 --replicas 2

With several models requests go to each in turn, and any model's engines and replicas are killed.
The load is 60 % of the capacity that is measured first, and at least 1,000 requests during the
kills. Before the kills the load runs without kills, for a fifth of their time. Good answers (right,
with a first token within 2 s) of both times are compared.
Writes bench/results/faults-soak-<date>.json (the figures), .jsonl (every request and kill) and
.svg (all of it over time). Exit status 1 if any request failed, differed or paused longer than 2 s
plus a prefill, if good answers fell below 70 %, or if requests, tasks or files leaked.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.versus.engine import commit
from deployments.checkpoints.resolve import resolve_model
from tests.deployments.on_ray.serve_cluster import ray_and_serve
from tests.faults.cluster import NAME, Broken, deployed
from tests.faults.load import Load, Run, kill_under_load
from tests.faults.timeline import picture

ENGINE = {"dtype": "float32", "num_blocks": 600, "max_num_seqs": 32}
RESULTS = Path(__file__).parents[2] / "bench" / "results"
SHARE = 0.6  # of the measured capacity
LONGEST_GAP = 2.0  # seconds, plus a prefill
FILES = 3  # open files more than before, for Ray's connections; a leak would be one per kill
QUIET = 0.2  # time without kills before, as a share of the time with kills
GOODPUT = 0.7  # bound on the goodput as a share of that without kills
# Tasks of Serve's calls to a router or replica, such as health checks, are not leaks. Requests of
# such calls are counted in `held`.
CALL = "UserCallableWrapper.call_user_method"
MIB = 64.0  # memory by which a router may grow because of fragmentation


async def soak(broken: Broken, options: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    await broken.settled(300)
    load = Load(broken, options.tokens)
    await load.learn()
    seconds = options.minutes * 60
    carried = await load.capacity(min(30.0, seconds / 2), at_once=12)
    rate = max(SHARE * carried, options.requests * 1.08 / seconds)
    print(f"capacity {carried:.2f} requests/s; {rate:.2f} are sent", file=sys.stderr)
    # What a stream that moves has to compute again, alone on its replica.
    alone = [await load.send_request(number, 0.0) for number in range(4)]
    prefill = statistics.median(item.first_s - item.at_s for item in alone)
    before = await broken.states()
    run = await kill_under_load(
        load, rate=rate, seconds=seconds, kills=options.kills, quiet=QUIET * seconds
    )
    recovered = await broken.settled(300)
    await asyncio.sleep(5)  # for the last work of the last replica's start
    after = await broken.states()
    return run, {
        "capacity_requests_per_s": round(carried, 2),
        "load_share": round(rate / carried, 2),
        "prefill_s": round(prefill, 3),
        **run.summary(),
        **run.against_quiet(),
        "seconds_to_full_strength_after": round(recovered, 1),
        "left_behind": left_behind(before, after),
        "before": before,
        "after": after,
    }


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a message for each resource of which more is held after a run than before."""
    collected = []
    for was, now in zip(before["routers"], after["routers"], strict=True):
        assert was["pid"] == now["pid"], "a router was replaced"
        collected += more_tasks("router", was["tasks"], now["tasks"])
        if now["open_files"] > was["open_files"] + FILES:
            collected.append(
                f"a router's open files: {was['open_files']}, then {now['open_files']}"
            )
        if now["resident_mib"] > was["resident_mib"] + MIB:
            collected.append(f"a router's MiB: {was['resident_mib']}, then {now['resident_mib']}")
        collected += [f"a router's {what}: {count}" for what, count in now["held"].items() if count]
    most: Counter[str] = Counter()
    for replica in before["replicas"]:
        most |= Counter(replica["tasks"])
    for now in after["replicas"]:
        if now["free_blocks"] != now["total_blocks"]:
            collected.append(f"blocks in use: {now['total_blocks'] - now['free_blocks']}")
        if now["running"] or now["waiting"] or now["in_flight"]:
            collected.append("requests at a replica")
        collected += more_tasks("replica", most, now["tasks"])
    return collected


def more_tasks(whose: str, before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return a message for each kind of tasks whose number has grown.

    before, after: number of tasks by the name of their coroutine function.
    """
    return [
        f"a {whose}'s tasks {name}: {before.get(name, 0)}, then {count}"
        for name, count in after.items()
        if name != CALL and count > before.get(name, 0)
    ]


def verdict(report: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return a message for each figure of a report that is out of its bounds."""
    bound = LONGEST_GAP + report["prefill_s"]
    checks = [
        (report["failed"] == 0, f"{report['failed']} requests failed"),
        (report["different"] == 0, f"{report['different']} answers differ"),
        (report["kills"] == options.kills, f"{report['kills']} kills of {options.kills}"),
        (report["requests"] >= options.requests, f"only {report['requests']} requests"),
        (report["longest_gap_s"] <= bound, f"a pause of {report['longest_gap_s']} s"),
        (
            report["moved_requests_right"] == report["moved_requests"],
            f"of {report['moved_requests']} that moved {report['moved_requests_right']} are right",
        ),
        (report["goodput_share"] >= GOODPUT, f"{report['goodput_share']:.0%} good answers"),
        (not report["left_behind"], "; ".join(report["left_behind"])),
    ]
    return [text for good, text in checks if not good]


def table(report: dict[str, Any]) -> str:
    rows = [
        ("requests", f"{report['requests']}, {report['load_share']:.0%} of capacity"),
        ("kills", report["kills"]),
        ("failed", report["failed"]),
        ("different text", report["different"]),
        (
            "choices on the victims",
            f"{report['streams_on_victims']} at {report['kills_with_known_streams']} kills",
        ),
        (
            "choices that moved",
            f"{report['moves']}, of {report['moved_requests']} requests, "
            f"{report['moved_requests_right']} of them right",
        ),
        (
            "good answers with kills, before",
            f"{report['goodput_with_kills_per_s']}/s, {report['goodput_quiet_per_s']}/s: "
            f"{report['goodput_share']:.0%}",
        ),
        ("routers' memory", f"{report['routers_mib_per_minute']:+} MiB a minute"),
        (
            "longest pause",
            f"{report['longest_gap_s']} s (a prefill alone: {report['prefill_s']} s)",
        ),
        ("p99, median of the longest", f"{report['p99_gap_s']} s, {report['median_gap_s']} s"),
        ("longest wait for a first event", f"{report['longest_first_event_s']} s"),
        ("left behind", "; ".join(report["left_behind"]) or "nothing"),
        ("verdict", "; ".join(report["verdict"]) or "as it must be"),
    ]
    return "\n".join(f"{name:32} {value}" for name, value in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000, help="at least")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--models", type=int, default=1, help="behind the same routers")
    parser.add_argument("--out", type=Path, help="of the report, without .json, .jsonl and .svg")
    options = parser.parse_args()
    os.environ.update({"RAY_worker_niceness": "0"})  # as `manta serve` does
    now = datetime.now(UTC)
    what = "soak" if options.models == 1 else f"soak-{options.models}-models"
    out: Path = options.out or RESULTS / f"faults-{what}-{now:%Y-%m-%d}"
    model = resolve_model("default", progress=lambda what, done, total: None)
    with (
        ray_and_serve(4) as cluster,
        deployed(
            cluster,
            model,
            None,
            replicas=options.replicas,
            num_cpus=0.5 if options.models == 1 else 0.3,
            models=[NAME, "second", "third", "fourth"][: options.models],
            engine=ENGINE,
        ) as broken,
    ):
        run, report = asyncio.run(soak(broken, options))
    report = {
        "commit": commit(),
        "date": f"{now:%Y-%m-%d}",
        "device": f"{os.cpu_count()} CPU cores",
        "when": now.isoformat(timespec="seconds"),
        "model": "default, float32",
        "models": options.models,
        "replicas": options.replicas,
        "verdict": verdict(report, options),
        **report,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{report['kills']} kills in {options.minutes:g} minutes, {report['requests']} requests"
    out.with_suffix(".svg").write_text(picture(run, title))
    lines = [{"kind": "kill", **asdict(kill)} for kill in run.kills]
    lines += [{"kind": "request", **asdict(request)} for request in run.requests]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return int(bool(report["verdict"]))


if __name__ == "__main__":
    sys.exit(main())
