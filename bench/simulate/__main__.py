"""python -m bench.simulate routing|scaling|overload|beside|scale|roles|tiers|costs|calibrate

routing, scaling: the real functions in a simulated fleet, against other policies; seeded, so rows
are equal on any machine. overload: routers and replicas in virtual time with slow engines, at ten
times their capacity. beside: a dataset's rows beside interactive requests, with the real scheduler.
roles: separate prefill and decode replicas, against replicas that do both. tiers: conversations
that exceed the device's KV cache, with the real scheduler and host tier, against no tier. costs:
the time of a routing decision and of prefix reports on this machine. calibrate: the cost of a real
replica's step on this machine, and the simulator's error.

--out FOLDER writes simulate-NAME-DATE.json and .jsonl, --pictures FOLDER the charts of docs/. On a
GPU machine:
    calibrate --model FOLDER --name llama-8b --set load_format=dummy --out FOLDER
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.report import result_file
from bench.simulate import (
    beside,
    calibrate,
    costs,
    overload,
    roles,
    routing,
    scale,
    scaling,
    tiers,
)
from bench.simulate.fleet.cluster import RoutingOutcome
from bench.simulate.pictures import Line, Panel, svg
from bench.versus.engine import engine_fields

_NAMES = (
    "routing", "scaling", "overload", "beside", "scale", "roles", "tiers", "costs", "calibrate",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.simulate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=_NAMES)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("--pictures", type=Path, help="folder for SVG files")
    parser.add_argument("--quick", action="store_true", help="the smallest fleet, or case, only")
    parser.add_argument("--model", help="calibrate: folder; default: the default model")
    parser.add_argument("--name", default="default", help="calibrate: label of the cases")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="calibrate: of the engine"
    )
    args = parser.parse_args()
    if args.what == "calibrate":
        calibrate.main(args.model, args.name, engine_fields(args.set), args.out)
        return
    rows: list[routing.RoutingRow] = []
    lines: list[dict[str, Any]] = []
    pictures: dict[str, str] = {}
    if args.what == "routing":
        for case_rows, outcomes in routing.all_rows(args.quick):
            _show(case_rows)
            rows += case_rows
            lines += [_line(case_rows[0].case.rpartition("/")[0], outcome) for outcome in outcomes]
            if case_rows[0].case.startswith(("mixed/64", "gpu/64")):
                name = case_rows[0].case.rpartition("/")[0]
                pictures["routing-" + name.replace("/", "-")] = _waits(name, outcomes)
    elif args.what == "scale":
        rows, lines = scale.all_rows(args.quick)
        _show(rows)
    elif args.what == "beside":
        rows, lines = beside.all_rows(args.quick)
        _show(rows)
    elif args.what == "tiers":
        rows, lines = tiers.all_rows(args.quick)
        _show(rows)
    elif args.what in ("costs", "overload", "roles"):
        measure = {"costs": costs.all_rows, "overload": overload.rows, "roles": roles.all_rows}
        rows = list(measure[args.what]())
        _show(rows)
        lines = [asdict(row) for row in rows]
    else:
        for case_rows, runs in scaling.all_rows():
            _show(case_rows)
            rows += case_rows
            lines += [run.line() for run in runs]
            name = case_rows[0].case.split("/")[0]
            pictures[f"scaling-{name}"] = scaling.picture(name, runs)
    if args.out:
        config = {"ours": {"seed": routing.SEED}, "peers": {}}
        if args.what == "routing":
            config["ours"]["adapter_seeds"] = routing.ADAPTER_SEEDS
        if args.what == "beside":
            config["ours"] = {"seeds": beside.SEEDS}
        device = "" if args.what in ("costs", "scale") else "simulated"
        table = [asdict(row) for row in rows]
        result_file.write(args.out, f"simulate-{args.what}", config, table, lines, device)
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        for name, text in pictures.items():
            (args.pictures / f"{name}.svg").write_text(text)


def _show(rows: list[routing.RoutingRow]) -> None:
    for row in rows:
        note = f"  ({row.note})" if row.note else ""
        print(
            f"{row.case:<36} {row.ours:>10g} {row.peer:>10g} {row.unit:<8} {row.ratio:>7g}{note}",
            flush=True,
        )


def _line(case: str, one: RoutingOutcome) -> dict[str, Any]:
    return {
        "case": case,
        "policy": one.policy,
        "seed": one.seed,
        "requests": len(one.jobs),
        "ttft_p50_s": round(one.ttft(0.5), 4),
        "ttft_p99_s": round(one.ttft(0.99), 4),
        "between_tokens_p99_s": round(one.speed(0.99), 4),
        "prefix_hit_rate": round(one.hit_rate(), 4),
        "adapter_loads": one.loads,
        "without_first_token": one.pending,
    }


def _waits(name: str, outcomes: list[RoutingOutcome]) -> str:
    lines = []
    for outcome in outcomes:
        waits = outcome.waits()
        shares = [n / 200 for n in range(201)]
        points = [
            (min(100.0, max(0.005, waits[min(len(waits) - 1, int(s * len(waits)))])), s)
            for s in shares
        ]
        lines.append(Line(outcome.policy, points))
    panel = Panel("share of requests", "seconds to the first token", lines, log=True, height=260)
    return svg(f"{name}: time to the first token at 80 % load", [panel])


if __name__ == "__main__":
    main()
