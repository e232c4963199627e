"""The comparison of quantised weights and KV caches with vLLM (bench/versus/quantised.py)."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus import quantised
from bench.versus.engine import engine_fields
from engine.config.engine_config import EngineConfig
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader

SPEED = {("bf16", "manta"): 2.0, ("kv-int8", "manta"): 3.0, ("int4", "manta"): 6.0}


def test_formats_are_read_as_they_are_called() -> None:
    """Bug: a format that an engine does not take for one, and whose figures are those of 16 bits; a
    key of a configuration that is no more."""
    formats = {}
    for name, form in quantised.FORMATS.items():
        quantized = read_quantized(Reader({"quantization_config": form.config}, "config.json"))
        scheme = None if quantized is None else quantized.scheme("model.layers.0.mlp.up_proj")
        if scheme is not None:
            formats[name] = (scheme.name, scheme.activations)
            assert quantized is not None and quantized.keeps("lm_head")
        EngineConfig(model="m", **engine_fields([*form.manta]))
    assert formats == {
        "fp8": ("FP8", 8),
        "fp8-block": ("FP8 by 128 x 128", 8),
        "w8a8": ("INT8", 8),
        "int4": ("4 bits", 16),
        "mxfp4": ("MXFP4", 16),
    }


@pytest.mark.parametrize(
    ("kind", "expert"),
    [("qwen3_moe", "mlp.experts.3.up_proj"), ("gpt_oss", "mlp.experts.gate_up_proj")],
)
def test_experts_are_the_only_ones_of_mxfp4(tmp_path: Path, kind: str, expert: str) -> None:
    """Bug: experts stay in 16 bits because a model's files name them otherwise, and the figures are
    those of 16 bits; attention or routers are packed too."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    folder = quantised.with_format(tmp_path, "mxfp4", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    quantized = read_quantized(Reader(config, "config.json"))
    assert quantized is not None
    scheme = quantized.scheme(f"model.layers.0.{expert}")
    assert scheme is not None and scheme.kind == "mxfp4"
    for name in ("self_attn.q_proj", "mlp.gate" if kind == "qwen3_moe" else "mlp.router"):
        assert quantized.scheme(f"model.layers.0.{name}") is None


def test_visits_that_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a later visit throws away another's formats or workloads, runs the same again, or asks
    vLLM for a format that it does not have."""
    (tmp_path / "config.json").write_text("{}")
    ran: list[tuple[str, str, list[str], list[str]]] = []

    def fake(
        side: str, model: str, names: list[str], change: list[str], against: object
    ) -> Iterator[Line]:
        name = Path(model).name if Path(model) != tmp_path else "bf16"
        ran.append((name, side, names, change))
        yield {"side": side, "config": {"side": side}}
        for workload in names:
            speed = SPEED.get((name, side), 1.5)
            figures = {"out_tok_s": speed, "total_tok_s": 2 * speed}
            yield {"side": side, "workload": workload, **figures}

    monkeypatch.setattr(quantised, "run_side", fake)

    def visit(*options: str) -> dict[str, dict[str, Any]]:
        ran.clear()
        fixed = ["--model", str(tmp_path), "--name", "m", "--runs", "1", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["quantised", *fixed, "--resume", *options])
        quantised.main()
        (table,) = tmp_path.glob("versus-quantised-*.json")
        return {row["case"]: row for row in json.loads(table.read_text())["rows"]}

    rows = visit("--formats", "kv-int8", "--workloads", "uniform")
    assert [(name, side) for name, side, *_ in ran] == [("bf16", "manta"), ("kv-int8", "manta")]
    assert ran[1][3] == ["kv_dtype=int8"]
    assert rows == {
        "m-kv-int8/uniform": {
            "case": "m-kv-int8/uniform", "ours": 3.0, "unit": "tok/s", "own": 1.5
        }
    }  # fmt: skip
    rows = visit("--formats", "int4", "kv-fp8", "--workloads", "uniform", "prefill")
    assert [(name, side, names) for name, side, names, _ in ran] == [
        ("bf16", "manta", ["prefill"]),
        ("int4", "manta", ["uniform", "prefill"]),
        ("int4", "vllm", ["uniform", "prefill"]),
        ("kv-fp8", "manta", ["uniform", "prefill"]),
        ("kv-fp8", "vllm", ["uniform", "prefill"]),
    ]
    assert ran[4][3] == ["kv_cache_dtype=fp8"]
    assert set(rows) >= {"m-kv-int8/uniform", "m-int4/uniform", "m-int4/prefill"}
    assert rows["m-int4/uniform"]["ratio"] == 4.0 and rows["m-int4/uniform"]["own"] == 3.0
    visit("--formats", "int4", "--workloads", "prefill", "--own")
    assert not ran
