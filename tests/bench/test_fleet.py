"""bench.fleet without Ray: the day, the prediction, what was watched, and what is ended."""

import argparse
import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.fleet import __main__ as fleet
from bench.fleet import server
from bench.fleet.predict import predict
from bench.fleet.server import POOLS, Watch, configuration
from bench.fleet.trace import QUESTIONS, SHAPES, day, rates_of, scenario, trace_of
from bench.report.result_file import Line
from deployments.config.load import parse_config
from engine.messages import EngineStats
from loadtest.chaos import server_processes
from loadtest.runner import RunClock, Task
from loadtest.scenario.schedule import lay_out

SECONDS, PEAK = 120.0, 10.0
FAST = {"base": 0.005, "sequence": 0.0001, "token": 0.0001, "start_seconds": 5.0}
RATES = {"prompt_rate": 9000.0, "output_rate": 5000.0, "kv_tokens": 16384}
MEASURED: dict[str, dict[str, float]] = {
    "gpu": {**FAST, **RATES},
    "cpu": {**FAST, **RATES, "token": 0.002, "prompt_rate": 480.0, "output_rate": 150.0},
}


def options(device: str = "cuda", **more: Any) -> argparse.Namespace:
    shape = {"minutes": SECONDS / 60, "rate": PEAK, "seed": 1, "port": 8000, "model": "default"}
    return argparse.Namespace(
        **shape, shape="day", gpu_device=device, gpu_set={}, set={}, kills=False, **more
    )


def test_a_day_has_a_night_a_noon_and_bursts(tmp_path: Path) -> None:
    """Another trace for the prediction than for the load; a question that no reference answers."""
    rates, rows = day(PEAK, 1), trace_of(SECONDS, PEAK, 1)
    assert rates[0] < 0.05 * PEAK < 0.5 * PEAK < rates[48] <= max(rates) == PEAK
    assert rows == trace_of(SECONDS, PEAK, 1) != trace_of(SECONDS, PEAK, 2)
    task = Task(scenario("http://127.0.0.1:1", rows, 1, tmp_path / "trace.jsonl"))
    (plan,) = lay_out(task.scenario(), "m")
    sent = [(visit.t, plan.spec(visit, 0)) for visit in plan.visits]
    assert [at for at, _ in sent] == pytest.approx([row.t for row in rows], abs=1e-5)
    assert [spec.expected for _, spec in sent] == [row.output for row in rows]
    assert len({spec.key() for _, spec in sent}) == QUESTIONS


def test_shapes_have_what_their_names_say() -> None:
    """Three traces that are one."""
    rates = {shape: rates_of(shape, PEAK, 1) for shape in SHAPES}
    assert set(rates["steady"]) == {PEAK / 2}
    assert rates["day"] == day(PEAK, 1) and max(rates["diurnal"]) == pytest.approx(0.6 * PEAK)
    assert set(rates["bursts"]) == {0.03 * PEAK, PEAK}
    assert len({tuple(trace_of(SECONDS, PEAK, 1, shape)) for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", POOLS)
def test_configurations_are_whole(name: str, device: str) -> None:
    """A configuration that a machine with a GPU refuses, after minutes on it."""
    config = parse_config(configuration(options(device), name), {})
    assert tuple(config.pools) == POOLS[name]


def test_replicas_come_and_go_in_the_prediction() -> None:
    """Replicas that are there before they are ready, that cost nothing, or that never go; a pool
    that is no help."""
    rows = trace_of(SECONDS, PEAK, 1)

    def guess(name: str, **gpu: float) -> dict[str, Any]:
        measured = {**MEASURED, "gpu": {**MEASURED["gpu"], **gpu}}
        return predict(configuration(options(), name), measured, rows, 60.0)

    gpu, cpu, mixed = guess("gpu-only"), guess("cpu-only"), guess("mixed")
    assert gpu["ttft_p50_s"] <= gpu["ttft_p99_s"] < 0.5  # of the night, few wait for a start
    assert SECONDS / 2 < gpu["replica_s"]["gpu"] < SECONDS + 30
    assert gpu["cost"] == pytest.approx(gpu["replica_s"]["gpu"] / 3600)
    assert cpu["ttft_p99_s"] > 2 * mixed["ttft_p99_s"]
    assert 0 < mixed["replica_s"]["gpu"] < gpu["replica_s"]["gpu"]
    assert 10 < guess("gpu-only", start_seconds=20.0)["ttft_p99_s"] < 20


def test_what_was_watched_is_summed() -> None:
    """Starts that cost nothing, or that last as long as the gap between two of them."""
    watch = Watch(("gpu",))
    counts = [
        (0, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
        (1, 0, 1),
        (0, 0, 0),
    ]
    watch.samples = [(10.0 + t, {"gpu": states}) for t, states in enumerate(counts)]
    assert watch.steps("gpu", 10.0) == [(0.0, 0), (3.0, 1), (5.0, 2), (6.0, 1), (7.0, 0)]
    assert watch.replica_seconds("gpu", 10.0) == 9.0
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    assert watch.measured("gpu", engine) == {}
    # Stretches of other steps each, of 10 ms, 1 ms a sequence and 0.1 ms a prompt token.
    frame, frames = EngineStats(total_blocks=8, block_size=16), list[EngineStats]()
    for steps, outputs, prompts in [(50, 50, 0), (50, 400, 0), (30, 60, 3000), (9, 9, 4000)] * 3:
        seconds = steps * 0.01 + outputs * 0.001 + prompts * 0.0001
        frame = EngineStats(
            step=frame.step + steps,
            output_tokens=frame.output_tokens + outputs,
            prompt_tokens=frame.prompt_tokens + prompts,
            busy_seconds=frame.busy_seconds + seconds,
            total_blocks=8,
            block_size=16,
        )
        frames.append(frame)
    watch.frames = {"engine-gpu/a": frames}
    measured = watch.measured("gpu", engine)
    assert measured["base"] == pytest.approx(0.01, rel=0.05)
    assert measured["token"] == pytest.approx(0.0001, rel=0.05)
    assert measured["start_seconds"] == pytest.approx(1.5)  # two starts, of 2 s and of 1 s
    assert measured["kv_tokens"] == 128


async def test_kills_do_not_wait_for_an_empty_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool without a replica kept the router alive, and a run with kills had none."""
    with subprocess.Popen(["sleep", "60"]) as sleep:
        (process,) = (p for p in server_processes._table().values() if p.pid == sleep.pid)
        router = replace(process, title="ray::ServeReplica:manta:router")
        instance = argparse.Namespace(find=lambda target: [router])
        monkeypatch.setattr(server, "instance_at", lambda url: instance)
        clock = RunClock(time.monotonic())
        task = asyncio.create_task(server.kills("", ("gpu",), 0.1)(clock))
        try:
            assert await asyncio.to_thread(sleep.wait, 20) == -9
            await asyncio.sleep(0.1)
            assert [mark.what for mark in clock.marks] == ["kill router"] and not task.done()
        finally:
            sleep.kill()
            task.cancel()


def line_of(name: str, ttft: float) -> Line:
    line = {"configuration": name, "requests": 9, "answered": 9, "identical": 8, "cost": 0.02}
    return {
        **line,
        "ttft_p50_s": ttft,
        "ttft_p99_s": ttft,
        "counts": {pool: [[0.0, 0], [5.0, 1], [9.0, 0]] for pool in POOLS[name]},
        "replica_s": dict.fromkeys(POOLS[name], 50.0),
        "measured": {pool: MEASURED[pool] if name != "mixed" else {} for pool in POOLS[name]},
        "config": configuration(options(), name),
    }


def test_rows_compare_with_the_prediction() -> None:
    """A mixed fleet that is predicted by what it did not measure, or not at all."""
    lines = [line_of("mixed", 1.0), line_of("gpu-only", 2.0)]
    rows = {row["case"]: row for row in fleet.rows_of(options(), lines)}
    assert rows["mixed/ttft_p99_s against gpu-only"]["ratio"] == 0.5
    assert rows["gpu-only/most_gpu"]["steps"] == [0, 1, 0]
    predicted = rows["gpu-only/predicted/ttft_p99_s"]
    assert predicted["error_percent"] == round(100 * (predicted["ours"] / 2.0 - 1), 1)
    assert "mixed/predicted/cost" not in rows  # nothing has measured the CPU pool
    lines.append(line_of("cpu-only", 2.0))
    assert "mixed/predicted/cost" in {row["case"] for row in fleet.rows_of(options(), lines)}


def test_all_that_was_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that outlives Ctrl-C in a session of its own, where no signal for the group comes."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(
        command: list[str], folder: None, environment: dict[str, str], seconds: float
    ) -> Iterator[Line]:
        assert seconds < SECONDS + 600 and os.path.isdir(environment["TMPDIR"])
        sleep = ["sleep", "60"]
        started.append(subprocess.Popen(sleep, env=environment, start_new_session=True))
        yield {}
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet, "lines_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(fleet.run_bounded(options(), "mixed"))
    assert started[0].wait(5) == -9
