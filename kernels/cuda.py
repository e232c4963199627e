"""The CUDA back end: every function of `kernels.dispatch.Kernels`, in Triton where that beats the library."""

from torch import Tensor
from torch.nn.functional import linear

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.attention_decode import attention_decode, plan
from kernels.attention_prefill import attention_prefill
from kernels.kv_write import rope_kv_write
from kernels.metadata import AttentionMeta
from kernels.norm import add_rms_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "attention",
    "gelu_tanh_mul",
    "linear",
    "prepare",
    "rms_norm",
    "rope_kv_write",
    "silu_mul",
]


def prepare(
    meta: AttentionMeta, num_heads: int, k_cache: Tensor, deterministic: bool = False
) -> None:
    """Plan the step's decodes (`attention_decode.plan`) into meta.plan; nothing where there are none."""
    if meta.num_decodes:
        _, num_kv_heads, _, head_dim = k_cache.shape
        meta.plan = plan(
            meta.kv_len[: meta.num_decodes],
            num_heads,
            num_kv_heads,
            head_dim,
            meta.max_kv_len,
            deterministic,
        )


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, meta: AttentionMeta
) -> Tensor:
    """See `kernels.dispatch.Kernels.attention`: leading decodes and the rest each have their kernel."""
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty((num_tokens, num_heads * head_dim))
    if meta.num_decodes:
        if meta.plan is None:
            prepare(meta, num_heads, k_cache)
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
            scale,
            first_entry=meta.num_decodes,
        )
    return out
