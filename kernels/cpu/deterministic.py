"""The CPU back end of deterministic mode (`EngineConfig.deterministic`).

A token's results depend on its request alone. They depend neither on the other requests of a step
nor on how the prompt was chunked, cached or recomputed after a preemption.

Generated matmuls and recurrent layers are batch-invariant already. Attention computes every token
as a decode, because torch's attention over a chunk adds in another order. The remaining operations
run in torch row by row, because torch's algorithms depend on the number of rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.attention.reference import (
    Gather,
    Scores,
    attend_padded,
    block_rows,
    plan_writes,
    without_gates,
)
from kernels.cpu import norm
from kernels.cpu.latent import decode as latent_decode
from kernels.cpu.latent.shape import shape_of
from kernels.cpu.native import LayerKernels, PlannedByFirstLayer
from kernels.cpu.recurrent.back_end import Step
from kernels.cpu.scores import Numbers
from kernels.cpu.whole_texts import whole_texts
from kernels.experts.reference import ExpertWeights
from kernels.experts.routing import Routing
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep

_FIRST = torch.zeros(1, dtype=torch.int64)


def _by_row(function: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """Return function(x [n, ...], *rest), called for one row of x at a time."""
    # Clone rows to align them, because torch's vector loops start differently at unaligned rows.
    return torch.cat([function(row.clone(), *rest) for row in x.split(1)])


class _DeterministicPlan(LayerKernels):
    """The plan of a step's attention, which all its layers share.

    every: the step's metadata with each token as a decode.
    apart: the metadata of each token as a step of its own, for the reference implementation.
    """

    def __init__(self, meta: AttentionMeta) -> None:
        super().__init__()
        self.every = _as_decodes(meta)
        self._writes: list[AttentionMeta] = []

    @cached_property
    def apart(self) -> list[AttentionMeta]:
        return _apart(self.every)

    def writes(self, cache: Cache) -> list[AttentionMeta]:
        """Return each token's metadata as a step of its own, planned for cache writes alone."""
        if not self._writes:
            self._writes = _apart(self.every)
            for part in self._writes:
                part.plan = plan_writes(part, cache)
        return self._writes


class Deterministic(PlannedByFirstLayer):
    DETERMINISTIC = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = norm.rms_norm(x, weight, eps)  # batch-invariant
        return _by_row(super().rms_norm, x, weight, eps) if normed is None else normed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _by_row(super().linear, x, weight, bias)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _by_row(super().silu_mul, gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return _by_row(super().gelu_tanh_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return _by_row(super().gelu_mul, gate_up)

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        return _by_row(super().relu_mul, gate_up)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        normed = norm.layer_norm(x, weight, bias, eps)  # batch-invariant
        return _by_row(super().layer_norm, x, weight, bias, eps) if normed is None else normed

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        groups: int,
        eps: float,
        gate_last: bool = False,
    ) -> Tensor:
        normed = norm.gated_norm(x, gate, weight, groups, eps, gate_last)
        if normed is not None:
            return normed
        plain = super().gated_norm
        return torch.cat(
            [
                plain(row.clone(), own.clone(), weight, groups, eps, gate_last)
                for row, own in zip(x.split(1), gate.split(1), strict=True)
            ]
        )

    def activation(self, x: Tensor, name: str) -> Tensor:
        return _by_row(super().activation, x, name)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        rows = zip(x.split(1), gate.split(1), strict=True)
        return torch.cat([super(Deterministic, self).sigmoid_mul(*row) for row in rows])

    def xielu(self, x: Tensor, parameters: Tensor) -> Tensor:
        return _by_row(super().xielu, x, parameters)

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = [
            super(Deterministic, self).route(row.clone(), routing, correction)
            for row in logits.split(1)
        ]
        weights, ids = zip(*rows, strict=True)
        return torch.cat(weights), torch.cat(ids)

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: ExpertWeights,
        residual: Tensor | None,
    ) -> Tensor:
        normed = torch.cat(
            [
                super(Deterministic, self).experts(row.clone(), weight, chosen, stack, None)
                for row, weight, chosen in zip(
                    x.split(1), weights.split(1), ids.split(1), strict=True
                )
            ]
        )
        return normed if residual is None else residual.add_(normed)

    def lora_add(self, y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
        for slot, tokens in step.segments:
            for token in tokens.tolist():
                alone = replace(step, segments=[(slot, _FIRST)])
                y[token] = super().lora_add(
                    y[token : token + 1].clone(), x[token : token + 1].clone(), layer, alone
                )[0]
        return y

    def rope_kv_write(self, inputs: RopeInputs, meta: AttentionMeta) -> Tensor:
        inputs = without_gates(inputs)
        if meta.plan is None:
            meta.plan = _DeterministicPlan(meta)
        kernels = meta.plan.choose(inputs.num_heads, inputs.k_cache, inputs.cos_sin, inputs.q_norm)
        if kernels is not None:
            return kernels.rope_kv_write(inputs, *meta.rotation(inputs.cos_sin), meta.slots)
        write = super().rope_kv_write
        tokens = zip(inputs.qkv.split(1), meta.plan.writes(inputs.k_cache), strict=True)
        queries = [write(inputs._replace(qkv=row.clone()), part) for row, part in tokens]
        return torch.cat(queries)

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
        if attended is not None:  # this kernel is batch-invariant
            return attended
        plain, parts = super(PlannedByFirstLayer, self).whole_texts, []
        rotary = meta.rotary
        for begin, end in pairwise(meta.query_start_host or meta.query_start.tolist()):
            alone = replace(
                meta,
                positions=meta.positions[begin:end].clone(),
                rotary=rotary and replace(rotary, rows=rotary.rows[begin:end].clone()),
                query_start_host=[0, end - begin],
                plan=None,
            )
            own = qkv[begin:end].clone()
            parts.append(plain(own, cos_sin, num_heads, scale, window, alone, dtype))
        return torch.cat(parts)

    def attention(self, inputs: AttentionInputs, meta: AttentionMeta) -> Tensor:
        q, k_cache, v_cache, scale, softcap, sinks, slopes = inputs
        plan = meta.plan
        if plan.kernels is not None:
            num_tokens, num_heads, head_dim = q.shape
            out = q.new_empty(num_tokens, num_heads * head_dim)
            numbers = Numbers(softcap, sinks, slopes)
            plan.kernels.decode(q, k_cache, v_cache, scale, plan.every, out, numbers)
            return out
        with _one_thread():
            return _attend_by_token(q, k_cache, v_cache, Scores.of(inputs), meta)

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
            meta.plan = _DeterministicPlan(meta)
        queries = latent_decode.write(q, latents, norm, eps, cos_sin, cache, meta)
        if queries is not None:
            return queries
        write = super().latent_write
        rows = zip(q.split(1), latents.split(1), meta.plan.apart, strict=True)
        return torch.cat(
            [write(row, latent, norm, eps, cos_sin, cache, part) for row, latent, part in rows]
        )

    def latent_attention(
        self, q: Tensor, cache: Tensor, up: Tensor, scale: float, meta: AttentionMeta
    ) -> Tensor:
        shape = shape_of(q, cache, up)
        if shape is not None:
            every, out = meta.plan.every, q.new_empty(len(q), shape.heads * shape.value)
            lengths, table = every.kv_len, every.block_table
            latent_decode.attend(shape, q, cache, up, scale, lengths, table, every.max_kv_len, out)
            return out
        attend = super().latent_attention
        rows = zip(q.split(1), meta.plan.apart, strict=True)
        return torch.cat([attend(row.clone(), cache, up, scale, part) for row, part in rows])

    def _without(self, meta: AttentionMeta, rows: list[Tensor], step: Step) -> Tensor:
        """Return step(rows, meta), a layer in plain torch, with each token as a step of its own."""
        if meta.plan is None:
            meta.plan = _DeterministicPlan(meta)
        outputs = []
        for at, part in enumerate(meta.plan.apart):
            outputs.append(step([tensor[at : at + 1].clone() for tensor in rows], part))
        return torch.cat(outputs)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's matmuls in one thread within the context.

    With more threads torch splits a batch of few matrices within each matrix. A token's sums would
    then depend on the other tokens.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _attend_by_token(
    q: Tensor, k_cache: Cache, v_cache: Cache, how: Scores, meta: AttentionMeta
) -> Tensor:
    """Return causal attention [num_tokens, heads * head_dim], computed token by token.

    A token's result equals that of the reference implementation for a step of this token alone, bit
    for bit. The keys and values of a sequence (an entry of the step) are gathered once for all its
    tokens. Tokens whose keys are in the same blocks share one torch call if the bits stay the same,
    because each call waits for torch's threads.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, size = k_cache.shape[1:3]
    grouped = q.contiguous().view(num_tokens, num_kv_heads, -1, head_dim)
    out = torch.empty_like(grouped)
    starts = meta.query_start_host or meta.query_start.tolist()
    for entry, length in enumerate(meta.kv_len_host or meta.kv_len.tolist()):
        begin, end = starts[entry], starts[entry + 1]
        if begin == end:
            continue
        # Blocks before the first visible key's may belong to another request.
        base = meta.first_key(length - (end - begin)) // size
        table = meta.block_table[entry : entry + 1, base : -(-length // size)]
        gather = Gather(block_rows(table, num_kv_heads), k_cache, (1, num_kv_heads, -1, head_dim))
        both = gather.read(k_cache, v_cache)
        base *= size
        for half in both:  # NaN of a block's earlier owner may follow the last key
            half[:, :, length - base :] = 0
        # Torch may sum data in another order at another offset in a cache line.
        aligned = (size * head_dim * both[0].itemsize) % 64 == 0
        alike = aligned and (num_heads * head_dim * both[0].itemsize) % 64 == 0
        # Tokens cannot share calls in other cases, as torch's matmuls of few rows depend on the
        # number of rows. Also, masked keys (of later tokens of the step, and of tokens before a
        # window) must be finite, as NaN times 0 is NaN.
        alike = alike and end - begin > 1 and not how.softcap and how.sinks is None
        fresh = 0 if meta.window or meta.chunk else length - (end - begin) - base
        alike = alike and all(bool(half[:, :, fresh:].isfinite().all()) for half in both)
        # Compute the last tokens first, and zero their keys afterwards. So the later keys, which a
        # token does not see, are zeros, as in a step of its own.
        for first, last in reversed(_spans(meta, size, length - (end - begin), length, alike)):
            at = torch.arange(first, last)
            seen = meta.first_key(at)
            begins = int(seen[0]) // size * size
            key, value = (
                half[:, :, begins - base : (first // size + 1) * size - base] for half in both
            )
            hidden = 0 if last - first > 1 else int(seen[0]) - begins
            if hidden or not aligned:
                key, value = key.clone(), value.clone()
                key[:, :, :hidden] = value[:, :, :hidden] = 0
            place = torch.arange(begins, begins + key.shape[2])
            ahead = (place - at[:, None])[:, None, None]
            mask = key.new_zeros(ahead.shape)
            mask.masked_fill_((ahead > 0) | (place < seen[:, None, None, None]), float("-inf"))
            own = slice(end - length + first, end - length + last)
            many = (last - first, -1, -1, -1)
            out[own] = attend_padded(
                grouped[own].clone(), key.expand(many), value.expand(many), how, mask, ahead
            )
            for half in both:
                half[:, :, first - base : last - base] = 0
    return out.view(num_tokens, num_heads * head_dim)


def _spans(
    meta: AttentionMeta, size: int, begin: int, end: int, alike: bool
) -> list[tuple[int, int]]:
    """Return (begin, end) of spans of positions whose visible keys are in the same blocks.

    The spans cover the positions [begin, end).
    alike: whether several positions may form a span; otherwise each span is a single position.
    """
    spans: list[tuple[int, int]] = []
    before = None
    for at in range(begin, end):
        blocks = (at // size, meta.first_key(at) // size)
        if alike and blocks == before:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
        before = blocks
    return spans


def _as_decodes(meta: AttentionMeta) -> AttentionMeta:
    """Return meta with each token as an entry of one query, which sees the keys up to its own."""
    num_tokens = len(meta.positions)
    lengths = meta.query_start.diff().long()
    entry = torch.arange(len(lengths)).repeat_interleave(lengths)
    assert len(entry) == num_tokens, "the CPU pads nothing"
    return AttentionMeta(
        positions=meta.positions,
        slots=meta.slots,
        query_start=torch.arange(num_tokens + 1, dtype=torch.int32),
        kv_len=meta.positions + 1,
        block_table=meta.block_table.index_select(0, entry),
        num_decodes=num_tokens,
        max_kv_len=meta.max_kv_len,
        window=meta.window,
        chunk=meta.chunk,
        rows=None if meta.rows is None else meta.rows.index_select(0, entry),
        rotary=meta.rotary,
    )


def _apart(every: AttentionMeta) -> list[AttentionMeta]:
    start = torch.arange(2, dtype=torch.int32)
    return [
        AttentionMeta(
            positions=every.positions[at : at + 1],
            slots=every.slots[at : at + 1],
            query_start=start,
            kv_len=every.kv_len[at : at + 1],
            block_table=every.block_table[at : at + 1],
            num_decodes=1,
            max_kv_len=length,
            window=every.window,
            chunk=every.chunk,
            rows=None if every.rows is None else every.rows[at : at + 1],
            rotary=None if every.rotary is None else every.rotary.of(at),
        )
        for at, length in enumerate(every.kv_len.tolist())
    ]
