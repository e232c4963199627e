"""Launches of the kernels that compute attention and write KV caches."""

from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime import driver

from kernels.activation import sigmoid_mul
from kernels.attention.candidates import takes_specialized_prefill
from kernels.attention.decode import attention_decode
from kernels.attention.decode_plan import plan
from kernels.attention.inputs import (
    AbsorbedInputs,
    AttentionInputs,
    LatentInputs,
    attention_form,
)
from kernels.attention.latent.decode import latent_decode, plan_latent
from kernels.attention.latent.expanded import latent_expanded
from kernels.attention.latent.prefill import latent_prefill
from kernels.attention.latent.specialized_decode import specialized_decode
from kernels.attention.latent.write import latent_write
from kernels.attention.prefill import attention_prefill
from kernels.attention.quantized_decode import quantized_decode
from kernels.attention.quantized_prefill import quantized_prefill
from kernels.attention.specialized_prefill import specialized_prefill
from kernels.attention.whole_texts import attend_texts, rotate_texts
from kernels.kv.format import FORMATS
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.kv.write import rope_kv_write
from kernels.metadata import AttentionMeta
from tests.kernels.launches.sizes import BLOCK_SIZE, EPS, MODELS, NUM_BLOCKS, bf16, int32, int64


def attention(model: str) -> None:
    """Launch the rotary embedding, cache writes, attention of prompts and of decodes, and
    bidirectional attention."""
    for size in (72, 128):
        texts, cos_sin = bf16(300, 3 * 16 * size), torch.empty(300, size)
        rotate_texts(texts, cos_sin, int32(300), 16)
        attend_texts(texts, int32(3), 16, size**-0.5)
    d = MODELS[model]
    heads, dim = d.num_heads + 2 * d.num_kv_heads, d.head_dim
    k_cache, v_cache = (bf16(NUM_BLOCKS, d.num_kv_heads, BLOCK_SIZE, dim) for _ in range(2))
    norms = (bf16(dim), bf16(dim)) if d.qk_norm else (None, None)
    for num_tokens in (5, 300):  # with and without programmatic dependent launch
        meta = AttentionMeta(
            positions=int32(num_tokens),
            slots=int64(num_tokens),
            query_start=int32(3),
            kv_len=int32(2),
            block_table=int32(2, 40),
            num_decodes=0,
            max_kv_len=600,
            counts=int32(2),
        )
        qkv, cos_sin = bf16(num_tokens, heads * dim), torch.empty(1024, dim)
        q = rope_kv_write(
            RopeInputs(qkv, cos_sin, *norms, EPS, k_cache, v_cache, d.num_heads), meta
        )
        gates = bf16(num_tokens, d.num_heads * dim)  # a gate after each query
        both = torch.cat((qkv, gates), 1)
        rope_kv_write(
            RopeInputs(both, cos_sin, *norms, EPS, k_cache, v_cache, d.num_heads, gated=True), meta
        )
        behind = both[:, : 2 * d.num_heads * dim].unflatten(1, (d.num_heads, 2, dim))[:, :, 1]
        sigmoid_mul(gates, behind)
    inputs = AttentionInputs(q, k_cache, v_cache, dim**-0.5)
    for deterministic in (False, True):
        attention_prefill(inputs, meta, torch.empty_like(q), deterministic)
    hopper = driver.active.get_current_target().arch == 90
    if hopper and takes_specialized_prefill(attention_form(inputs), (9, 0)):
        specialized_prefill(inputs, meta, torch.empty_like(q))
    for entries in (1, 20, 64, 512):
        step = _decodes(entries, d.num_heads, k_cache)
        q = bf16(entries, d.num_heads, dim)
        inputs = AttentionInputs(q, k_cache, v_cache, dim**-0.5)
        attention_decode(inputs, step, torch.empty_like(q))
        counts = int32(1)
        step.plan = plan(step.kv_len, d.num_heads, k_cache, 8192, counts, rows=int32(entries))
        attention_decode(inputs, step, torch.empty_like(q))
    # Masks and changes of scores that some layers have (tests/kernels/test_masks.py).
    heads32 = torch.empty(d.num_heads)
    for window, chunk, how in (
        (1024, 0, (0.0, None, None)),
        (0, 8192, (50.0, None, None)),
        (128, 0, (0.0, heads32, None)),
        (0, 0, (0.0, None, heads32)),
    ):
        step = _decodes(20, d.num_heads, k_cache, window, chunk)
        q = bf16(20, d.num_heads, dim)
        out = torch.empty_like(q)
        inputs = AttentionInputs(q, k_cache, v_cache, dim**-0.5, *how)
        attention_decode(inputs, step, out)
        meta.window, meta.chunk = window, chunk
        for deterministic in (False, True):
            attention_prefill(inputs, meta, out, deterministic)
        if hopper and takes_specialized_prefill(attention_form(inputs), (9, 0)):
            specialized_prefill(inputs, meta, out)


def _step(entries: int) -> AttentionMeta:
    """Return the metadata of a step of decodes alone."""
    table = int32(entries, 512)
    return AttentionMeta(
        int32(entries), int64(entries), int32(entries + 1), int32(entries), table, entries, 8192
    )


def _decodes(
    entries: int, heads: int, k_cache: Cache, window: int = 0, chunk: int = 0
) -> AttentionMeta:
    """Return the metadata of a step of decodes alone, with its plan."""
    meta = _step(entries)
    meta.plan = plan(meta.kv_len, heads, k_cache, 8192, int32(1), window, chunk)
    return meta


def _latent_decodes(entries: int, heads: int, rank: int, cache: Tensor) -> AttentionMeta:
    """Return the metadata of a step of decodes over latents, with its plan."""
    meta = _step(entries)
    meta.plan = plan_latent(meta.kv_len, heads, rank, cache, 8192, int32(1))
    return meta


def quantized_attention(model: str) -> None:
    """Launch cache writes and attention over quantised keys and values."""
    d = MODELS[model]
    heads, dim = d.num_heads + 2 * d.num_kv_heads, d.head_dim
    norms = (bf16(dim), bf16(dim)) if d.qk_norm else (None, None)
    heads32 = torch.empty(d.num_heads)
    for form in FORMATS.values():
        if form.name == "fp8" and driver.active.get_current_target().arch < 89:
            continue  # engine/resolve.py refuses this dtype on such GPUs
        form = replace(form, hadamard=dim // 2) if form.name == "int4" else form
        shape = (NUM_BLOCKS, d.num_kv_heads, BLOCK_SIZE, dim)
        k_cache, v_cache = (QuantizedKV.empty(form, shape) for _ in range(2))
        meta = AttentionMeta(
            int32(5), int64(5), int32(3), int32(2), int32(2, 40), 0, 600, counts=int32(2)
        )
        qkv, cos_sin = bf16(5, heads * dim), torch.empty(1024, dim)
        q = rope_kv_write(
            RopeInputs(qkv, cos_sin, *norms, EPS, k_cache, v_cache, d.num_heads), meta
        )
        out = torch.empty_like(q)
        inputs = AttentionInputs(q, k_cache, v_cache, dim**-0.5)
        for deterministic in (False, True):
            quantized_prefill(inputs, meta, out, deterministic)
        meta.window = 1024
        quantized_prefill(inputs._replace(softcap=50.0, sinks=heads32), meta, out)
        q = bf16(512, d.num_heads, dim)
        out = torch.empty_like(q)
        for entries in (1, 20, 64, 512):
            step = _decodes(entries, d.num_heads, k_cache)
            inputs = AttentionInputs(q[:entries], k_cache, v_cache, dim**-0.5)
            quantized_decode(inputs, step, out)
        for how in ((50.0, heads32, None), (0.0, None, heads32)):
            quantized_decode(AttentionInputs(q, k_cache, v_cache, dim**-0.5, *how), step, out)


# (heads, elements of a head without rotary embedding) of DeepSeek-V3, GLM-4.7-Flash and
# DeepSeek-V2-Lite.
LATENTS = {"llama-8b": (128, 128), "qwen3-0.6b": (20, 192), "smollm2-135m": (16, 128)}


def latent(model: str) -> None:
    """Launch cache writes, decodes and chunks over latents of 512 + 64 elements, also in
    float32."""
    heads, nope = LATENTS[model]
    rank, rope = 512, 64
    for dtype in (torch.bfloat16, torch.float32):
        cache = torch.empty(NUM_BLOCKS, 1, BLOCK_SIZE, rank + rope, dtype=dtype)
        meta = AttentionMeta(
            int32(20), int64(20), int32(3), int32(2), int32(2, 40), 0, 600, counts=int32(2)
        )
        down = torch.empty(20, heads * (nope + rope) + rank + rope, dtype=dtype)
        q = down[:, : -(rank + rope)].unflatten(1, (heads, nope + rope))
        norm, cos_sin = torch.empty(rank, dtype=dtype), torch.empty(1024, rope)
        q = latent_write(q, down[:, -(rank + rope) :], norm, EPS, cos_sin, cache, meta)
        absorbed = torch.empty(heads, 20, rank, dtype=dtype)
        out = torch.empty(20, heads, rank, dtype=dtype)
        queries = AbsorbedInputs(absorbed, q, cache, 0.1)
        latent_prefill(queries, meta, out)
        meta = replace(meta, query_start_host=[0, 10, 20], kv_len_host=[40, 30])
        up = torch.empty(heads, nope + 128, rank, dtype=dtype)
        latent_expanded(LatentInputs(q, cache, up, 0.1), meta, out[:, :, :128].contiguous())
        for entries in (20, 64):  # the launch for few entries, and the one for many
            latent_decode(queries, _latent_decodes(entries, heads, rank, cache), out)
            hopper = driver.active.get_current_target().arch == 90
            if hopper and dtype == torch.bfloat16 and entries == 64:
                q, tall = bf16(entries, 128, nope + rope), bf16(128, entries, rank)
                step = _latent_decodes(entries, 128, rank, cache)
                inputs = AbsorbedInputs(tall, q, cache, 0.1)
                specialized_decode(inputs, step, bf16(entries, 128, rank))
