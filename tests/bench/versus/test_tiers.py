"""The comparison of tiers: its workloads on a tiny model, and which sides are held together."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus import tiers as versus
from tests.engine.models.test_programs import SHAPES
from tests.engine.test_memory import SIZES

RESULTS = {
    "host": {"dialogue": 300.0, "first": 40.0, "copies": 50.0},
    "none": {"dialogue": 100.0, "first": 200.0},
    "vllm": {"dialogue": 250.0},
}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the sides' processes by fixed results; return the list of their commands."""
    started: list[list[str]] = []

    def fake(command: list[str]) -> Iterator[Line]:
        started.append(command)
        side = command[command.index("--side") + 1]
        yield {"side": side, "ready_s": 1.0, "config": {"of": side}}
        for name, result in RESULTS[side].items():
            yield {"side": side, "workload": name, "result": result}

    monkeypatch.setattr(versus, "lines_of", fake)
    return started


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[Line]:
    """Run the comparison, and return the rows of its table."""
    arguments = ("--model", "m", "--name", "m", "--out", str(out), *arguments)
    monkeypatch.setattr(sys, "argv", ["versus", *arguments])
    versus.main()
    (table,) = out.glob("versus-tiers-*.json")
    rows: list[Line] = json.loads(table.read_text())["rows"]
    return rows


def test_host_is_held_against_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    """Bug: a side is held against itself, or vLLM runs in Manta's environment."""
    rows = run(monkeypatch, tmp_path, "--vllm-python", "other")
    assert {row["case"]: row.get("ratio") for row in rows} == {
        "m/dialogue/none": 3.0,
        "m/dialogue/vllm": 1.2,
        "m/first/none": 0.2,
        "m/copies": None,
    }
    assert [command[0] for command in commands] == [sys.executable, sys.executable, "other"]


def test_resume_runs_only_the_sides_that_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    """Bug: a second call runs all sides again, or compares only its own."""
    run(monkeypatch, tmp_path, "--sides", "host")
    rows = run(monkeypatch, tmp_path, "--resume", "--sides", "none", "vllm")
    assert [command[command.index("--side") + 1] for command in commands] == list(RESULTS)
    assert {row["case"] for row in rows} > {"m/dialogue/none", "m/dialogue/vllm"}


class Counting:
    """A side that records its prompts, and reports half of each as cached."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # (prompts, tokens of the longest)

    def generate(self, prompts: list[list[int]], tokens: list[int]) -> list[tuple[list[int], int]]:
        self.asked.append((len(prompts), max(map(len, prompts))))
        return [([5] * count, len(ids) // 2) for ids, count in zip(prompts, tokens, strict=True)]


def test_workloads_are_as_large_as_they_say() -> None:
    """Bug: the dialogue fits into the pool, or what comes back has never left."""
    sizes = versus.Sizes(1024, 3.0, 64, 16, 16, 3, 256)
    side = Counting()
    results = dict(versus.measure(versus.Side(side.generate, None, {}), sizes))
    assert results.keys() == versus.UNITS.keys() - {"copies"}
    assert 0.45 < results["return_hits"] <= 0.5
    grown = sizes.opening + 2 * sizes.message + 3 * sizes.answer
    longer = grown + sizes.message + sizes.answer
    turns = [asked for asked in side.asked if asked[1] > sizes.opening]
    dialogue, again = turns[1], turns[3]
    assert dialogue[0] * grown > 2.9 * sizes.pool and again[0] * longer > 7.9 * sizes.pool
    assert longest_of(side) <= versus.longest(sizes)


def longest_of(side: Counting) -> int:
    return max(length for _, length in side.asked)


@pytest.mark.slow
def test_a_side_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bug: a side does not start with its tiers, or a workload does not fit the engine."""
    values = {"architectures": ["Qwen3ForCausalLM"], **SIZES, **SHAPES}
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments: dict[str, Any] = {
        "model": tmp_path, "device": "cpu", "dtype": "float32", "pool_tokens": 256,
        "host_gib": 0.03, "disk_gib": 0.02, "disk_folder": tmp_path / "kv", "over": 2.0,
        "opening": 64, "message": 16, "answer": 8, "turns": 2, "long": 160, "streams": 4,
    }  # fmt: skip
    versus.run_side("disk", argparse.Namespace(**arguments))
    lines = [json.loads(x) for x in capfd.readouterr().out.splitlines() if x.startswith("{")]
    results = {line["workload"]: line["result"] for line in lines if "workload" in line}
    assert results.keys() - {"copies"} == versus.UNITS.keys() - {"copies"}
    assert all(result > 0 for name, result in results.items() if name != "return_hits")
