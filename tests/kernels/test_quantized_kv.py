"""Keys and values in 8 and 4 bits: what the reference writes and reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.kv.format import FORMATS, KVFormat
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import QuantizedKV, by_hadamard, dequantize, hadamard, quantize
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.layout import lay_out


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, meta: AttentionMeta) -> Tensor:
    """Return attention in float64, [num_tokens without padding, num_heads, head_dim], by entry."""
    size, group = keys.shape[2], q.shape[1] // keys.shape[1]
    starts, rows = meta.query_start.tolist(), []
    for entry, length in enumerate(meta.kv_len.tolist()):
        query = q[starts[entry] : starts[entry + 1]].double()
        at = torch.arange(length)
        blocks = meta.block_table[entry, at // size].long()
        key, value = (
            cache[blocks, :, at % size].double().repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
        position = torch.arange(length - len(query), length)
        score.masked_fill_(at > position[:, None], -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), value))
    return torch.cat(rows)


# The most that an element may be off by, in the largest magnitude of its head.
ERROR = {"int8": 0.5 / 127 * 1.01, "fp8": 1 / 16 * 1.01, "int4": 1 / 15 * 1.05}
forms = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


@forms
def test_an_element_is_off_by_half_a_step_at_most(form: KVFormat) -> None:
    """Bug: a scale rounded down lets the largest code overflow; a row of zeros becomes NaN."""
    x = torch.randn(200, 64) * torch.logspace(-6, 4, 200)[:, None]
    x[7] = 0.0
    x[8] = 3.0
    x[9, 1:] = 0.0
    got = dequantize(form, *quantize(form, x))
    most = x.abs().amax(-1, keepdim=True)
    assert ((got - x).abs() <= ERROR[form.name] * most).all()
    assert not got[7].any()


def test_codes_of_four_bits_lie_where_the_page_says() -> None:
    """Bug: halves of a byte exchanged, or neighbours packed into one."""
    form = FORMATS["int4"]
    x = torch.arange(16.0)[torch.randperm(16)][None] - 4
    codes, numbers = quantize(form, x)
    assert numbers.tolist() == [[1.0, -4.0]]
    raw = codes.numpy()[0]
    assert (np.stack((raw & 15, raw >> 4), 1).reshape(-1) == x[0].numpy() + 4).all()


def test_turning_changes_no_product_and_spreads_outliers() -> None:
    """Bug: a matrix that is not orthogonal; queries and keys rotated in different pieces."""
    form = replace(FORMATS["int4"], hadamard=16)
    matrix = hadamard(16, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix.T, torch.eye(16), atol=1e-6)
    q, k = torch.randn(5, 48), torch.randn(5, 48)
    k[:, 3] = 50.0
    assert torch.allclose(
        (by_hadamard(form, q) * by_hadamard(form, k)).sum(-1), (q * k).sum(-1), atol=1e-3
    )
    assert by_hadamard(form, k).abs().max() < 20


@forms
@pytest.mark.parametrize("block_size", [1, 4])
def test_attention_reads_what_was_written(form: KVFormat, block_size: int) -> None:
    """Bug: a head's scale taken for its neighbour's; padding written; a block's codes over
    another's scales; a chunk that reads the keys before they were rounded."""
    heads, kv_heads, dim = 4, 2, 16
    form = replace(form, hadamard=8) if form.name == "int4" else form
    entries = [(range(20), 6, 1), (range(40, 60), 0, 5), (range(20, 40), 3, 4)]
    kernels, scale = Kernels(), dim**-0.5
    cos_sin = torch.randn(32, dim)
    caches = [QuantizedKV.empty(form, (64, kv_heads, block_size, dim)) for _ in range(2)]
    before = lay_out([(blocks, 0, start) for blocks, start, _ in entries if start], block_size)
    step = lay_out(entries, block_size, padding=2)
    written = []
    for meta in (before, step):
        qkv = torch.randn(len(meta.positions), (heads + 2 * kv_heads) * dim)
        q = kernels.rope_kv_write(RopeInputs(qkv, cos_sin, None, None, 0.0, *caches, heads), meta)
        written.append(qkv.view(len(qkv), -1, dim)[:, heads + kv_heads :])
    out = kernels.attention(AttentionInputs(q, *caches, scale), step)
    dense = []
    for cache in caches:
        head = torch.arange(kv_heads)
        rows = cache.read(torch.arange(64).repeat_interleave(kv_heads), head.repeat(64))
        dense.append(rows.view(64, kv_heads, block_size, dim))
    want = attention(q, *dense, scale, step)
    assert torch.allclose(out[: len(want)].view(want.shape).double(), want, atol=1e-5)
    # Of the values, which nothing rotates: what the step wrote lies in its slots, and nowhere else.
    own = step.slots[:-2]
    got = dense[1][own // block_size, :, own % block_size]
    most = written[1][:-2].abs().amax(-1, keepdim=True)
    assert ((got - written[1][:-2]).abs() <= ERROR[form.name] * most).all()
    everything = torch.cat((before.slots, own))
    dense[1][everything // block_size, :, everything % block_size] = 0.0
    assert not dense[1].any()
