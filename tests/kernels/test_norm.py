"""RMS norm against float64."""

import pytest
import torch

from kernels.norm import rms_norm
from tests.kernels.oracle import BOUND, DTYPES, random, row_error

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (17, 100), (2, 8192)], ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Columns past an odd width counted into the mean; sums of outliers in half precision."""
    x = random(*shape, dtype=dtype)
    x[0, 5] = 300.0
    weight = random(shape[1], dtype=dtype)
    wide = x.double()
    ref = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    kept = x.clone()
    assert row_error(rms_norm(x, weight, 1e-5), ref) < BOUND[dtype]
    assert torch.equal(x, kept)
