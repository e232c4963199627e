"""Matmuls of one to eight tokens with packed weights, in bfloat16 on Ampere or later.

Weights are loaded from memory directly into the registers that tensor cores read, without shared
memory and without barriers.

A program computes 16 or 32 outputs. Each of its warps has a contiguous part of the columns, and
the warps' sums are added at the end. A thread loads its next codes before it multiplies the current
ones. One to five instructions convert a pair of codes exactly to two bfloat16 numbers. Scales are
applied to the sums of their groups, in float32.

The kernel is in Gluon, because Triton's own language does not control register layouts. No
interpreter runs Gluon, so tests need a GPU (`tests/kernels/test_packed.py`);
`tests/kernels/test_compile.py` only compiles the kernel.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gemm.packed.codes import (
    OFFSETS,
    bytes_fit,
    floats,
    four_nibbles,
    integers,
    integers_fit,
)
from kernels.launch.device import compute_capability
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

TOKENS = 8  # the short side of the MMA tile
_WORDS = 32  # 16-bit words of a row per step of a warp: 128 codes of 4 bits, 64 of 8
_AHEAD = 2  # steps that are loaded ahead
_GROUP = 128  # inputs that share a scale of 4-bit codes


class FewTile(NamedTuple):
    """The tile of a program, as one `gl.constexpr`."""

    rows: int  # outputs per program
    tokens: int
    words: int  # words of a row per step of a warp
    shares: int  # parts of the columns, one per warp
    ptx: tuple[str, ...]  # PTX for each field (code) of a word, which decodes it


@gluon.jit
def _decoded(words, TILE: gl.constexpr, AT: gl.constexpr):
    """Decode field AT of each word to bfloat16, two words at a time by inline PTX."""
    return gl.inline_asm_elementwise(
        TILE.ptx[AT], "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _part(word, AT: gl.constexpr, TYPE: gl.constexpr):
    """Return the 16 bits at 16 * AT as a number of this type."""
    return (word >> (16 * AT)).to(gl.int16).to(TYPE, bitcast=True)


@gluon.jit
def _packed_few_kernel(
    x,  # [tokens, columns]
    codes,  # int16 [rows, columns / FIELDS]
    scale,  # 4-bit codes: int32 pairs of float16 [rows, columns / 256]; else float32 [rows]
    offset,  # int32 like the scale's pairs
    bias,  # [rows]
    residual,  # [tokens, rows]
    out,  # [tokens, rows]
    tokens,
    rows,
    columns,
    FIELDS: gl.constexpr,  # codes per word: 4 of 4 bits with groups of 128, or 2 of 8 bits
    OFFSET: gl.constexpr,  # value of OFFSETS; unless 0 (none), decoded codes are 128 too large
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    TILE: gl.constexpr,  # `FewTile`
    PDL: gl.constexpr,
):
    ROWS: gl.constexpr = TILE.rows
    SHARES: gl.constexpr = TILE.shares
    TOKENS: gl.constexpr = TILE.tokens
    WORDS: gl.constexpr = TILE.words
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SHARES, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=4)
    share_l = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    share_l = share_l.expand_dims(1).expand_dims(2)
    row_l = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    row_l = row_l.expand_dims(0).expand_dims(2)
    word_l = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    word_l = word_l.expand_dims(0).expand_dims(1)
    share_r = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    share_r = share_r.expand_dims(1).expand_dims(2)
    word_r = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    word_r = word_r.expand_dims(0).expand_dims(2)
    token_r = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
    token_r = token_r.expand_dims(0).expand_dims(1)
    share_s = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    share_s = share_s.expand_dims(1).expand_dims(2)
    row_s = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    row_s = row_s.expand_dims(0).expand_dims(2)

    first = gl.program_id(0) * ROWS
    pitch = columns // FIELDS
    steps = pitch // WORDS // SHARES  # steps of a share, an even number
    at = codes + (first + row_l).to(gl.int64) * pitch + (share_l * steps * WORDS + word_l)
    exists = (token_r < tokens) & (word_r >= 0)
    if FIELDS == 4:  # a span of four runs, one for each field
        x_at = x + token_r * columns + (share_r * steps * (4 * WORDS) + word_r)
    else:  # two neighbours in a word
        x_at = x.to(gl.pointer_type(gl.int32), bitcast=True)
        x_at = x_at + token_r * pitch + (share_r * steps * WORDS + word_r)
    pairs = (first + row_s).to(gl.int64) * (pitch // WORDS // 2) + share_s * (steps // 2)

    # Codes and scales depend on no earlier kernel, so load the first ones before gdc_wait.
    first_w = gl.load(at, eviction_policy="evict_first")
    second_w = gl.load(at + WORDS, eviction_policy="evict_first")
    if FIELDS == 4:
        s_pair = gl.load(scale + pairs)
        if OFFSET:
            o_pair = gl.load(offset + pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    zero = gl.zeros([SHARES, ROWS, TOKENS], gl.float32, layout=SUMS)
    ones = gl.full([SHARES, ROWS, WORDS], 1.0, gl.bfloat16, layout=LEFT)
    acc = zero
    other = zero
    for step in range(0, steps, 2):
        at += 2 * WORDS
        pairs += 1
        goes_on = step + 2 < steps
        more = gl.full([SHARES, ROWS, WORDS], goes_on, gl.int1, layout=LEFT)
        next_first = gl.load(at, mask=more, other=0, eviction_policy="evict_first")
        next_second = gl.load(at + WORDS, mask=more, other=0, eviction_policy="evict_first")
        if FIELDS == 4:
            has = gl.full([SHARES, ROWS, 1], goes_on, gl.int1, layout=SUMS)
            next_s = gl.load(scale + pairs, mask=has, other=0)
            if OFFSET:
                next_o = gl.load(offset + pairs, mask=has, other=0)
        # Load all of x before its first use: a load takes longer than the computation.
        xs = ()
        for run in gl.static_range(8 if FIELDS == 4 else 2):
            xs = xs + (gl.load(x_at + run * WORDS, mask=exists, other=0),)  # noqa: RUF005
        for half in gl.static_range(2):
            w = first_w if half == 0 else second_w
            if FIELDS == 4:
                even = mma_v2(_decoded(w, TILE, 0), xs[4 * half], zero)
                odd = mma_v2(_decoded(w, TILE, 1), xs[4 * half + 1], zero)
                even = mma_v2(_decoded(w, TILE, 2), xs[4 * half + 2], even)
                odd = mma_v2(_decoded(w, TILE, 3), xs[4 * half + 3], odd)
                s = _part(s_pair, half, gl.float16).to(gl.float32)
                acc += (even + odd) * s
                if OFFSET:
                    # Sum x with a matrix of ones, for the excess of 128 and the offset.
                    even = mma_v2(ones, xs[4 * half], zero)
                    odd = mma_v2(ones, xs[4 * half + 1], zero)
                    even = mma_v2(ones, xs[4 * half + 2], even)
                    odd = mma_v2(ones, xs[4 * half + 3], odd)
                    o = _part(o_pair, half, gl.float16).to(gl.float32)
                    if OFFSET == 1:
                        acc += (even + odd) * (o - 128.0 * s)
                    else:
                        acc += (even + odd) * ((o - 128.0) * s)
            else:
                both = xs[half]
                acc = mma_v2(_decoded(w, TILE, 0), _part(both, 0, gl.bfloat16), acc)
                other = mma_v2(_decoded(w, TILE, 1), _part(both, 1, gl.bfloat16), other)
        x_at += 2 * WORDS * (4 if FIELDS == 4 else 1)
        first_w, second_w = next_first, next_second
        if FIELDS == 4:
            s_pair = next_s
            if OFFSET:
                o_pair = next_o
    if FIELDS == 2:
        acc += other

    y = gl.sum(acc, axis=0)
    WHOLE: gl.constexpr = gl.SliceLayout(0, SUMS)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WHOLE)).expand_dims(1)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, WHOLE)).expand_dims(0)
    inside = (token < tokens) & (row < rows)
    if FIELDS == 2:
        y *= gl.load(scale + row)
    if BIAS:
        y += gl.load(bias + row).to(gl.float32)
    place = token * rows + row
    if ADD:
        y += gl.load(residual + place, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def tile(bits: int, rows: int, steps: int) -> tuple[int, int]:
    """Return (ROWS, SHARES), the fastest in a sweep over llama-8b's matrices on one H200."""
    num_rows, most = 16, 8
    if bits == 4 and rows > 4096 and steps < 64:
        most = 4
    while steps % (_AHEAD * most):
        most //= 2
    return num_rows, most


def few_fits(x: Tensor, weight: PackedWeight) -> bool:
    """Whether `packed_few` supports x and the weight.

    x must have up to TOKENS bfloat16 tokens. The weight must consist of whole tiles, either of
    4-bit integers in groups of 128 with float16 scales, or of 8 bits with a float32 scale per
    output.
    """
    form, (rows, columns) = weight.form, weight.shape
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] <= TOKENS and rows % 32 == 0):
        return False
    if compute_capability(x.device) < (8, 0):
        return False
    if columns % (_AHEAD * _WORDS * 16 // form.bits):
        return False
    if form.bits == 8:
        return bytes_fit(weight) and form.scale == torch.float32
    return integers_fit(weight) and form.group == _GROUP and form.scale == torch.float16


def packed_few(
    x: Tensor,  # [tokens, in] bfloat16
    weight: PackedWeight,  # [out, in]
    residual: Tensor | None = None,  # like the result, and overwritten by it
    config: tuple[int, int] | None = None,
) -> Tensor:
    """Return x @ weight.T + bias + residual, [tokens, out] bfloat16, accumulated in float32.

    `few_fits` must be true.
    """
    form, (rows, columns) = weight.form, weight.shape
    tokens = x.shape[0]
    out = x.new_empty((tokens, rows)) if residual is None else residual
    fields = 16 // form.bits
    num_rows, shares = config or tile(form.bits, rows, columns // (fields * _WORDS))
    scale, offset = weight.scale, weight.offset
    if form.bits == 4:  # two groups at a time
        scale = scale.view(torch.int32)
        offset = None if offset is None else offset.view(torch.int32)
        ptx = four_nibbles(weight)
    else:
        decode = floats if form.code == "e4m3" else integers
        ptx = [decode(False), decode(True), "", ""]
    _packed_few_kernel[(triton.cdiv(rows, num_rows),)](
        x,
        weight.codes.view(torch.int16),
        scale,
        offset,
        weight.bias,
        residual,
        out,
        tokens,
        rows,
        columns,
        FIELDS=fields,
        OFFSET=OFFSETS[form.offset],
        ADD=residual is not None,
        BIAS=weight.bias is not None,
        TILE=FewTile(rows=num_rows, tokens=TOKENS, words=_WORDS, shares=shares, ptx=tuple(ptx)),
        num_warps=shares,
        **pdl(x.device),
    )
    return out
