"""The decoding of quantised keys and values inside Triton kernels (formats:
`kernels.kv.quantized`).

Attention never multiplies an element by its scale. A key's scale multiplies its score, a value's
scale its softmax weight. Matmuls use the codes alone. Codes are converted to float16, which
represents every code exactly and takes fewer instructions than a conversion to bfloat16.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv.quantized import QuantizedKV

KINDS = {"int8": 1, "fp8": 2, "int4": 3}  # values of the constexpr KIND; 0 = unquantised


class CodePages(NamedTuple):
    """The format and layout of a cache of codes, as one `tl.constexpr`.

    kind: a value of KINDS; 0 = not quantised.
    code_page: stride between blocks in `QuantizedKV.codes`, in elements.
    number_page: stride between blocks in the result of `words`, in words.
    """

    kind: int
    code_page: int
    number_page: int


def code_pages(cache: QuantizedKV) -> CodePages:
    """Return the kernels' constants for the cache's format and layout."""
    pages = cache.codes.stride(0), cache.numbers.stride(0) // cache.form.words
    return CodePages(KINDS[cache.form.name], *pages)


def words(*caches: QuantizedKV) -> tuple[Tensor, ...]:
    """Return views of caches' scales and offsets: one int16 or int32 word per token and head."""
    kinds = {1: torch.int16, 2: torch.int32}
    return tuple(cache.numbers.view(kinds[cache.form.words]) for cache in caches)


def products(q: Tensor) -> dict[str, Any]:
    """Return the constexprs of a kernel's matmuls with codes.

    DTYPE: the dtype in which queries, softmax weights and codes are multiplied.
    ASM: whether inline PTX converts codes to float16, which is faster than the compiler's code, and
    which the interpreter cannot run. A byte or nibble becomes the low end of 1024's mantissa, so
    that no conversion instruction is needed.
    """
    dtype = tl.float32 if q.dtype == torch.float32 else tl.float16
    return {"DTYPE": dtype, "ASM": dtype == tl.float16 and not triton.knobs.runtime.interpret}


def pairs(cache: QuantizedKV) -> Tensor:
    """Return a view of a cache's codes as int16, two bytes each."""
    return cache.codes.view(torch.int16)


@triton.jit
def shift_of(query, odd):
    """Return log2 of a power of two, at least the largest magnitude in each row: [rows].

    query, odd: two halves of a row's elements. Divided by the power of two, bfloat16 numbers fit
    into float16 without overflow.
    """
    most = tl.maximum(tl.max(tl.abs(query), axis=1), tl.max(tl.abs(odd), axis=1))
    return tl.ceil(tl.log2(tl.maximum(most, 1e-30)))


@triton.jit
def words_at(words, page, in_page, mask, NUMBER_PAGE: tl.constexpr):
    """Load the words (scale and offset) of n tokens. page, in_page: block and row in the block."""
    return tl.load(words + page.to(tl.int64) * NUMBER_PAGE + in_page, mask=mask, other=0)


@triton.jit
def numbers_in(word, KIND: tl.constexpr):
    """Unpack words to (scale, least element) in float32.

    int8 and fp8 have no least element: the scale is returned in its place.

    A bfloat16 is read as bits, because Triton's interpreter reads it wrongly.
    """
    if KIND == 3:
        scale = (word << 16).to(tl.float32, bitcast=True)
        least = (word & -0x10000).to(tl.float32, bitcast=True)
    else:
        # Read as unsigned, since no scale is negative: ptxas takes 8 instructions to extend a sign.
        bits = word.to(tl.uint16, bitcast=True).to(tl.uint32)
        scale = (bits << 16).to(tl.float32, bitcast=True)
        least = scale
    return scale, least


@triton.jit
def middle_of(scale, least):
    """Return the element that int4's code 8 stands for.

    Matmuls use code - 8, and this element is added to the result. Numbers near zero lose less
    precision when softmax weights are rounded.
    """
    return least + 8.0 * scale


@triton.jit
def exponent_of(scale):
    """Estimate the binary logarithms of scales [n], in float32.

    The estimate is the float's exponent, linearly interpolated by its mantissa. It is at most 0.09
    too small, and never below -60.
    """
    bits = scale.to(tl.int32, bitcast=True).to(tl.float32)
    return tl.maximum(bits * (2.0**-23) - 127.0, -60.0)


@triton.jit
def parts_of(codes, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Convert codes [keys, bytes] to floats in two tensors, without applying scales.

    int4: the first tensor has the even elements minus 8, the second the odd elements minus 8.
    8 bits: both tensors have all elements.
    """
    if KIND == 3:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, c, less;
                mov.b32 c, 0x64646464;
                mov.b32 less, 0xE408E408;
                and.b32 a, $4, 0x0F0F0F0F;
                shr.u32 b, $4, 4;
                and.b32 b, b, 0x0F0F0F0F;
                prmt.b32 $0, a, c, 0x4140;
                prmt.b32 $1, a, c, 0x4342;
                prmt.b32 $2, b, c, 0x4140;
                prmt.b32 $3, b, c, 0x4342;
                add.rn.f16x2 $0, $0, less;
                add.rn.f16x2 $1, $1, less;
                add.rn.f16x2 $2, $2, less;
                add.rn.f16x2 $3, $3, less;
                }""",
                "=&r,=&r,=&r,=&r,r",
                [codes],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
        else:
            low = ((codes & 15).to(tl.int16) - 8).to(DTYPE)
            high = ((codes >> 4).to(tl.int16) - 8).to(DTYPE)
        return low, high
    if KIND == 1 and ASM:
        low = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, c, less;
            mov.b32 c, 0x64646464;
            mov.b32 less, 0xE480E480;
            xor.b32 a, $2, 0x80808080;
            prmt.b32 $0, a, c, 0x4140;
            prmt.b32 $1, a, c, 0x4342;
            add.rn.f16x2 $0, $0, less;
            add.rn.f16x2 $1, $1, less;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        low = codes.to(DTYPE)
    return low, low


@triton.jit
def elements_of(codes, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Convert codes [keys, bytes] to floats [keys, elements] in order; int4 codes minus 8."""
    if KIND == 3:
        KEYS: tl.constexpr = codes.shape[0]
        WIDTH: tl.constexpr = 2 * codes.shape[1]
        twice = tl.reshape(tl.join(codes, codes), [KEYS, WIDTH])
        if ASM:  # 1024 + low half, 1024 + 16 * high half
            numbers = tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, mask, big, each, less;
                mov.b32 mask, 0x00F0000F;
                mov.b32 big, 0x64006400;
                mov.b32 each, 0x2C003C00;
                mov.b32 less, 0xD480E408;
                prmt.b32 a, $2, 0, 0x4140;
                prmt.b32 b, $2, 0, 0x4342;
                lop3.b32 a, a, mask, big, 0xEA;
                lop3.b32 b, b, mask, big, 0xEA;
                fma.rn.f16x2 $0, a, each, less;
                fma.rn.f16x2 $1, b, each, less;
                }""",
                "=&r,=&r,r",
                [twice],
                dtype=tl.float16,
                is_pure=True,
                pack=4,
            )
        else:
            high = (tl.arange(0, WIDTH) % 2 == 1)[None, :]
            numbers = (tl.where(high, twice >> 4, twice & 15).to(tl.int16) - 8).to(DTYPE)
    else:
        numbers, _ = parts_of(codes, KIND, DTYPE, ASM)
    return numbers


@triton.jit
def pair_parts(codes, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Convert codes of values to floats in four tensors, without applying scales.

    codes: int16 [keys, pairs of bytes]. Loads for tensor cores can transpose pairs of bytes, but
        not bytes.

    int4: tensor i has every fourth element from element i on, minus 8. 8 bits: tensors 0 and 2 have
    the even elements, tensors 1 and 3 the odd elements.
    """
    if KIND == 3:
        if ASM:
            a, b, c, d = tl.inline_asm_elementwise(
                """{
                .reg .b32 x, y, z, mask, high, less;
                mov.b32 mask, 0x000F000F;
                mov.b32 high, 0x64006400;
                mov.b32 less, 0xE408E408;
                shr.u32 x, $4, 4;
                shr.u32 y, $4, 8;
                shr.u32 z, $4, 12;
                lop3.b32 $0, $4, mask, high, 0xEA;
                lop3.b32 $1, x, mask, high, 0xEA;
                lop3.b32 $2, y, mask, high, 0xEA;
                lop3.b32 $3, z, mask, high, 0xEA;
                add.rn.f16x2 $0, $0, less;
                add.rn.f16x2 $1, $1, less;
                add.rn.f16x2 $2, $2, less;
                add.rn.f16x2 $3, $3, less;
                }""",
                "=&r,=&r,=&r,=&r,r",
                [codes],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a = ((codes & 15) - 8).to(DTYPE)
            b = (((codes >> 4) & 15) - 8).to(DTYPE)
            c = (((codes >> 8) & 15) - 8).to(DTYPE)
            d = (((codes >> 12) & 15) - 8).to(DTYPE)
        return a, b, c, d
    if KIND == 1:
        if ASM:
            a, b = tl.inline_asm_elementwise(
                """{
                .reg .b32 x, c, less;
                mov.b32 c, 0x64646464;
                mov.b32 less, 0xE480E480;
                xor.b32 x, $2, 0x80808080;
                prmt.b32 $0, x, c, 0x4240;
                prmt.b32 $1, x, c, 0x4341;
                add.rn.f16x2 $0, $0, less;
                add.rn.f16x2 $1, $1, less;
                }""",
                "=&r,=&r,r",
                [codes],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            a, b = ((codes << 8) >> 8).to(DTYPE), (codes >> 8).to(DTYPE)
    elif ASM:
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 x;
            .reg .b16 low, high;
            prmt.b32 x, $2, 0, 0x3120;
            mov.b32 {low, high}, x;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = (codes & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        b = ((codes >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return a, b, a, b


@triton.jit
def up(x):
    """Round x >= 0 up to the next number that bfloat16 represents; x and result are float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """Round x to the nearest number that bfloat16 represents; x and result are float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(low, high, KIND: tl.constexpr):
    """Return (scale, least element) for quantising heads whose elements are within [low, high].

    The least element is 0 for int8 and fp8.
    """
    if KIND == 3:
        least = rounded(low)
        scale = up(tl.maximum(high - least, 0.0) / 15.0)
    else:
        least = tl.zeros_like(low)
        most = 448.0 if KIND == 2 else 127.0
        scale = up(tl.maximum(high, -low) / most)
    return scale, least


@triton.jit
def store_numbers(words, at, scale, least, mask, KIND: tl.constexpr):
    """Store the scale and the least element of each of n heads, packed into one word a head.

    at: [n], indices into `words`.
    """
    bits = scale.to(tl.int32, bitcast=True) >> 16
    if KIND == 3:
        tl.store(words + at, bits | least.to(tl.int32, bitcast=True), mask=mask)
    else:
        tl.store(words + at, bits.to(tl.int16), mask=mask)


@triton.jit
def store_codes(target, x, scale, least, exists, count, KIND: tl.constexpr):
    """Quantise x [heads, n] and store its codes at the pointers target [heads, 1].

    exists: [heads], mask of the heads to store.
    count: the number of elements to store, even for int4.
    """
    size: tl.constexpr = x.shape[1]
    inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None]
    if KIND == 2:
        code = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0).to(tl.float8e4nv)
        at = tl.arange(0, size)
        tl.store(target + at[None, :], code, mask=exists[:, None] & (at < count)[None, :])
    elif KIND == 1:
        code = nearest(tl.minimum(tl.maximum(x * inverse, -127.0), 127.0))
        at = tl.arange(0, size)
        mask = exists[:, None] & (at < count)[None, :]
        tl.store(target + at[None, :], code.to(tl.int8), mask=mask)
    else:
        above = (x - least[:, None]) * inverse
        code = nearest(tl.minimum(tl.maximum(above, 0.0), 15.0))
        even, odd = tl.split(tl.reshape(code, [x.shape[0], size // 2, 2]))
        at = tl.arange(0, size // 2)
        mask = exists[:, None] & (at < count // 2)[None, :]
        tl.store(target + at[None, :], (even | (odd << 4)).to(tl.uint8), mask=mask)


@triton.jit
def nearest(x):
    """Round float32 x to int32, ties to even, by adding 1.5 * 2^23, where floats are integers."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def by_hadamard(x, STAGES: tl.constexpr):
    """Multiply each block of 2^STAGES elements of x [heads, n] by a Hadamard matrix.

    See `kernels.kv.quantized.by_hadamard`.
    """
    heads: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    # Sums over pairs take warp shuffles. Exchanging the halves would go through shared memory.
    second = (tl.arange(0, 2) == 1)[None, None, :, None]
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [heads, size // (2 << stage), 2, 1 << stage])
        total = tl.expand_dims(tl.sum(pairs, axis=2), 2)
        apart = tl.expand_dims(tl.sum(tl.where(second, -pairs, pairs), axis=2), 2)
        x = tl.reshape(tl.where(second, apart, total), [heads, size])
    return x * (2.0 ** (-0.5 * STAGES))
