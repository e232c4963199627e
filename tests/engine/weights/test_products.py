"""What `manta plan` and `manta doctor` say of weights in fewer bits."""

import json
import re
from pathlib import Path

import pytest

from deployments.cli import doctor
from deployments.cli.plan import run as run_plan
from deployments.cli.target import read_planned
from deployments.plan.memory import Hardware
from engine.config.quantized import Quantized
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.quantization.products import MEASURED, products
from engine.quantization.registry import METHODS
from tests.engine.weights.quantized_files import FILES
from tests.engine.weights.test_stored_weights import SCHEMES

RESULTS = Path(__file__).parents[3] / "bench" / "results"
H200, A100, T4 = (9, 0), (8, 0), (7, 5)


def read(name: str) -> Quantized:
    found = read_quantized(
        Reader({"quantization_config": {**FILES, **SCHEMES}[name]}, "config.json")
    )
    assert found is not None
    return found


def said(name: str, capability: tuple[int, int] | None) -> str:
    """Of a file of FILES or SCHEMES, or of a configuration's quantization; None: the CPU."""
    known = name in FILES or name in SCHEMES
    quantized = read(name) if known else None
    lines = products("auto" if known else name, quantized, capability, capability is not None)
    return "; ".join(lines)


def test_each_format_has_a_line() -> None:
    """Bug: a format that plan and doctor are silent about, or that they fail at."""
    for name in (*FILES, *SCHEMES, *METHODS):
        for capability in (H200, A100, T4, None):
            assert bool(said(name, capability)) == (name != "none"), name


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("fp8", H200, "products of 8-bit floats from 32 tokens a step on.* 1.23"),
        ("fp8", A100, r"decoded .*products of 8-bit floats take compute capability 9\.x\)$"),
        ("w8a8", A100, "products of 8-bit integers from 32"),
        ("compressed-w8a8", T4, r"decoded .*8-bit integers take compute capability 8\.0"),
        ("compressed-w8a8", None, "multiplied in its bits, activations in 8"),
        ("int8", None, "activations in 16"),
        ("fp8-block", H200, "FP8 by 128 x 128: products of 8-bit floats from 2 tokens"),
        ("fp8-block", None, "no product here; expanded to 16 bits"),
        ("gptq-ordered", H200, "inputs in another order: decoded in the product.* a step$"),
        ("awq", H200, "measured on an H200, times 16 bits: one stream 1.88.*256 requests 0.94"),
        ("nf4", None, "expanded to 16 bits"),
    ],
)
def test_what_a_device_does(name: str, capability: tuple[int, int] | None, words: str) -> None:
    """Bug: a device is said to have products that it decodes for, or a format to be kept that is
    expanded."""
    assert re.search(words, said(name, capability)), said(name, capability)


def test_figures_are_those_of_the_result() -> None:
    """Bug: figures that nobody measured, or that a newer measurement has replaced."""
    rows: dict[str, float] = {}  # by case, of the newest file that has it
    for file in sorted(RESULTS.glob("versus-quantised-*.json")):
        rows |= {row["case"]: row["own"] for row in json.loads(file.read_text())["rows"]}
    told = {
        f"llama-8b-{name}/{workload}": ratio
        for name, ratios in MEASURED.items()
        for workload, ratio in ratios.items()
    }
    assert told == {case: own for case, own in rows.items() if case in told}
    assert {case.split("/")[0] for case in rows} >= {f"llama-8b-{name}" for name in MEASURED}


def test_plan_and_doctor_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: lines that are made and printed nowhere."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 384,
        "max_position_embeddings": 256,
        "quantization_config": FILES["compressed-w8a8"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_plan(str(tmp_path), "a100", 1, None) == 0
    assert "INT8: products of 8-bit integers from 32 tokens a step on" in capsys.readouterr().out
    *_, check = doctor.model_checks(*read_planned(str(tmp_path)), Hardware.gpu("t4"))
    assert check.name == "weights" and "INT8: decoded" in check.text
