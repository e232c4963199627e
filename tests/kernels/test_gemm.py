"""The matrix product for few rows against float64."""

import pytest
import torch

from tests.kernels.oracle import BOUND, DTYPES, random, row_error

from kernels import cuda
from kernels.gemm_small_m import few_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 300), (64, 512), (33, 2048), (17, 4097)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_rows(tokens: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    """The tail of an odd width read from the next row, a row of x taken twice, rows past the end written."""
    x, weight = random(tokens, shape[1], dtype=dtype), random(*shape, dtype=dtype)
    extra = random(shape[0], dtype=dtype) if bias else None
    ref = x.double() @ weight.double().T + (0 if extra is None else extra.double())
    assert row_error(few_rows(x, weight, extra), ref) < BOUND[dtype]


def test_other_shapes_go_to_the_library() -> None:
    """More rows than the kernel has, or a transposed weight."""
    x, weight = random(7, 96), random(96, 40).T
    assert row_error(cuda.linear(x, weight, None), x.double() @ weight.double().T) < 1e-5
    assert row_error(cuda.linear(x[:2], weight, None), x[:2].double() @ weight.double().T) < 1e-5
