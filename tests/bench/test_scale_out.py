"""Throughput of several replicas: what a run that was cut off leaves, and what becomes of it."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.scale_out import grow, measure, missing, rows_of, whole
from loadtest.scenario import workloads
from tests.deployments.on_ray.serve_cluster import free_port, tiny_model
from tests.loadtest.fake_server import FakeServer

ROOT = Path(__file__).parents[2]

LINES = [
    {"label": "start", "replicas_at_start": 1},
    {"label": "warm", "failed": 0},
    {"label": "1 replicas", "replicas": 1, "out_tok_s": 100.0},
    {"label": "grow", "to": 2, "first_answers_s": [9.0], "failed": []},
    {"label": "warm", "failed": 0},
    {"label": "2 replicas", "replicas": 2, "out_tok_s": 190.0},
    {"label": "grow", "to": 4, "first_answers_s": [8.0, 11.0], "failed": []},
]


def test_a_run_that_was_cut_off_goes_on() -> None:
    """A growth that counts although nothing was measured after it; a count that runs twice."""
    lines = whole(LINES)
    assert [line["label"] for line in lines] == [line["label"] for line in LINES[:-1]]
    assert missing([1, 2, 4], lines) == [4] and missing([1, 2], lines) == []


def test_rows_are_against_so_many_times_one() -> None:
    """A throughput against itself; the fastest of the new replicas instead of the slowest."""
    rows = {row["case"]: (row["ours"], row["peer"], row["ratio"]) for row in rows_of("m", LINES)}
    assert rows == {
        "m/2": (190.0, 200.0, 0.95),
        "m/2/first_answer": (9.0, 15.0, 0.6),
        "m/4/first_answer": (11.0, 15.0, 0.733),
    }


def test_each_replica_gets_the_same_lengths() -> None:
    """The first 256 requests of one replica against four's 1,024, which are longer by chance; or
    the same prompts again, which a router brings together; or, for a client process of the larger
    load, other lengths than those of one with one replica."""
    with FakeServer(per_chunk=256) as server:
        args = argparse.Namespace(streams=3, count=6, cpu=True)
        line = measure(args, server.url, 2)
    assert (line["label"], line["replicas"]) == ("2 replicas", 2)
    assert (line["ok"], line["failed"], line["concurrency"]) == (12, 0, 6)
    first = workloads.build("dialogue")[:6]
    sizes = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.seen)
    assert sizes == sorted([(len(ids), num_out) for ids, num_out in first] * 2)
    assert len({tuple(body["prompt"]) for body in server.seen}) == 12


@pytest.mark.long
@pytest.mark.serve
@pytest.mark.timeout(240)
def test_the_whole_of_it_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """A program that can only be tried where four GPUs are, and fails there after its first
    minutes. Two replicas with engines of a known pace, on Ray, behind routers."""
    model = tiny_model(tmp_path / "tiny", positions=2048)
    command = [sys.executable, "-m", "tests.bench.counting_scale_out", "--model", str(model)]
    command += ["--cpu", "--replicas", "1", "2", "--streams", "2", "--count", "6"]
    command += ["--port", str(free_port()), "--name", "m", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: slower than is promised
    (path,) = (tmp_path / "out").glob("*.json")
    result = json.loads(path.read_text())
    rows = {row["case"]: row for row in result["rows"]}
    print(rows)
    assert set(rows) == {"m/2", "m/2/first_answer"}
    assert 0.7 < rows["m/2"]["ratio"] < 1.2
    assert 0 < rows["m/2/first_answer"]["ours"] < 60
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    loads = {line["replicas"]: line for line in lines if "out_tok_s" in line}
    assert [(n, load["ok"], load["failed"]) for n, load in loads.items()] == [(1, 6, 0), (2, 12, 0)]
    assert not any(line.get("failed") for line in lines)


def test_replicas_that_were_there_are_not_new() -> None:
    """After a start, /metrics told of an old replica only after the decision: its "first answer"
    came after 0.1 s."""

    class Server:
        deployed = False
        heard = 0

        def answered(self) -> dict[str, float]:
            self.heard += 1
            if self.deployed:
                return {"a": 3.0, "b": 5.0, "c": 1.0}
            # Another router each time, and the second has heard of one only.
            return [{}, {"a": 0.0}, {"b": 5.0}][min(self.heard, 3) - 1]

        def deploy(self, replicas: int) -> None:
            assert self.heard >= 3
            self.deployed = True

        def ask(self) -> None:
            pass

    fake: Any = Server()
    line = grow(fake, 2, 3)
    assert line["to"] == 3 and len(line["first_answers_s"]) == 1 and not line["failed"]
