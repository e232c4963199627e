"""Products with packed weights on the GPU's kernels, against float64 of the weights that the codes
stand for."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.gemm.packed import blocks, fp8, int8
from kernels.gemm.packed import dot as dot_module
from kernels.gemm.packed.dot import expand, packed_dot, pair_ptx, scale_codes_fits
from kernels.gemm.packed.few import few_fits, packed_few
from kernels.gemm.packed.gemv import packed_gemv
from kernels.gemm.packed.gemv4 import gemv4, gemv4_fits
from kernels.gemm.packed.gemv8 import gemv8, gemv8_fits
from kernels.gemm.packed.mma4 import MmaTile, form_fits, mma4, mma4_fits
from kernels.gemm.packed.round_rows import E4M3, TOP, round_rows
from kernels.packed import E2M1, Format, PackedWeight
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, random, row_error

pytestmark = pytest.mark.triton
cuda = kernels_for("cuda")
TABLE = tuple(range(3, 243, 15))
F32 = torch.float32
FORMS = {
    "int4-128": (Format(4, 128, zero=8), 256),
    "int4-64-zero": (Format(4, 64, F32, offset="shift"), 320),
    "int4-32-add": (Format(4, 32, offset="add"), 160),
    "int4-row": (Format(4, 288, F32, zero=8), 288),
    "e2m1-32": (Format(4, 32, F32, zero=12, table=E2M1), 256),
    "e2m1-16": (Format(4, 16, F32, zero=12, table=E2M1), 96),
    "table-64": (Format(4, 64, F32, zero=128, table=TABLE), 192),
    "int8-128": (Format(8, 128, zero=128), 256),
    "int8-row": (Format(8, 288, F32, zero=128), 288),
    "int8-32-shift": (Format(8, 32, F32, offset="shift"), 160),
    "int8-16-zero": (Format(8, 16, F32, zero=32), 160),
    "e4m3-row": (Format(8, 288, F32, code="e4m3", activations=8), 288),
    "int8-both": (Format(8, 288, F32, zero=128, activations=8), 288),
    "e4m3-block": (Format(8, 128, F32, code="e4m3", rows=128, activations=8), 512),
}
# What `packed_few` is made for, and the shorter ways of `packed_dot`.
FEW = {
    "few-int4": (Format(4, 128, zero=8), 512),
    "few-int4-add": (Format(4, 128, offset="add"), 768),
    "few-int4-shift": (Format(4, 128, offset="shift"), 2048),
    "few-int8": (Format(8, 640, F32, zero=128), 640),
    "few-e4m3": (Format(8, 1024, F32, code="e4m3"), 1024),
}
# Groups of more than a span, and what AWQ and GPTQ are read into.
SPANS = {
    "int4-256": (Format(4, 256, offset="add"), 1280),
    "int4-zeros": (Format(4, 128, F32, offset="shift"), 640),
}
BLOCKS = {"odd-blocks": (Format(8, 128, F32, code="e4m3", rows=128, activations=8), 384)}
QUICK = ("int4-128", "e2m1-32", "int8-32-shift")
# The interpreter takes seconds for each; a GPU none.
EACH = [
    pytest.param(name, marks=[pytest.mark.slow] if DEVICE == "cpu" and name not in QUICK else [])
    for name in FORMS
]
# float32 keeps 2^-24 of the largest partial sum, and codes come with 128 more.
BOUNDS = {**BOUND, F32: 2e-5}


def packed(name: str, rows: int, bias: bool = False) -> tuple[PackedWeight, Tensor]:
    """Return a packed weight and the float64 numbers that it stands for."""
    form, width = {**FORMS, **FEW, **SPANS, **BLOCKS}[name]
    torch.manual_seed(rows)
    count = -(-rows // form.rows)
    codes = torch.randint(0, 256, (rows, width * form.bits // 8), dtype=torch.uint8)
    if form.code == "e4m3":
        codes[(codes & 127) == 127] = 0  # NaN
    scale = (0.5 + torch.rand(count, width // form.group)) / 64
    offset = None
    if form.offset == "add":
        offset = -0.1 * torch.rand_like(scale)
    elif form.offset == "shift":
        offset = -torch.randint(0, 1 << form.bits, scale.shape).float()
    added = random(rows, dtype=torch.float32).to(torch.float16) if bias else None
    weight = PackedWeight(form, rows, width, added, torch.device(DEVICE))
    parts = [tensor if tensor is None else tensor.to(DEVICE) for tensor in (codes, scale, offset)]
    weight.fill(0, (parts[0], parts[1], parts[2]))  # type: ignore[arg-type]
    return weight, weight.dense(torch.float64)


@pytest.mark.parametrize("name", FORMS)
def test_codes_come_back(name: str) -> None:
    """A nibble in another's place."""
    weight, _ = packed(name, 40)
    form, width = FORMS[name]
    codes, scale, offset = weight.decoded()
    again = PackedWeight(form, 40, width, None, torch.device(DEVICE))
    again.fill(0, (codes, scale, offset))
    assert torch.equal(again.codes.view(torch.uint8), weight.codes.view(torch.uint8))
    torch.manual_seed(40)
    drawn = torch.randint(0, 256, (40, width * form.bits // 8), dtype=torch.uint8).to(DEVICE)
    if form.code == "e4m3":
        drawn[(drawn & 127) == 127] = 0
    assert torch.equal(codes, drawn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_one_token(name: str, dtype: torch.dtype) -> None:
    """A scale of the wrong group, a zero forgotten, a tail taken from the next row, a fusion that
    is right for one type of code only."""
    weight, ref = packed(name, 24, bias=True)
    width = weight.shape[1]
    x, residual = random(1, width, dtype=dtype), random(1, 24, dtype=dtype)
    norm = random(width, dtype=dtype)
    assert weight.bias is not None
    plain = x.double() @ ref.T + weight.bias.double()
    assert row_error(packed_gemv(x, weight, residual=residual), plain + residual.double()) < (
        2 * BOUNDS[dtype]
    )
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    gate, up = (normed @ ref.T + weight.bias.double()).chunk(2, -1)
    got = packed_gemv(x, weight, norm=norm, eps=1e-5, gate="silu")
    assert row_error(got, torch.nn.functional.silu(gate) * up) < 4 * BOUNDS[dtype]
    for config in ((8, 8, 1), (16, 16, 2)):
        got = packed_gemv(x, weight, config=config)
        assert row_error(got, plain) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != F32], ids=str)
@pytest.mark.parametrize(
    ("name", "outputs"), [("e4m3-row", 22), ("few-e4m3", 22), ("odd-blocks", 384)]
)
def test_one_token_of_floats(name: str, outputs: int, dtype: torch.dtype) -> None:
    """Codes of a word or numbers of x in another's place, words and outputs that fill no tile, a
    scale or a bias of the gate's that the up has, where one block has rows of both too; what norm,
    gate and residual make of it."""
    weight, ref = packed(name, outputs, bias=True)
    width = weight.shape[1]
    x, residual = random(1, width, dtype=dtype), random(1, outputs, dtype=dtype)
    norm = random(width, dtype=dtype)
    assert weight.bias is not None
    plain = x.double() @ ref.T + weight.bias.double()
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    gate, up = (normed @ ref.T + weight.bias.double()).chunk(2, -1)
    even = [(2, 64, 1)] if DEVICE != "cpu" else []  # the interpreter takes no mask of one number
    for config in (None, (4, 64, 1), (8, 64, 2), *even):
        got = gemv8(x, weight, residual=residual, config=config)
        assert row_error(got, plain + residual.double()) < 2 * BOUNDS[dtype]
        got = gemv8(x, weight, norm=norm, eps=1e-5, gate="silu", config=config)
        assert row_error(got, torch.nn.functional.silu(gate) * up) < 4 * BOUNDS[dtype]
    assert gemv8_fits(x, weight, norm)
    assert not gemv8_fits(x, weight, norm.float())
    assert not gemv8_fits(random(2, width, dtype=dtype), weight, None)
    assert not gemv8_fits(random(width + 1, dtype=dtype)[1:].view(1, -1), weight, None)
    whole, _ = packed("int8-row", 22)
    assert not gemv8_fits(random(1, 288, dtype=dtype), whole, None)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != F32], ids=str)
@pytest.mark.parametrize(
    "name", ["int4-128", "int4-64-zero", "int4-32-add", "few-int4-add", "few-int4-shift"]
)
def test_one_token_of_integers(name: str, dtype: torch.dtype) -> None:
    """A nibble that is given another one's number of x, or its place's power of two; words and
    outputs that fill no tile, a span or a group that ends within one; what norm, gate and residual
    make of it."""
    weight, ref = packed(name, 22, bias=True)
    width = weight.shape[1]
    x, residual = random(1, width, dtype=dtype), random(1, 22, dtype=dtype)
    norm = random(width, dtype=dtype)
    assert weight.bias is not None
    plain = x.double() @ ref.T + weight.bias.double()
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    gate, up = (normed @ ref.T + weight.bias.double()).chunk(2, -1)
    even = [(2, 16, 1)] if DEVICE != "cpu" else []  # the interpreter takes no mask of one number
    for config in (None, (4, 64, 2), (16, 32, 1), *even):
        got = gemv4(x, weight, residual=residual, config=config)
        assert row_error(got, plain + residual.double()) < 2 * BOUNDS[dtype]
        got = gemv4(x, weight, norm=norm, eps=1e-5, gate="silu", config=config)
        assert row_error(got, torch.nn.functional.silu(gate) * up) < 4 * BOUNDS[dtype]
    assert gemv4_fits(x, weight, norm)
    assert not gemv4_fits(x, weight, norm.float())
    assert not gemv4_fits(random(2, width, dtype=dtype), weight, None)
    other, _ = packed("e2m1-32", 22)
    assert not gemv4_fits(random(1, 256, dtype=dtype), other, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_several_tokens(name: str, dtype: torch.dtype) -> None:
    """Rows or columns that do not fill a tile, a share of the columns left out or taken twice, a
    tile of tokens in another's place."""
    weight, ref = packed(name, 40, bias=True)
    assert weight.bias is not None
    count = 20 if name == "int4-128" else 5  # two tiles of tokens
    x, residual = random(count, weight.shape[1], dtype=dtype), random(count, 40, dtype=dtype)
    plain = x.double() @ ref.T + weight.bias.double() + residual.double()
    width = 32
    # Scaled weights are rounded to x's type, as an expanded weight would be.
    for split in (1, 2):
        got = packed_dot(x, weight, residual.clone(), (32, 16, width, 1, 2), split)
        assert row_error(got, plain) < 2 * BOUNDS[dtype]
    step = weight.form.span  # of which its codes are in x's order
    if scale_codes_fits(weight, step) and dtype != F32:
        tile = (32, 16, step // 4, 1, 2)
        for split in (1, 2):
            got = packed_dot(x, weight, residual.clone(), tile, split, scale_codes=True)
            assert row_error(got, plain) < 2 * BOUNDS[dtype]


def test_floats_of_a_gpu_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 8-bit floats, on GPUs before 8.9: an exponent that is off, subnormals that are zeros, a
    sign that is lost."""
    monkeypatch.setattr("kernels.gemm.packed.codes.converts", lambda device: False)
    form = Format(8, 256, F32, code="e4m3")
    weight = PackedWeight(form, 16, 256, None, torch.device(DEVICE))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(16, 1)
    codes[(codes & 127) == 127] = 0  # NaN
    weight.fill(0, (codes, torch.ones(16, 1, device=DEVICE), None))
    want = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(expand(weight, random(1)), want)
    x = random(3, 256)
    for tokens in (1, 3):
        dense = x[:tokens]
        product = packed_gemv if tokens == 1 else packed_dot
        assert row_error(product(dense, weight), dense.double() @ want.double().T) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EACH)
def test_expanded(name: str, dtype: torch.dtype) -> None:
    """A tail of columns that is left out; a nibble at another's place."""
    weight, ref = packed(name, 40)
    assert row_error(expand(weight, random(1, dtype=dtype)), ref) < BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_every_number_of_tokens_means_the_same(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The back end's own way for a number of tokens, against the reference's."""
    monkeypatch.setattr("kernels.gemm.packed.candidates.DECODED_TOKENS", 16)
    monkeypatch.setattr(dot_module, "tile", lambda *_: (32, 16, 32, 1, 2))
    dtype = torch.float16
    for name in ("int4-128", "e4m3-row"):
        weight, _ = packed(name, 24, bias=True)
        width = weight.shape[1]
        x, norm = random(tokens, width, dtype=dtype), random(width, dtype=dtype)
        residual = random(tokens, 24, dtype=dtype)
        reference = Kernels()
        for how in (
            {},
            {"norm": norm, "eps": 1e-5},
            {"norm": norm, "eps": 1e-5, "gate": "silu"},
            {"norm": norm, "eps": 1e-5, "gate": "relu"},
        ):
            ref = reference.packed_linear(x, weight, **how)  # type: ignore[arg-type]
            got = cuda.packed_linear(x, weight, **how)  # type: ignore[arg-type]
            assert row_error(got, ref) < 6 * BOUND[dtype], how
        ref = reference.packed_linear(x, weight, residual=residual.clone())
        assert row_error(cuda.packed_linear(x, weight, residual=residual), ref) < 4 * BOUND[dtype]


# ---- 8 bits on both sides ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "group"), [(48, 0), (300, 0), (96, 32)])
def test_rows_are_rounded(size: int, group: int, dtype: torch.dtype) -> None:
    """A scale of another row or group, a row of zeros, a norm that is left out; rows behind x's
    that a product of groups needs."""
    x, norm = random(5, size, dtype=dtype), random(size, dtype=dtype)
    x[2] = 0
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    for weight, ref in ((None, wide), (norm, normed)):
        rows, scales = round_rows(x, weight, 1e-5, group=group)
        assert len(rows) == len(scales) == (16 if group else 5)
        assert scales.stride(0) == 1
        rows, scales = rows[:5], scales[:5]
        top = ref.abs().view(5, -1, group or size).amax(-1)
        assert torch.allclose(scales.double(), top / 448, rtol=1e-3, atol=2e-12)
        scale = scales.double().repeat_interleave(group or size, 1)
        actual = rows.double() * scale
        # Half of the last of three bits of mantissa, or of the smallest step.
        bound = (ref.abs() / 16).maximum(scale * 2**-10) * 1.01
        near = (actual - ref).abs() <= bound
        if DEVICE == "cpu":  # the interpreter loses a carry out of the mantissa
            nearest = (ref / scale).float().to(E4M3).float()
            near |= torch.frexp(nearest).mantissa.abs() == 0.5
        assert near.all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 300])
def test_rows_are_rounded_to_whole_numbers(size: int, dtype: torch.dtype) -> None:
    """Numbers that are cut instead of rounded, an end of the range that wraps around, a row of
    zeros that becomes NaN."""
    x, norm = random(5, size, dtype=dtype), random(size, dtype=dtype)
    x[2], x[3, 7] = 0, -100.0
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    for weight, ref in ((None, wide), (norm, normed)):
        rows, scales = round_rows(x, weight, 1e-5, torch.int8)
        assert rows.dtype == torch.int8
        top = ref.abs().amax(-1, keepdim=True)
        assert torch.allclose(scales.double(), top / 127, rtol=1e-3, atol=2e-12)
        # float32 divides, and a row's largest number may be a hair above its scale's.
        assert ((rows.double() * scales.double() - ref).abs() <= 0.5001 * scales.double()).all()
        assert int(rows.int().abs().max()) == TOP[torch.int8]


@pytest.mark.parametrize("gate", ["silu", "gelu_pytorch_tanh", "gelu", "relu"])
def test_rows_are_gated_on_the_way(gate: str) -> None:
    """Halves in the wrong order, an up that is left out, a number that is not rounded to x's type
    before it is to 8 bits: what gate and rounding give one after the other."""
    both = random(5, 600, dtype=torch.float16)
    both[2] = 0
    inner = cuda.GATES[gate](both)
    for to, group in ((torch.int8, 0), (E4M3, 0), (E4M3, 4)):
        rows, scales = (tensor[:5] for tensor in round_rows(both, to=to, gate=gate, group=group))
        want, want_scales = (tensor[:5] for tensor in round_rows(inner, to=to, group=group))
        assert torch.equal(rows.view(torch.int8), want.view(torch.int8))
        assert torch.equal(scales, want_scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_on_both_sides(dtype: torch.dtype) -> None:
    """A scale of the neighbouring row, a share of the columns that is left out or taken twice, a
    tile that has rows of two bands, bias or residual added for each share; what is behind the last
    row, output or column."""
    weight, ref = packed("int8-both", 40, bias=True)
    assert weight.bias is not None
    x, residual = random(70, weight.shape[1], dtype=dtype), random(70, 40, dtype=dtype)
    rows, scales = round_rows(x, to=torch.int8)
    exact = (rows.double() * scales.double()) @ ref.T + weight.bias.double()
    for config in ((16, 16, 64, 1, 2), (32, 32, 32, 1, 2)):
        for split in (1, 2, 5):
            got = int8.int8_linear(rows, scales, weight, dtype, None, config, split)
            assert got.dtype == dtype
            assert row_error(got, exact) < BOUND[dtype]
    dense = residual.clone()
    got = int8.int8_linear(rows, scales, weight, dtype, dense, (32, 32, 32, 1, 2), 2)
    assert got is dense
    assert row_error(got, exact + residual.double()) < 2 * BOUND[dtype]


def test_what_rounds_its_rows() -> None:
    """Weights alone in 8 bits, whose x is to stay as it is; few rows, which are read for nothing;
    and what rounding them costs, against the weights' own numbers."""
    dtype = torch.float16
    both, ref = packed("int8-both", 40, bias=True)
    alone, _ = packed("int8-row", 40)
    floats, _ = packed("e4m3-row", 40)
    least = both.form.rounded_rows
    x, norm = random(least, 288, dtype=dtype), random(288, dtype=dtype)
    assert int8.fits(both, x)
    assert not int8.fits(alone, x) and not int8.fits(floats, x)
    assert both.bias is not None
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    want = normed @ ref.T + both.bias.double()
    got = cuda.packed_linear(x, both, norm=norm, eps=1e-5)
    rows, scales = round_rows(x, norm, 1e-5, torch.int8)
    exact = (rows.double() * scales.double()) @ ref.T + both.bias.double()
    assert row_error(got, exact) < BOUND[dtype]
    assert 1e-3 < row_error(got, want) < 0.04  # a row's largest number is six times its others
    gate, up = got.double().chunk(2, -1)
    gated = cuda.packed_linear(x, both, norm=norm, eps=1e-5, gate="silu")
    assert row_error(gated, torch.nn.functional.silu(gate) * up) < 4 * BOUND[dtype]
    fixed = kernels_for("cuda", deterministic=True)
    pair = random(least, 2 * 288, dtype=dtype)
    for kernels, count in ((cuda, least), (cuda, least - 1), (fixed, 2)):
        some = pair[:count]
        takes = kernels.takes_gate(some, both)
        assert takes is (kernels is fixed or count == least)
        assert not kernels.takes_gate(some, alone)
        behind = random(count, 40, dtype=dtype)
        apart = kernels.packed_linear(kernels.GATES["silu"](some), both, residual=behind.clone())
        at_once = kernels.packed_linear(some, both, x_gate="silu", residual=behind)
        assert torch.equal(at_once, apart)
    alike = fixed.packed_linear(x, both, norm=norm, eps=1e-5)
    single = fixed.packed_linear(x[3:4], both, norm=norm, eps=1e-5)
    assert torch.equal(single, alike[3:4])
    assert row_error(alike, exact) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != F32], ids=str)
@pytest.mark.parametrize("tokens", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_blocks_on_both_sides(tokens: int, dtype: torch.dtype) -> None:
    """A scale of another block, of the row below or of the group before; a share of the columns
    left out or taken twice, one that has none; bias or residual added for each share; outputs
    that end within a block."""
    weight, ref = packed("e4m3-block", 320, bias=True)
    assert weight.bias is not None
    weight.bias = weight.bias.to(dtype)
    x, residual = random(tokens, 512, dtype=dtype), random(tokens, 320, dtype=dtype)
    x *= torch.logspace(-2, 2, 4, device=x.device).repeat_interleave(128).to(dtype)
    rows, scales = round_rows(x, group=128)
    dense = rows[:tokens].double() * scales[:tokens].double().repeat_interleave(128, 1)
    exact = dense @ ref.T + weight.bias.double()
    assert blocks.fits(x, weight) and not blocks.fits(x.float(), weight)
    for config in ((64, 16, 4, 2), (128, 64, 4, 2)):
        for split in (1, 3):
            got = blocks.block_linear(rows, scales, weight, tokens, dtype, None, config, split)
            assert got.shape == (tokens, 320) and got.dtype == dtype
            assert row_error(got, exact) < BOUND[dtype]
            behind = residual.clone()
            got = blocks.block_linear(rows, scales, weight, tokens, dtype, behind, config, split)
            assert got is behind
            assert row_error(got, exact + residual.double()) < 2 * BOUND[dtype]


def test_what_each_format_is_multiplied_by() -> None:
    """Another kernel than the one that is best; rows that are rounded to 8 bits where they should
    stay, or stay where they should be rounded."""
    dtype = torch.float16
    square, _ = packed("odd-blocks", 384)
    several, single = random(3, 384, dtype=dtype), random(1, 384, dtype=dtype)
    assert torch.equal(cuda.packed_linear(single, square), gemv8(single, square))
    assert not cuda.takes_gate(single, square)
    rounds = blocks.fits(several, square)
    assert rounds or DEVICE != "cpu"
    got = cuda.packed_linear(several, square)
    if rounds:
        want = blocks.block_linear(*round_rows(several, group=128), square, 3, dtype)
    else:
        want = packed_dot(several, square)
    assert torch.equal(got, want)
    assert cuda.takes_gate(several, square) is rounds
    for name in ("int4-64-zero", "int4-128", "few-int4-add"):  # `packed_few` takes no float16
        whole, _ = packed(name, 22)
        single = random(1, whole.shape[1], dtype=dtype)
        assert torch.equal(cuda.packed_linear(single, whole), gemv4(single, whole))


def test_shares_of_the_columns() -> None:
    """More programs than multiprocessors hold, where one more share costs a second round; a share
    that has next to nothing to add up."""
    for splits in (dot_module.splits, blocks.splits):
        for size, programs, steps in itertools.product(
            (64 * 16, 64 * 64, 128 * 64, 128 * 128), (1, 30, 96, 132, 500), (1, 8, 32, 112)
        ):
            actual = splits(size, programs, steps, 132)
            assert actual == 1 or actual * programs <= 4 * 132
            assert actual == 1 or steps // actual >= 2
    assert dot_module.splits(64 * 16, 64, 112, 132) > 1 < blocks.splits(64 * 16, 64, 112, 132)


@pytest.mark.parametrize("tokens", [64, 128, 256, 8192])
def test_when_torch_multiplies_blocks(tokens: int) -> None:
    """A product that divides no columns is given few tiles, or tiles that are mostly empty."""
    form = Format(8, 128, F32, code="e4m3", rows=128, activations=8)
    narrow, wide = (
        PackedWeight(form, outputs, 128, None, torch.device("meta")) for outputs in (128, 1 << 16)
    )
    assert fp8.pays(tokens, wide) is (tokens > 64)
    assert fp8.pays(tokens, narrow) is (tokens > 256)  # of the eight multiprocessors told there


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 9, 33, 64, 100, 256, 300])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 4096), (1152, 14336), (6144, 128)])
def test_blocks_on_a_device(outputs: int, width: int, tokens: int) -> None:
    """Tiles and shares as they are chosen there; a part of a product that the units keep in fewer
    bits than float32; what the whole way makes of norm, gate and residual."""
    form = Format(8, 128, F32, code="e4m3", rows=128, activations=8)
    weight = PackedWeight(form, outputs, width, None, torch.device(DEVICE))
    weight.codes.random_(0, 127)
    weight.codes ^= torch.randint_like(weight.codes, 2) << 7
    weight.scale.uniform_(0.5, 1.5).mul_(2.0**-8)
    ref = weight.dense(torch.float64)
    x = random(tokens, width, dtype=torch.bfloat16)
    residual = random(tokens, outputs, dtype=torch.bfloat16)
    rows, scales = round_rows(x, group=128)
    dense = rows[:tokens].double() * scales[:tokens].double().repeat_interleave(128, 1)
    got = blocks.block_linear(rows, scales, weight, tokens, torch.bfloat16)
    assert row_error(got, dense @ ref.T) < BOUND[torch.bfloat16]
    got = cuda.packed_linear(x, weight, residual=residual.clone())
    assert row_error(got, dense @ ref.T + residual.double()) < 2 * BOUND[torch.bfloat16]
    norm = random(width, dtype=torch.bfloat16)
    got = cuda.packed_linear(x, weight, norm=norm, eps=1e-5, gate="silu")
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    gate, up = (normed @ ref.T).chunk(2, -1)
    assert row_error(got, torch.nn.functional.silu(gate) * up) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 33, 64, 200, 300, 2000])
@pytest.mark.parametrize(("outputs", "width"), [(512, 288), (4096, 4096), (1000, 14336)])
def test_whole_numbers_on_a_device(tokens: int, outputs: int, width: int) -> None:
    """Tiles and splits as they are chosen there: sums of whole numbers are exact."""
    form = Format(8, width, F32, zero=128, activations=8)
    weight = PackedWeight(form, outputs, width, None, torch.device(DEVICE))
    weight.codes.view(torch.uint8).random_(0, 256)
    weight.scale.uniform_(0.5, 1.5)
    x = random(tokens, width, dtype=torch.bfloat16)
    residual = random(tokens, outputs, dtype=torch.bfloat16)
    rows, scales = round_rows(x, to=torch.int8)
    exact = (rows.double() @ weight.codes.double().T) * scales.double() * weight.scale.double().T
    for config in (None, int8.FIXED):
        got = int8.int8_linear(rows, scales, weight, torch.bfloat16, None, config)
        assert row_error(got, exact) < BOUND[torch.bfloat16]
        dense = residual.clone()
        got = int8.int8_linear(rows, scales, weight, torch.bfloat16, dense, config)
        assert row_error(got, exact + residual.double()) < 2 * BOUND[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 31, 200])
@pytest.mark.parametrize("name", FEW)
def test_a_few_tokens_on_a_device(name: str, tokens: int) -> None:
    """A pair of codes decoded in the wrong order, a scale of the next group, a share of the columns
    left out, a row of the tile that belongs to no token; bias and residual added twice."""
    weight, ref = packed(name, 224, bias=True)
    assert weight.bias is not None
    weight.bias = weight.bias.bfloat16()
    x = random(tokens, weight.shape[1], dtype=torch.bfloat16)
    residual = random(tokens, 224, dtype=torch.bfloat16)
    plain = x.double() @ ref.T + weight.bias.double()
    bound = 2 * BOUND[torch.bfloat16]
    if tokens <= 8:
        assert few_fits(x, weight)
        for config in (None, (16, 1), (32, 1)):
            assert row_error(packed_few(x, weight, config=config), plain) < bound
        got = packed_few(x, weight, residual.clone())
        assert row_error(got, plain + residual.double()) < bound
    assert pair_ptx(x, weight, 32 if weight.form.bits == 4 else 128)
    for split in (1, 2):
        assert row_error(packed_dot(x, weight, split=split), plain) < bound


MATRIX = ("int4-128", "int4-256", "few-int4", "few-int4-add", "few-int4-shift", "int4-zeros")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", MATRIX)
def test_integers_on_matrix_units(name: str, tokens: int, dtype: torch.dtype) -> None:
    """A nibble that is given another one's number of x, a scale or a zero of another group or of
    the other half of a tile, the sum of a group that another token's has, outputs that fill no
    tile, spans that fill no turn of the warps; what gate, bias and residual make of it."""
    for outputs in (16, 88, 250):
        weight, ref = packed(name, outputs, bias=True)
        assert weight.bias is not None
        weight.bias = weight.bias.to(dtype)
        width = weight.shape[1]
        x, residual = random(tokens, width, dtype=dtype), random(tokens, outputs, dtype=dtype)
        assert form_fits(x, weight)
        plain = x.double() @ ref.T + weight.bias.double()
        gate, up = plain.chunk(2, -1)
        silu = torch.nn.functional.silu(gate) * up
        for config in (None, MmaTile(1, 1, 2), MmaTile(4, 2, 1)):
            dense = residual.clone()
            assert mma4(x, weight, residual=dense, config=config) is dense
            assert row_error(dense, plain + residual.double()) < 2 * BOUND[dtype]
            got = mma4(x, weight, config=config)
            assert row_error(got, plain) < 2 * BOUND[dtype]
            got = mma4(x, weight, gate="silu", config=config)
            assert row_error(got, silu) < 4 * BOUND[dtype]
        got = mma4(x, weight, gate="gelu_pytorch_tanh")
        gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert row_error(got, gelu) < 4 * BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "width"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
)
def test_integers_on_matrix_units_at_the_sizes_of_models(outputs: int, width: int) -> None:
    """Products at llama-8b's sizes as they are launched there; a token whose numbers depend on the
    others of its step."""
    dtype = torch.bfloat16
    for form in (Format(4, 128, zero=8), Format(4, 128, F32, offset="shift")):
        weight = PackedWeight(form, outputs, width, None, torch.device(DEVICE))
        weight.codes.view(torch.uint8).random_(0, 256)
        weight.scale.uniform_(0.5, 1.5)
        if weight.offset is not None:
            weight.offset.random_(-15, 1)
        ref = weight.dense(torch.float32)
        x = random(8, width, dtype=dtype)
        config = MmaTile(8, 1, 2)
        whole = mma4(x, weight, config=config)
        assert row_error(whole, x.double() @ ref.double().T) < 2 * BOUND[dtype]
        for tokens in (1, 2, 5, 8):
            got = mma4(x[:tokens], weight)
            assert row_error(got, x[:tokens].double() @ ref.double().T) < 2 * BOUND[dtype]
            assert torch.equal(mma4(x[:tokens], weight, config=config), whole[:tokens])


@pytest.mark.gpu
def test_what_matrix_units_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that end within a span, numbers of tokens that no table names, an activation that the
    kernel has not."""
    dtype = torch.bfloat16
    table = (1, 64, 2048, None), (3, 64, 2048, MmaTile(8, 1, 4))
    monkeypatch.setattr("kernels.gemm.packed.mma4.TILES", table)
    weight, _ = packed("few-int4-shift", 64)
    x, norm = random(3, 2048, dtype=dtype), random(2048, dtype=dtype)
    assert mma4_fits(x, weight) and mma4_fits(x[:2], weight)
    assert not mma4_fits(x[:1], weight)
    small, _ = packed("int4-64-zero", 64)
    assert not mma4_fits(random(2, 320, dtype=dtype), small)
    for gate in (None, "silu", "relu"):
        got = cuda.packed_linear(x, weight, norm=norm, eps=1e-5, gate=gate)
        want = Kernels().packed_linear(x, weight, norm=norm, eps=1e-5, gate=gate)
        assert row_error(got, want) < 6 * BOUND[dtype]
    two = x[:2]
    assert torch.equal(cuda.packed_linear(two, weight), mma4(two, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 31, 32, 300])
@pytest.mark.parametrize("name", FORMS)
def test_inside_a_graph(name: str, tokens: int) -> None:
    """What a graph replays is what a launch computes, for every way that the back end takes."""
    width = FORMS[name][1]
    weight, ref = packed(name, 512)
    x = random(tokens, width, dtype=torch.bfloat16)
    for _ in range(2):
        cuda.packed_linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.packed_linear(x, weight)
    x.copy_(random(tokens, width, dtype=torch.bfloat16))
    graph.replay()
    able = fp8.scales_fit(x, weight) or int8.fits(weight, x)
    able = able or blocks.fits(x, weight)
    rounded = able and tokens >= weight.form.rounded_rows
    bound = 0.06 if rounded else 2 * BOUND[torch.bfloat16]
    assert row_error(out, x.double() @ ref.T) < bound
    if rounded:
        to = E4M3 if weight.form.code == "e4m3" else torch.int8
        rows, scales = (
            tensor[:tokens] for tensor in round_rows(x, to=to, group=fp8.group_of(weight))
        )
        scales = scales.repeat_interleave(width // scales.shape[1], 1)
        exact = (rows.double() * scales.double()) @ ref.T
        assert row_error(out, exact) < 2 * BOUND[torch.bfloat16]
