"""Kernels over keys and values in 8 and 4 bits: what they write, against the reference; what they
read, against float64 over the same numbers."""

from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.dispatch import kernels_for
from kernels.kv.format import FORMATS, KVFormat
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import QuantizedKV, dequantize
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.oracle import (
    BOUND,
    DEVICE,
    DTYPES,
    attention,
    multiply_rows_apart,
    paged,
    random,
    row_error,
)

pytestmark = pytest.mark.triton
gpu = pytest.mark.gpu
cuda, cuda_deterministic = kernels_for("cuda"), kernels_for("cuda", True)
forms = pytest.mark.parametrize("name", FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slow(*values: Any) -> Any:
    """Mark a case that takes seconds in the interpreter."""
    return pytest.param(*values, marks=() if DEVICE == "cuda" else pytest.mark.slow)


def quantized(name: str, cache: Tensor) -> QuantizedKV:
    """Return the quantised numbers of a plain cache.

    Where that has NaN, codes and scales are NaN, or as large as they can be.
    """
    form = FORMATS[name]
    quantised = QuantizedKV.empty(form, tuple(cache.shape), cache.device)  # type: ignore[arg-type]
    quantised.codes.view(torch.uint8).fill_(0x7F)
    quantised.numbers.fill_(torch.nan)
    blocks, heads, places = (~cache.isnan().any(-1)).nonzero().unbind(-1)
    quantised.write(blocks, heads, places, cache[blocks, heads, places])
    return quantised


def plain(cache: QuantizedKV) -> Tensor:
    """Return the cache's numbers in float64, as `oracle.attention` takes them."""
    raw = dequantize(cache.form, cache.codes, cache.numbers)
    return raw.double()


def check(
    name: str,
    kv_len: list[int],
    query_len: list[int],
    heads: tuple[int, int, int],  # query heads, key heads, elements
    block_size: int,
    decodes: int,
    dtype: torch.dtype,
    sees: tuple[int, int] = (0, 0),
    padding: int = 0,
    back_ends: tuple[Any, ...] = (cuda, cuda_deterministic),
    **how: Any,
) -> AttentionMeta:
    num_heads, kv_heads, dim = heads
    *caches, meta = paged(
        kv_len, query_len, kv_heads, dim, block_size, decodes, torch.float32, padding=padding
    )
    meta.window, meta.chunk = sees
    # Scales of neighbours that differ: one that is taken for another is not within rounding.
    for cache in caches:
        cache *= torch.rand(*cache.shape[:-1], 1, device=DEVICE) * 4 + 0.05
    for entry, (length, queries) in enumerate(zip(kv_len, query_len, strict=True)):
        first = int(meta.first_key(length - queries)) // block_size
        for block in meta.block_table[entry, :first].tolist():
            for cache in caches:
                cache[block] = torch.nan
        meta.block_table[entry, :first] = 2**30
    k_cache, v_cache = (quantized(name, cache) for cache in caches)
    q = random(sum(query_len) + padding, num_heads, dim, dtype=dtype)
    want = attention(q, plain(k_cache), plain(v_cache), dim**-0.5, meta, **how)
    for back_end in back_ends:
        meta.plan = meta.counts = None
        back_end.prepare(meta, num_heads, k_cache)
        for _ in range(2 if back_end is cuda else 1):  # counters are as the first layer found them
            out = back_end.attention(
                AttentionInputs(q, k_cache, v_cache, dim**-0.5, **how), meta
            ).view(q.shape)
            assert out.isfinite().all()
            assert row_error(out[: len(want)], want) < BOUND[dtype]
    return meta


@forms
@pytest.mark.parametrize(
    ("dtype", "block_size", "dim"),
    [(DTYPES[0], 16, 64), (DTYPES[1], 16, 32), slow(DTYPES[1], 1, 128), slow(DTYPES[-1], 64, 64)],
    ids=str,
)
def test_mixed_step(name: str, dtype: torch.dtype, block_size: int, dim: int) -> None:
    """A scale of another key, of values for keys, or of a tile too late; halves of a byte
    exchanged; a page of NaN read through a weight of zero."""
    kv_len, query_len = [150, 1, 35, 70], [1, 1, 35, 3]
    check(name, kv_len, query_len, (4, 1, dim), block_size, 2, dtype, padding=5)


@forms
@pytest.mark.parametrize(
    "heads",
    [(5, 1, 80), *(slow(shape) for shape in [(4, 4, 96), (24, 1, 64), (9, 3, 256), (4, 2, 16)])],
    ids=str,
)
def test_heads(name: str, heads: tuple[int, int, int]) -> None:
    """Padded heads or elements in the sums; groups that are no power of two."""
    check(name, [130, 33, 40, 75], [1, 1, 7, 33], heads, 16, 2, DTYPES[0])


@forms
@pytest.mark.parametrize(
    ("sees", "how"),
    [((20, 0), "sinks"), slow((0, 24), "cap"), slow((64, 0), "plain"), slow((0, 0), "slopes"),
     slow((0, 0), "cap and sinks")],
    ids=str,
)  # fmt: skip
def test_what_is_seen_and_scored(name: str, sees: tuple[int, int], how: str) -> None:
    """A mask off by one, a block read that went back, a cap before the scale, a sink that counts
    with a value's scale."""
    torch.manual_seed(0)
    kv_len, query_len = [130, 3, 65, 50, 17], [1, 1, 3, 25, 17]
    extra: dict[str, Any] = {"softcap": 3.0} if "cap" in how else {}
    if "sinks" in how:
        extra["sinks"] = torch.randn(8, device=DEVICE).abs() * 4
    if how == "slopes":
        extra["slopes"] = torch.rand(8, device=DEVICE) * 0.3
    check(name, kv_len, query_len, (8, 1, 32), 16, 2, torch.float32, sees, 5, **extra)


@forms
@pytest.mark.parametrize("lengths", [[1100], slow([2600, *[1] * 80])], ids=["grid", "last"])
def test_decodes_in_splits(name: str, lengths: list[int]) -> None:
    """Splits merged with the wrong weights, or without the odd elements."""
    count = len(lengths) if DEVICE == "cuda" else min(len(lengths), 6)  # the interpreter is slow
    dtype = DTYPES[1] if DEVICE == "cpu" else DTYPES[0]
    heads = (8, 4, 64)
    meta = check(name, lengths[:count], [1] * count, heads, 16, count, dtype, back_ends=(cuda,))
    assert int(meta.plan.count[0]) > count, "nothing was split"


@forms
def test_numbers_that_are_far_apart(name: str) -> None:
    """float16 overflows, or loses a value whose scale is small, where factors of keys and values
    are not taken out first; a value of zeros is divided by its scale."""
    dtype = DTYPES[1] if DEVICE == "cpu" else DTYPES[0]
    *caches, meta = paged([200, 90], [1, 40], 2, 64, 16, 1, torch.float32)
    q = (random(41, 4, 64) * 3e3).to(dtype)
    keys, values = caches
    keys *= 1e-3
    values *= torch.logspace(-6, 5, values.shape[2], device=DEVICE)[:, None]
    values[:, :, 3] *= torch.where(values[:, :, 3].isnan(), torch.nan, 0.0)
    k_cache, v_cache = (quantized(name, cache) for cache in caches)
    want = attention(q, plain(k_cache), plain(v_cache), 0.125, meta)
    for back_end in (cuda, cuda_deterministic):
        meta.plan = meta.counts = None
        out = back_end.attention(AttentionInputs(q, k_cache, v_cache, 0.125), meta).view(q.shape)
        if dtype == torch.float16:  # whose results end at 65504
            want = want.clamp(-65504, 65504)
            out = out.nan_to_num(nan=0.0)
        assert row_error(out, want) < 2 * BOUND[dtype]


# What a number may differ by from the reference's, in the largest magnitude of its head: where both
# round what lies between two. The interpreter's e4m3 loses the carry of 1.96 to 2.
STEP = {"int8": 1 / 127, "fp8": 1 / 8 if DEVICE == "cuda" else 1 / 2, "int4": 2 / 15}


@forms
@dtypes
@pytest.mark.parametrize(
    ("norm", "shape"),
    [(True, (9, 3, 64, 64, 16)), (False, (5, 1, 80, 80, 1)), (True, (8, 8, 96, 48, 32)),
     slow(False, (16, 8, 128, 128, 64)), slow(True, (4, 1, 256, 64, 16))],
    ids=str,
)  # fmt: skip
def test_keys_and_values_are_written(
    name: str, shape: tuple[int, ...], norm: bool, dtype: torch.dtype
) -> None:
    """A maximum over padding or over half a head, the wrong half rotated, queries rotated otherwise
    than keys, slot -1 written to, a block's codes over another's scales."""
    num_heads, kv_heads, dim, rotary, block_size = shape
    form = rotated_form(name, dim, rotary)
    count, num_blocks = 11, 24
    qkv = random(count, (num_heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[3] = 0.0
    cos_sin = random(64, rotary)
    weights = [random(dim, dtype=dtype) if norm else None for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:count]
    slots[[2, 7]] = -1
    positions = torch.randint(0, 64, (count,), device=DEVICE).int()
    starts = torch.arange(count + 1, device=DEVICE).int()
    tables = torch.zeros(count, 1, device=DEVICE).int()
    quantised, queries = [], []
    for back_end, inputs in (
        (cuda, (qkv, cos_sin, *weights)),
        (
            Kernels(),
            [None if tensor is None else tensor.float() for tensor in (qkv, cos_sin, *weights)],
        ),
    ):
        caches = [
            QuantizedKV.empty(form, (num_blocks, kv_heads, block_size, dim), DEVICE)
            for _ in range(2)
        ]
        meta = AttentionMeta(positions, slots, starts, positions + 1, tables, count, 64)
        q = back_end.rope_kv_write(RopeInputs(*inputs, 1e-6, *caches, num_heads), meta)
        queries.append(q)
        quantised.append(caches)
    assert row_error(*queries) < BOUND[dtype]
    written = slots >= 0
    at = (slots[written] // block_size, slice(None), slots[written] % block_size)
    for ours, theirs in zip(*quantised, strict=True):
        got, want = plain(ours)[at], plain(theirs)[at]
        most = want.abs().amax(-1, keepdim=True) * STEP[name] * 1.02
        assert ((got - want).abs() <= most).all()
        assert float((got != want).float().mean()) < 0.07
        for tensor in (ours.codes.view(torch.uint8), ours.numbers):  # nothing else was touched
            tensor[at] = 0
            assert not tensor.any()


def rotated_form(name: str, dim: int, rotary: int) -> KVFormat:
    pieces = gcd(rotary // 2, dim - rotary)
    return replace(FORMATS[name], hadamard=pieces & -pieces) if name == "int4" else FORMATS[name]


@forms
def test_deterministic_rows_ignore_the_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's numbers that depend on other rows of its tile, or on where its chunk begins."""
    multiply_rows_apart(monkeypatch)
    *caches, meta = paged([80], [80], 2, 64, 16, 0, torch.float32)
    k_cache, v_cache = (quantized(name, cache) for cache in caches)
    q = random(80, 4, 64, dtype=DTYPES[-1])
    parts = []
    for borders in ((0, 80), (0, 37, 80), (0, 79, 80), (0, 16, 48, 80)):
        chunks = []
        for begin, end in pairwise(borders):
            step = replace(
                meta,
                query_start=torch.tensor([0, end - begin], device=DEVICE).int(),
                kv_len=torch.tensor([end], device=DEVICE).int(),
                num_decodes=int(end - begin == 1), max_kv_len=end,
                plan=None, counts=None,
            )  # fmt: skip
            chunk = q[begin:end].contiguous()
            chunks.append(
                cuda_deterministic.attention(AttentionInputs(chunk, k_cache, v_cache, 0.125), step)
            )
        parts.append(torch.cat(chunks))
    assert all(torch.equal(part, parts[0]) for part in parts[1:])
