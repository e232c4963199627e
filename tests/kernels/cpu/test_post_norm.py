"""The rest of a post-norm layer behind attention, in one launch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu.gemm.dense import PackedLinear
from kernels.cpu.native import Native
from kernels.cpu.post_norm import rest_of_layer

HIDDEN, INNER = 128, 320
PLAIN = Native()

Layer = tuple[
    tuple[PackedLinear, PackedLinear, PackedLinear],
    tuple[tuple[Tensor | None, Tensor | None, float], tuple[Tensor | None, Tensor | None, float]],
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layer(dtype: torch.dtype, attended: int = HIDDEN, bias: bool = True) -> Layer:
    torch.manual_seed(0)

    def product(outputs: int, width: int) -> PackedLinear:
        if not PackedLinear.fits(outputs, width):
            pytest.skip("no products are generated on this machine")
        weight = (torch.randn(outputs, width) / width**0.5).to(dtype)
        return PackedLinear(weight, torch.randn(outputs).to(dtype) if bias else None)

    products = product(HIDDEN, attended), product(INNER, HIDDEN), product(HIDDEN, INNER)
    weights = [torch.randn(HIDDEN) for _ in range(4)]
    second = weights[3] if bias else None
    return products, ((weights[0], weights[1], 1e-12), (weights[2], second, 1e-5))


def apart(attended: Tensor, residual: Tensor, given: Layer, act: str) -> Tensor:
    (out, up, down), (first, second) = given
    x = PLAIN.layer_norm(out.add_to_residual(attended, residual.clone()), *first)
    return PLAIN.layer_norm(down.add_to_residual(PLAIN.activation(up(x), act), x), *second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("act", ["gelu", "relu"])
@pytest.mark.parametrize("rows", [192, 331, 1100])
def test_same_numbers_as_apart(dtype: torch.dtype, act: str, rows: int) -> None:
    """A row's numbers that depend on how many rows a step has, as short steps take these launches
    apart; a last block of few rows that is left out, or written behind the end; a norm that reads
    the sums of the rows of another block."""
    parts = layer(dtype)
    attended, memory = torch.randn(rows, HIDDEN), torch.randn(rows + 40, HIDDEN)
    residual, behind = memory[:rows], memory[rows:].clone()
    wanted = apart(attended, residual, parts, act)
    output = rest_of_layer(attended, residual, *parts, act)
    assert output is not None and output.data_ptr() == residual.data_ptr()
    assert torch.equal(output, wanted)
    assert torch.equal(memory[rows:], behind)


def test_other_shapes() -> None:
    """Attention of another width than the residual, which its rows are rounded with; products and a
    norm without a bias."""
    parts = layer(torch.bfloat16, attended=192, bias=False)
    attended, residual = torch.randn(300, 192), torch.randn(300, HIDDEN)
    wanted = apart(attended, residual, parts, "gelu")
    output = rest_of_layer(attended, residual, *parts, "gelu")
    assert output is not None and torch.equal(output, wanted)


def test_left_apart() -> None:
    """Few rows given to one thread while others idle; products of two kinds read as one; a function
    that there is no code for."""
    (out, up, down), norms = layer(torch.bfloat16)
    (wide, *_), _ = layer(torch.float32)
    x = torch.randn(256, HIDDEN)
    few = x[:100].clone()
    assert rest_of_layer(few, few.clone(), (out, up, down), norms, "gelu") is None
    assert rest_of_layer(x, x.clone(), (wide, up, down), norms, "gelu") is None
    assert rest_of_layer(x, x.clone(), (out, up, down), norms, "no such function") is None
