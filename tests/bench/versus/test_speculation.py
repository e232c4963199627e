"""The comparison of speculation: equal rates on both sides, and rows of all four."""

import json
from pathlib import Path

import pytest

from bench.report.result_file import Line
from bench.versus.speculation import SIDES, options, rows_of, write_eagle3
from engine.config.eagle3_config import Eagle3Config
from engine.config.model_config import ModelConfig
from engine.speculation.settings import read_speculation

LLAMA = Path("bench/models/llama-8b")


def test_both_sides_accept_as_many(tmp_path: Path) -> None:
    """Bug: our rates are of a draft after accepted ones, vLLM's of all drafts up to one."""
    rates = (0.75, 0.55, 0.4)
    ours, theirs = (
        json.loads(options(side, "eagle3", tmp_path, rates)[0].partition("=")[2])
        for side in ("manta", "vllm")
    )
    settings = read_speculation(ours)
    assert settings is not None and settings.rates == rates
    assert (settings.method, settings.tokens, settings.model) == ("eagle3", 3, str(tmp_path))
    assert theirs["synthetic_acceptance_rates"] == [0.75, 0.4125, 0.165]
    assert theirs["num_speculative_tokens"] == 3


def test_drafter_has_the_sizes_of_the_model(tmp_path: Path) -> None:
    """Bug: the drafter is smaller than published ones are, so its passes cost too little."""
    write_eagle3(json.loads((LLAMA / "config.json").read_text()), tmp_path)
    model = ModelConfig.from_folder(LLAMA)
    drafter = Eagle3Config.from_folder(tmp_path, model)
    assert drafter.vocab_size == 32_000 and drafter.layer.num_layers == 1
    assert drafter.layer.hidden_size == model.hidden_size


def test_row_needs_all_sides() -> None:
    """Bug: a gain over a side that did not run."""
    rates = dict(zip(SIDES, (300.0, 200.0, 150.0, 100.0), strict=True))
    lines: list[Line] = [
        {"side": side, "workload": "single", "out_tok_s": rate} for side, rate in rates.items()
    ]
    lines += [{"side": "manta", "workload": "streams64", "out_tok_s": 9.0}]
    (row,) = rows_of("m/eagle3", lines)
    assert row["case"] == "m/eagle3/single" and row["ratio"] == 1.5
    assert (row["own"], row["peer_own"]) == (2.0, 2.0)
    (row,) = rows_of("m/eagle3", [line for line in lines if "vllm" not in line["side"]])
    assert (row["own"], row["ratio"], row["peer_own"]) == (2.0, None, None)


def test_rates_that_are_none_are_refused() -> None:
    """Bug: a benchmark with wrong rates measures something else."""
    with pytest.raises(Exception, match="rates must be"):
        read_speculation({"method": "mtp", "rates": "0.5 x"})
