"""Formats of weights against peers on the CPU: what counts, and what is refused."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.versus.cpu import formats as versus
from bench.versus.cpu.side import measure


def saying(text: str, code: int = 0) -> str:
    """Return a command line that prints this text."""
    program = f"import sys; print({text!r}); sys.exit({code})"
    return shlex.join([sys.executable, "-c", program])


def test_the_best_quiet_round_counts(tmp_path: Path) -> None:
    """A figure of a busy machine, another format's, or a column that only one side has."""
    mine, other, alone = (
        versus.Side((form,), name, [])
        for form, name in (("q4", ""), ("q4", "peer"), ("int8", "peer"))
    )
    mine.rounds = [
        {"prefill_tok_s": 90.0, "other": 0.9},
        {"prefill_tok_s": 30.0, "batch_tok_s": 8.0, "other": 0.0},
        {"prefill_tok_s": 40.0, "other": 0.01},
    ]
    other.rounds = alone.rounds = [{"prefill_tok_s": 20.0, "single_decode_tok_s": 5.0, "other": 0}]
    (row,) = versus.rows([mine, other, alone])
    assert row["case"] == "q4/prefill/peer" and row["ratio"] == 2.0 and row["ours"] == 40.0
    assert row["busy"] == 0.01
    other.formats = ("q4", "int8")  # a command that stands against both
    third = versus.Side(("int8",), "", [], [{"prefill_tok_s": 10.0, "other": 0.0}])
    cases = {row["case"]: row["ratio"] for row in versus.rows([mine, third, other])}
    assert cases == {"q4/prefill/peer": 2.0, "int8/prefill/peer": 0.5}


def test_the_least_memory_of_a_quiet_round_counts() -> None:
    """Bug: memory is left out, so that nobody sees which side takes twice as much."""
    mine, other = versus.Side(("q4",), "", []), versus.Side(("q4",), "peer", [])
    mine.rounds = [{"peak_rss_mb": 300, "other": 0.0}, {"peak_rss_mb": 250, "other": 0.02}]
    mine.rounds.append({"peak_rss_mb": 100, "other": 0.9})
    other.rounds = [{"peak_rss_mb": 500, "other": 0.0}]
    (row,) = versus.rows([mine, other])
    assert row["case"] == "q4/memory/peer" and row["unit"] == "MB"
    assert row["ratio"] == 0.5 and row["busy"] == 0.02


def test_a_turn_is_a_process(tmp_path: Path) -> None:
    """A peer that failed counted as slow, or its message lost."""
    side = versus.peer(f"q4:x={saying('RESULT ' + json.dumps({'batch_tok_s': 3.5}))}", tmp_path)
    assert side.command[-2:] == ["--workload", str(tmp_path)]
    said = versus.turn(side)
    assert said["batch_tok_s"] == 3.5 and said["other"] >= 0
    with pytest.raises(SystemExit, match="no RESULT line\nno such model"):
        versus.turn(versus.peer(f"q4:x={saying('no such model', 1)}", tmp_path))
    for text in ("q4=default", "q4"):
        with pytest.raises(SystemExit, match="FORMAT=MODEL:QUANTIZATION"):
            versus.ours(text, tmp_path, 3)


def test_a_busy_machine_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of a machine that did something else meanwhile."""
    command = saying("RESULT " + json.dumps({"batch_tok_s": 3.5}))
    arguments = ["--workload", "w", "--peer", f"q4:x={command}", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["versus", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(versus, "BUSY", -1.0)
    with pytest.raises(SystemExit, match="busy in every round of q4 x"):
        versus.main()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(versus, "BUSY", 1e9)
    versus.main()
    (file,) = tmp_path.glob("versus-cpu-*.json")
    commands = json.loads(file.read_text())["config"]["sides"]
    assert commands["q4:x"][0] == Path(sys.executable).name, "no path of this machine"


def test_columns_are_what_they_say() -> None:
    """Prompt tokens counted as made, or the first token's time in the decode rate."""
    asked: list[tuple[list[int], list[int]]] = []

    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        asked.append(([len(prompt) for prompt in prompts], counts))
        time.sleep(sum(counts) * 1e-4)  # else two runs may take the same time

    requests: list[dict[str, Any]] = [
        {"kind": "prefill", "prompt_ids": [1] * 100, "max_tokens": 1},
        {"kind": "single", "prompt_ids": [1] * 10, "max_tokens": 8},
        *({"kind": "batch", "prompt_ids": [1] * 5, "max_tokens": 6} for _ in range(3)),
    ]
    figures = measure(generate, requests, ["prefill", "single", "batch"], 2)
    assert set(figures) == {"prefill_tok_s", "single_decode_tok_s", "batch_tok_s"}
    single = [counts for lengths, counts in asked if lengths == [10]]
    assert single == [[4], [1], [1], [8], [8]]
    assert [counts for lengths, counts in asked if len(lengths) == 3][1:] == [[6, 6, 6]] * 2


def test_tokens_that_take_no_time_have_no_rate() -> None:
    """Bug: a division by zero, or a negative rate in a table."""
    request = {"kind": "single", "prompt_ids": [1], "max_tokens": 1}
    times = iter([0.0, 2.0, 0.0, 1.0])
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit, match="raise max_tokens"),
    ):
        patch.setattr(time, "perf_counter", lambda: next(times))
        measure(lambda prompts, counts: None, [request], ["single"], 1)
