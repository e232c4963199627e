"""Kernels: the operations that a model step is made of, each in plain torch.

It is the base of every back end, which overrides what it has a faster way for, and the oracle that
they are tested against: a new operation is a method here and, where it matters, one in a back end.

What is the same for all layers of a step (which cache rows to gather, masks, rotations) is
computed at the first layer and kept in ``meta.plan``.

Attention gathers an entry's blocks into contiguous keys and calls SDPA. Decodes are batched:
entries of like length are padded to one length, so one long request among short ones does not
make all of them long.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    relu,
    scaled_dot_product_attention,
    silu,
    softplus,
)
from torch.nn.functional import rms_norm as _rms_norm

from kernels.experts import reference as mixture
from kernels.experts.reference import ExpertWeights
from kernels.experts.routing import Routing
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep
from kernels.packed import PackedWeight

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square_(),
}


class Kernels:
    """All tensors are contiguous unless said otherwise and live on one device; x is
    [num_tokens, hidden]."""

    DETERMINISTIC = False  # a token's numbers depend on its request alone, bit by bit

    def __init__(self) -> None:
        # hidden_act of config.json -> gated activation
        self.GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
            "silu": self.silu_mul,
            "gelu_pytorch_tanh": self.gelu_tanh_mul,
            "gelu": self.gelu_mul,
            "relu": self.relu_mul,
        }

    def prepare(self, meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
        """Once a step and group of layers, before the layers: fill meta.plan with what they share.

        It may do nothing. k_cache is any of these layers'; it gives block size, KV heads and head
        size. On CUDA it launches on the current stream and reads nothing back, so it can sit in a
        graph.
        """
        meta.plan = _make_plan(meta, k_cache)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight, computed in float32, returned in x's dtype."""
        if x.dtype != torch.float32:
            if weight.dtype != x.dtype:
                return self.rms_norm(x.float(), weight.float(), eps).to(x.dtype)
            return _rms_norm(x, weight.shape, weight, eps)
        # Half the operations of the composite above; the sum of squares must not be rounded to 16
        # bits.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1])
        return torch.mul(x, mean.rsqrt_()).mul_(weight)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]: silu(first half) * second half."""
        size = gate_up.shape[-1] // 2
        return silu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[-1] // 2
        return gelu(gate_up[:, :size], approximate="tanh").mul_(gate_up[:, size:])

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The exact gelu, of the error function."""
        size = gate_up.shape[-1] // 2
        return gelu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[-1] // 2
        return relu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis of x [..., size],
        computed in float32, returned in x's dtype. weight, bias [size]; None = one, zero."""
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def activation(self, x: Tensor, name: str) -> Tensor:
        """A function of each element, in float32: "silu", "gelu" (of the error function),
        "gelu_pytorch_tanh", "relu", "relu2" (its square). A new tensor of x's dtype."""
        return _ACTIVATIONS[name](x.float()).to(x.dtype)

    def xielu(self, x: Tensor, parameters: Tensor) -> Tensor:
        """xIELU (Huang and Schlag 2024), in float32; a new tensor of x's dtype.

        parameters [4] float32: alpha_p and alpha_n before their softplus, beta, eps.
        x > 0: a_p x^2 + beta x; else a_n (expm1(min(x, eps)) - x) + beta x, with a_p =
        softplus(alpha_p), a_n = beta + softplus(alpha_n).
        """
        alpha_p, alpha_n, beta, eps = parameters.unbind()
        positive, negative = softplus(alpha_p), beta + softplus(alpha_n)
        x32 = x.float()
        below = (torch.expm1(torch.minimum(x32, eps)) - x32) * negative
        return (torch.where(x32 > 0, positive * x32 * x32, below) + beta * x32).to(x.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias; weight is [out, in]."""
        return linear(x, weight, bias)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """linear(rms_norm(x)): what stands before attention."""
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def norm_gated_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,  # [2 * out, in]: the gate's rows, then the up's
        bias: Tensor | None,
        gate: str,  # a key of GATES
    ) -> Tensor:
        """gate(linear(rms_norm(x))) -> [num_tokens, out]: the first half of an MLP."""
        return self.GATES[gate](self.norm_linear(x, norm, eps, weight, bias))

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual + linear(x), written over residual."""
        return residual.add_(self.linear(x, weight, bias))

    def packed_linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """gate(rms_norm(x) @ weight.T + bias), or residual + x @ weight.T + bias, written over
        residual. norm [in]; without it x is taken as it is. gate: a key of GATES, whose rows come
        before the up's; the result is then [num_tokens, out / 2]."""
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        y = linear(x, weight.dense(x.dtype), weight.bias)
        if residual is not None:
            return residual.add_(y)
        return y if gate is None else self.GATES[gate](y)

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        """Look for a faster way to do linear (add: linear_add) with these weights, all of one
        shape, for these numbers of rows of x. It may do nothing."""

    def rope_kv_write(
        self,
        qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        # [max_positions, rotary_dim] float32: cosines, then sines (rotate-half form)
        cos_sin: Tensor,
        # [head_dim]: RMS norm over each head before the rotation (Qwen3), or None
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], written at meta.slots
        v_cache: Tensor,
        num_heads: int,
        meta: AttentionMeta,
    ) -> Tensor:
        """Split, norm and rotate; write keys and values to the cache.

        Returns q [num_tokens, num_heads, head_dim].
        """
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        plan = _plan(meta, k_cache)
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        turning = heads[:, : num_heads + num_kv_heads]
        if q_norm is not None and k_norm is not None:
            q, k = turning[:, :num_heads], turning[:, num_heads:]
            turning = torch.cat(
                (self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)), dim=1
            )
        rotation = plan.rotations.get(cos_sin.data_ptr())
        if rotation is None:
            rotation = _rotation(cos_sin, meta.positions)
            plan.rotations[cos_sin.data_ptr()] = rotation
        turned = _rotate(turning.float(), *rotation)
        keys, values = turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        for cache, new in ((k_cache, keys), (v_cache, values)):
            if plan.written is not None:
                new = new[plan.written]
            new = new.to(cache.dtype).reshape(-1, head_dim)
            cache.view(-1, head_dim).index_copy_(0, plan.write_rows, new)
        return turned[:, :num_heads].to(qkv.dtype)

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
        """Causal attention of each entry's queries over its cached keys (this step's included), as
        far as meta.window and meta.chunk let them see.

        q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]. The last query
        token of entry e stands at position kv_len[e] - 1. Padding tokens give finite values of no
        meaning. The score of the query at t and the key at s is scale * q k; with softcap > 0 then
        softcap * tanh(score / softcap) (Gemma 2). sinks [num_heads] float32: logits that join each
        softmax and have no value (gpt-oss). slopes [num_heads] float32: slope * (s - t) is added
        (ALiBi).
        """
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.shape[1]
        group = num_heads // num_kv_heads
        plan = _plan(meta, k_cache)
        grouped = q.view(num_tokens, num_kv_heads, group, head_dim)
        how = Scores.of(num_kv_heads, scale, softcap, sinks, slopes)
        if plan.whole is not None:
            attended = _decode(grouped, k_cache, v_cache, how, plan.whole)
            return attended.reshape(num_tokens, num_heads * head_dim)
        out = q.new_zeros(num_tokens, num_kv_heads, group, head_dim)
        for part in plan.decodes:
            out[part.tokens] = _decode(grouped[part.tokens], k_cache, v_cache, how, part)
        for chunk in plan.chunks:
            out[chunk.begin : chunk.end] = attend_chunk(grouped, k_cache, v_cache, how, chunk)
        return out.view(num_tokens, num_heads * head_dim)

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """logits [num_tokens, experts] of a router -> the weights of the chosen experts
        [num_tokens, chosen] float32, and their numbers, int32.

        correction [experts] float32: is added to scores for the choice alone.
        """
        return mixture.route(logits, routing, correction)

    def norm_route(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        router: Tensor,  # [experts, hidden]
        bias: Tensor | None,
        routing: Routing,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """rms_norm(x), and what `route` makes of a router's logits for that."""
        normed = self.rms_norm(x, norm, eps)
        return normed, *self.route(self.linear(normed, router, bias), routing, correction)

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: ExpertWeights,
        residual: Tensor | None,
    ) -> Tensor:
        """Each token's experts, weighted and summed: [num_tokens, hidden]; added to residual and
        written over it if there is one, which must not be x. weights, ids: of `route`."""
        return mixture.experts(x, weights, ids, stack, residual)

    def lora_add(self, y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
        """y [num_tokens, out], the layer's output for x [num_tokens, in], plus B (A x) of each
        token's adapter; written over y. Tokens without an adapter are not touched.
        """
        for slot, tokens in step.segments:
            mine = x.index_select(0, tokens)
            at = 0
            for index, size in enumerate(layer.outs, start=layer.first_part):
                found = step.parts[slot].get(index)
                if found is not None:
                    a, b = found
                    delta = linear(linear(mine.to(a.dtype), a), b).to(y.dtype)
                    y[:, at : at + size].index_add_(0, tokens, delta)
                at += size
        return y

    def lora_gated(
        self, gate_up: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep, gate: str
    ) -> Tensor:
        """gate(lora_add(gate_up, x)) -> [num_tokens, out / 2] of all tokens; gate: a key of
        GATES."""
        return self.GATES[gate](self.lora_add(gate_up, x, layer, step))


@lru_cache(maxsize=8)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class Scores:
    """How queries and keys become weights: see `Kernels.attention`. sinks, slopes: as
    [num_kv_heads, group]."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @classmethod
    def of(
        cls,
        num_kv_heads: int,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
        slopes: Tensor | None,
    ) -> "Scores":
        by_head = [
            None if each is None else each.view(num_kv_heads, -1) for each in (sinks, slopes)
        ]
        return cls(scale, softcap, by_head[0], by_head[1])

    def attend(
        self, q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """q [..., queries, head_dim] over keys and values [..., keys, head_dim], with mask added to
        the scores. sinks count where they can be broadcast to [..., queries, 1]."""
        if self.softcap == 0.0 and self.sinks is None:
            return scaled_dot_product_attention(
                q, key, value, attn_mask=mask, is_causal=causal, scale=self.scale
            )
        score = q.float() @ key.float().transpose(-1, -2) * self.scale
        if self.softcap:
            score = self.softcap * torch.tanh(score / self.softcap)
        if causal:
            above = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
            score = score.masked_fill(above, float("-inf"))
        if mask is not None:
            score = score + mask
        if self.sinks is not None:
            sinks = self.sinks.expand(*score.shape[:-1], 1)
            weight = torch.cat((score, sinks), -1).softmax(-1)[..., :-1]
        else:
            weight = score.softmax(-1)
        return (weight @ value.float()).to(q.dtype)


def attend_chunk(
    grouped: Tensor, k_cache: Tensor, v_cache: Tensor, how: Scores, chunk: "PrefillChunk"
) -> Tensor:
    """grouped [num_tokens, num_kv_heads, group, head_dim] -> the chunk's rows of the result."""
    # Products over many queries are faster in float32 than in 16 bits without AMX.
    key, value = (
        half[:, :, : chunk.num_keys].to(grouped.dtype).expand(-1, grouped.shape[2], -1, -1)
        for half in chunk.gather.read(k_cache, v_cache)
    )
    length = chunk.end - chunk.begin
    mask, causal = chunk.mask, chunk.mask is None and length > 1
    if how.slopes is not None:
        at = torch.arange(chunk.num_keys, device=key.device)
        ahead = at - at[-length:, None]  # [length, num_keys]: s - t
        mask = (
            ahead * how.slopes[..., None, None]
            if mask is None
            else mask + ahead * how.slopes[..., None, None]
        )
        if causal:
            mask, causal = mask.masked_fill(ahead > 0, float("-inf")), False
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks[..., None, None])
    attended = how.attend(
        # Heads that share keys stand side by side, their keys expanded without a copy.
        grouped[chunk.begin : chunk.end].permute(1, 2, 0, 3),
        key,
        value,
        None if mask is None else mask.to(grouped.dtype),
        causal,
    )
    return attended.permute(2, 0, 1, 3)


class _Gather:
    """Which rows of a cache seen as [-1, block_size * head_dim] to read, and where to.

    The buffer serves all layers: allocating megabytes for each would fault their pages in anew.
    """

    def __init__(self, rows: Tensor, cache: Tensor, shape: tuple[int, ...]) -> None:
        """rows [n] int64. shape: of the keys as SDPA takes them, -1 for their number."""
        buffer = cache.new_empty(2, rows.shape[0], cache.shape[2] * cache.shape[3])
        self.rows = rows
        self.into = (buffer[0], buffer[1])
        self.key, self.value = (half.view(shape) for half in self.into)
        self.flat = buffer.view(-1, cache.shape[3])  # [2 * n * block_size, head_dim]

    def read(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        for cache, half in zip((k_cache, v_cache), self.into, strict=True):
            torch.index_select(cache.view(-1, half.shape[1]), 0, self.rows, out=half)
        return self.key, self.value


@dataclass(slots=True)
class _DecodeBatch:
    """Entries with one query each, padded to one length."""

    tokens: Tensor  # [n] int64: their tokens
    gather: _Gather  # of n * num_kv_heads * blocks rows
    # Rows of gather.flat past their entry's last key: a block's earlier owner may have left a NaN
    # there, and weight 0 times NaN is NaN.
    unused: Tensor  # int64
    mask: Tensor  # [n, 1, 1, blocks * block_size]: 0 or -inf, in the cache's dtype
    ahead: Tensor  # [n, 1, 1, blocks * block_size] int64: the key's position less the query's


@dataclass(slots=True)
class PrefillChunk:
    """One entry with any number of queries, tokens [begin, end) of the step."""

    begin: int
    end: int
    num_keys: int  # from the first block that one of its queries sees
    gather: _Gather  # of num_kv_heads * blocks rows
    mask: Tensor | None  # [end - begin, num_keys] float32; None = plain causal


@dataclass(slots=True)
class _ReferencePlan:
    write_rows: Tensor  # [num_written * num_kv_heads] int64: rows of a cache seen as [-1, head_dim]
    written: Tensor | None  # tokens that have a slot; None = all
    whole: _DecodeBatch | None = None  # the step is one batch of decodes in order
    decodes: list[_DecodeBatch] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    # By the address of the table: (cos, sin), each [num_tokens, 1, rotary_dim] float32, as _rotate
    # takes them.
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def _plan(meta: AttentionMeta, cache: Tensor) -> _ReferencePlan:
    if not isinstance(meta.plan, _ReferencePlan):
        meta.plan = _make_plan(meta, cache)
    return meta.plan


def _make_plan(meta: AttentionMeta, cache: Tensor) -> _ReferencePlan:
    _, num_kv_heads, block_size, _ = cache.shape
    slots, written = meta.slots, None
    if bool((slots < 0).any()):
        written = (slots >= 0).nonzero().squeeze(1)
        slots = slots[written]
    head = torch.arange(num_kv_heads, device=slots.device)
    first = torch.div(slots, block_size, rounding_mode="floor") * (num_kv_heads * block_size)
    write_rows = (first + slots % block_size)[:, None] + head * block_size
    plan = _ReferencePlan(write_rows.flatten(), written)

    kv_lens = meta.kv_len_host or meta.kv_len.tolist()
    first = [meta.first_key(max(0, n - 1)) // block_size * block_size for n in kv_lens]
    seen = [n - at for n, at in zip(kv_lens, first, strict=True)]
    groups = _groups(seen[: meta.num_decodes], block_size)
    plan.decodes = [_plan_decodes(meta, cache, entries, seen) for entries in groups]
    if len(groups) == 1 and len(groups[0]) == len(meta.slots):
        plan.whole = plan.decodes[0]
    plan.chunks = plan_chunks(meta, cache)
    return plan


def _plan_decodes(
    meta: AttentionMeta, cache: Tensor, entries: list[int], seen: list[int]
) -> _DecodeBatch:
    """seen: of each entry, its keys from the first block on that its query sees."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    device = cache.device
    blocks = -(-max(seen[entry] for entry in entries) // block_size)
    index = torch.tensor(entries, device=device)
    kv_len = meta.kv_len.index_select(0, index).clamp_(min=1)[:, None]
    first = meta.first_key(kv_len - 1)  # [n, 1]
    at = first // block_size + torch.arange(blocks, device=device)  # [n, blocks]
    table = meta.block_table.index_select(0, index)
    table = table.gather(1, at.clamp(max=table.shape[1] - 1).long())
    # What stands in a table before and behind the entry's own blocks means nothing.
    rows = _block_rows(torch.where(at * block_size < kv_len, table, table[:, :1]), num_kv_heads)
    position = first // block_size * block_size
    position = position + torch.arange(blocks * block_size, device=device)
    outside = (position >= kv_len) | (position < first)
    unused = outside[None, :, None].expand(2, -1, num_kv_heads, -1).flatten().nonzero().squeeze(1)
    mask = torch.zeros(outside.shape, dtype=cache.dtype, device=device)
    mask.masked_fill_(outside, float("-inf"))
    gather = _Gather(rows, cache, (len(entries), num_kv_heads, -1, head_dim))
    ahead = position - (kv_len - 1)
    return _DecodeBatch(index, gather, unused, mask[:, None, None], ahead[:, None, None])


def plan_chunks(meta: AttentionMeta, cache: Tensor) -> list[PrefillChunk]:
    """Of the entries that are not decodes."""
    starts = meta.query_start_host or meta.query_start.tolist()
    kv_lens = meta.kv_len_host or meta.kv_len.tolist()
    return [
        _plan_chunk(meta, cache, entry, starts[entry], starts[entry + 1], kv_lens[entry])
        for entry in range(meta.num_decodes, len(kv_lens))
    ]


def _plan_chunk(
    meta: AttentionMeta, cache: Tensor, entry: int, begin: int, end: int, kv_len: int
) -> PrefillChunk:
    length, size = end - begin, cache.shape[2]
    first = meta.first_key(kv_len - length) // size
    rows = _block_rows(
        meta.block_table[entry : entry + 1, first : -(-kv_len // size)], cache.shape[1]
    )
    gather = _Gather(rows, cache, (cache.shape[1], 1, -1, cache.shape[3]))
    num_keys = kv_len - first * size
    whole = not (meta.window or meta.chunk)
    if whole and (length == 1 or length == kv_len):
        return PrefillChunk(begin, end, num_keys, gather, None)
    if whole:
        mask = torch.full((length, num_keys), float("-inf"), device=cache.device)
        return PrefillChunk(begin, end, num_keys, gather, mask.triu_(num_keys - length + 1))
    key = torch.arange(first * size, kv_len, device=cache.device)
    query = key[-length:, None]
    hidden = (key > query) | (key < meta.first_key(query))
    mask = torch.zeros(hidden.shape, device=cache.device).masked_fill_(hidden, float("-inf"))
    return PrefillChunk(begin, end, num_keys, gather, mask)


def _groups(kv_lens: list[int], block_size: int) -> list[list[int]]:
    """Split decodes into batches; padding adds at most half again, or a few blocks an entry."""
    if not kv_lens:
        return []
    spare = 4 * block_size
    if max(kv_lens) * len(kv_lens) <= 1.5 * sum(kv_lens) + spare * len(kv_lens):
        return [list(range(len(kv_lens)))]
    order = sorted(range(len(kv_lens)), key=kv_lens.__getitem__)
    groups = [[order[0]]]
    for entry in order[1:]:
        if kv_lens[entry] > 1.5 * kv_lens[groups[-1][0]] + spare:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _block_rows(table: Tensor, num_kv_heads: int) -> Tensor:
    """[n, blocks] block ids -> [n * num_kv_heads * blocks] rows, by entry, head, block."""
    head = torch.arange(num_kv_heads, device=table.device)[:, None]
    return (table[:, None].long() * num_kv_heads + head).flatten()


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, how: Scores, part: _DecodeBatch) -> Tensor:
    """q [n, num_kv_heads, group, head_dim], as is the result: a group is SDPA's queries."""
    key, value = part.gather.read(k_cache, v_cache)
    part.gather.flat.index_fill_(0, part.unused, 0.0)
    mask = part.mask
    if how.slopes is not None:
        mask = mask + (part.ahead * how.slopes[..., None]).to(mask.dtype)
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks[..., None])
    return how.attend(q.to(key.dtype), key, value, mask).to(q.dtype)


def _rotation(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the table as [num_tokens, 1, rotary_dim] factors: (cos, cos) and (-sin, sin)."""
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim] float32; only the first rotary_dim of each head turn."""
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    swapped = part.roll(rotary_dim // 2, -1)
    turned = torch.mul(part, cos).addcmul_(swapped, sin)
    if rotary_dim == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
