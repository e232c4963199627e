"""RMS norm and layer norm against float64."""

import pytest
import torch
from torch.nn.functional import silu

from kernels.dispatch import kernels_for
from kernels.norm import layer_norm, rms_norm
from kernels.reference import Kernels
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
    before = x.clone()
    normed = rms_norm(x, weight, 1e-5)
    assert row_error(normed, ref) < BOUND[dtype]
    residual = random(*shape, dtype=dtype)
    want = residual.double() + normed.double()  # a device may round float32 once for both
    added = rms_norm(x, weight, 1e-5, add_to=residual)
    assert added is residual and row_error(added, want) < BOUND[dtype]
    assert torch.equal(x, before)


@pytest.mark.parametrize("back_end", ["cuda", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "gate_last"), [(0, False), (1, False), (3, False), (3, True)])
def test_gated_norm(groups: int, gate_last: bool, dtype: torch.dtype, back_end: str) -> None:
    """A part's mean that has another's elements; a gate of rows in longer ones; no norm at all."""
    x, gate = random(5, 300), random(5, 400, dtype=dtype)[:, 20:320]
    weight = random(300) if groups else None
    ref = x.double() if gate_last else x.double() * silu(gate.double())
    parts = ref.unflatten(1, (max(groups, 1), -1))
    if weight is not None:
        ref = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight
    ref = ref * silu(gate.double()) if gate_last else ref
    kernels = kernels_for("cuda") if back_end == "cuda" else Kernels()
    out = kernels.gated_norm(x, gate, weight, max(groups, 1), 1e-5, gate_last)
    assert out.dtype == dtype and row_error(out, ref) < BOUND[dtype]


@pytest.mark.parametrize("parts", ["weight and bias", "weight", "neither"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (17, 100), (2, 4096)], ids=str)
def test_layer_norm(shape: tuple[int, int], dtype: torch.dtype, parts: str) -> None:
    """Columns past an odd width that count into the variance; a mean far from zero that is lost in
    half precision; weights of another type."""
    x = random(*shape, dtype=dtype) + 3
    weight = random(shape[1]) if parts != "neither" else None
    bias = random(shape[1], dtype=dtype) if parts == "weight and bias" else None
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    ref = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    ref = ref if weight is None else ref * weight.double()
    ref = ref if bias is None else ref + bias.double()
    before = x.clone()
    assert row_error(layer_norm(x, weight, bias, 1e-5), ref) < BOUND[dtype]
    assert torch.equal(x, before)
