"""The default CPU back end: generated kernels if machine and shapes allow, else plain torch.

Kernels are generated for rotary embeddings, attention, latent attention and recurrent layers.
Matmuls are not included: `engine.quantization` runs them with `kernels.cpu.gemm.linear`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.attention.reference import (
    PrefillChunk,
    Scores,
    attend_chunk,
    plan_chunks,
    without_gates,
)
from kernels.cpu.attention import CpuAttention, attention_for
from kernels.cpu.latent import decode as latent_decode
from kernels.cpu.latent.prefill import prefill as latent_prefill
from kernels.cpu.latent.prefill import worth_making
from kernels.cpu.latent.shape import shape_of
from kernels.cpu.prefill import Entries, prefill_for
from kernels.cpu.recurrent.back_end import Recurrent
from kernels.cpu.scores import Numbers
from kernels.cpu.whole_texts import whole_texts
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.metadata import AttentionMeta


class LayerKernels:
    """The attention kernels for the current layer's shape, as a part of a step's plan."""

    def __init__(self) -> None:
        self.kernels: CpuAttention | None = None  # None: the reference computes attention
        self._shape_key: tuple[int, bool] | None = None

    def choose(
        self, num_heads: int, k_cache: Cache, cos_sin: Tensor, q_norm: Tensor | None
    ) -> CpuAttention | None:
        """Return the kernels for a layer's shape of heads, or None to use the reference."""
        shape_key = (cos_sin.shape[1], q_norm is not None)
        if shape_key != self._shape_key:
            self._shape_key = shape_key
            _, num_kv_heads, block_size, head_dim = k_cache.shape
            if isinstance(k_cache, QuantizedKV):
                return None
            self.kernels = attention_for(
                num_heads, num_kv_heads, head_dim, block_size, *shape_key, k_cache.dtype
            )
        return self.kernels


class PlannedByFirstLayer(Recurrent):
    """A back end that plans a step when its first layer runs.

    `prepare` cannot plan yet, as only layers know their rotary embeddings and head norms.
    """

    def prepare(
        self, meta: AttentionMeta, num_heads: int, k_cache: Cache, latent_rank: int = 0
    ) -> None:
        """Do nothing: the step's first layer plans it."""

    def whole_texts(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        num_heads: int,
        scale: float,
        window: int,
        meta: AttentionMeta,
        dtype: torch.dtype,
    ) -> Tensor:
        attended = whole_texts(qkv, cos_sin, num_heads, scale, window, meta, dtype)
        if attended is not None:
            return attended
        return super().whole_texts(qkv, cos_sin, num_heads, scale, window, meta, dtype)


@dataclass(slots=True)
class _Chunk:
    """A prompt's chunk: tokens [begin, end) of the step.

    table: the request's block table. length: tokens of the request up to the chunk's end.
    """

    begin: int
    end: int
    table: Tensor
    length: int

    @property
    def positions(self) -> Tensor:
        count = self.end - self.begin
        return torch.arange(self.length - count, self.length, dtype=torch.int32)


class _NativePlan(LayerKernels):
    """The plan of a step's attention, which all its layers share.

    The plan has the generated kernels, the prompts' chunks for generated and for reference
    attention, and the plan of the torch reference.
    """

    def __init__(self, meta: AttentionMeta) -> None:
        super().__init__()
        self.reference = replace(meta, plan=None)
        self.gathered: list[PrefillChunk] | None = None
        self._meta = meta
        self._chunks: list[_Chunk] | None = None
        self._entries: Entries | None = None

    @property
    def entries(self) -> Entries:
        """The chunks' queries in the form that `kernels.cpu.prefill` takes."""
        if self._entries is None:
            spans = [
                (chunk.begin, chunk.end, chunk.table.data_ptr(), chunk.length)
                for chunk in self.chunks
            ]
            own = self._meta.positions.int()
            first = self._meta.first_key(own).contiguous()
            last = own if self._meta.last_keys is None else self._meta.last_keys
            self._entries = Entries(spans, first, last, self._meta.block_table)
        return self._entries

    @property
    def chunks(self) -> list[_Chunk]:
        """The prompts' chunks of the step."""
        if self._chunks is None:
            meta = self._meta
            starts = meta.query_start_host or meta.query_start.tolist()
            lengths = meta.kv_len_host or meta.kv_len.tolist()
            self._chunks = []
            for entry in range(meta.num_decodes, len(lengths)):
                begin, end, length = starts[entry], starts[entry + 1], lengths[entry]
                if begin < end:
                    table = meta.block_table[entry]
                    self._chunks.append(_Chunk(begin, end, table, length))
        return self._chunks


class Native(PlannedByFirstLayer):
    def rope_kv_write(self, inputs: RopeInputs, meta: AttentionMeta) -> Tensor:
        inputs = without_gates(inputs)
        if meta.plan is None:
            meta.plan = _NativePlan(meta)
        kernels = meta.plan.choose(inputs.num_heads, inputs.k_cache, inputs.cos_sin, inputs.q_norm)
        if kernels is not None:
            return kernels.rope_kv_write(inputs, *meta.rotation(inputs.cos_sin), meta.slots)
        return super().rope_kv_write(inputs, meta.plan.reference)

    def attention(self, inputs: AttentionInputs, meta: AttentionMeta) -> Tensor:
        if meta.plan is None:
            meta.plan = _NativePlan(meta)
        plan, decodes = meta.plan, meta.num_decodes
        if plan.kernels is None:
            return super().attention(inputs, plan.reference)
        q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1:3]
        out = q.new_empty(num_tokens, num_heads * head_dim)
        numbers = Numbers(softcap, sinks, slopes)
        if decodes:
            plan.kernels.decode(q, k_cache, v_cache, scale, meta, out, numbers)
        if decodes == num_tokens:
            return out
        prefill = prefill_for(
            num_heads, num_kv_heads, head_dim, block_size, k_cache.dtype, numbers.scored
        )
        if prefill:
            prefill(q, k_cache, v_cache, scale, plan.entries, out, numbers)
            end = plan.chunks[-1].end if plan.chunks else decodes
            out[end:].zero_()  # padding
            return out
        if plan.gathered is None:
            plan.gathered = plan_chunks(meta, k_cache)
        grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        how = Scores.of(inputs)
        out[plan.gathered[-1].end if plan.gathered else decodes :].zero_()  # padding
        for part in plan.gathered:
            attended = attend_chunk(grouped, k_cache, v_cache, how, part)
            out[part.begin : part.end].view_as(attended).copy_(attended)
        return out

    def latent_write(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        cache: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        if meta.plan is None:
            meta.plan = _NativePlan(meta)
        queries = latent_decode.write(q, latents, norm, eps, cos_sin, cache, meta)
        if queries is not None:
            return queries
        return super().latent_write(q, latents, norm, eps, cos_sin, cache, meta.plan.reference)

    def latent_attention(
        self, q: Tensor, cache: Tensor, up: Tensor, scale: float, meta: AttentionMeta
    ) -> Tensor:
        if meta.plan is None:
            meta.plan = _NativePlan(meta)
        plan, end = meta.plan, meta.num_decodes
        shape = shape_of(q, cache, up)
        if shape is None:
            return super().latent_attention(q, cache, up, scale, plan.reference)
        out = q.new_empty(len(q), shape.heads * shape.value)
        if end:
            latent_decode.attend(
                shape, q[:end], cache, up, scale, meta.kv_len, meta.block_table, meta.max_kv_len,
                out[:end],
            )  # fmt: skip
        if end == len(q):
            return out
        for chunk in plan.chunks:
            end = chunk.end
            own, into = q[chunk.begin : end], out[chunk.begin : end]
            if worth_making(len(own), chunk.length, shape):
                latent_prefill(shape, own, cache, up, scale, chunk.table, chunk.length, into)
            else:
                table = chunk.table.expand(len(own), -1)
                latent_decode.attend(
                    shape, own, cache, up, scale, chunk.positions + 1, table, chunk.length, into
                )
        out[end:].zero_()  # padding
        return out
