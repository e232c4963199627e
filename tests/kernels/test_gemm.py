"""Matrix products for a few rows, and of one order of summation, against float64."""

from typing import Any

import pytest
import torch

from kernels.dispatch import kernels_for
from kernels.gemm import cublaslt, cublaslt_tune, deterministic, gated
from kernels.gemm.small_m import few_rows
from kernels.launch import nvrtc
from tests.kernels.oracle import BOUND, DTYPES, random, row_error

pytestmark = pytest.mark.triton
cuda, cuda_deterministic = kernels_for("cuda"), kernels_for("cuda", True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("shape", [(40, 300), (64, 512), (33, 2048), (17, 4097)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_rows(tokens: int, shape: tuple[int, int], extras: bool, dtype: torch.dtype) -> None:
    """An odd width's tail read from the next row, a row of x taken twice, a bias left out."""
    x, weight = random(tokens, shape[1], dtype=dtype), random(*shape, dtype=dtype)
    ref = x.double() @ weight.double().T
    bias = residual = None
    if extras:
        bias, residual = random(shape[0], dtype=dtype), random(tokens, shape[0], dtype=dtype)
        ref += bias.double() + residual.double()
    assert row_error(few_rows(x, weight, bias, residual), ref) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2, 4, 7])
def test_every_number_of_tokens_means_the_same(tokens: int, dtype: torch.dtype) -> None:
    """A product that is right for one number of tokens only: each has its own path."""
    if torch.device(random(1).device).type == "cpu" and dtype == torch.float16:
        pytest.skip("the library's half-precision products on the CPU round more")
    x, weight = random(tokens, 96, dtype=dtype), random(40, 96, dtype=dtype)
    residual, norm = random(tokens, 40, dtype=dtype), random(96, dtype=dtype)
    wide = x.double()
    ref = wide @ weight.double().T
    assert row_error(cuda.linear(x, weight, None), ref) < BOUND[dtype]
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    ref_normed = normed @ weight.double().T
    got = cuda.norm_linear(x, norm, 1e-5, weight, None)
    assert row_error(got, ref_normed) < 2 * BOUND[dtype]
    ref += residual.double()
    assert row_error(cuda.linear_add(x, weight, None, residual), ref) < 2 * BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 64, 1040])
def test_bias_and_residual(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias of the layer that used the same matmul before, a residual that is replaced, a matmul
    that is used after it was dropped for a newer shape."""
    monkeypatch.setattr(cublaslt, "_MOST_BIASED", 1)
    for rows in (tokens, tokens + 8, tokens):
        x, weight = random(rows, 96, dtype=dtype), random(40, 96, dtype=dtype)
        for _ in range(2):
            bias, residual = random(40, dtype=dtype), random(rows, 40, dtype=dtype)
            ref = x.double() @ weight.double().T + bias.double() + residual.double()
            y = cuda.linear_add(x, weight, bias, residual)
            assert y is residual or rows <= 4
            assert row_error(y, ref) < 2 * BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu", "quick_gelu"])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_activation_after_a_matmul(tokens: int, act: str, dtype: torch.dtype) -> None:
    """A GELU of another kind, an activation before the bias, a bias left out."""
    x, weight = random(tokens, 96, dtype=dtype), random(40, 96, dtype=dtype) / 8
    bias = random(40, dtype=dtype)
    functions = {
        "gelu_pytorch_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    }
    for added in (bias, None):
        wide = x.double() @ weight.double().T
        ref = functions[act](wide if added is None else wide + added.double())
        assert row_error(cuda.linear_act(x, weight, added, act), ref) < 2 * BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 300), (70, 128), (17, 130)], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_fixed(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows, outputs or columns that do not fill a tile; a bias or a residual left out."""
    x, weight = random(tokens, shape[1], dtype=dtype), random(*shape, dtype=dtype)
    bias, residual = random(shape[0], dtype=dtype), random(tokens, shape[0], dtype=dtype)
    ref = x.double() @ weight.double().T
    assert row_error(cuda_deterministic.linear(x, weight, None), ref) < BOUND[dtype]
    ref += bias.double() + residual.double()
    assert row_error(cuda_deterministic.linear_add(x, weight, bias, residual), ref) < BOUND[dtype]


def test_every_tile_means_the_same() -> None:
    """A tile that only large steps on a GPU would take: its grid, its groups, its edges."""
    x, weight = random(200, 40, dtype=torch.float16), random(270, 40, dtype=torch.float16)
    ref = x.double() @ weight.double().T
    for tile in deterministic.TILES[2]:
        out = deterministic.product(x, weight, None, None, tile)
        assert row_error(out, ref) < BOUND[torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fixed_rows_ignore_the_rest(dtype: torch.dtype) -> None:
    """With deterministic kernels a row is the same bit by bit at any number of rows; with the
    others it is not, or this test tests nothing."""
    x, weight = random(70, 264, dtype=dtype), random(32, 264, dtype=dtype)
    norm = random(264, dtype=dtype)

    def differ(back_end: Any) -> bool:
        def rows(count: int) -> torch.Tensor:
            part = x[:count].contiguous()
            gated = back_end.norm_gated_linear(part, norm, 1e-5, weight, None, "silu")
            residual = torch.ones(count, 32, dtype=dtype, device=x.device)
            return torch.cat([gated, back_end.linear_add(part, weight, None, residual)], dim=1)

        whole = rows(70)
        return not all(torch.equal(rows(n), whole[:n]) for n in (1, 2, 65))

    assert not differ(cuda_deterministic)
    assert differ(cuda)


def activation_of(gate: str, wide: torch.Tensor) -> torch.Tensor:
    """act(first half) * second half in float64."""
    first, second = wide.chunk(2, dim=1)
    if gate == "silu":
        return torch.nn.functional.silu(first) * second
    return torch.nn.functional.gelu(first, approximate="tanh") * second


GATED_SHAPES = [
    (256, 14336, 512), (70, 72, 200), (128, 1000, 64), (300, 1000, 200), (1100, 3072, 1024),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
def test_gated(shape: tuple[int, int, int], gate: str, dtype: torch.dtype) -> None:
    """Rows, outputs or elements that do not fill a tile, a stage that is read too early, a gate and
    an up projection of different outputs, sums that are not rounded before the activation."""
    rows, size, depth = shape
    x, weight = random(rows, depth, dtype=dtype), random(2 * size, depth, dtype=dtype) / 8
    composed = cuda.GATES[gate](torch.nn.functional.linear(x, weight))
    ref = activation_of(gate, x.double() @ weight.double().T)
    for split_rows in (True,) if rows > 128 else (False, True):
        y = gated.gated(x, weight, gate, gated.plan_of(split_rows, rows, size, 66))
        assert row_error(y, ref) < 1.01 * row_error(composed, ref)


@pytest.mark.gpu
def test_an_mlp_takes_the_gated_product(caplog: pytest.LogCaptureFixture) -> None:
    """A warning at each start, and the GEMM and the activation one by one, on a GPU that has it."""
    x, norm = random(256, 2048, dtype=torch.bfloat16), random(2048, dtype=torch.bfloat16)
    weight = random(16384, 2048, dtype=torch.bfloat16) / 8
    assert gated.gated_plan(x, weight, "silu")
    y = cuda.norm_gated_linear(x, norm, 1e-5, weight, None, "silu")
    wide = cuda.rms_norm(x, norm, 1e-5).double() @ weight.double().T
    assert row_error(y, activation_of("silu", wide)) < BOUND[torch.bfloat16]
    assert not caplog.records


def test_without_a_compiler_a_gemm_and_an_activation_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that ends where torch has no NVRTC."""

    def absent() -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "_compiler", absent)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nonexistent")
    kernels = gated._Kernels(14336, "silu", torch.bfloat16, torch.device("cpu"))
    assert not kernels.usable() and not kernels.usable()
    (record,) = caplog.records
    assert "libnvrtc" in record.message


GATED_ROWS = {  # rows -> whether they are split in a cluster
    64: None,
    65: False,
    128: False,
    129: None,
    192: None,
    256: True,
    257: None,
    512: True,
    8192: True,
}


@pytest.mark.parametrize(("rows", "split_rows"), GATED_ROWS.items())
def test_rows_of_the_gated_product(rows: int, split_rows: bool | None) -> None:
    """The kernel where most of its last tiles are empty, so that cuBLASLt is up to 1.2 times as
    fast."""
    plan = gated._fastest(rows, 14336, 66)
    assert (plan and plan.split_rows) == split_rows
    if plan:
        assert plan.tile == 112


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
def test_every_algorithm_of_the_search(add: bool) -> None:
    """A tile or a split that the library accepts and then gets wrong: an old residual doubled, the
    partial sums of a split in 16 bits, a choice for another number of rows."""
    weights = [random(1536, 2048, dtype=torch.bfloat16) for _ in range(3)]
    for rows in (16, 40, 200, 256):
        x = random(rows, 2048, dtype=torch.bfloat16)
        residual = random(rows, 1536, dtype=torch.bfloat16)
        ref = x.double() @ weights[0].double().T + (residual.double() if add else 0)
        search = cublaslt_tune._AlgorithmSearch(weights, rows, add)
        search.try_offered()
        offered = len(search.timed)
        search.try_variants()
        assert len(search.timed) > offered
        for place, (_, algorithm) in enumerate(search.timed):
            y = residual.clone() if add else torch.empty_like(residual)
            search.matmul.run(algorithm, x, weights[0], y)
            assert row_error(y, ref) < BOUND[torch.bfloat16], (rows, place)
        cublaslt_tune.tune(weights, [rows, 10**4], add)
        if add:
            actual = cublaslt.linear_add_(x, weights[0], residual.clone())
        else:
            actual = cublaslt.linear(x, weights[0], None)
        assert row_error(actual, ref) < BOUND[torch.bfloat16], rows
