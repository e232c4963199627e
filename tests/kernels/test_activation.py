"""Gated activations against float64."""

import pytest
import torch

from kernels.activation import gelu_tanh_mul, silu_mul
from tests.kernels.oracle import BOUND, DTYPES, random, row_error

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1536), (5, 100), (3, 14336)], ids=str)
def test_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Halves swapped, an overflow of exp at large gates, a tail of columns left unwritten."""
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    gate, up = gate_up.double().chunk(2, -1)
    assert row_error(silu_mul(gate_up), torch.nn.functional.silu(gate) * up) < BOUND[dtype]
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    assert row_error(gelu_tanh_mul(gate_up), gelu * up) < BOUND[dtype]
