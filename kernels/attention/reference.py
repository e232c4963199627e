"""Attention in plain torch: the oracle of every back end, and the CPU's implementation without
generated kernels.

`kernels.reference.Kernels.attention` defines the operation.

The KV blocks of a sequence (an entry of the step) are gathered into contiguous keys for SDPA.
Decodes of similar length are padded to one length and computed as one batch. So short requests are
not padded to the length of a long one.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.inputs import AttentionInputs
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.kv.rotation import rotation_of
from kernels.metadata import AttentionMeta


@dataclass(frozen=True, slots=True)
class Scores:
    """The options of attention scores, see `Kernels.attention`.

    sinks, slopes: [num_kv_heads, group].
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Scores":
        """Return the options of a layer's inputs."""
        heads = inputs.k_cache.shape[1]
        by_head = [
            None if values is None else values.view(heads, -1)
            for values in (inputs.sinks, inputs.slopes)
        ]
        return cls(inputs.scale, inputs.softcap, by_head[0], by_head[1])

    def attend(
        self, q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Return attention of q [..., queries, head_dim] over keys and values.

        key, value: [..., keys, head_dim].
        mask: added to scores. slopes are not applied: the caller adds them to the mask.

        sinks must be broadcastable to [..., queries, 1].
        """
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
    grouped: Tensor, k_cache: Cache, v_cache: Cache, how: Scores, chunk: "PrefillChunk"
) -> Tensor:
    """Return the attention of one chunk's queries.

    grouped: the step's queries [num_tokens, num_kv_heads, group, head_dim]. Returns the chunk's
    rows of the result, [length, num_kv_heads, group, head_dim].
    """
    # Matmuls with many queries are faster in float32 than in 16 bits without AMX.
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
        # The heads of a group are adjacent; their keys are expanded without a copy.
        grouped[chunk.begin : chunk.end].permute(1, 2, 0, 3),
        key,
        value,
        None if mask is None else mask.to(grouped.dtype),
        causal,
    )
    return attended.permute(2, 0, 1, 3)


class Gather:
    """The rows to read from a cache viewed as [-1, block_size * head_dim], and a buffer for them.

    The buffer serves all layers: a new buffer per layer would cost page faults for megabytes.
    """

    def __init__(self, rows: Tensor, cache: Cache, shape: tuple[int, ...]) -> None:
        """Allocate the buffer for the rows, int64 [n].

        shape: the shape of keys for SDPA, with -1 for the number of keys.
        """
        size = (2, rows.shape[0], cache.shape[2] * cache.shape[3])
        buffer = torch.empty(size, dtype=cache.dtype, device=cache.device)
        self.rows = rows
        self.into = (buffer[0], buffer[1])
        self.key, self.value = (half.view(shape) for half in self.into)
        self.flat = buffer.view(-1, cache.shape[3])  # [2 * n * block_size, head_dim]

    def read_keys(self, cache: Tensor) -> Tensor:
        """Gather the rows of a cache that has no values, and return them as keys."""
        half = self.into[0]
        torch.index_select(cache.view(-1, half.shape[1]), 0, self.rows, out=half)
        return self.key

    def read(self, k_cache: Cache, v_cache: Cache) -> tuple[Tensor, Tensor]:
        for cache, half in zip((k_cache, v_cache), self.into, strict=True):
            if isinstance(cache, QuantizedKV):
                heads = cache.shape[1]
                half.copy_(cache.read(self.rows // heads, self.rows % heads).flatten(1))
            else:
                torch.index_select(cache.view(-1, half.shape[1]), 0, self.rows, out=half)
        return self.key, self.value


@dataclass(slots=True)
class DecodeBatch:
    """A batch of decodes, padded to one length."""

    tokens: Tensor  # [n] int64: each decode's token in the step
    gather: Gather  # reads n * num_kv_heads * blocks rows
    # int64: rows of gather.flat that no query sees. They are zeroed, as a block's earlier owner may
    # have left a NaN there, and weight 0 times NaN is NaN.
    unused: Tensor
    mask: Tensor  # [n, 1, 1, blocks * block_size]: 0 or -inf, in the cache's dtype
    # [n, 1, 1, blocks * block_size] int64: the key's position minus the query's
    ahead: Tensor


@dataclass(slots=True)
class PrefillChunk:
    """An entry with any number of queries: tokens [begin, end) of the step."""

    begin: int
    end: int
    num_keys: int  # number of keys, from the block of the first visible key on
    gather: Gather  # reads num_kv_heads * blocks rows
    mask: Tensor | None  # [end - begin, num_keys] float32; None = plain causal


@dataclass(slots=True)
class ReferencePlan:
    # [num_written * num_kv_heads] int64: rows of a cache viewed as [-1, head_dim]
    write_rows: Tensor
    written: Tensor | None  # indices of the tokens that have a slot; None = all
    whole: DecodeBatch | None = None  # the only batch, if the step is one batch of decodes in order
    decodes: list[DecodeBatch] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    # Address of a rotary table -> (cos, sin) of the step's tokens, see `rotation_of`.
    _rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotation(self, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary factors of the step's tokens (`rotation_of`), cached for each table."""
        rotation = self._rotations.get(cos_sin.data_ptr())
        if rotation is None:
            rotation = self._rotations[cos_sin.data_ptr()] = rotation_of(cos_sin, positions)
        return rotation


def plan_of(meta: AttentionMeta, cache: Cache) -> ReferencePlan:
    if not isinstance(meta.plan, ReferencePlan):
        meta.plan = make_plan(meta, cache)
    return meta.plan


def without_gates(inputs: RopeInputs) -> RopeInputs:
    """Return the inputs without output gates, which may follow each head's query in qkv."""
    if not inputs.gated:
        return inputs
    qkv, num_heads, head_dim = inputs.qkv, inputs.num_heads, inputs.k_cache.shape[3]
    queries = qkv[:, : 2 * num_heads * head_dim].unflatten(1, (num_heads, 2, head_dim))[:, :, 0]
    qkv = torch.cat((queries.flatten(1), qkv[:, 2 * num_heads * head_dim :]), dim=1)
    return inputs._replace(qkv=qkv, gated=False)


def write_cache(cache: Cache, rows: Tensor, values: Tensor) -> None:
    """Write values [n, head_dim] to the rows, int64 [n], of a cache viewed as [-1, head_dim]."""
    _, heads, size, head_dim = cache.shape
    if isinstance(cache, QuantizedKV):
        block = rows // (heads * size)
        cache.write(block, rows // size % heads, rows % size, values)
    else:
        cache.view(-1, head_dim).index_copy_(0, rows, values.to(cache.dtype))


def plan_writes(meta: AttentionMeta, cache: Cache) -> ReferencePlan:
    """Return a plan of a step's cache writes only, without its attention."""
    _, num_kv_heads, block_size, _ = cache.shape
    slots, written = meta.slots, None
    if bool((slots < 0).any()):
        written = (slots >= 0).nonzero().squeeze(1)
        slots = slots[written]
    head = torch.arange(num_kv_heads, device=slots.device)
    first = torch.div(slots, block_size, rounding_mode="floor") * (num_kv_heads * block_size)
    write_rows = (first + slots % block_size)[:, None] + head * block_size
    return ReferencePlan(write_rows.flatten(), written)


def make_plan(meta: AttentionMeta, cache: Cache) -> ReferencePlan:
    plan, block_size = plan_writes(meta, cache), cache.shape[2]
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
    meta: AttentionMeta, cache: Cache, entries: list[int], seen: list[int]
) -> DecodeBatch:
    """Return the plan of the decodes `entries`, all padded to the longest of them.

    entries: the decodes' indices in the step.
    seen: for each entry of the step, its number of keys from the block of the first visible key on.
    """
    _, num_kv_heads, block_size, head_dim = cache.shape
    device = cache.device
    blocks = -(-max(seen[entry] for entry in entries) // block_size)
    index = torch.tensor(entries, device=device)
    kv_len = meta.kv_len.index_select(0, index).clamp_(min=1)[:, None]
    first = meta.first_key(kv_len - 1)  # [n, 1]
    at = first // block_size + torch.arange(blocks, device=device)  # [n, blocks]
    table = meta.block_table.index_select(0, index)
    table = table.gather(1, at.clamp(max=table.shape[1] - 1).long())
    # A table's ids before and after the entry's own blocks are undefined.
    rows = block_rows(torch.where(at * block_size < kv_len, table, table[:, :1]), num_kv_heads)
    position = first // block_size * block_size
    position = position + torch.arange(blocks * block_size, device=device)
    outside = (position >= kv_len) | (position < first)
    unused = outside[None, :, None].expand(2, -1, num_kv_heads, -1).flatten().nonzero().squeeze(1)
    mask = torch.zeros(outside.shape, dtype=cache.dtype, device=device)
    mask.masked_fill_(outside, float("-inf"))
    gather = Gather(rows, cache, (len(entries), num_kv_heads, -1, head_dim))
    ahead = position - (kv_len - 1)
    return DecodeBatch(index, gather, unused, mask[:, None, None], ahead[:, None, None])


def plan_chunks(meta: AttentionMeta, cache: Cache) -> list[PrefillChunk]:
    """Return a PrefillChunk for each entry that is not a decode."""
    starts = meta.query_start_host or meta.query_start.tolist()
    kv_lens = meta.kv_len_host or meta.kv_len.tolist()
    return [
        _plan_chunk(meta, cache, entry, starts[entry], starts[entry + 1], kv_lens[entry])
        for entry in range(meta.num_decodes, len(kv_lens))
    ]


def _plan_chunk(
    meta: AttentionMeta, cache: Cache, entry: int, begin: int, end: int, kv_len: int
) -> PrefillChunk:
    length, size = end - begin, cache.shape[2]
    first = meta.first_key(kv_len - length) // size
    rows = block_rows(
        meta.block_table[entry : entry + 1, first : -(-kv_len // size)], cache.shape[1]
    )
    gather = Gather(rows, cache, (cache.shape[1], 1, -1, cache.shape[3]))
    num_keys = kv_len - first * size
    whole = not (meta.window or meta.chunk) and meta.last_keys is None
    if whole and (length == 1 or length == kv_len):
        return PrefillChunk(begin, end, num_keys, gather, None)
    if whole:
        mask = torch.full((length, num_keys), float("-inf"), device=cache.device)
        return PrefillChunk(begin, end, num_keys, gather, mask.triu_(num_keys - length + 1))
    key = torch.arange(first * size, kv_len, device=cache.device)
    query = key[-length:, None]
    last = query if meta.last_keys is None else meta.last_keys[begin:end, None]
    hidden = (key > last) | (key < meta.first_key(query))
    mask = torch.zeros(hidden.shape, device=cache.device).masked_fill_(hidden, float("-inf"))
    return PrefillChunk(begin, end, num_keys, gather, mask)


def _groups(kv_lens: list[int], block_size: int) -> list[list[int]]:
    """Return lists of decodes (indices in kv_lens) to batch.

    Padding adds at most half of the keys, and a few blocks per decode.
    """
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


def block_rows(table: Tensor, num_kv_heads: int) -> Tensor:
    """Return the rows of block ids [n, blocks] in a cache viewed as [-1, block_size * head_dim].

    They are in the order of entry, head, block: [n * num_kv_heads * blocks].
    """
    head = torch.arange(num_kv_heads, device=table.device)[:, None]
    return (table[:, None].long() * num_kv_heads + head).flatten()


def attend_decodes(
    q: Tensor, k_cache: Cache, v_cache: Cache, how: Scores, part: DecodeBatch
) -> Tensor:
    """Return the attention of decodes, shaped like q [n, num_kv_heads, group, head_dim].

    SDPA takes the heads of a group as its queries.
    """
    key, value = part.gather.read(k_cache, v_cache)
    part.gather.flat.index_fill_(0, part.unused, 0.0)
    return attend_padded(q, key, value, how, part.mask, part.ahead)


def attend_padded(
    q: Tensor, key: Tensor, value: Tensor, how: Scores, mask: Tensor, ahead: Tensor
) -> Tensor:
    """Return the attention of padded entries, shaped like q [n, num_kv_heads, group, head_dim].

    key, value: [n, num_kv_heads, keys, head_dim], zeros where the mask hides them.
    mask, ahead: the fields of DecodeBatch.
    """
    if how.slopes is not None:
        mask = mask + (ahead * how.slopes[..., None]).to(mask.dtype)
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks[..., None])
    return how.attend(q.to(key.dtype), key, value, mask).to(q.dtype)
