"""Codes of packed weights as numbers, inside Triton kernels (`kernels.packed.PackedWeight`).

A nibble becomes a float32 by its place: as the fourth to seventh bit of the mantissa of 128 it is
128 + nibble, which takes a shift and one logical operation, where a conversion would take two
slower ones. What is too much by that (BASE) leaves the sum over a group once.
"""

from typing import Any

import triton
import triton.language as tl

from kernels.packed import E2M1, PackedWeight

INT, E2M1_CODE, TABLE, E4M3_CODE = 0, 1, 2, 3  # what a code is; the last is of 8 bits
OFFSETS = {"none": 0, "add": 1, "shift": 2}


@triton.jit
def nibble(words, table, AT: tl.constexpr, CODE: tl.constexpr):
    """Of int32 words the nibble at 4 * AT, as a float32: code + 128, or the number that it stands
    for (e2m1 times 2)."""
    if CODE == 0:
        bits = (words << (16 - 4 * AT)) if AT < 4 else (words >> (4 * AT - 16))
        value = ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)
    elif CODE == 1:
        # Exponent and mantissa at the low end of float32's exponent: e2m1 times 2^-126, subnormals
        # included.
        sign = (words << (28 - 4 * AT)) & -0x80000000
        bits = (words << (22 - 4 * AT)) if AT < 6 else (words >> (4 * AT - 22))
        value = (sign | (bits & 0x01C00000)).to(tl.float32, bitcast=True)
        value *= 1.7014118346046923e38  # 2^127
    else:
        value = tl.load(table + ((words >> (4 * AT)) & 15))
    return value


@triton.jit
def eight_bits(codes, CODE: tl.constexpr):
    """Of 8-bit codes the float32."""
    if CODE == 3:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32)


def code_of(weight: PackedWeight) -> int:
    if weight.form.code == "e4m3":
        return E4M3_CODE
    if weight.form.table == E2M1:
        return E2M1_CODE
    return TABLE if weight.form.table else INT


def constants(weight: PackedWeight) -> dict[str, Any]:
    """Of the weight's format, for a kernel.

    BASE: what is to be taken off a code as kernels decode it, for scale * (code - zero).
    """
    form = weight.form
    code = code_of(weight)
    if form.bits == 4:
        base = (128 if code == INT else 0) + (form.zero if code == INT else 0)
    else:
        base = form.zero - 128 if form.code == "int" else 0
    return {
        "BITS": form.bits,
        "CODE": code,
        "BASE": base,
        "OFFSET": OFFSETS[form.offset],
        "GROUP": form.group,
        "BAND": form.rows,
        "SPAN": form.span if form.bits == 4 else form.group,
    }
