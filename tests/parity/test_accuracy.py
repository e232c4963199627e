"""What formats of weights cost in accuracy, on the default model (`bench.accuracy`)."""

import json
from pathlib import Path

import pytest

from bench import accuracy
from deployments.checkpoints.resolve import resolve_model
from kernels.cpu.codegen.compiler import has_int8
from tests.kernels.test_generated import able

RESULTS = Path(__file__).parents[2] / "bench" / "results"
# Nats a token from float32: the mean of 929 tokens, and twice what was measured.
KL_BOUNDS = {
    "bf16": 0.0005,
    "gguf-file": 0.01,
    "gguf-q8_0": 0.01,
    "int8": 0.015,
    "w8a8": 0.024,
    "uint8-64": 0.014,
    "uint8-128": 0.014,
    "uint8-256": 0.015,
    "uint8-512": 0.016,
    "convert-w8a8": 0.019,
    "kv-int8": 0.005,
}
# Relative change of perplexity. On so few tokens it changes by chance, about as much as this.
PERPLEXITY_BOUND = 0.05


@pytest.mark.slow
@pytest.mark.skipif(not (able() and has_int8()), reason="no AVX512-VNNI")
def test_next_token_distributions() -> None:
    """Outliers that take the precision of the rest: text still looks like English then."""
    folders = resolve_model("default", blocks=True), resolve_model("default")
    for row in accuracy.measure(*folders, tuple(KL_BOUNDS)):
        case = row["case"].removeprefix("smollm2-135m/")
        assert row["kl"] < KL_BOUNDS[case], row
        assert abs(row["perplexity_ratio"] - 1) < PERPLEXITY_BOUND, row


def test_the_result_is_of_all_formats() -> None:
    """Bug: a format is quoted that nobody measured, or one is left out because it was bad."""
    newest = max(RESULTS.glob("accuracy-*.json"))
    rows = {row["case"]: row for row in json.loads(newest.read_text())["rows"]}
    assert set(rows) == {f"smollm2-135m/{case}" for case in accuracy.CASES}
    for case, bound in KL_BOUNDS.items():
        assert rows[f"smollm2-135m/{case}"]["kl"] < bound
