"""The CPU back end: the reference, with rotation and decode attention by generated kernels where
the machine and the shapes allow. Products are `engine.quantization`'s, by `kernels.cpu.linear`."""

from dataclasses import replace

from torch import Tensor

from kernels.attention.reference import PrefillChunk, Scores, attend_chunk, plan_chunks
from kernels.cpu.attention import CpuAttention, attention_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels


class LayerKernels:
    """The generated kernels of the layer that a step is at; a part of a step's plan."""

    def __init__(self) -> None:
        self.kernels: CpuAttention | None = None  # None: the reference
        self._turn: tuple[int, bool] | None = None

    def choose(
        self, num_heads: int, k_cache: Tensor, cos_sin: Tensor, q_norm: Tensor | None
    ) -> CpuAttention | None:
        """The kernels of a layer that turns and norms its heads so; None: the reference."""
        turn = (cos_sin.shape[1], q_norm is not None)
        if turn != self._turn:
            self._turn = turn
            _, num_kv_heads, block_size, head_dim = k_cache.shape
            self.kernels = attention_for(
                num_heads, num_kv_heads, head_dim, block_size, *turn, k_cache.dtype
            )
        return self.kernels


class PlannedByFirstLayer(Kernels):
    """A step is planned when its first layer runs: only layers know how they turn their heads."""

    def prepare(self, meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
        """Nothing yet."""


class _NativePlan(LayerKernels):
    """What the layers of a step share: generated kernels, chunks, and the step as the reference
    plans it, for what is not generated."""

    def __init__(self, meta: AttentionMeta) -> None:
        super().__init__()
        self.reference = replace(meta, plan=None)
        self.chunks: list[PrefillChunk] | None = None


class Native(PlannedByFirstLayer):
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
            meta.plan = _NativePlan(meta)
        kernels = meta.plan.choose(num_heads, k_cache, cos_sin, q_norm)
        if kernels is not None:
            return kernels.rope_kv_write(qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, meta)
        reference = meta.plan.reference
        return super().rope_kv_write(
            qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, num_heads, reference
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
        if meta.plan is None:
            meta.plan = _NativePlan(meta)
        plan, decodes = meta.plan, meta.num_decodes
        # Generated decodes see all keys, and their scores are plain.
        special = softcap or sinks is not None or slopes is not None or meta.window or meta.chunk
        if plan.kernels is None or (decodes and special):
            return super().attention(
                q, k_cache, v_cache, scale, plan.reference,
                softcap=softcap, sinks=sinks, slopes=slopes,
            )  # fmt: skip
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.shape[1]
        out = q.new_empty(num_tokens, num_heads * head_dim)
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
