"""What the faults share: what is asked, figures with their bounds, and what is left behind."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from tests.deployments.on_ray.live import NAME, Live, grown, holdings, quiet, resident_mib

PATH = "/v1/completions"
BODY = {"model": NAME, "prompt": "the answer to this question", "ignore_eos": True}
STEP = 0.02  # seconds, of the engines


@dataclass
class Report:
    """Figures with bounds. rows: the figures, as in a result file. lines: the data behind them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add_row(self, case: str, value: float, unit: str, **bound: float) -> None:
        """Add a figure. bound: `most` or `least`, the bound of its value."""
        self.rows.append({"case": case, "value": round(value, 4), "unit": unit, **bound})

    def value(self, case: str) -> float:
        return next(row["value"] for row in self.rows if row["case"] == case)

    def wrong(self) -> list[str]:
        return [
            f"{row['case']}: {row['value']} {row['unit']}"
            for row in self.rows
            if row["value"] > row.get("most", float("inf")) or row["value"] < row.get("least", 0)
        ]

    def finish(self, out: Path | None, name: str, **config: Any) -> int:
        """Print the figures, write them if `out` is a folder, and return the exit status."""
        wrong = self.wrong()
        if out:
            config |= {"load_average": round(os.getloadavg()[1], 1), "verdict": wrong}
            write(out, name, config, self.rows, self.lines)
        for row in self.rows:
            print(f"{row['case']:70} {row['value']:10} {row['unit']}")
        print("; ".join(wrong) or "as it must be")
        return int(bool(wrong))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a quantile of a sorted list."""
    return values[min(len(values) - 1, int(share * len(values)))]


async def ended(live: Live, seconds: float = 30.0) -> float:
    """Wait until nothing is in flight, and return the seconds that it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(quiet, live):
        assert time.monotonic() < began + seconds, "something is held"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def resident(live: Live) -> dict[str, float]:
    """Return the resident memory of each process in MiB."""
    pids = {f"router {pid}": pid for pid in live.router_states()}
    for pid, stats in live.replica_stats().items():
        pids |= {f"replica {pid}": pid, f"engine of {pid}": stats["engine_pid"]}
    return {name: resident_mib(pid) for name, pid in pids.items()}


@asynccontextmanager
async def leaves_nothing(
    live: Live, report: Report, case: str, at_once: int
) -> AsyncIterator[None]:
    """Count what processes hold before and after a block, and report what has grown."""
    await ended(live)
    # A router that has just replaced another is not in haproxy's configuration yet, and its
    # connections from there would count as others.
    await asyncio.to_thread(live.find_all_routers)
    before, mib = await asyncio.to_thread(holdings, live), await asyncio.to_thread(resident, live)
    yield
    report.add_row(f"{case}/quiet after", await ended(live), "s")
    more = await asyncio.to_thread(grown, live, before, at_once)
    for what in more:
        print(f"{case}: left behind: {what}", file=sys.stderr)
    report.add_row(f"{case}/kinds of things left behind", len(more), "", most=0)
    after = await asyncio.to_thread(resident, live)
    growth = max(after[name] - mib[name] for name in mib)
    most = (
        20 if case == "disconnects" else 64
    )  # what streams had in buffers leaves gaps in the heap
    report.add_row(f"{case}/growth of a process at most", growth, "MiB", most=most)
