"""Empty programs of prefill attention, which `bench.kernels.surplus` adds to price them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.kernels.surplus import Step, price
from kernels.attention.inputs import AttentionInputs
from kernels.attention.prefill import attention_prefill
from kernels.metadata import AttentionMeta
from tests.bench.test_kernels import INTERPRETED
from tests.bench.test_surplus import CPU


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("graph", [False, True])
def test_empty_blocks_change_nothing(graph: bool) -> None:
    """Bug: an added block writes somewhere, so that its price is not that of an empty one."""
    results: list[torch.Tensor] = []

    def kernel(inputs: AttentionInputs, meta: AttentionMeta, out: torch.Tensor) -> torch.Tensor:
        attention_prefill(inputs, meta, out.fill_(7.0))
        return out

    def timer(calls: Sequence[Any]) -> float:
        results.extend(call().clone() for call in calls)
        return 1.0

    step = Step(3, [40, 9, 33], 20, graph)
    row = price(CPU, step, kernel, timer, extra=5)
    assert (row["with_work"], row["launched"]) == (7, 12 if graph else 9)
    first, second, first_again, second_again = results
    assert torch.equal(first, first_again) and torch.equal(second, second_again)
    assert not torch.equal(first, second) and (first[:3] == 7.0).all() and (first[3:] != 7.0).all()
