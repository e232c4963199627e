"""Matmuls with weights in 4 and 8 bits, against float64. On a machine that cannot compile:
skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu.codegen import processor
from kernels.cpu.gemm import blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.cpu.gemm.panels import GATES
from kernels.packed import BLOCK, Format
from kernels.reference import Kernels
from tests.kernels.cpu.test_generated import able
from tests.kernels.test_reference import normed

pytestmark = pytest.mark.skipif(not able(), reason="no compiler for this machine")

TABLE = tuple(range(3, 255, 16))
FORMATS = {
    "4-zero": Format(4, zero=8),
    "4-add": Format(4, offset="add"),
    "4-add-16": Format(4, 16, torch.float32, offset="add"),
    "4-zero-16": Format(4, 16, torch.float32, zero=4),
    "4-table": Format(4, zero=128, table=TABLE),
    "4-shift-64": Format(4, 64, torch.float32, offset="shift"),
    "8-zero": Format(8, zero=128),
    "8-zero-16": Format(8, 16, torch.float32, zero=32),
    "8-add": Format(8, 32, torch.bfloat16, offset="add"),
    "8-shift-128": Format(8, 128, torch.float32, offset="shift"),
    "8-zero-row": Format(8, 256, torch.float32, zero=128),
}


def made(
    form: Format, outputs: int, width: int, bias: Tensor | None = None
) -> tuple[PackedBlocks, Tensor]:
    """Return a random packed weight, and its float64 numbers."""
    groups = width // form.group
    codes = torch.randint(0, 1 << form.bits, (outputs, width), dtype=torch.uint8)
    scale = (torch.rand(outputs, groups) * 0.02 + 0.001).to(form.scale)
    offset = None
    if form.offset == "add":
        offset = (-torch.rand(outputs, groups) * 0.1).to(form.scale)
    elif form.offset == "shift":
        offset = (-torch.rand(outputs, groups) * (1 << form.bits)).to(form.scale)
    stored = codes
    if form.bits == 4:
        both = codes.view(outputs, -1, 2, 16)
        stored = (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)
    packed = PackedBlocks(form, outputs, width, bias)
    half = outputs // 64 * 32  # in two pieces, as a layer of two tensors
    for rows in (slice(0, half), slice(half, outputs)):
        part = None if offset is None else offset[rows]
        packed.fill(rows.start, stored[rows], scale[rows], part)
    values = torch.tensor(form.table, dtype=torch.uint8)[codes.long()] if form.table else codes
    weight = (values.double() - form.zero).view(outputs, groups, -1)
    wide = [None if part is None else part.double().unsqueeze(-1) for part in (scale, offset)]
    if wide[1] is not None and form.offset == "shift":
        weight = weight + wide[1]
    weight = weight * wide[0]
    if wide[1] is not None and form.offset == "add":
        weight = weight + wide[1]
    return packed, weight.view(outputs, width)


def rounded(x: Tensor) -> Tensor:
    """Return x as the GEMMs round it: to 8 bits with a scale for each 32 numbers.

    The error is at most half a step, which is a 254th of the largest number.
    """
    groups = x.view(x.shape[0], -1, BLOCK)
    top = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    whole = (groups.double() * (127 / top).double()).round()  # ties fall as they do there
    return (whole * (top / 127).double()).view(x.shape)


def without_ties(x: Tensor) -> Tensor:
    """Return x without numbers so near the middle of two steps that a last bit decides the
    rounding."""
    groups = x.view(x.shape[0], -1, BLOCK).double()
    steps = groups * 127 / groups.abs().amax(-1, keepdim=True)
    near = (steps.abs().frac() - 0.5).abs() < 1e-3
    return torch.where(near.view(x.shape), 0.99 * x, x)


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return the error bound of x @ weight.T: half a step of each number of x, and float32's
    rounding."""
    groups = x.double().abs().view(x.shape[0], -1, BLOCK)
    steps = (groups.amax(-1, keepdim=True) / 254).expand_as(groups).reshape(x.shape)
    return (steps * 1.001 + x.double().abs() * 1e-5) @ weight.abs().T + 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str) -> None:
    """Halves of a byte exchanged, a scale of the group or output beside, a sum that saturates, rows
    lost between tiles: all of these are far beyond what rounding x can do."""
    form, width = FORMATS[name], 256
    bias = torch.randn(192) if "add" in name else None
    packed, weight = made(form, 192, width, bias)
    added = torch.zeros(192).double() if bias is None else bias.double()
    for rows in (1, 2, 6, 7, 13, 40, 48, 67):
        x = without_ties(torch.randn(rows, width) * torch.rand(rows, 1) * 3)
        assert ((packed(x) - (x.double() @ weight.T + added)).abs() <= bound(x, weight)).all()
        # The same x as it was rounded: what is left is float32's.
        exact = rounded(x) @ weight.T + added
        terms = weight.abs() + 0.02 * (1 << form.bits)  # before an offset cancels them
        limit = 2e-6 * (rounded(x).abs() @ terms.T) + 1e-5
        assert ((packed(x) - exact).abs() <= limit).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_to_call(name: str) -> None:
    """Gate and up exchanged, a residual lost, x rounded before the norm."""
    form, width, eps = FORMATS[name], 256, 1e-5
    bias = torch.randn(128)
    packed, weight = made(form, 128, width, bias)
    for rows in (1, 9, 33, 50):
        x, norm = torch.randn(rows, width), torch.rand(width)
        residual = torch.randn(rows, 128)
        plain = packed(x)
        assert torch.allclose(
            packed.add_to_residual(x, residual.clone()), plain + residual, atol=1e-5
        )
        limit = bound(normed(x, norm, eps).float(), weight)
        after = normed(x, norm, eps) @ weight.T + bias.double()
        assert ((packed.after_norm(x, norm, eps) - after).abs() <= limit).all()
        for gate in GATES:
            outputs = packed.after_norm(x, norm, eps)
            want = Kernels().GATES[gate](outputs)
            assert torch.allclose(
                packed.gated_after_norm(x, norm, eps, gate), want, rtol=1e-4, atol=1e-5
            )
        wide = torch.full((rows, 200), 7.0)
        packed.into(x, wide, 40)
        assert torch.equal(wide[:, 40:168], plain)
        assert (wide[:, :40] == 7).all() and (wide[:, 168:] == 7).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_weights(name: str) -> None:
    """A token's embedding would be another's, or its blocks in another order."""
    packed, weight = made(FORMATS[name], 128, 256)
    ids = torch.tensor([0, 127, 5, 64, 64, 33])
    assert torch.allclose(packed.rows(ids).double(), weight[ids], rtol=1e-6, atol=1e-6)
    assert packed.rows(ids[:0]).shape == (0, 256)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["4-add", "8-zero", "4-shift-64", "4-table", "4-add-16"])
def test_a_row_does_not_depend_on_its_neighbours(name: str, threads: int) -> None:
    """A request's text would change with what else is in the batch; a panel that is expanded for
    many rows is another one's, or another thread's."""
    packed, _ = made(FORMATS[name], 256, 256)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (40, blocks._MANY + 7):
            x, norm = torch.randn(count, 256) * torch.rand(count, 1), torch.rand(256)
            whole = packed.after_norm(x, norm, 1e-5)
            gated = packed.gated_after_norm(x, norm, 1e-5, "silu")
            for rows in (1, 5, 6, 8, 13):
                for at in range(0, count - rows, rows):
                    part = x[at : at + rows].contiguous()
                    output = packed.after_norm(part, norm, 1e-5)
                    assert torch.equal(output, whole[at : at + rows])
                    output = packed.gated_after_norm(part, norm, 1e-5, "silu")
                    assert torch.equal(output, gated[at : at + rows])
    finally:
        torch.set_num_threads(before)


def test_the_ends_of_the_range() -> None:
    """Sums of 8-bit products that wrap around or saturate."""
    for form in (FORMATS["8-zero"], FORMATS["8-shift-128"], FORMATS["4-table"]):
        for code in (0, (1 << form.bits) - 1):
            packed, _ = made(form, 64, 128)
            stored = torch.full((64, 128 * form.bits // 8), code * (17 if form.bits == 4 else 1))
            scale = torch.ones(64, 128 // form.group).to(form.scale)
            offset = -128 * torch.ones_like(scale) if form.offset == "shift" else None
            packed.fill(0, stored.to(torch.uint8), scale, offset)
            value = (form.table[code] if form.table else code) - 128
            for sign in (1.0, -1.0):
                assert torch.equal(
                    packed(torch.full((1, 128), sign))[0], torch.full((64,), sign * value * 128)
                )


def test_nan_in_nan_out() -> None:
    """A NaN that is lost would let a broken step pass for a good one."""
    for name in ("4-zero", "4-add"):
        packed, _ = made(FORMATS[name], 64, 96)
        x = torch.zeros(3, 96)
        x[1, 5] = torch.nan
        x[2, 7] = torch.inf
        out = packed(x)
        assert not out[0].any() and out[1].isnan().all() and not out[2].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    """A panel or a group that is not full would read and write beside its memory."""
    form = FORMATS["4-shift-64"]
    assert blocks.fits(form, 128, 192)
    assert not blocks.fits(form, 128, 96) and not blocks.fits(form, 96 + 8, 192)
    packed, _ = made(form, 128, 192)
    assert packed._weight.nbytes + packed._bias.nbytes == blocks.num_bytes(form, 128, 192, False)


@pytest.mark.skipif(bool(os.environ.get("ATEN_CPU_CAPABILITY")), reason="this is the inner run")
@pytest.mark.slow
@pytest.mark.parametrize("vnni", ["", "avxvnni"])
def test_other_processors(vnni: str) -> None:
    """AVX2 with and without AVX-VNNI, on a processor that has more."""
    if vnni and " avx_vnni " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX-VNNI")
    inner = "test_products or test_the_ends or test_rows or test_a_row or test_nan"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        inner,
    ]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "MANTA_TEST_VNNI": vnni or "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
    assert "skipped" not in done.stdout


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("MANTA_TEST_VNNI") == "none":
        monkeypatch.setattr(processor, "byte_dot", lambda: "")
