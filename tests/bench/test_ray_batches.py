"""bench.ray_batches: its figures, and once the whole on Ray."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

from bench import ray_batches
from bench.report.result_file import Line
from tests.deployments.on_ray.serve_cluster import tiny_model


def test_a_rate_is_that_of_the_middle() -> None:
    """The start of an engine, or the last rows of a batch, count as its speed."""
    ends = [(100.0 + number / 10, 5) for number in range(100)]
    assert ray_batches.rate([*ends, (500.0, 5)]) == pytest.approx(50)
    assert ray_batches.rate(ends[::-1]) == pytest.approx(50)


def test_rows_are_the_same_for_each_case() -> None:
    """Two sides answer different rows, or all rows are equally long."""
    rows = ray_batches.rows_of(200, 512, 256)
    assert rows == ray_batches.rows_of(200, 512, 256)
    assert len({len(row["ids"]) for row in rows}) > 30 and len({row["output"] for row in rows}) > 20
    assert all(4 <= len(row["ids"]) <= 256 and 2 <= row["output"] <= 64 for row in rows)


def test_the_table() -> None:
    """A ratio that is upside down."""
    lines = [
        {"case": "offline", "tok_s": 100.0, "whole_s": 1.0, "rows": 10},
        {"case": "serve-stage", "tok_s": 95.0, "whole_s": 2.0, "rows": 10},
        beside("interactive", 0.0, 5.0, 0.2),
        beside("interactive", 0.3, 30.0, 0.2),
        beside("dataset", 0.0, 100.0),
        beside("both", 0.0, 90.0, 0.3),
        {**beside("both", 0.3, 95.0, 0.21), "dataset_tok_s": 63.0},
    ]
    ratios = {row["case"]: row["ratio"] for row in ray_batches.table(lines)}
    assert ratios == {
        "serve-stage": 0.95,
        "beside/one/p99": 1.5,
        "beside/one/idle": 0.9,
        "beside/30%/p99": 1.05,
        "beside/30%/idle": 0.9,
    }


def beside(phase: str, load: float, rate: float, slowest: float | None = None) -> Line:
    """Return a line of `beside`, whose slowest first token is `slowest` seconds; None = none."""
    firsts = [] if slowest is None else [0.1] * 99 + [slowest]
    return {"case": "beside", "phase": phase, "load": load, "tok_s": rate, "first_s": firsts}


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.long
def test_all_cases(tmp_path: Path) -> None:
    """A case that Ray Data's next version, or a row's columns, have broken."""
    folder = tiny_model(tmp_path / "tiny", positions=1024)
    ray_batches.main([
        "--model", str(folder), "--rows", "800", "--seconds", "2", "--turns", "1",
        "--longest", "64", "--loads", "0", "0.3", "--batch-size", "32",
        "--out", str(tmp_path / "out"), "--set", "device=cpu", "num_threads=1",
        "load_format=dummy", "dtype=float32", "num_blocks=400",
    ])  # fmt: skip
    (table,) = (tmp_path / "out").glob("*.json")
    rows = json.loads(table.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "engine-stage", "serve-stage", "beside/one/p99", "beside/one/idle",
        "beside/30%/p99", "beside/30%/idle",
    ]  # fmt: skip
    assert all(row["ours"] > 0 for row in rows)
