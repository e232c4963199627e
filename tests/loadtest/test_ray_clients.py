"""Client processes on Ray's nodes."""

import asyncio
from pathlib import Path

import pytest

from loadtest.client.ray_nodes import compare_clocks, files_of
from loadtest.http import clock
from loadtest.measure.figures import percentiles
from loadtest.runner import RunOptions, Task, run
from loadtest.scenario.parse import parse
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.loadtest.fake_server import FakeServer


@pytest.mark.serve
@pytest.mark.slow
def test_actors_share_a_run(shared_cluster: Cluster, tmp_path: Path) -> None:
    """Shares that overlap or leave requests out; percentiles merged from percentiles; key files and
    traces that only one machine has."""
    (tmp_path / "gold.key").write_text("secret\n")
    text = (
        "target: {key_file: gold.key}\n"
        "work: {name: tokens, input: 4, output: 5}\n"
        "phases:\n"
        "  - {name: first, warmup: true, arrivals: {kind: closed, concurrency: 2}, requests: 6}\n"
        "  - {name: load, arrivals: {kind: poisson, rate: 40}, requests: 80}\n"
    )
    with FakeServer(first=lambda number: 0.02 + number % 10 * 0.01, gap=0.005) as server:
        task = Task(text, folder=tmp_path, overrides={"target.url": server.url})
        result = run(task, RunOptions(procs=2, ray=shared_cluster.address))
    s, records = result.summary, result.records
    assert s.reasons == [] or "client" in s.reasons[0]
    assert (s.requests, s.succeeded, s.warmup_requests) == (80, 80, 6)
    assert sorted(r.index for r in records if r.phase == "load") == list(range(80))
    assert {h["authorization"] for h in server.seen_headers} == {"Bearer secret"}
    assert s.ttft == percentiles(r.ttft_s for r in records if not r.warmup and r.ttft_s)
    assert s.run.procs == 2 and s.run.client_host.count(";") == 2


def test_clocks_of_two_machines() -> None:
    """Records of another machine a week away; a slow answer taken for a clock that is late."""
    delays = iter([0.05, 0.0, 0.03] * 10)

    async def ask() -> float:
        await asyncio.sleep(next(delays))
        return clock() + 1000

    offset, known = asyncio.run(compare_clocks(ask))
    assert abs(offset - 1000) <= known < 0.02


def test_files_come_along(tmp_path: Path) -> None:
    """A key file or a trace that the nodes are told to read and do not have."""
    for name in ("a.key", "b.key", "c.key"):
        (tmp_path / name).write_text("k\n")
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 3, "output_length": 2}\n')
    text = (
        "target: {key_file: a.key}\n"
        "work: {tenants: [{name: x}, {name: y, key_file: b.key}]}\n"
        "phases:\n"
        "  - {name: one, arrivals: {kind: trace, file: t.jsonl}}\n"
        "  - {name: two, arrivals: {kind: poisson, rate: 1}, requests: 1,\n"
        "     work: {tenants: [{name: z, key_file: c.key}]}}\n"
    )
    items = dict(files_of(parse(text, folder=tmp_path)))
    assert {key: path.name for key, path in items.items()} == {
        "target.key_file": "a.key",
        "work.tenants.1.key_file": "b.key",
        "phases.0.arrivals.file": "t.jsonl",
        "phases.1.work.tenants.0.key_file": "c.key",
    }
    moved = parse(
        text, "s", tmp_path, {key: str(tmp_path / "a.key") for key in items if "0.a" not in key}
    )
    assert moved.work.tenants[1].key_file == tmp_path / "a.key"
