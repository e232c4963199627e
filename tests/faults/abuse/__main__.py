"""Clients that leave, clients that do not read, and far too many of them.

    python -m tests.faults.abuse

Real sockets, haproxy, two routers and two replicas whose engines count instead of thinking. First
10,000 connections that break at random moments; then 100 readers that take a byte a second, beside
8 streams whose gaps are compared with those alone and beside 100 readers that take all; then, where
16 requests run at once, a minute of ten times the load, from two keys with two priorities each.

Memory, tasks, threads, open files, blocks and requests in flight are counted before and after.
Writes bench/results/faults-abuse-<date>.json (the figures, with their bounds) and .jsonl (what came
of each request of the overload; memory over the disconnects; the readers). Exit status 1 if a
figure is out of its bounds.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from tests.deployments.on_ray.live import Live, live_server
from tests.deployments.on_ray.serve_cluster import tiny_model
from tests.faults.abuse.disconnects import disconnects, freed
from tests.faults.abuse.overload import overload
from tests.faults.abuse.report import STEP, Report
from tests.faults.abuse.slow_readers import slow_readers

RESULTS = Path(__file__).parents[3] / "bench" / "results"
ROWS = 64  # of an engine, for what leaves and what does not read
FEW = 8  # for the overload: what two cores' clients can flood


def main() -> int:
    parser = argparse.ArgumentParser("tests.faults.abuse", description=__doc__.splitlines()[0])
    parser.add_argument("--disconnects", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=100)
    parser.add_argument("--reader-seconds", type=float, default=25.0, help="of each of five parts")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster is stopped
    report = Report()
    with tempfile.TemporaryDirectory(prefix="manta-abuse-") as name:
        model = tiny_model(Path(name) / "tiny", positions=8192)
        keys = Path(name) / "keys"
        keys.write_text("one\ntwo\n")
        keys.chmod(0o600)
        headers = ["Authorization: Bearer one", "Authorization: Bearer two"]
        http = {"proxy": "haproxy", "api_keys_file": str(keys)}

        async def patience(live: Live) -> None:
            await disconnects(live, report, options.disconnects, 100, headers[0])
            await freed(live, report, 40, headers[0])
            await slow_readers(live, report, options.readers, options.reader_seconds, headers[0])

        with live_server(model, fake=True, http=http, engine={"max_num_seqs": ROWS}) as live:
            asyncio.run(patience(live))
        with live_server(model, fake=True, http=http, engine={"max_num_seqs": FEW}) as live:
            asyncio.run(overload(live, report, 2 * FEW, options.overload_seconds, headers))
    return report.finish(
        options.out,
        "faults-abuse",
        routers=2,
        replicas=2,
        engine=f"counts, {STEP} s a step, {ROWS} rows, {FEW} for the overload",
        edge="haproxy",
        reader_seconds=options.reader_seconds,
        overload_seconds=options.overload_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
