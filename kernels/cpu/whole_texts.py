"""Bidirectional attention over whole texts by generated kernels, in two launches for all texts.

Keys and values of a step's texts are written to temporary pages, from which prefill attention
reads.
"""

import torch
from torch import Tensor

from kernels.cpu.attention import rotation_for
from kernels.cpu.codegen.processor import CompilerUnavailable, dot_bf16
from kernels.cpu.prefill import Entries, prefill_for
from kernels.cpu.scores import Numbers, Scored
from kernels.kv.inputs import RopeInputs
from kernels.metadata import AttentionMeta

_BLOCK = 16  # keys per page
_PLAIN = Numbers()


class WholeTexts:
    """The plan of bidirectional attention in a step of complete texts, which its layers share."""

    def __init__(self, meta: AttentionMeta) -> None:
        starts = torch.tensor(meta.query_start_host or meta.query_start.tolist())
        lengths = starts.diff()
        pages = (lengths + _BLOCK - 1) // _BLOCK
        first_page = pages.cumsum(0) - pages
        self._pages = int(pages.sum())
        self._table = torch.arange(self._pages, dtype=torch.int32)
        self._length = lengths.repeat_interleave(lengths).int()  # length of each token's text
        begins = starts[:-1].repeat_interleave(lengths)
        self.positions = (torch.arange(len(begins)) - begins).int()
        self.slots = first_page.repeat_interleave(lengths) * _BLOCK + self.positions
        at, blocks = starts.tolist(), first_page.tolist()
        self._spans = [
            (begin, end, self._table.data_ptr() + 4 * block, end - begin)
            for begin, end, block in zip(at[:-1], at[1:], blocks, strict=True)
        ]
        self._entries: dict[int, Entries] = {}
        self._keys: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def entries(self, window: int) -> Entries:
        entries = self._entries.get(window)
        if entries is None:
            last, first = self._length - 1, torch.zeros_like(self.positions)
            if window:
                last = torch.minimum(last, self.positions + window)
                first = (self.positions - window).clamp(min=0)
            entries = self._entries[window] = Entries(self._spans, first, last, self._table)
        return entries

    def keys(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a layer's keys and values: [2, pages, heads, _BLOCK, dim].

        All layers with these sizes use the same memory.
        """
        kind = heads, dim, dtype
        keys = self._keys.get(kind)
        if keys is None:
            shape = (2, self._pages, heads, _BLOCK, dim)
            keys = self._keys[kind] = torch.empty(shape, dtype=dtype)
        return keys


def whole_texts(
    qkv: Tensor,
    cos_sin: Tensor | None,
    num_heads: int,
    scale: float,
    window: int,
    meta: AttentionMeta,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return bidirectional attention within each text; arguments: `Kernels.whole_texts`.

    Returns None where no kernel can be generated.
    """
    dim = qkv.shape[1] // (3 * num_heads)
    try:
        key_dtype = dtype if dtype == torch.bfloat16 and dot_bf16() else torch.float32
    except CompilerUnavailable:
        return None
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    rotation = rotation_for(num_heads, num_heads, dim, _BLOCK, rotary, key_dtype)
    attend = prefill_for(num_heads, num_heads, dim, _BLOCK, key_dtype, Scored())
    if rotation is None or attend is None:
        return None
    if meta.plan is None:
        meta.plan = WholeTexts(meta)
    plan: WholeTexts = meta.plan
    assert len(qkv) == len(plan.positions), "tokens of no text"
    keys, values = plan.keys(num_heads, dim, key_dtype)
    table, rows = torch.empty(0, 0), plan.positions
    if cos_sin is not None:
        table, rows = meta.rotation(cos_sin)
    inputs = RopeInputs(qkv, table, None, None, 0.0, keys, values, num_heads)
    q = rotation.rope_kv_write(inputs, table, rows, plan.slots)
    out = qkv.new_empty(len(qkv), num_heads * dim)
    attend(q, keys, values, scale, plan.entries(window), out, _PLAIN)
    return out
