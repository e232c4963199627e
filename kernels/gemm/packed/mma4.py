"""Matmuls of one to eight tokens with 4-bit integers in groups of 128 or more, on tensor cores.

The kernel needs Ampere or later, and fuses gate, bias and residual as `kernels.gemm.gemv` does. A
norm is not fused, as that would take longer than a separate launch.

Codes and x are loaded from memory directly into the registers that tensor cores read, 16 bytes per
load, without shared memory and barriers. A shift and a logical operation convert a pair of codes to
two 16-bit numbers; `kernels.gemm.packed.gemv4` converts and multiplies single codes. No code has to
be moved between threads, because inputs can be summed in any order, if codes and x have the same
order. Of a span of 128 inputs (`Format.span`), lane 4 * g + c has the words 8 * c to 8 * c + 7 of
outputs g and 8 + g. Nibble i of these eight words has the codes of the eight inputs from
32 * i + 8 * c on.

A program computes one or several tiles of 16 outputs, or of 8 gate rows and the corresponding 8 up
rows. Its warps take spans of inputs in turn, and the warps' sums are added at the end. Each token
is a column of the MMA tile, so its results do not depend on other tokens.

The kernel is in Gluon, because Triton's own language does not control register layouts. No
interpreter runs Gluon, so tests need a GPU (`tests/kernels/test_packed.py`);
`tests/kernels/test_compile.py` only compiles the kernel.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.activation import CODES, _act
from kernels.gemm.gemv import GATES
from kernels.gemm.packed.codes import INT, OFFSETS, code_of
from kernels.launch.device import compute_capability
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

TOKENS = 8  # the short side of the MMA tile
_SPAN = 128
_OUTPUTS = 16  # outputs of a tile
_MAGIC = {"bf16": 128, "f16": 1024}  # numbers into whose mantissa's low bits a nibble is moved
_FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}


def _bits(value: float, kind: str) -> str:
    """Return a 32-bit PTX literal with the number in both halves. kind: "bf16" or "f16"."""
    half = int(torch.tensor(value, dtype=_FLOATS[kind]).view(torch.int16)) & 0xFFFF
    return f"0x{half << 16 | half:08x}"


def _mma(kind: str, to: str, left: tuple[str, ...], right: tuple[str, ...], plus: str) -> str:
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{to}}}, "
        f"{{{', '.join(left)}}}, {{{', '.join(right)}}}, {{{plus}}};"
    )


@lru_cache
def _product(kind: str, less: int) -> str:
    """Return PTX that multiplies a span's codes by x and writes the sums to $0 to $3.

    The codes of the first eight outputs are in $4 to $7, those of the other eight in $8 to $11, and
    x is in $12 to $27.

    In bfloat16 decoded codes are 128 too large; the caller subtracts this from the group's sum. In
    float16 the PTX itself subtracts the excess and the zero point `less`.
    """
    base = _MAGIC[kind]
    magic = _bits(base, kind)
    wide = kind == "f16"  # a mantissa has room for two nibbles; the higher one is 16 times as large
    lines = [
        "{ .reg .b32 a<4>, t, one, z, part, y; .reg .f32 c<4>, d<4>, n; mov.f32 n, 0f00000000;",
        f"mov.b32 one, {_bits(1, kind)}; mov.b32 z, {_bits(-(base + less), kind)};",
        f"mov.b32 part, {_bits(1 / 16, kind)}; mov.b32 y, {_bits(-(base // 16 + less), kind)};",
    ]
    empty = "n, n, n, n"
    sums = {0: empty, 1: empty}
    for nibble in range(4):
        chain = nibble // 2  # two independent chains of MMAs hide latency
        name = ", ".join(f"{'cd'[chain]}{i}" for i in range(4))
        high = wide and nibble % 2 == 1
        shift = 4 * (nibble - high)
        mask = "0x00f000f0" if high else "0x000f000f"
        for pair in range(2):
            for half in range(2):
                for late in range(2):
                    word, to = f"${4 + 4 * half + 2 * pair + late}", f"a{2 * late + half}"
                    source = word
                    if shift:
                        lines.append(f"shr.u32 t, {word}, {shift};")
                        source = "t"
                    lines.append(f"lop3.b32 {to}, {source}, {mask}, {magic}, 0xea;")
                    if wide:
                        by, plus = ("part", "y") if high else ("one", "z")
                        lines.append(f"fma.rn.{kind}x2 {to}, {to}, {by}, {plus};")
            x = 12 + 4 * nibble + 2 * pair
            left = ("a0", "a1", "a2", "a3")
            lines.append(_mma(kind, name, left, (f"${x}", f"${x + 1}"), sums[chain]))
            sums[chain] = name
    lines += [f"add.f32 ${i}, c{i}, d{i};" for i in range(4)]
    return " ".join([*lines, "}"])


@lru_cache
def _sum(kind: str) -> str:
    """Return PTX that writes the sums of x's columns to every row of $0 to $3. x: $4 to $19."""
    lines = [
        "{ .reg .b32 one; .reg .f32 c<4>, n; mov.f32 n, 0f00000000;",
        f"mov.b32 one, {_bits(1, kind)};",
    ]
    plus = "n, n, n, n"
    for at in range(8):
        to = "$0, $1, $2, $3" if at == 7 else "c0, c1, c2, c3"
        right = (f"${4 + 2 * at}", f"${5 + 2 * at}")
        lines.append(_mma(kind, to, ("one",) * 4, right, plus))
        plus = to
    return " ".join([*lines, "}"])


PRODUCT = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
SUM = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))


class MmaTile(NamedTuple):
    warps: int  # warps per program, which divide the inputs among them
    tiles: int  # tiles of 16 outputs per program
    ahead: int  # spans that a warp loads ahead


class MmaCodes(NamedTuple):
    """The rule by which 4-bit codes become operands of `mma`, as one `gl.constexpr`."""

    matmul_ptx: str  # PTX for the matmul of a step's codes and x
    sum_ptx: str  # PTX for the sums of a step's x
    base: int  # amount by which decoded codes are too large
    offset: int  # 0: none, 1: added to weights, 2: added to codes
    group: int  # inputs that share a scale


_ANY = float("inf")
# (maximum tokens, maximum outputs, maximum inputs, tile); the first row that fits is used. Tiles
# were the fastest in a sweep over llama-8b's matrices on an H200. None: `gemv4` is faster, as it
# fuses the norm.
TILES: tuple[tuple[int, float, float, MmaTile | None], ...] = (
    (1, 4096, 4096, None),
    (8, 4096, 4096, MmaTile(8, 1, 4)),
    (8, 4096, _ANY, MmaTile(16, 1, 1)),
    (1, 16384, _ANY, None),
    (8, _ANY, _ANY, MmaTile(4, 1, 1)),
)
LONE = MmaTile(8, 1, 1)  # the tile of direct calls of the kernel for which `TILES` has None


@gluon.constexpr_function
def _layout(SHARES):
    """Return the register layout of [shares of the inputs, lanes, a thread's elements]."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [SHARES, 1, 1], [2, 1, 0])


@gluon.jit
def _bring(codes_at, scale_at, offset_at, share, share3, step, STEPS: gl.constexpr,
           PER: gl.constexpr, OFFSET: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Load words, scales and offsets of each half tile for this step along the inputs.

    Steps from STEPS on are masked. EVEN: whether all warps have the same number of steps.
    """
    words, scales, offsets = (), (), ()
    has = (share + step) < STEPS
    has3 = (share3 + step) < STEPS
    group = (share + step) // PER
    for half in gl.static_range(len(codes_at)):
        words = words + (  # noqa: RUF005
            gl.load(codes_at[half] + step * 16, mask=has3, eviction_policy="evict_first"),
        )
        if EVEN:
            scales = scales + (gl.load(scale_at[half] + group, mask=has),)  # noqa: RUF005
        else:
            scales = scales + (gl.load(scale_at[half] + group, mask=has, other=0.0),)  # noqa: RUF005
        if OFFSET != 0:
            if EVEN:
                offsets = offsets + (gl.load(offset_at[half] + group, mask=has),)  # noqa: RUF005
            else:
                offsets = offsets + (  # noqa: RUF005
                    gl.load(offset_at[half] + group, mask=has, other=0.0),
                )
    return words, scales, offsets


@gluon.jit
def _both(halves, at: gl.constexpr, element):
    """Return the scale or offset of each of a thread's four sums, in float32.

    Two of the sums belong to output g, two to output 8 + g.
    """
    low = halves[2 * at].to(gl.float32).expand_dims(2)
    high = halves[2 * at + 1].to(gl.float32).expand_dims(2)
    return gl.where(element < 2, low, high)


@gluon.jit
def _store(y, first, bias, residual, out, tokens, rows, GATED: gl.constexpr, ACT: gl.constexpr,
           ADD: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Apply bias, gate and residual to a tile's sums y, and store the results.

    y: [g, c, 4], the four sums of each lane 4 * g + c.
    """
    low, high = y.reshape([8, 4, 2, 2]).permute([0, 1, 3, 2]).split()
    S: gl.constexpr = low.type.layout
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
    e = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, S)))
    token = 2 * c.expand_dims(0).expand_dims(2) + e.expand_dims(0).expand_dims(1)
    row = first + g.expand_dims(1).expand_dims(2)
    for half in gl.static_range(1 if GATED else 2):
        mine = row + 8 * half
        mask = (token < tokens) & (mine < rows)
        value = low if half == 0 else high
        if BIAS:
            value += gl.load(bias + mine, mask=mine < rows, other=0.0).to(gl.float32)
        if GATED:
            up = high
            if BIAS:
                up += gl.load(bias + rows + mine, mask=mine < rows, other=0.0).to(gl.float32)
            value = _act(value, ACT) * up
        to = token.to(gl.int64) * rows + mine
        if ADD:
            value += gl.load(residual + to, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + to, value.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _mma4_kernel(
    x,  # [tokens, WIDTH / 2] int32: two numbers each
    codes,  # [rows, WIDTH / 8] int32: eight codes each; GATED: twice the rows
    scale,  # [rows, WIDTH / GROUP]
    offset,
    bias,  # [rows]
    residual,  # [tokens, rows]
    out,  # [tokens, rows]
    tokens,
    rows,
    CODES: gl.constexpr,  # `MmaCodes`
    GATED: gl.constexpr,
    ACT: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    WIDTH: gl.constexpr,
    TILE: gl.constexpr,  # `MmaTile`
    PDL: gl.constexpr,
):
    AHEAD: gl.constexpr = TILE.ahead
    TILES: gl.constexpr = TILE.tiles
    WARPS: gl.constexpr = TILE.warps
    L: gl.constexpr = _layout(WARPS)
    FLAT: gl.constexpr = gl.SliceLayout(2, L)
    STEPS: gl.constexpr = WIDTH // 128
    PER: gl.constexpr = CODES.group // 128
    EVEN: gl.constexpr = STEPS % (WARPS * AHEAD) == 0
    EACH: gl.constexpr = 8 if GATED else 16  # outputs of a tile
    share = gl.arange(0, WARPS, layout=gl.SliceLayout(1, FLAT)).expand_dims(1)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, FLAT)).expand_dims(0)
    share3, lane3 = share.expand_dims(2), lane.expand_dims(2)
    at = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = at.expand_dims(0).expand_dims(1)
    inner = share3 * 16 + lane3 % 4 * 4 + at
    codes_at, scale_at, offset_at = (), (), ()
    for tile in gl.static_range(TILES):
        row = (gl.program_id(0) * TILES + tile) * EACH + lane // 4
        for half in gl.static_range(2):
            if GATED:
                source = gl.minimum(row, rows - 1) + half * rows
            else:
                source = gl.minimum(row + 8 * half, rows - 1)
            source = source.to(gl.int64)
            codes_at = codes_at + (codes + source.expand_dims(2) * (WIDTH // 8) + inner,)  # noqa: RUF005
            scale_at = scale_at + (scale + source * (WIDTH // CODES.group),)  # noqa: RUF005
            if CODES.offset != 0:
                offset_at = offset_at + (offset + source * (WIDTH // CODES.group),)  # noqa: RUF005
    # Codes and scales depend on no earlier kernel, so load the first ones before gdc_wait.
    words, scales, offsets = (), (), ()
    for ahead in gl.static_range(AHEAD):
        w, s, o = _bring(
            codes_at,
            scale_at,
            offset_at,
            share,
            share3,
            ahead * WARPS,
            STEPS,
            PER,
            CODES.offset,
            EVEN,
        )
        words, scales, offsets = words + w, scales + s, offsets + o
    place = share3 * 64 + lane3 % 4 * 4 + at
    x_at = x + gl.minimum(lane3 // 4, tokens - 1).to(gl.int64) * (WIDTH // 2) + place
    zeros = gl.zeros([WARPS, 32, 4], gl.float32, layout=L)
    acc = ()
    for _ in gl.static_range(TILES):
        acc = acc + (zeros,)  # noqa: RUF005
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, (STEPS + WARPS - 1) // WARPS, AHEAD):
        # Load all of x before its first use: a load takes longer than the computation.
        xs = ()
        for ahead in gl.static_range(AHEAD):
            step = (start + ahead) * WARPS
            for field in gl.static_range(4):
                if EVEN:
                    xs = xs + (gl.load(x_at + step * 64 + field * 16),)  # noqa: RUF005
                else:
                    has = (share3 + step) < STEPS
                    xs = xs + (  # noqa: RUF005
                        gl.load(x_at + step * 64 + field * 16, mask=has, other=0),
                    )
        next_words, next_scales, next_offsets = (), (), ()
        for ahead in gl.static_range(AHEAD):
            x0, x1 = xs[4 * ahead], xs[4 * ahead + 1]
            x2, x3 = xs[4 * ahead + 2], xs[4 * ahead + 3]
            if CODES.base != 0 or CODES.offset != 0:
                total = gl.inline_asm_elementwise(
                    CODES.sum_ptx, SUM, [x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=4
                )
            sums = ()
            for tile in gl.static_range(TILES):
                part = gl.inline_asm_elementwise(
                    CODES.matmul_ptx, PRODUCT,
                    [
                        words[2 * (ahead * TILES + tile)],
                        words[2 * (ahead * TILES + tile) + 1],
                        x0, x1, x2, x3,
                    ],
                    dtype=gl.float32, is_pure=True, pack=4,
                )  # fmt: skip
                if CODES.base != 0:
                    part -= CODES.base * total
                if CODES.offset == 2:
                    part += _both(offsets, ahead * TILES + tile, at) * total
                value = acc[tile] + part * _both(scales, ahead * TILES + tile, at)
                if CODES.offset == 1:
                    value += _both(offsets, ahead * TILES + tile, at) * total
                sums = sums + (value,)  # noqa: RUF005
            acc = sums
            w, s, o = _bring(
                codes_at, scale_at, offset_at, share, share3,
                (start + AHEAD + ahead) * WARPS, STEPS, PER, CODES.offset, EVEN,
            )  # fmt: skip
            next_words, next_scales = next_words + w, next_scales + s
            next_offsets = next_offsets + o
        words, scales, offsets = next_words, next_scales, next_offsets

    for tile in gl.static_range(TILES):
        y = gl.sum(acc[tile], axis=0).reshape([8, 4, 4])
        first = (gl.program_id(0) * TILES + tile) * EACH
        _store(y, first, bias, residual, out, tokens, rows, GATED, ACT, ADD, BIAS)


def tile(tokens: int, outputs: int, width: int) -> MmaTile | None:
    """Return a launch's tile from `TILES`, or None if `gemv4` is faster.

    tokens: up to TOKENS. outputs: rows of the weight, including gates. width: inputs of the weight.
    """
    return next(
        shape
        for most, rows, columns, shape in TILES
        if tokens <= most and outputs <= rows and width <= columns
    )


def form_fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel of `mma4` supports the form of x and of the weight.

    x must have one to eight 16-bit tokens. The weight must have 4-bit integers whose groups are
    multiples of 128 inputs.
    """
    form = weight.form
    return (
        0 < x.shape[0] <= TOKENS
        and x.dtype in _SHORT
        and form.bits == 4
        and code_of(weight) == INT
        and form.zero < 128
        and form.rows == 1
        and form.span == _SPAN
        and x.is_contiguous()
        and x.storage_offset() % 2 == 0  # the kernel reads two numbers at a time
    )


def mma4_fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether to use `mma4` for x and the weight: the kernel and the device support them, and
    `TILES` has a tile for their sizes."""
    return (
        x.is_cuda
        and compute_capability(x.device) >= (8, 0)
        and form_fits(x, weight)
        and tile(x.shape[0], *weight.shape) is not None
    )


def mma4(
    x: Tensor,  # [tokens, in]
    weight: PackedWeight,  # [out, in]; with a gate [2 * out, in]
    *,
    gate: str | None = None,  # a key of GATES
    residual: Tensor | None = None,  # [tokens, out], overwritten by the result
    config: MmaTile | None = None,
) -> Tensor:
    """Return x @ weight.T for up to eight tokens and 4-bit weights, with fused gate or residual.

    Returns [tokens, out] in x's dtype, accumulated in float32. Only on CUDA; `form_fits` must be
    true.
    """
    assert gate is None or gate in GATES
    form, (rows, width), tokens = weight.form, weight.shape, x.shape[0]
    chosen = config or tile(tokens, rows, width) or LONE
    outs = rows // 2 if gate else rows
    outputs = (_OUTPUTS // 2 if gate else _OUTPUTS) * chosen.tiles
    out = x.new_empty((tokens, outs)) if residual is None else residual
    kind = _SHORT[x.dtype]
    more = kind == "bf16"  # whether decoded codes are 128 too large; else PTX subtracts the zero
    _mma4_kernel[(triton.cdiv(outs, outputs),)](
        x.view(torch.int32),
        weight.codes.view(torch.int32),
        weight.scale,
        weight.offset,
        weight.bias,
        residual,
        out,
        tokens,
        outs,
        CODES=MmaCodes(
            matmul_ptx=_product(kind, form.zero),
            sum_ptx=_sum(kind),
            base=_MAGIC[kind] + form.zero if more else 0,
            offset=OFFSETS[form.offset],
            group=form.group,
        ),
        GATED=gate is not None,
        ACT=CODES[gate] if gate else 0,
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        WIDTH=width,
        TILE=chosen,
        num_warps=chosen.warps,
        **pdl(x.device),
    )
    return out
