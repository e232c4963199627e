"""The CUDA back end: `kernels.dispatch.Kernels`, in Triton where that beats the library."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.attention.decode import attention_decode, plan
from kernels.attention.prefill import attention_prefill
from kernels.gemm import cublaslt
from kernels.gemm.cublaslt_tune import tune
from kernels.gemm.gemv import fits, gemv
from kernels.gemm.small_m import few_rows, few_rows_fit
from kernels.kv_write import rope_kv_write
from kernels.lora import lora_add, lora_gated
from kernels.metadata import AttentionMeta
from kernels.norm import rms_norm

__all__ = [
    "DETERMINISTIC",
    "GATES",
    "attention",
    "gelu_tanh_mul",
    "linear",
    "linear_add",
    "lora_add",
    "lora_gated",
    "norm_gated_linear",
    "norm_linear",
    "prepare",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
    "tune_linear",
]

DETERMINISTIC = False
GATES = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if fits(x):
        return gemv(x, weight, bias)
    if few_rows_fit(x, weight):
        return few_rows(x, weight, bias)
    return cublaslt.linear(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    if fits(x):
        return gemv(x, weight, bias, norm=norm, eps=eps)
    return linear(rms_norm(x, norm, eps), weight, bias)


def norm_gated_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gate: str
) -> Tensor:
    if fits(x):
        return gemv(x, weight, bias, norm=norm, eps=eps, gate=gate)
    return GATES[gate](linear(rms_norm(x, norm, eps), weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if fits(x):
        return gemv(x, weight, bias, residual=residual)
    if few_rows_fit(x, weight):
        return few_rows(x, weight, bias, residual)
    if bias is not None:
        residual += bias
    return cublaslt.linear_add_(x, weight, residual)


def tune_linear(weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
    tune(weights, sizes, add)


def prepare(meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
    """Plan the step's decodes (`attention_decode.plan`) into meta.plan, if there are any."""
    if meta.counts is None:
        counts = [meta.num_decodes, len(meta.kv_len)]
        meta.counts = torch.tensor(counts, dtype=torch.int32, device=meta.kv_len.device)
    if meta.num_decodes:
        kv_len = meta.kv_len[: meta.num_decodes]
        meta.plan = plan(kv_len, num_heads, k_cache, meta.max_kv_len, meta.counts[:1])


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, meta: AttentionMeta
) -> Tensor:
    """Leading decodes and the rest each have their kernel."""
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if meta.counts is None:
        prepare(meta, num_heads, k_cache)
    assert meta.counts is not None
    if meta.num_decodes:
        attention_decode(q, k_cache, v_cache, out, meta.block_table, scale, meta.plan)
    if num_tokens > meta.num_decodes:
        attention_prefill(
            q,
            k_cache,
            v_cache,
            out,
            meta.block_table,
            meta.query_start,
            meta.kv_len,
            meta.counts,
            scale,
        )
    return out
