"""What `manta plan` and `manta doctor` say of weights in fewer bits."""

import json
import re
from pathlib import Path
from typing import cast

import pytest
import torch

from deployments.cli import doctor
from deployments.cli.plan import run as run_plan
from deployments.cli.target import read_planned
from deployments.plan.memory import Hardware
from engine.config.quantized import Quantized
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.quantization.products import measured_speeds, products
from engine.quantization.registry import METHODS
from kernels.cuda import Cuda
from kernels.experts import rounded
from kernels.experts.reference import PackedExperts
from kernels.packed import Code, Format, PackedWeight
from tests.engine.weights.quantized_files import FILES
from tests.engine.weights.test_stored_weights import SCHEMES

RESULTS = Path(__file__).parents[3] / "bench" / "results"
H200, A100, T4 = (9, 0), (8, 0), (7, 5)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 256,
}


def read(name: str) -> Quantized:
    quantized = read_quantized(
        Reader({"quantization_config": {**FILES, **SCHEMES}[name]}, "config.json")
    )
    assert quantized is not None
    return quantized


def said(
    name: str,
    capability: tuple[int, int] | None,
    *,
    of_experts: bool = False,
    deterministic: bool = False,
) -> str:
    """Return what `manta plan` says of a format's kernels.

    name: a file of FILES or SCHEMES, or a configuration's quantization.
    capability: the GPU's; None: the CPU.
    of_experts: whether the model is a mixture.
    """
    known = name in FILES or name in SCHEMES
    quantized = read(name) if known else None
    cuda = capability is not None
    linears, experts = ["model.layers.0.mlp.up_proj"], ["model.layers.0.mlp.experts.0.up_proj"]
    quantization = "auto" if known else name
    return "; ".join(
        products(
            quantization, quantized, capability, cuda, linears, experts * of_experts, deterministic
        )
    )


def test_each_format_has_a_line() -> None:
    """Bug: a format that plan and doctor are silent about, or that they fail at."""
    for name in (*FILES, *SCHEMES, *METHODS):
        for capability in (H200, A100, T4, None):
            assert bool(said(name, capability)) == (name != "none"), name


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("fp8", H200, "GEMMs of 8-bit floats from 32 tokens a step on.* 1.23"),
        ("fp8", A100, r"decoded .*GEMMs of 8-bit floats take compute capability 9\.x\)$"),
        ("w8a8", A100, "GEMMs of 8-bit integers from 32"),
        ("compressed-w8a8", T4, r"decoded .*8-bit integers take compute capability 8\.0"),
        ("compressed-w8a8", None, "multiplied in its bits, activations in 8"),
        ("int8", None, "activations in 16"),
        ("fp8-block", H200, "FP8 by 128 x 128: GEMMs of 8-bit floats from 2 tokens"),
        ("fp8-block", None, "no GEMM here; dequantised to 16 bits"),
        ("gptq-ordered", H200, "inputs in another order: decoded in the GEMM.* a step$"),
        ("awq", H200, "measured on an H100 or H200, .*: one stream 2.33.*256 requests 1.00"),
        ("nf4", None, "dequantised to 16 bits"),
    ],
)
def test_what_a_device_does(name: str, capability: tuple[int, int] | None, words: str) -> None:
    """Bug: a device is said to have products that it decodes for, or a format to be kept that is
    expanded."""
    assert re.search(words, said(name, capability)), said(name, capability)


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("fp8", H200, "from 32 tokens .*fp8, experts: GEMMs of 8-bit floats in steps of any"),
        ("compressed-fp8-dynamic", H200, "FP8, experts: GEMMs of 8-bit floats in steps of any"),
        ("fp8", A100, r"fp8, experts: decoded in the GEMM \(GEMMs .* capability 9\.x\)$"),
        (
            "w8a8",
            H200,
            "w8a8: GEMMs of 8-bit integers from 32 .*experts: decoded in the GEMM$",
        ),
        ("fp8-block", H200, "128 x 128: GEMMs .* from 2 .*experts: decoded in the GEMM$"),
        ("awq", H200, "4 bits: decoded .*; 4 bits, experts: decoded in the GEMM$"),
        ("gptq-ordered", H200, "experts: no GEMM here; dequantised to 16 bits at the start$"),
        ("fp8", None, "^((?!experts).)*$"),
    ],
)
def test_what_a_device_does_with_experts(
    name: str, capability: tuple[int, int] | None, words: str
) -> None:
    """Bug: experts are said to round what they read as linear layers do, or to be expanded for
    large steps."""
    assert re.search(words, said(name, capability, of_experts=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "w8a8",
            "^w8a8: GEMMs of 8-bit integers in steps of any size; .*decoded in the GEMM$",
        ),
        ("fp8", "^fp8: dequantised to 16 bits in each step; fp8, experts: decoded in the GEMM$"),
        ("awq", "^4 bits: dequantised to 16 bits in each step; 4 bits, experts: decoded"),
    ],
)
def test_what_deterministic_mode_does(name: str, words: str) -> None:
    """Bug: plan promises what a mode without tuned products does not do."""
    line = said(name, H200, of_experts=True, deterministic=True)
    assert re.search(words, line), line


def test_what_was_measured_is_said_of_it_alone() -> None:
    """Bug: blocks of another size are said to be as fast as those of 128 x 128."""
    settings = {**FILES["fp8-block"], "weight_block_size": [64, 128]}
    other = read_quantized(Reader({"quantization_config": settings}, "config.json"))
    names = ["model.layers.0.mlp.up_proj"]
    (line,) = products("auto", other, H200, True, names, ())
    assert "64 x 128" in line and "measured" not in line
    assert "measured on an H100 or H200" in said("fp8-block", H200)


def test_what_is_said_of_rounding_is_what_kernels_do() -> None:
    """Bug: plan names another number of tokens than the back end goes by."""
    for code, rows, group in (("e4m3", 1, 256), ("e4m3", 128, 128), ("int", 1, 256)):
        zero = 128 if code == "int" else 0
        form = Format(
            8, group, torch.float32, zero, code=cast(Code, code), rows=rows, activations=8
        )
        weight = PackedWeight(form, 256, 256, None, torch.device("cpu"))
        stack = PackedExperts(weight, weight, None, None, "silu", 0.0, False)
        x = torch.empty(form.rounded_rows, 256, dtype=torch.bfloat16)
        assert rounded.rounded_fits(x[:1], stack) is form.rounds_experts(H200)
        back_end = Cuda()  # of e4m3 with a scale an output a CPU has no such product
        assert back_end.takes_gate(x, weight) is (code == "int" or rows > 1)
        assert not back_end.takes_gate(x[:-1], weight)


def test_figures_are_those_of_the_result() -> None:
    """Bug: figures that nobody measured, or that a newer measurement has replaced."""
    rows: dict[str, float] = {}  # by case, of the newest file that has it
    files = RESULTS.glob("versus-quantised-*.json")
    for file in sorted(files, key=lambda file: (file.stem[-len("2026-11-28") :], file.name)):
        rows |= {row["case"]: row["own"] for row in json.loads(file.read_text())["rows"]}
    measured = {
        f"llama-8b-{name}/{workload}": ratio
        for name, ratios in measured_speeds().items()
        for workload, ratio in ratios.items()
    }
    assert measured == {case: own for case, own in rows.items() if case in measured}
    assert {case.split("/")[0] for case in rows} >= {
        f"llama-8b-{name}" for name in measured_speeds()
    }


def test_plan_and_doctor_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: lines that are made and printed nowhere."""
    config = {**LLAMA, "quantization_config": FILES["compressed-w8a8"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_plan(str(tmp_path), "a100", 1, None) == 0
    assert "INT8: GEMMs of 8-bit integers from 32 tokens a step on" in capsys.readouterr().out
    checks = list(doctor.model_checks(*read_planned(str(tmp_path)), Hardware.gpu("t4")))
    assert any(check.name == "weights" and "INT8: decoded" in check.text for check in checks)
    assert checks[-1].name == "KV cache" and "decodes by attention_decode" in checks[-1].text


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_has_no_format(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a format that the file says of a head alone is listed where the head is the embedding,
    or left out where it is not."""
    groups = {
        "layers": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}},
        "head": {
            "targets": ["re:.*lm_head"],
            "weights": {"num_bits": 8, "group_size": 32},
        },
    }
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config = {**LLAMA, "tie_word_embeddings": tied}
    config["quantization_config"] = {**method, "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_plan(str(tmp_path), "h200", 1, None) == 0
    plan = capsys.readouterr().out
    assert "4 bits: decoded" in plan
    assert ("8 bits" in plan) is not tied
    checks = list(doctor.model_checks(*read_planned(str(tmp_path)), Hardware.gpu("h200")))
    assert len([check for check in checks if check.name == "weights"]) == 2 - tied


def test_a_mixture_that_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the lines of experts come from no model, or their format is not the one that the file
    says of them."""
    config = {
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "quantization_config": FILES["compressed-fp8-dynamic"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_plan(str(tmp_path), "h200", 1, None) == 0
    plan = capsys.readouterr().out
    assert "FP8: GEMMs of 8-bit floats from 32 tokens a step on" in plan
    assert "FP8, experts: GEMMs of 8-bit floats in steps of any size" in plan
