"""The comparison with adapters can be cut off and taken up again, and says why a side failed."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus.lora import (
    SIDES,
    expected_seconds,
    finished,
    plan,
    rows_of,
    runs_of,
    writing_seconds,
)


def lines_of(side: str, count: int, none: float, kept: float = 1.0, start: int = 0) -> list[Line]:
    """Return the lines of a side's process.

    none: tokens/s without adapters. kept: the share of it with adapters.
    """
    key = {"side": side, "adapters": count, "start": start}
    speeds = {"none": none, "adapters": none * kept}
    runs = [{**key, "run": run, "out_tok_s": speeds[run]} for run in runs_of(side, count)]
    runs[-1]["out_tok_s"] -= 1.0  # the best counts
    return [{**key, "config": {}}, *runs]


def test_what_was_cut_off_runs_again() -> None:
    """Half a run beside whole ones would be a run under different conditions."""
    cut = lines_of("manta", 64, 100.0, 0.8)[:-1]
    assert not finished(("manta", 64, 0), cut)
    assert finished(("manta", 64, 0), lines_of("manta", 64, 100.0))
    loads = {"side": "loads", "adapters": 32, "start": 0, "loading_p99_ms": 2.0}
    assert finished(("loads", 32, 0), [loads]) and not finished(("loads", 32, 0), [])
    args = argparse.Namespace(counts=[16, 0], runs=1, sides=list(SIDES), cpu=False)
    assert plan(args) == [
        ("manta", 0, 0),
        ("vllm", 0, 0),
        ("manta", 16, 0),
        ("vllm", 16, 0),
        ("loads", 32, 0),
    ]
    assert all(expected_seconds(side, count) < 300 for side, count, _ in plan(args))
    assert writing_seconds(64, 64) == writing_seconds(0, 64) == 0 < writing_seconds(64, 16)


def test_rows_are_shares_of_the_same_side() -> None:
    """A share of the other's base would claim what was not measured; a share of a base that pays
    for slots that nobody uses would hide what they cost."""
    lines = lines_of("manta", 0, 110.0) + lines_of("vllm", 0, 90.0)
    lines += lines_of("manta", 16, 100.0, 0.88) + lines_of("vllm", 16, 100.0, 0.5)
    lines += lines_of("manta", 64, 55.0, 0.75)
    for start, loading in enumerate((2.5, 2.1)):
        figures = {"quiet_p99_ms": 2.0, "loading_p99_ms": loading}
        lines.append({"side": "loads", "adapters": 32, "start": start, **figures})
    off, first, second, third = rows_of("m", lines)
    assert (off["case"], off["ours"], off["peer"], "kept" in off) == ("m/0", 110.0, 90.0, False)
    assert (first["case"], first["kept"], first["peer_kept"]) == ("m/16", 0.8, 0.5)
    assert (first["ours_base"], first["ours_none"], first["peer_base"]) == (110.0, 100.0, 100.0)
    assert first["ratio"] == 1.76
    assert (second["case"], second["kept"]) == ("m/64", 0.375) and "ratio" not in second
    assert (third["case"], third["ratio"]) == ("m/loads", 1.05)


@pytest.mark.slow
def test_a_trial_without_a_gpu(tmp_path: Path) -> None:
    """A command that is only ever run on a GPU fails there, on a borrowed machine, at its first
    typing error."""
    fields: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 32, "intermediate_size": 48}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    fields |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    command = [sys.executable, "-m", "bench.versus.lora", "--cpu", "--resume", "--name", "tiny"]
    command += ["--model", str(tmp_path / "model"), "--out", str(tmp_path), "--counts", "0", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tmp_path.glob("versus-lora-*.json")
    rows = json.loads(table.read_text())["rows"]
    assert [row["case"] for row in rows] == ["tiny/0", "tiny/3", "tiny/loads"]
    assert rows[1]["kept"] > 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "to do" not in again.stdout, again.stdout + again.stderr
    assert json.loads(table.read_text())["rows"] == rows
