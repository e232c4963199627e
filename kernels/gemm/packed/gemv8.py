"""Matmuls of a single token with 8-bit floats that have one scale per output, or per block of
outputs and inputs, like `kernels.gemm.gemv`.

Codes and x are read as words of four numbers. So a thread has codes and numbers of x for the same
inputs, and nothing is moved between threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.gemv import GATES, fits, fused, gated
from kernels.gemm.packed.codes import bytes_fit, converts, eight_bits
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

_BAND = 32  # outputs of a weight block must be a multiple, so that a program has rows of one block
# PTX, from compute capability 8.9 on, that converts four e4m3 codes in $4 to float32 in $0 to $3.
_FOUR = """{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q;
mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
mov.b32 {a, b}, p; mov.b32 {c, d}, q;
cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"""


@triton.jit
def converted(w, HOW: tl.constexpr):
    """Convert the four codes of each word to float32. HOW: PTX from `decoder`."""
    return tl.inline_asm_elementwise(
        HOW,
        "=f,=f,=f,=f,r",
        [w],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def number(words, AT: tl.constexpr, TYPE: tl.constexpr):
    """Convert the 16 bits at bit 16 * AT of each word, a number of TYPE, to float32."""
    return (words >> (16 * AT)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _gemv8_kernel(
    x,  # [columns / 4] int64: four numbers each
    codes,  # [rows, columns / 4] int32: four codes each; GATED: twice the rows
    scale,  # [rows]; GROUP: [rows / BAND, words / GROUP]
    bias,
    norm,  # [columns / 4] int64, as x
    residual,  # [rows]
    out,  # [rows]
    eps,
    rows,
    words,  # columns / 4
    FUSED: tl.constexpr,  # `kernels.gemm.gemv.Fused`
    HOW: tl.constexpr,  # PTX from `decoder`
    GROUP: tl.constexpr,  # words that share a scale; 0: all words of a row
    BAND: tl.constexpr,  # rows that share a scale
    ROWS: tl.constexpr,  # rows per program; GATED: gate and up rows alternate
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles divide the rows and the words
    PDL: tl.constexpr,
):
    index = tl.arange(0, ROWS)
    if FUSED.gated:
        mine = tl.program_id(0) * (ROWS // 2) + index // 2
        source = mine + (index % 2) * rows
    else:
        mine = tl.program_id(0) * ROWS + index
        source = mine
    row_mask = mine < rows
    word = tl.max_contiguous(tl.arange(0, WORDS), 2)
    at = codes + source.to(tl.int64)[:, None] * words + word[None, :]
    acc = tl.zeros([ROWS, WORDS], tl.float32)
    squares = tl.zeros([WORDS], tl.float32)
    if GROUP > 0:  # a program's rows belong to one block, or to one block of gates and one of ups
        first = tl.program_id(0) * (ROWS // 2 if FUSED.gated else ROWS)
        scales = scale + (first // BAND).to(tl.int64) * (words // GROUP)
        if FUSED.gated:
            up_scales = scale + ((first + rows) // BAND).to(tl.int64) * (words // GROUP)
            is_up = (index % 2 == 1)[:, None]
    TYPE: tl.constexpr = out.dtype.element_ty  # also the dtype of x and of the norm
    # The first codes depend on no earlier kernel, so load them before gdc_wait.
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        first_mask = row_mask[:, None] & (word < words)[None, :]
        w = tl.load(at, mask=first_mask, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, words, WORDS):
        here = start + word
        if EVEN:
            value = tl.load(x + here)
            if FUSED.norm:
                n = tl.load(norm + here)
        else:
            value = tl.load(x + here, mask=here < words, other=0)
            if FUSED.norm:
                n = tl.load(norm + here, mask=here < words, other=0)
        x0, x1 = number(value, 0, TYPE), number(value, 1, TYPE)
        x2, x3 = number(value, 2, TYPE), number(value, 3, TYPE)
        if FUSED.norm:
            squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
            x0 *= number(n, 0, TYPE)
            x1 *= number(n, 1, TYPE)
            x2 *= number(n, 2, TYPE)
            x3 *= number(n, 3, TYPE)
        at += WORDS
        if EVEN:
            ahead = tl.load(at, mask=start + WORDS < words, eviction_policy="evict_first")
        else:
            ahead_mask = row_mask[:, None] & (here + WORDS < words)[None, :]
            ahead = tl.load(at, mask=ahead_mask, other=0, eviction_policy="evict_first")
        if HOW != "":
            w0, w1, w2, w3 = converted(w, HOW)
        else:
            w0 = eight_bits(w.to(tl.uint8), 3)
            w1 = eight_bits((w >> 8).to(tl.uint8), 3)
            w2 = eight_bits((w >> 16).to(tl.uint8), 3)
            w3 = eight_bits((w >> 24).to(tl.uint8), 3)
        if GROUP > 0:
            group = here // GROUP
            has = here < words
            s = tl.load(scales + group, mask=has, other=0.0)[None, :]
            if FUSED.gated:
                up = tl.load(up_scales + group, mask=has, other=0.0)[None, :]
                s = tl.where(is_up, up, s)
            part = w0 * x0[None, :]
            part += w1 * x1[None, :]
            part += w2 * x2[None, :]
            part += w3 * x3[None, :]
            acc += part * s
        else:
            acc += w0 * x0[None, :]
            acc += w1 * x1[None, :]
            acc += w2 * x2[None, :]
            acc += w3 * x3[None, :]
        w = ahead
    y = tl.sum(acc, axis=1)
    if GROUP == 0:
        y *= tl.load(scale + source, mask=row_mask, other=0.0)
    if FUSED.norm:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / (4 * words) + eps)
    if FUSED.bias:
        y += tl.load(bias + source, mask=row_mask, other=0.0).to(tl.float32)
    if FUSED.gated:
        y = gated(y, ROWS, FUSED.gelu)
        outs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        outs = mine
    out_mask = outs < rows
    if FUSED.add:
        y += tl.load(residual + outs, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out + outs, y.to(out.dtype.element_ty), mask=out_mask)


def decoder(device: torch.device) -> str:
    """Return PTX that decodes four codes; "" in the interpreter, which runs no PTX."""
    return _FOUR if device.type == "cuda" else ""


def tile(rows: int, blocks: bool) -> tuple[int, int, int]:
    """Return (ROWS, WORDS, warps), the fastest in sweeps over llama-8b's matrices on one H200.

    blocks: whether the weight has block scales.
    """
    if rows >= 16384:
        return 8, 128, 1
    words, warps = (256, 2) if rows > 4096 else (512, 4)
    return 8 if blocks else 4, words, warps


def gemv8_fits(x: Tensor, weight: PackedWeight, norm: Tensor | None) -> bool:
    """Whether `gemv8` supports the inputs: one 16-bit token, 8-bit floats that the device converts.

    Scales must be float32, one per output or per block. A norm must have x's dtype.
    """
    form = weight.form
    blocks = form.rows % _BAND == 0 and weight.shape[0] % form.rows == 0
    return (
        fits(x)
        and form.code == "e4m3"
        and form.scale == torch.float32
        and (blocks or bytes_fit(weight))
        and weight.shape[1] % 4 == 0
        and converts(x.device)
        and in_words(x)
        and (norm is None or (norm.dtype == x.dtype and in_words(norm)))
    )


def in_words(numbers: Tensor) -> bool:
    """Whether a tensor of 16-bit numbers can be read as words of four."""
    return numbers.is_contiguous() and numbers.storage_offset() % 4 == 0


def gemv8(
    x: Tensor,  # [1, in]
    weight: PackedWeight,  # [out, in]; with a gate [2 * out, in]
    *,
    norm: Tensor | None = None,  # [in], in x's dtype
    eps: float = 0.0,
    gate: str | None = None,  # a key of GATES
    residual: Tensor | None = None,  # [1, out]
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Return x @ weight.T for a single token and 8-bit floats, with fused norm, gate or residual.

    Returns [1, out] in x's dtype, accumulated in float32. `gemv8_fits` must be true.
    """
    assert gate is None or gate in GATES
    rows, columns = weight.shape
    blocks = not bytes_fit(weight)
    num_rows, words, warps = config or tile(rows, blocks)
    outs = rows // 2 if gate else rows
    per_program = num_rows // 2 if gate else num_rows
    out = x.new_empty((1, outs))
    _gemv8_kernel[(triton.cdiv(outs, per_program),)](
        x.view(torch.int64),
        weight.codes.view(torch.int32),
        weight.scale,
        weight.bias,
        None if norm is None else norm.view(torch.int64),
        residual,
        out,
        eps,
        outs,
        columns // 4,
        FUSED=fused(norm, gate, residual, weight.bias),
        HOW=decoder(x.device),
        GROUP=weight.form.group // 4 if blocks else 0,
        BAND=weight.form.rows,
        ROWS=num_rows,
        WORDS=words,
        EVEN=columns % (4 * words) == 0 and outs % per_program == 0,
        num_warps=warps,
        **pdl(x.device),
    )
    return out
