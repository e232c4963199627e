"""The random load of bench.memory_load: seconds on the CPU, ten minutes on a GPU."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import long_context
from bench.memory_load import Report, draw, load
from bench.versus.engine import engine_fields
from engine.factory import build
from engine.library.llm import make_config

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def engine(folder: Path, model: dict[str, Any], **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**TINY, **model}))
    return build(make_config(str(folder), {"load_format": "dummy", **fields}))[0]


@pytest.mark.parametrize("fields", [{}, {"block_size": 1, "allocation": "cumsum"}], ids=str)
def test_on_the_cpu(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Requests that fail, stall or lose blocks when memory is always short."""
    tokens = 600
    core = engine(
        tmp_path, {}, device="cpu", num_threads=1, max_num_seqs=16, max_model_len=256,
        max_num_batched_tokens=128, num_blocks=tokens // fields.get("block_size", 16), **fields,
    )  # fmt: skip
    report = load(core, 120, unit="steps")
    assert not report.faults
    assert report.ended > 10 and report.aborted < report.ended and report.output_tokens > 100


def test_what_is_drawn() -> None:
    """Bug: nobody asked for prompt_logprobs or min_p, and the logits of whole prompts, 2 GiB, were
    never there while memory was short."""
    rng = random.Random(0)
    drawn = [draw(rng, number, 256, 128).params for number in range(200)]
    for name in ("min_p", "top_p", "top_k", "logprobs", "prompt_logprobs", "temperature"):
        assert len({getattr(params, name) for params in drawn}) > 1, name


def test_faults_are_told() -> None:
    """A load that shows nothing passes for one that shows something."""
    assert not Report(preemptions=1).faults
    assert len(Report(preemptions=0, out_of_memory=1, failed=2, reserved=2**29).faults) == 4


def test_fields_on_the_command_line() -> None:
    """--change deterministic=true that compares Manta with the text "true"."""
    assert engine_fields(["block_size=1", "deterministic=true", "admission=peak"]) == {
        "block_size": 1, "deterministic": True, "admission": "peak"
    }  # fmt: skip


def test_long_context(tmp_path: Path) -> None:
    """The command for the memory-load figures breaks unseen, since it is meant for a GPU."""
    core = engine(tmp_path, {}, device="cpu", num_threads=1, max_num_seqs=2, max_model_len=1024)
    line = long_context.measure(core, 1024)
    assert line["tokens"] == 1024 and line["ttft_s"] > 0 and line["out_of_memory"] == 0


def test_longer_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu_checks asks for 131,072 tokens of a model with 32,768 positions and is refused, or gets
    them and nobody is told that the positions were raised."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 256}))
    words = f"x --model {tmp_path} --tokens 512 --out {tmp_path}/out --set device=cpu num_threads=1"
    monkeypatch.setattr(sys, "argv", words.split())
    long_context.main()
    result = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert result["rows"][0]["tokens"] == 512
    for figures in (result["config"]["ours"], result["rows"][0]):
        assert figures["positions"] == "256, raised to 512"


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_minutes_on_a_device(tmp_path: Path) -> None:
    """Memory that grows while it serves, and a step that finds none."""
    model = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    core = engine(
        tmp_path, model, device="cuda", dtype="bfloat16", max_num_seqs=512,
        kv_cache_bytes=8 << 30,
    )  # fmt: skip
    report = load(core, 600, say=True)
    assert not report.faults
