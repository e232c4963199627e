"""The price of prefill attention's empty programs: the counts and the arithmetic."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.kernels import surplus
from bench.kernels.sizes import LLAMA
from bench.kernels.surplus import EXTRA, STEPS, Step, rows, with_blocks
from kernels.attention.inputs import AttentionInputs
from kernels.metadata import AttentionMeta

CPU = LLAMA._replace(
    heads=4, kv_heads=1, dim=16, hidden=32, inner=48, device="cpu", dtype=torch.float32
)


def launch(inputs: AttentionInputs, meta: AttentionMeta, out: torch.Tensor) -> int:
    """Stand in for a kernel with tiles of 128 rows: return the blocks that it would launch."""
    return meta.most_blocks(out.shape[0], 32, decodes=False)


def test_counts_and_prices() -> None:
    """Bugs: blocks with work among the surplus; a price for all launched blocks, or of another
    number of extra ones; a share of the attention called one of the step."""
    launched: list[object] = []

    def timer(calls: Sequence[Any]) -> float:
        results = [call() for call in calls]
        if not isinstance(results[0], int):
            return 40.0  # a matmul
        assert len({*results}) == 1
        launched.append(results[0])
        return 100.0 + 0.002 * results[0]

    counted = {
        row["case"].partition("/")[2]: (row["with_work"], row["launched"], row)
        for row in rows(CPU, STEPS, {"prefill": launch}, timer)
    }
    assert [counted[name][:2] for name in STEPS if "ShareGPT" not in name] == [
        (256, 258), (256, 273), (16, 18), (16, 25), (16, 282),
    ]  # fmt: skip
    assert launched[:2] == [258, 258 + EXTRA]
    row = counted["256 decodes, a chunk of 512, in a graph"][2]
    assert row["surplus_us"] == pytest.approx(266 * 0.002, abs=1e-3)
    assert row["matmuls_us"] == 160.0
    assert row["of_step"] == pytest.approx(0.532 / (100.564 + 160), rel=0.01)
    assert row["of_attention"] == pytest.approx(0.532 / 100.564, rel=0.01)


def test_the_patch_ends() -> None:
    """Bug: later launches have the extra blocks, too."""
    meta, _ = surplus.layout_of(CPU, Step(0, [40]))
    call, seen = with_blocks(lambda: meta.most_blocks(40, 32, decodes=False), 5)
    assert call() == 8 and seen == [32, 3]
    assert meta.most_blocks(40, 32, decodes=False) == 3


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a trace of torch's where a sentence would do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["surplus"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        surplus.main()
