"""Activations, gated or alone, against float64."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu, softplus

from kernels.activation import (
    activation,
    add_opened,
    gelu_mul,
    gelu_tanh_mul,
    relu_mul,
    sigmoid_mul,
    silu_mul,
    xielu,
)
from tests.kernels.oracle import BOUND, DTYPES, random, row_error

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1536), (5, 100), (3, 14336)], ids=str)
def test_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Halves swapped, an overflow of exp at large gates, a tail of columns left unwritten."""
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    gate, up = gate_up.double().chunk(2, -1)
    assert row_error(silu_mul(gate_up), silu(gate) * up) < BOUND[dtype]
    assert row_error(gelu_tanh_mul(gate_up), gelu(gate, approximate="tanh") * up) < BOUND[dtype]
    assert row_error(gelu_mul(gate_up), gelu(gate) * up) < BOUND[dtype]
    assert row_error(relu_mul(gate_up), relu(gate) * up) < BOUND[dtype]


PLAIN = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain(name: str, dtype: torch.dtype) -> None:
    """The tanh form where the exact one was meant, an overflow of exp, a tail left unwritten."""
    x = random(3, 1500, dtype=dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    assert row_error(activation(x, name), PLAIN[name](x.double())) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu(dtype: torch.dtype) -> None:
    """The branches exchanged, a softplus forgotten, exp(x) - 1 near zero."""
    x = random(3, 1500, dtype=dtype)
    x[0, :4] = torch.tensor([-80.0, 80.0, -1e-3, 1e-3])
    parameters = torch.tensor([0.3, -0.7, 0.5, -1e-6], device=x.device)
    alpha_p, alpha_n, beta, eps = parameters.double()
    wide = x.double()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * (beta + softplus(alpha_n))
    ref = torch.where(wide > 0, softplus(alpha_p) * wide * wide, below) + beta * wide
    assert row_error(xielu(x, parameters), ref) < BOUND[dtype]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2048, 2048), (96, 5000)], ids=str)
def test_add_opened(sizes: tuple[int, int], dtype: torch.dtype, add: bool) -> None:
    """A token's number of another token, a residual left out, columns behind the first block."""
    hidden, size = sizes
    inputs, x, gate = (
        random(3, size, dtype=dtype),
        random(3, hidden, dtype=dtype),
        random(1, hidden, dtype=dtype) * hidden**-0.5,  # few gates close, where halves are coarse
    )
    residual = random(3, size, dtype=dtype) if add else None
    ref = inputs.double() * torch.sigmoid(x.double() @ gate.double().T)
    if residual is not None:
        ref = ref + residual.double()
    actual = add_opened(inputs, x, gate, residual)
    assert actual is (inputs if residual is None else residual)
    assert row_error(actual, ref) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 16, 256, 1024), (4, 3, 80, 160), (1, 1, 20, 0)], ids=str)
def test_sigmoid_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Another head's or another token's gate, a query in the place of its gate, columns behind the
    last; a factor that is not rounded, as it is where it is kept in memory."""
    tokens, heads, size, more = shape
    projected, x = (
        random(tokens, 2 * heads * size + more, dtype=dtype),
        random(tokens, heads * size),
    )
    projected[0, size : size + 4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    x = x.to(dtype)
    gate = projected[:, : 2 * heads * size].unflatten(1, (heads, 2, size))[:, :, 1]
    exact = x.double() * torch.sigmoid(gate.double()).flatten(1)
    expected = x * torch.sigmoid(gate).flatten(1)
    actual = sigmoid_mul(x, gate)
    assert actual is x
    assert row_error(actual, exact) < BOUND[dtype]
    if dtype != torch.float32:
        assert (
            actual != expected
        ).float().mean() < 0.005  # where exp's last bit decides a rounding
