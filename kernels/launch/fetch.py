"""Weights on their way to the L2 cache before what they are multiplied by is there."""

import triton
import triton.language as tl


@triton.jit
def fetch(rows, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """rows: pointers to the first of WIDTH numbers each, of which AHEAD, a power of two, are asked
    for. Of use before `gdc_wait`: what no kernel writes comes while the one before still runs. A
    load there would need registers, or be one that waits. Not in the interpreter, which knows no
    PTX."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # numbers in 128 bytes
    line = tl.minimum(tl.arange(0, AHEAD // LINE), (WIDTH - 1) // LINE)
    at = (rows[:, None] + (line * LINE)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
