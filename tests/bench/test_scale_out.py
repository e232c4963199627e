"""Throughput of several replicas: what a run that was cut off leaves, and what becomes of it."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.scale_out import grow, load, missing, requests_of, rows_of, whole

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
    kept = whole(LINES)
    assert [line["label"] for line in kept] == [line["label"] for line in LINES[:-1]]
    assert missing([1, 2, 4], kept) == [4] and missing([1, 2], kept) == []


def test_rows_are_against_so_many_times_one() -> None:
    """A throughput against itself; the fastest of the new replicas instead of the slowest."""
    rows = {row["case"]: (row["ours"], row["peer"], row["ratio"]) for row in rows_of("m", LINES)}
    assert rows == {
        "m/2": (190.0, 200.0, 0.95),
        "m/2/first_answer": (9.0, 15.0, 0.6),
        "m/4/first_answer": (11.0, 15.0, 0.733),
    }


def test_each_replica_gets_the_same_lengths() -> None:
    """The first 256 requests of one replica against four's 1,024, which are longer by chance."""
    one, four = requests_of(256, 1, 8), requests_of(256, 4, 8)
    for client in range(32):
        there = [(len(ids), num_out) for ids, num_out in four[client::32]]
        assert there == [(len(ids), num_out) for ids, num_out in one[client % 8 :: 8]]
    assert len({tuple(ids) for ids, _ in four}) > 1000  # only the shortest may be equal
    assert sorted(num_out for _, num_out in requests_of(10, 3, 8))[::3] == sorted(
        num_out for _, num_out in one[:10]
    )


def test_the_load_script_runs_these_requests(tmp_path: Path) -> None:
    """The requests that it would make itself, unnoticed."""
    args = argparse.Namespace(streams=4, count=6, cpu=True, load_script=tmp_path / "load.py")
    (tmp_path / "workloads.py").write_text("raise SystemExit('the wrong one')")
    args.load_script.write_text(
        "import json, sys, workloads\n"
        "built = workloads.build('dialogue')\n"
        "print(json.dumps({'built': [[len(ids), n] for ids, n in built], 'args': sys.argv[1:]}))\n"
    )
    line = load(args, "http://x", 2)
    assert line["built"] == [[len(ids), num_out] for ids, num_out in requests_of(6, 2, 1)]
    said = dict(zip(line["args"][::2], line["args"][1::2], strict=True))
    assert (said["--limit"], said["--concurrency"], said["--procs"]) == ("12", "8", "2")
    args.load_script.write_text("print('{}')")
    with pytest.raises(SystemExit, match="does not take its requests"):
        load(args, "http://x", 2)


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
