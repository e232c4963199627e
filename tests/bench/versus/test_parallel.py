"""The table of several GPUs: which runs it makes, and what it makes of them."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import sums
from bench.report.result_file import Line
from bench.versus import parallel

SUMS: list[Line] = [
    {"bytes": 8192, "one_shot": 3.0, "two_shot": 5.0, "with_norm": 4.0, "nccl": 10.0,
     "nccl_apart": 16.0},
    {"bytes": 16384, "one_shot": 6.0, "two_shot": 5.0, "nccl": 10.0, "nccl_apart": 16.0},
    {"bytes": 32768, "one_shot": 20.0, "two_shot": 15.0, "nccl": 12.0, "nccl_apart": 18.0},
    {"bytes": 65536, "nccl": 12.0, "nccl_apart": 18.0},
]  # fmt: skip


def test_ways_cross_where_one_is_slower() -> None:
    """Bugs: the largest size that happens to be faster behind one that is not; a way that was not
    measured."""
    assert sums.crossings(SUMS) == (8192, 16384)
    assert sums.crossings([{**SUMS[0], "nccl": 1.0}]) == (0, 0)
    assert sums.crossings([{"bytes": 8192, "one_shot": 3.0, "two_shot": 5.0}]) == (8192, 8192)


def test_what_a_sweep_says() -> None:
    """Bugs: a setting that is better by chance alone, or that single streams pay for; a norm that
    goes with more rows than it pays for, because it happens to pay for yet more."""

    def lines(factor: float, small: float) -> list[Line]:
        bare = [
            {"rows": size // 16384, "columns": 8192, "norm": False, "one_shot": factor * time,
             "nccl": 12.0}
            for size, time in ((2 << 20, 8.0), (4 << 20, 10.0), (8 << 20, 13.0), (16 << 20, 10.0))
        ]  # fmt: skip
        normed = [
            {"rows": rows, "columns": columns, "norm": True, "apart": 10.0 * scale,
             "with_norm": time * scale, "nccl": 20.0}
            for columns in sums.HIDDEN
            for rows, time in zip(sums.TOKENS, (8, 9, 9.5, 11, 9, 9, 9, 9), strict=True)
            for scale in (small if rows * columns * 2 <= sums.SMALL else factor,)
        ]  # fmt: skip
        return bare + normed

    first, second, third, _ = sums.SETTINGS
    lines_by_side = {first: lines(1.0, 1.0), second: lines(0.99, 1.0), third: lines(0.8, 1.1)}
    asked = sums.what_to_set(lines_by_side)
    assert (asked["PROGRAMS"], asked["TILE"]) == first
    assert asked["CROSSINGS[2]"] == [4 << 20] * 2 and asked["LARGEST"] == 8 << 20
    lines_by_side[third] = lines(0.8, 1.0)
    asked = sums.what_to_set(lines_by_side)
    assert (asked["PROGRAMS"], asked["TILE"]) == third
    assert asked["CROSSINGS[2]"] == [16 << 20] * 2 and asked["LARGEST"] == 16 << 20


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a ratio the wrong way round, or of another side's best; a run that is made twice, or
    that was cut off and counts."""
    ran: list[tuple[str, tuple[str, ...]]] = []

    def run_side(
        side: str, folder: str, names: list[str], change: list[str], against: None
    ) -> Iterator[Line]:
        ran.append((side, (*change, *names)))
        speed = 4.0 if change else 2.0
        yield {"ready_s": 5.0, "side": side}
        for name in names:
            yield {"workload": name, "out_tok_s": speed, "total_tok_s": 9.0, "side": side}

    def lines_of(command: list[str]) -> Iterator[Line]:
        ran.append(("sums", tuple(command[-2:])))
        yield from [*SUMS, {"crossings": {"2": [8192, 16384]}}]

    monkeypatch.setattr(parallel, "run_side", run_side)
    monkeypatch.setattr(parallel, "lines_of", lines_of)
    asked: dict[str, Any] = {"model": ["a", "b"], "name": ["llama-70b", "llama-8b"], "ranks": 2}
    args = Namespace(**asked, runs=1, vllm=True, out=tmp_path, resume=False)
    parallel.measure(args)
    both = ("single", "uniform")
    tensor = [
        ("manta", ("tensor_parallel=2", *both)),
        ("vllm", ("tensor_parallel_size=2", *both)),
    ]
    staged = [("manta", ("pipeline_parallel=2", "uniform")), ("manta", ("uniform",))]
    assert ran == [("sums", ("--ranks", "2")), *tensor, *tensor, *staged]
    (table,) = tmp_path.glob("versus-parallel-*.json")
    rows = {row["case"]: row["ratio"] for row in json.loads(table.read_text())["rows"]}
    assert rows["all-reduce/8k"] == 0.3 and rows["sum-norm/8k"] == 0.25
    assert "all-reduce/64k" not in rows and "sum-norm/16k" not in rows
    assert rows["llama-70b-tp2/single"] == rows["llama-8b-tp2/ready"] == 1.0
    assert rows["llama-8b-pp2/uniform"] == 2.0
    (raw,) = tmp_path.glob("*.jsonl")
    raw.write_text("".join(line + "\n" for line in raw.read_text().splitlines()[:-1]))
    ran.clear()
    args.resume = True
    parallel.measure(args)
    assert ran == [("manta", ("uniform",))]
