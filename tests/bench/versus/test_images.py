"""The comparison of pictures: which turn counts, and what each side runs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.report.result_file import Line
from bench.versus import images as versus

RESULTS = {
    "manta": {"first": (90.0, 80.0), "load": (60.0, 50.0), "text": (99.0, 98.0)},
    "vllm": {"first": (100.0, 160.0), "load": (40.0, 48.0)},
    "manta-text": {"text": (90.0, 100.0)},
}


def test_the_best_turn_of_each_workload_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the slower of two times counts as the best; text is held against vLLM's pictures."""

    def fake(command: list[str]) -> Iterator[Line]:
        side = command[command.index("--side") + 1]
        yield {"side": side, "ready_s": 1.0, "config": {"of": side}}
        for name, both in RESULTS[side].items():
            for turn, result in enumerate(both):
                yield {"side": side, "workload": name, "turn": turn, "result": result}

    monkeypatch.setattr(versus, "lines_of", fake)
    monkeypatch.setattr(versus, "UNITS", {n: versus.UNITS[n] for n in ("first", "load", "text")})
    arguments = ["--model", "m", "--name", "m", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["versus", *arguments])
    versus.main()
    (table,) = tmp_path.glob("versus-images-*.json")
    rows = json.loads(table.read_text())["rows"]
    assert {row["case"]: (row["ours"], row["peer"], row["ratio"]) for row in rows} == {
        "m/first": (80.0, 100.0, 0.8),
        "m/load": (60.0, 48.0, 1.25),
        "m/text": (99.0, 100.0, 0.99),
    }
