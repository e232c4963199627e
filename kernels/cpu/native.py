"""The CPU back end: the reference, with rotation and decode attention by generated kernels where
the machine and the shapes allow. Products are `engine.quantization`'s, by `kernels.cpu.linear`."""

from dataclasses import replace

from torch import Tensor

from kernels.cpu.attention import CpuAttention, attention_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels, PrefillChunk, Scores, attend_chunk, plan_chunks


class _NativePlan:
    """What the layers of a step share: kernels, chosen by the first rotation, and chunks."""

    def __init__(self, kernels: CpuAttention) -> None:
        self.kernels = kernels
        self.chunks: list[PrefillChunk] | None = None
        self.reference: AttentionMeta | None = None  # the step as the reference plans it


class Native(Kernels):
    def prepare(self, meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
        """The first layer does it."""

    def rope_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        meta: AttentionMeta,
    ) -> Tensor:
        if meta.plan is None:
            _, num_kv_heads, block_size, head_dim = k_cache.shape
            kernels = attention_for(
                num_heads,
                num_kv_heads,
                head_dim,
                block_size,
                cos_sin.shape[1],
                q_norm is not None,
                k_cache.dtype,
            )
            if kernels is not None:
                meta.plan = _NativePlan(kernels)
        if isinstance(meta.plan, _NativePlan):
            return meta.plan.kernels.rope_kv_write(
                qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, meta
            )
        return super().rope_kv_write(
            qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, num_heads, meta
        )

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        meta: AttentionMeta,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        plan = meta.plan
        if not isinstance(plan, _NativePlan):
            return super().attention(
                q, k_cache, v_cache, scale, meta, softcap=softcap, sinks=sinks, slopes=slopes
            )
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.shape[1]
        decodes = meta.num_decodes
        out = q.new_empty(num_tokens, num_heads * head_dim)
        if decodes and (softcap or sinks is not None or slopes is not None):
            if plan.reference is None:
                plan.reference = replace(meta, plan=None)
            return super().attention(
                q, k_cache, v_cache, scale, plan.reference,
                softcap=softcap, sinks=sinks, slopes=slopes,
            )  # fmt: skip
        if decodes:
            plan.kernels.decode(q, k_cache, v_cache, scale, meta, out)
        if decodes < num_tokens:
            if plan.chunks is None:
                plan.chunks = plan_chunks(meta, k_cache)
            grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
            how = Scores.of(num_kv_heads, scale, softcap, sinks, slopes)
            out[plan.chunks[-1].end if plan.chunks else decodes :].zero_()  # padding
            for chunk in plan.chunks:
                attended = attend_chunk(grouped, k_cache, v_cache, how, chunk)
                out[chunk.begin : chunk.end].view_as(attended).copy_(attended)
        return out
