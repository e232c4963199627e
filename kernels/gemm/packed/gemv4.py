"""Matmuls of a single token with 4-bit integers in groups, like `kernels.gemm.gemv`.

Codes are read as words of sixteen codes, and x as words of four numbers. So a thread has codes and
numbers of x for the same inputs, and nothing is moved between threads.

A nibble becomes a float16 when its bits are moved into the mantissa of 1024. In the low bits this
gives 1024 + nibble, four bits higher 1024 + 16 * nibble. So a pair takes one logical operation, and
every other pair a shift. x is divided by the factor of 16 beforehand, and the excess of 1024 is
subtracted from each word's sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gemm.gemv import GATES, fits, fused, gated
from kernels.gemm.packed.codes import INT, OFFSETS, code_of
from kernels.gemm.packed.gemv8 import in_words, number
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight

_WORD = 16  # codes


def _sixteen() -> str:
    """Return PTX that decodes the 16 codes of the 64-bit word in $16 to float32.

    The numbers of nibble i of the word's four 16-bit parts are written to $(4 * i) and the three
    registers after it.
    """
    lines = ["{ .reg .b32 w, p; .reg .b16 a, b; .reg .b32 l, h; mov.b64 {l, h}, $16;"]
    for half, word in enumerate(("l", "h")):
        for nibble in range(4):
            if nibble == 2:
                lines.append(f"shr.b32 {word}, {word}, 8;")
            mask = "0x000f000f" if nibble % 2 == 0 else "0x00f000f0"
            to = 4 * nibble + 2 * half
            lines.append(
                f"lop3.b32 p, {word}, {mask}, 0x64006400, 0xea; mov.b32 {{a, b}}, p; "
                f"cvt.f32.f16 ${to}, a; cvt.f32.f16 ${to + 1}, b;"
            )
    return " ".join((*lines, "}"))


_SIXTEEN = _sixteen()


@triton.jit
def _code(words, AT: tl.constexpr, PLACE: tl.constexpr):
    """Decode nibble PLACE of the 16 bits at 16 * AT to the float32 that `_sixteen`'s PTX returns.

    The interpreter runs this instead of PTX.
    """
    value = ((words >> (16 * AT + 4 * PLACE)) & 15).to(tl.float32)
    return 1024.0 + (value * 16.0 if PLACE % 2 == 1 else value)


@triton.jit
def _decoded(w, HOW: tl.constexpr):
    if HOW != "":
        numbers = tl.inline_asm_elementwise(
            HOW,
            "=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,l",
            [w],
            dtype=(
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
                tl.float32, tl.float32, tl.float32, tl.float32,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        numbers = (
            _code(w, 0, 0), _code(w, 1, 0), _code(w, 2, 0), _code(w, 3, 0),
            _code(w, 0, 1), _code(w, 1, 1), _code(w, 2, 1), _code(w, 3, 1),
            _code(w, 0, 2), _code(w, 1, 2), _code(w, 2, 2), _code(w, 3, 2),
            _code(w, 0, 3), _code(w, 1, 3), _code(w, 2, 3), _code(w, 3, 3),
        )  # fmt: skip
    return numbers


class Nibbles(NamedTuple):
    """The rule by which 4-bit codes become numbers."""

    ptx: str  # PTX from `decoder`
    zero: int
    offset: int
    group: int  # words whose codes share a scale
    run: int  # words of a span; also the distance in x between two nibbles of a word


@triton.jit
def _gemv4_kernel(
    x,  # [columns / 4] int64: four numbers each
    codes,  # [rows, columns / 16] int64: sixteen codes each; GATED: twice the rows
    scale,  # [rows, words / GROUP]
    offset,
    bias,
    norm,  # [columns / 4] int64: four numbers each
    residual,  # [rows]
    out,  # [rows]
    eps,
    rows,
    words,  # columns / 16
    FUSED: tl.constexpr,  # `kernels.gemm.gemv.Fused`
    CODES: tl.constexpr,  # `Nibbles`
    ROWS: tl.constexpr,  # rows per program; GATED: gate and up rows alternate
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,  # whether tiles divide the rows and the words
    PDL: tl.constexpr,
):
    HOW: tl.constexpr = CODES.ptx
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
    groups = source.to(tl.int64)[:, None] * (words // CODES.group)
    acc = tl.zeros([ROWS, WORDS], tl.float32)
    squares = tl.zeros([WORDS], tl.float32)
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
        inside = here < words
        exists = row_mask[:, None] & inside[None, :]
        group = groups + (here // CODES.group)[None, :]
        if EVEN:
            s = tl.load(scale + group).to(tl.float32)
        else:
            s = tl.load(scale + group, mask=exists, other=0.0).to(tl.float32)
        if CODES.offset != 0:
            if EVEN:
                o = tl.load(offset + group).to(tl.float32)
            else:
                o = tl.load(offset + group, mask=exists, other=0.0).to(tl.float32)
        at += WORDS
        if EVEN:
            ahead = tl.load(at, mask=start + WORDS < words, eviction_policy="evict_first")
        else:
            ahead_mask = row_mask[:, None] & (here + WORDS < words)[None, :]
            ahead = tl.load(at, mask=ahead_mask, other=0, eviction_policy="evict_first")
        codes16 = _decoded(w, HOW)
        place = here // CODES.run * (4 * CODES.run) + here % CODES.run
        place = tl.max_contiguous(tl.multiple_of(place, 2), 2)
        part = tl.zeros([ROWS, WORDS], tl.float32)
        even = tl.zeros([WORDS], tl.float32)
        odd = tl.zeros([WORDS], tl.float32)
        for field in tl.static_range(4):
            if EVEN:
                value = tl.load(x + place + field * CODES.run)
                if FUSED.norm:
                    n = tl.load(norm + place + field * CODES.run)
            else:
                value = tl.load(x + place + field * CODES.run, mask=inside, other=0)
                if FUSED.norm:
                    n = tl.load(norm + place + field * CODES.run, mask=inside, other=0)
            x0, x1 = number(value, 0, TYPE), number(value, 1, TYPE)
            x2, x3 = number(value, 2, TYPE), number(value, 3, TYPE)
            if FUSED.norm:
                squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
                x0 *= number(n, 0, TYPE)
                x1 *= number(n, 1, TYPE)
                x2 *= number(n, 2, TYPE)
                x3 *= number(n, 3, TYPE)
            if field % 2 == 0:
                even += (x0 + x1) + (x2 + x3)
            else:
                odd += (x0 + x1) + (x2 + x3)
                x0 *= 0.0625
                x1 *= 0.0625
                x2 *= 0.0625
                x3 *= 0.0625
            part += codes16[4 * field] * x0[None, :]
            part += codes16[4 * field + 1] * x1[None, :]
            part += codes16[4 * field + 2] * x2[None, :]
            part += codes16[4 * field + 3] * x3[None, :]
        part -= ((1024.0 + CODES.zero) * even + (64.0 + CODES.zero) * odd)[None, :]
        if CODES.offset == 1:
            acc += part * s + o * (even + odd)[None, :]
        elif CODES.offset == 2:
            acc += (part + o * (even + odd)[None, :]) * s
        else:
            acc += part * s
        w = ahead
    y = tl.sum(acc, axis=1)
    if FUSED.norm:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / (16 * words) + eps)
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
    """Return PTX that decodes a word; "" in the interpreter, which runs no PTX."""
    return _SIXTEEN if device.type == "cuda" else ""


def tile(rows: int, words: int) -> tuple[int, int, int]:
    """Return (ROWS, WORDS, warps), the fastest in a sweep over llama-8b's matrices on one H200.

    words: words of a row. For a few short rows, one step per row is fastest.
    """
    if rows >= 16384:
        return 8, 64, 1
    if rows > 4096:
        return 8, 128, 2
    return (4, 256, 2) if words <= 256 else (8, 256, 2)


def gemv4_fits(x: Tensor, weight: PackedWeight, norm: Tensor | None) -> bool:
    """Whether `gemv4` supports the inputs: one 16-bit token and 4-bit integers.

    Groups must have 32 or more inputs, and a norm must have x's dtype.
    """
    return (
        fits(x)
        and weight.form.bits == 4
        and code_of(weight) == INT
        and weight.form.span >= 2 * _WORD
        and in_words(x)
        and (norm is None or (norm.dtype == x.dtype and in_words(norm)))
    )


def gemv4(
    x: Tensor,  # [1, in]
    weight: PackedWeight,  # [out, in]; with a gate [2 * out, in]
    *,
    norm: Tensor | None = None,  # [in], in x's dtype
    eps: float = 0.0,
    gate: str | None = None,  # a key of GATES
    residual: Tensor | None = None,  # [1, out]
    config: tuple[int, int, int] | None = None,
) -> Tensor:
    """Return x @ weight.T for a single token and 4-bit weights, with fused norm, gate or residual.

    Returns [1, out] in x's dtype, accumulated in float32. `gemv4_fits` must be true.
    """
    assert gate is None or gate in GATES
    form, (rows, columns) = weight.form, weight.shape
    num_rows, words, warps = config or tile(rows, columns // _WORD)
    outs = rows // 2 if gate else rows
    per_program = num_rows // 2 if gate else num_rows
    out = x.new_empty((1, outs))
    _gemv4_kernel[(triton.cdiv(outs, per_program),)](
        x.view(torch.int64),
        weight.codes.view(torch.int64),
        weight.scale,
        weight.offset,
        weight.bias,
        None if norm is None else norm.view(torch.int64),
        residual,
        out,
        eps,
        outs,
        columns // _WORD,
        FUSED=fused(norm, gate, residual, weight.bias),
        CODES=Nibbles(
            ptx=decoder(x.device),
            zero=form.zero,
            offset=OFFSETS[form.offset],
            group=form.group // _WORD,
            run=form.span // _WORD,
        ),
        ROWS=num_rows,
        WORDS=words,
        EVEN=columns % (_WORD * words) == 0 and outs % per_program == 0,
        num_warps=warps,
        **pdl(x.device),
    )
    return out
