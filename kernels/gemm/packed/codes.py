"""The decoding of packed weights to numbers inside Triton kernels (`kernels.packed.PackedWeight`).

A nibble becomes a float32 when its bits are moved into the mantissa of 128, which gives 128 +
nibble. That takes a shift and a logical operation; a conversion would take two slower instructions.
The excess of 128 (`CodeFormat.base`) is subtracted once from the sum over a group. For bfloat16,
PTX decodes two numbers at a time.
"""

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch.device import compute_capability
from kernels.packed import E2M1, FLOAT8, PackedWeight

# Kinds of codes: 4- or 8-bit integers; e2m1; index in a table; e4m3, on devices with an instruction
# that converts e4m3, and without it.
INT, E2M1_CODE, TABLE, E4M3_CODE, E4M3_BITS = 0, 1, 2, 3, 4
OFFSETS = {"none": 0, "add": 1, "shift": 2}


@triton.jit
def nibble(words, table, AT: tl.constexpr, CODE: tl.constexpr):
    """Decode the nibble at bit 4 * AT of int16 words to float32.

    Returns code + 128 for integers, twice the number for e2m1, or the table's entry.
    """
    words = words.to(tl.int32)
    if CODE == 0:
        bits = words << (16 - 4 * AT)
        value = ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)
    elif CODE == 1:
        # Move exponent and mantissa to the low end of float32's exponent. This gives e2m1 times
        # 2^-126, also for subnormal numbers.
        sign = (words << (28 - 4 * AT)) & -0x80000000
        bits = words << (22 - 4 * AT)
        value = (sign | (bits & 0x01C00000)).to(tl.float32, bitcast=True)
        value *= 1.7014118346046923e38  # 2^127
    else:
        value = tl.load(table + ((words >> (4 * AT)) & 15))
    return value


@triton.jit
def eight_bits(codes, CODE: tl.constexpr):
    """Convert 8-bit codes to float32, without their scale."""
    if CODE == 3:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif CODE == 4:
        # Move e4m3's fields to float32's, whose exponent bias is 120 larger. This gives e4m3 times
        # 2^-120, also for subnormal numbers.
        bits = codes.to(tl.int32)
        bits = ((bits << 24) & -0x80000000) | ((bits & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        value = codes.to(tl.float32)
    return value


def converts(device: torch.device) -> bool:
    """Whether the device, or the interpreter, has instructions that convert 8-bit floats."""
    return compute_capability(device) >= FLOAT8


def code_of(weight: PackedWeight) -> int:
    if weight.form.code == "e4m3":
        return E4M3_CODE if converts(weight.codes.device) else E4M3_BITS
    if weight.form.table == E2M1:
        return E2M1_CODE
    return TABLE if weight.form.table else INT


class CodeFormat(NamedTuple):
    """The format of a packed weight in kernels, as one `tl.constexpr`.

    bits: size of a code, 4 or 8.
    code: INT, E2M1_CODE, TABLE, E4M3_CODE or E4M3_BITS.
    base: the number to subtract from decoded codes, for scale * (code - zero).
    offset: a value of OFFSETS.
    group: inputs that share a scale.
    band: outputs that share a scale.
    span: inputs after which the order of 4-bit codes repeats (`Format.span`).
    """

    bits: int
    code: int
    base: int
    offset: int
    group: int
    band: int
    span: int


def code_format(weight: PackedWeight) -> CodeFormat:
    """Return the kernels' constants for the weight's format."""
    form = weight.form
    code = code_of(weight)
    if form.bits == 4:
        base = (128 if code == INT else 0) + (form.zero if code == INT else 0)
    else:
        base = form.zero - 128 if form.code == "int" else 0
    span = form.span if form.bits == 4 else form.group
    offset = OFFSETS[form.offset]
    return CodeFormat(form.bits, code, base, offset, form.group, form.rows, span)


# ---- Pairs of codes as pairs of bfloat16 numbers: PTX for inline assembly ------------------------

_ONE, _MAGIC = 0x3F80, 0x4300  # 1 and 128 in bfloat16


def _twice(half: int) -> str:
    return f"0x{half << 16 | half:08x}"


def _bfloat16(value: float) -> int:
    """Return the bits of a number that bfloat16 represents exactly."""
    return int.from_bytes(struct.pack(">f", value)[:2], "big")


def nibbles(at: int, less: int) -> str:
    """Return PTX that decodes two nibbles to bfloat16 numbers 128 + nibble - less, in $0.

    The nibbles are at bit 4 * at of both 16-bit halves of $1. They are moved into the low bits of
    the mantissa of 128.
    """
    shift = f"shr.b32 t, $1, {4 * at};" if at else "mov.b32 t, $1;"
    decode = f"lop3.b32 t, t, 0x000f000f, {_twice(_MAGIC)}, 0xea;"
    if not less:
        return f"{{ .reg .b32 t; {shift} {decode} mov.b32 $0, t; }}"
    return (
        f"{{ .reg .b32 t, o, z; {shift} {decode} mov.b32 o, {_twice(_ONE)}; "
        f"mov.b32 z, {_twice(_bfloat16(-less))}; fma.rn.bf16x2 $0, t, o, z; }}"
    )


def four_nibbles(weight: PackedWeight) -> list[str]:
    """Return PTX for each of a word's four nibbles, which decodes it to code minus zero point.

    For formats with an offset it decodes to code + 128.
    """
    form = weight.form
    return [nibbles(at, 0 if form.offset != "none" else 128 + form.zero) for at in range(4)]


# PTX: two bfloat16 numbers times 2^87.
LIFT = (
    f"{{ .reg .b32 k, z; mov.b32 k, {_twice(_bfloat16(2.0**87))}; mov.b32 z, 0x80008000; "
    f"fma.rn.bf16x2 $0, $1, k, z; }}"
)


def scaled_floats(at: int) -> str:
    """Return PTX that decodes two e2m1 nibbles and multiplies them by their scales, in $0.

    The nibbles are at bit 4 * at of both 16-bit halves of $1; $2 has the scales. The bfloat16
    results are 2^-126 times nibble times scale, because the nibbles' bits become the low end of
    bfloat16's exponent and the high end of its mantissa.
    """
    by = 6 - 4 * at
    bring = f"shl.b32 t, $1, {by};" if by > 0 else f"shr.b32 t, $1, {-by};"
    sign = f"shl.b32 u, $1, {12 - 4 * at};" if at < 3 else "mov.b32 u, $1;"
    return (
        f"{{ .reg .b32 t, u, z; {bring} and.b32 t, t, 0x01c001c0; {sign} "
        f"lop3.b32 t, u, 0x80008000, t, 0xea; mov.b32 z, 0x80008000; "
        f"fma.rn.bf16x2 $0, t, $2, z; }}"
    )


def integers_fit(weight: PackedWeight) -> bool:
    """Whether `four_nibbles` can decode the weight's 4-bit codes."""
    return code_of(weight) == INT and weight.form.zero < 128


def scales_only(weight: PackedWeight) -> bool:
    """Whether the weight's 8-bit codes have scales, and neither offsets nor zero points."""
    form = weight.form
    return form.offset == "none" and (form.code == "e4m3" or form.zero == 128)


def bytes_fit(weight: PackedWeight) -> bool:
    """Whether the weight's 8-bit codes have one scale per output, and no offset or zero point."""
    form = weight.form
    return scales_only(weight) and form.group == weight.shape[1] and form.rows == 1


def floats(high: bool) -> str:
    """Return PTX that converts the low or high bytes of $1's halves from e4m3 to bfloat16 in $0."""
    bring = "mov.b32 t, $1;" if high else "shl.b32 t, $1, 8;"
    return f"{{ .reg .b32 t, u; {bring} {_float_in('t', '$0')} }}"


def integers(high: bool) -> str:
    """Return PTX that converts the low or the high signed bytes of $1's halves to bfloat16 in $0.

    The low seven bits go into the mantissa of 128; then 128 is subtracted, or 256 if the sign bit
    is set.
    """
    bring = "shr.b32 t, $1, 8;" if high else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t, u; {bring} {_integer_in('t', '$0')} }}"


def four_bytes(code: int) -> str:
    """Return PTX that converts the four codes in $2, e4m3 or signed, to bfloat16 in $0 and $1."""
    if code in (E4M3_CODE, E4M3_BITS):  # spread codes into the high bytes of two halves
        spread, decode = ("0x1404", "0x3424"), _float_in
    else:
        spread, decode = ("0x4140", "0x4342"), _integer_in
    parts = (
        f"prmt.b32 t, $2, 0, {bytes_}; {decode('t', to)}"
        for bytes_, to in zip(spread, ("$0", "$1"), strict=True)
    )
    return f"{{ .reg .b32 t, u; {' '.join(parts)} }}"


def _float_in(source: str, to: str) -> str:
    """Return PTX that converts the e4m3 bytes in the high bytes of two halves to bfloat16."""
    return (
        f"shr.b32 u, {source}, 4; and.b32 u, u, 0x07f007f0; "
        f"lop3.b32 u, {source}, 0x80008000, u, 0xea; "
        f"{{ .reg .b32 k, z; mov.b32 k, {_twice(_bfloat16(2.0**120))}; mov.b32 z, 0x80008000; "
        f"fma.rn.bf16x2 {to}, u, k, z; }}"
    )


def _integer_in(source: str, to: str) -> str:
    """Return PTX that converts the signed bytes in the low bytes of two halves to bfloat16."""
    return (
        f"lop3.b32 u, {source}, 0x007f007f, {_twice(_MAGIC)}, 0xea; "
        f"lop3.b32 {source}, {source}, 0x00800080, 0xc300c300, 0xea; "
        f"{{ .reg .b32 o; mov.b32 o, {_twice(_ONE)}; "
        f"fma.rn.bf16x2 {to}, u, o, {source}; }}"
    )
