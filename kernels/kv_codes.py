"""Codes of cached keys and values inside Triton kernels (`kernels.quantized_kv` has their meaning).

Attention never multiplies an element by its scale. A key's numbers go into its score, a value's
into its weight; products are of the bare codes. These are in float16, which holds every code
exactly, and to which fewer instructions lead from 8 bits than to bfloat16.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized_kv import QuantizedKV

KINDS = {"int8": 1, "fp8": 2, "int4": 3}  # the constexpr KIND; 0 = numbers of the model's type


def constants(cache: QuantizedKV) -> dict[str, Any]:
    """Of the cache's format and layout, for a kernel: elements from a block to the next."""
    return {
        "KIND": KINDS[cache.form.name],
        "CODE_PAGE": cache.codes.stride(0),
        "NUMBER_PAGE": cache.numbers.stride(0),
    }


def words(*caches: QuantizedKV) -> tuple[Tensor, ...]:
    """Their numbers, as `number` reads them: int16."""
    return tuple(cache.numbers.view(torch.int16) for cache in caches)


def product_type(q: Tensor) -> tl.dtype:
    """Of queries, weights and codes where they are multiplied: the constexpr DTYPE."""
    return tl.float32 if q.dtype == torch.float32 else tl.float16


@triton.jit
def shift_of(query, odd):
    """[rows]: log2 of what brings a row's elements between -1 and 1, whole, so that float16 holds a
    bfloat16's digits."""
    most = tl.maximum(tl.max(tl.abs(query), axis=1), tl.max(tl.abs(odd), axis=1))
    return tl.ceil(tl.log2(tl.maximum(most, 1e-30)))


@triton.jit
def number(words, at, mask):
    """bfloat16 numbers as float32; read as int16, because the interpreter's bfloat16 is wrong."""
    bits = tl.load(words + at, mask=mask, other=0).to(tl.int32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def numbers_at(words, page, in_page, mask, NUMBER_PAGE: tl.constexpr, KIND: tl.constexpr):
    """Scale and least element of the rows in_page [n] of the blocks page [n]; for other kinds than
    int4 the latter is the scale once more."""
    at = page.to(tl.int64) * NUMBER_PAGE + in_page * (2 if KIND == 3 else 1)
    scale = number(words, at, mask)
    least = scale
    if KIND == 3:
        least = number(words, at + 1, mask)
    return scale, least


@triton.jit
def low_half(codes, dtype: tl.constexpr):
    """Of int4 the even elements; of 8 bits all."""
    if codes.dtype == tl.uint8:
        codes = codes & 15
    return codes.to(dtype)


@triton.jit
def high_half(codes, dtype: tl.constexpr):
    """Of int4 the odd elements."""
    return (codes >> 4).to(dtype)


@triton.jit
def up(x):
    """x >= 0 as the next number that a bfloat16 holds and that is not less."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """x as the nearest number that a bfloat16 holds."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(low, high, KIND: tl.constexpr):
    """Scale and least element of heads whose elements are low .. high."""
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
    """As int16 [n], at rows at [n]."""
    WORDS: tl.constexpr = 2 if KIND == 3 else 1
    bits = scale.to(tl.int32, bitcast=True) >> 16
    tl.store(words + at * WORDS, bits.to(tl.int16), mask=mask)
    if KIND == 3:
        bits = least.to(tl.int32, bitcast=True) >> 16
        tl.store(words + at * WORDS + 1, bits.to(tl.int16), mask=mask)


@triton.jit
def store_codes(target, x, scale, least, exists, count, KIND: tl.constexpr):
    """x [heads, n] to the codes at target [heads, 1], of the heads that exist and the first `count`
    elements, which are even for int4."""
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
        mask = exists[:, None] & (2 * at < count)[None, :]
        tl.store(target + at[None, :], (even | (odd << 4)).to(tl.uint8), mask=mask)


@triton.jit
def nearest(x):
    """int32, halves to the even one: at 1.5 * 2^23 a float32 has no fraction."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def turned(x, STAGES: tl.constexpr):
    """Each 2^STAGES elements of x [heads, n] by Hadamard's matrix: `quantized_kv.turned`."""
    heads: tl.constexpr = x.shape[0]
    size: tl.constexpr = x.shape[1]
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [heads, size // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        both = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(both, [heads, size])
    return x * (2.0 ** (-0.5 * STAGES))
