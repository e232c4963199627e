"""The CUDA back end where a token's numbers depend on its request alone
(`engine.config.EngineConfig.deterministic`): not on who else is in the step, nor on how its own
prompt was cut into chunks, found in the prefix cache, or computed again after a preemption.

So there is one way to do each thing: products in one order of summation whatever their rows, and
one attention kernel for decodes and chunks alike, that walks the keys from the first to the last
and never splits them. Everything else goes row by row anyway.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.attention.prefill import attention_prefill
from kernels.cuda import GATES
from kernels.gemm.deterministic import linear_fixed
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

DETERMINISTIC = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fixed(x, weight, bias)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fixed(rms_norm(x, norm, eps), weight, bias)


def norm_gated_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gate: str
) -> Tensor:
    return GATES[gate](norm_linear(x, norm, eps, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return linear_fixed(x, weight, bias, residual)


def tune_linear(weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
    """Nothing that time may decide."""


def prepare(meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
    if meta.counts is None:
        counts = [meta.num_decodes, len(meta.kv_len)]
        meta.counts = torch.tensor(counts, dtype=torch.int32, device=meta.kv_len.device)


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, meta: AttentionMeta
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if meta.counts is None:
        prepare(meta, num_heads, k_cache)
    assert meta.counts is not None
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
        deterministic=True,
    )
    return out
