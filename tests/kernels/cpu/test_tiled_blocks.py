"""Matmuls of many rows with weights in 4 and 8 bits by AMX's tiles, against those by VNNI. On a
machine without AMX: skipped."""

import pytest
import torch

from kernels.cpu.codegen.processor import CompilerUnavailable, amx_int8
from kernels.cpu.gemm import blocks, tiled_blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.cpu.gemm.panels import GATES
from kernels.packed import BLOCK, Format
from tests.kernels.cpu.test_blocks import FORMATS, made

WIDTH = 256
TILED = {
    **{name: form for name, form in FORMATS.items() if form.units == 1},
    "4-zero-128": Format(4, 128, torch.float16, zero=8),
    "4-add-table": Format(4, offset="add", table=tuple(range(0, 256, 17))),
}


def able() -> bool:
    try:
        return amx_int8()
    except CompilerUnavailable:
        return False


needs_amx = pytest.mark.skipif(not able(), reason="no AMX")


@pytest.fixture
def from_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles compute any number of rows."""
    monkeypatch.setattr(tiled_blocks, "FROM", 1)


def calls(packed: PackedBlocks, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result of each way to call a GEMM."""
    torch.manual_seed(1)
    norm, residual = torch.rand(x.shape[1]), torch.randn(x.shape[0], 192)
    wide = torch.full((x.shape[0], 200), 7.0)
    packed.into(x, wide, 5)
    outputs = [
        packed(x),
        packed.add_to_residual(x, residual),
        packed.after_norm(x, norm, 1e-5),
        wide,
    ]
    return outputs + [packed.gated_after_norm(x, norm, 1e-5, gate) for gate in GATES]


@needs_amx
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", TILED)
def test_the_same_bits(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's text would change with how many tokens stand beside it: a sum in another order, a
    code with a wrong sign, a block of the next tile, a row of a tile that is not full."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    form = TILED[name]
    assert tiled_blocks.fits(form, WIDTH)
    bias = torch.randn(192) if "add" in name or "8-zero" in name else None
    packed, _ = made(form, 192, WIDTH, bias)
    every = (*range(1, 101), 127, 128, 129, 300) if threads == 1 else (1, 17, 33, 100, 128, 300)
    for rows in every:
        x = torch.randn(rows, WIDTH) * torch.rand(rows, 1) * 3
        monkeypatch.setattr(tiled_blocks, "FROM", 1 << 30)
        want = calls(packed, x)
        monkeypatch.setattr(tiled_blocks, "FROM", 1)
        for output, expected in zip(calls(packed, x), want, strict=True):
            assert torch.equal(output, expected), rows


@needs_amx
@pytest.mark.parametrize("width", [128, 192, 320, 576])
def test_widths(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product ahead that reads the next tile's blocks before this one's are done, or another's
    scales, where a row has few blocks or a group is as long as a row."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for form in (Format(8, width, torch.float32, zero=128), FORMATS["4-add"], FORMATS["8-zero"]):
        packed, _ = made(form, 192, width)
        for rows in (1, 16, 17, 50):
            x = torch.randn(rows, width)
            monkeypatch.setattr(tiled_blocks, "FROM", 1 << 30)
            want = calls(packed, x)
            monkeypatch.setattr(tiled_blocks, "FROM", 1)
            assert all(map(torch.equal, calls(packed, x), want)), (form, rows)


@needs_amx
@pytest.mark.usefixtures("from_one_row")
def test_the_ends_of_the_range() -> None:
    """Whole sums as large as they get lose no bit on their way to floats."""
    for form in (FORMATS["8-zero"], FORMATS["8-shift-128"], FORMATS["4-table"]):
        for code in (0, (1 << form.bits) - 1):
            packed, _ = made(form, 64, 128)
            stored = torch.full((64, 128 * form.bits // 8), code * (17 if form.bits == 4 else 1))
            scale = torch.ones(64, 128 // form.group).to(form.scale)
            offset = torch.zeros_like(scale) if form.offset == "shift" else None
            packed.fill(0, stored.to(torch.uint8), scale, offset)
            value = (form.table[code] if form.table else code) - form.zero
            for sign in (1.0, -1.0):
                want = torch.full((40, 64), sign * value * 127 * 128)
                assert torch.equal(packed(torch.full((40, 128), sign * 127.0)), want)


@needs_amx
@pytest.mark.usefixtures("from_one_row")
def test_nan_in_nan_out() -> None:
    """A NaN that is lost, or that is seen in the rows of its tile."""
    for name in ("4-zero", "4-add"):
        packed, _ = made(FORMATS[name], 64, 128)
        x = torch.zeros(20, 128)
        x[1, 5], x[18, 7] = torch.nan, torch.inf
        out = packed(x)
        assert out[1].isnan().all() and not out[18].isfinite().any()
        out[1] = out[18] = 0
        assert not out.any()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_blocks_fill_the_threads(threads: int) -> None:
    """A thread that waits for another one's block, or scratch that is too small for a block."""
    form = FORMATS["4-add"]
    for rows in range(1, 3000, 37):
        length = tiled_blocks.block_rows(form, WIDTH, rows, threads)
        shared, own = tiled_blocks.scratch_bytes(form, WIDTH, rows, threads)
        assert shared % 64 == own % 64 == 0
        tile = WIDTH // BLOCK * 16 * (BLOCK + 8)
        if not length:
            assert rows < 64 * threads and shared == -(-rows // 16) * tile
            continue
        assert length % 16 == 0 and length <= 256 and own >= length // 16 * tile
        count = -(-rows // length)
        most = -(-count // threads)  # blocks of a thread
        assert most * length <= rows / threads + most * 16


def test_what_tiles_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that tiles multiply wrongly: groups of 16, codes that no byte holds, a scale for
    an odd number of blocks, rows of an odd number."""
    monkeypatch.setattr(tiled_blocks, "amx_int8", lambda: True)
    assert tiled_blocks.fits(FORMATS["4-zero"], 128)
    assert not tiled_blocks.fits(FORMATS["4-zero"], 96)
    assert not tiled_blocks.fits(FORMATS["4-zero"], 64)
    assert not tiled_blocks.fits(FORMATS["4-zero-16"], 128)
    assert not tiled_blocks.fits(Format(8, zero=32), 128)
    assert not tiled_blocks.fits(Format(4, 96, zero=8), 192)
    monkeypatch.setattr(tiled_blocks, "amx_int8", lambda: False)
    assert not tiled_blocks.fits(FORMATS["4-zero"], 128)
    assert blocks.fits(FORMATS["4-zero"], 128, 128) or not able()
