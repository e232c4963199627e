"""What a schema costs a full batch: each side against itself, and a run that masks nothing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus import structured as versus
from tests.deployments.on_ray.serve_cluster import tiny_model


def said(side: str, none: float, schema: float) -> list[Line]:
    rates = {"none": (none, 2 * none), "schema": (2 * schema, schema)}
    turns = [
        {"side": side, "kind": kind, "turn": turn, "out_tok_s": rate}
        for kind, both in rates.items()
        for turn, rate in enumerate(both)
    ]
    return [{"side": side, "ready_s": 1.0, "config": {"of": side}}, *turns]


def test_the_best_turn_of_each_kind_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of two sides' speeds where each is to be held against itself."""

    def fake(command: list[str]) -> Iterator[Line]:
        side = command[command.index("--side") + 1]
        yield from said(side, *((50.0, 49.0) if side == "manta" else (40.0, 36.0)))

    monkeypatch.setattr(versus, "lines_of", fake)
    arguments = ["--model", "m", "--name", "m", "--streams", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["versus", *arguments])
    versus.main()
    (table,) = tmp_path.glob("versus-structured-m-*.json")
    document = json.loads(table.read_text())
    assert document["config"]["peers"] == {"vllm": {"of": "vllm"}}
    rows = {row["case"]: (row["ours"], row["peer"], row["ratio"]) for row in document["rows"]}
    assert rows == {
        "m/4/kept": (0.98, 0.9, 1.089),
        "m/4/none": (100.0, 80.0, 1.25),
        "m/4/schema": (98.0, 72.0, 1.361),
    }


@pytest.mark.slow  # an engine process
def test_streams_are_masked_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents that end before the others, or a schema that reaches no engine."""
    monkeypatch.setattr(versus, "HIGH_ID", 250)
    folder = tiny_model(tmp_path / "model")
    change: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory_fraction": 0.05}
    versus.run_side("manta", str(folder), 3, 100, 1, max_model_len=256, **change)
    first, *turns = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["config"]["max_num_seqs"] == 3
    assert [turn["kind"] for turn in turns] == ["none", "schema"]
    assert all(turn["out_tok_s"] > 0 for turn in turns)
