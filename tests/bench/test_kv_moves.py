"""The bench of moved KV blocks: its engines on a tiny model, and its rows."""

import json
import sys
from pathlib import Path

import pytest

from bench.kv import moves
from tests.engine.test_host_kv import PLAIN
from tests.engine.test_memory import SIZES


@pytest.mark.slow  # two engines start
def test_blocks_move_between_two_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the second engine computes the prompt; the warm-up is a line of the result."""
    (tmp_path / "config.json").write_text(
        json.dumps({**SIZES, **PLAIN, "max_position_embeddings": 512})
    )
    out = tmp_path / "out"
    words = ["--tokens", "160", "--prompts", "2", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["", "--model", str(tmp_path), "--out", str(out), *words])
    moves.main()
    (table,) = out.glob("kv-moves-*.json")
    rows = json.loads(table.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        *(
            f"model/{way}/moved-of-{case}"
            for way in ("shm", "tcp")
            for case in ("warm", "computed")
        ),
        "model/shm-of-tcp",
    ]
    (raw,) = out.glob("kv-moves-*.jsonl")
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    assert [(line["prompt"], line["way"]) for line in lines] == [
        (1, "shm"), (1, "tcp"), (2, "shm"), (2, "tcp")
    ]  # fmt: skip
    assert all(line["rate"] > 0 for line in lines)


def test_rows_compare_medians() -> None:
    """Bug: a slow first prompt decides a row."""
    line = {"way": "tcp", "computed": 200.0, "warm": 10.0, "rate": 1.0}
    lines = [line | {"moved": moved} for moved in (900.0, 20.0, 20.0)]
    assert [row["ratio"] for row in moves.rows_of("m", lines)] == [2.0, 0.1]
    lines += [line | {"way": "shm", "moved": 30.0, "rate": rate} for rate in (0.1, 3.0, 3.0)]
    assert [row["ratio"] for row in moves.rows_of("m", lines)] == [3.0, 0.15, 2.0, 0.1, 3.0]
    lines += [line | {"way": "gpu", "moved": 15.0, "rate": 6.0}]
    cases = {row["case"]: row["ratio"] for row in moves.rows_of("m", lines)}
    assert cases["m/gpu/moved-of-warm"] == 1.5 and cases["m/gpu-of-tcp"] == 6.0
