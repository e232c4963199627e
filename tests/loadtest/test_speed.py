"""The client's own cost: it must be able to drive a fast server from one core."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.runner import Task, run_async

ROOT = Path(__file__).parents[2]


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rate", "output", "floor"), [("chunks", 150, 40, 5_000), ("requests", 450, 1, 400)]
)
def test_one_core_drives(what: str, rate: int, output: int, floor: int) -> None:
    """5,000 streamed chunks/s and 400 requests/s in one process. Its CPU time counts, not the
    clock, so that a busy machine does not fail it; by half more than the floor."""
    text = (
        f"work: {{name: tokens, input: 16, output: {output}}}\n"
        f"phases: [{{name: a, arrivals: {{kind: poisson, rate: {rate}}}, duration: 6s}}]\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.fake_server"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        result = asyncio.run(run_async(Task(text, overrides={"target.url": url})))
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(10)
    s = result.summary
    assert s.failed == 0
    chunks = sum(len(record.chunks) for record in result.records)
    done = {"chunks": chunks, "requests": s.requests}[what] / s.duration_s
    possible = done / s.client.cpu_share
    print(
        f"{what}: {done:.0f}/s at {s.client.cpu_share:.0%} of a core = {possible:.0f}/s a core; "
        f"late p99 {s.client.lateness.p99 * 1000:.2f} ms"
    )
    assert possible >= floor * 1.5
