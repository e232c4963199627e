"""AttentionMeta: where each query token finds its keys.

Built once a step, shared by all layers, passed along.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """Layout of one step's tokens: entries back to back, decodes (one token each) first.

    KV caches are [num_blocks, num_kv_heads, block_size, head_dim] for keys and for values, one pair
    a layer. Within one layer all of the step's keys are written before any attention reads, so an
    entry may read blocks that another entry of the same step writes (requests that share a prefix).
    """

    positions: Tensor  # [num_tokens] int32: index of each token in its request
    # [num_tokens] int64: block * block_size + offset to write; -1 = padding, write nothing
    slots: Tensor
    query_start: Tensor  # [num_entries + 1] int32
    kv_len: Tensor  # [num_entries] int32: keys of the entry, this step's included
    block_table: Tensor  # [num_entries, max_blocks] int32
    num_decodes: int  # leading entries with exactly one query token
    max_query_len: int
    max_kv_len: int
    # the same on the host; the CPU back end loops over them
    query_start_host: list[int] | None = None
    kv_len_host: list[int] | None = None
    # what a back end computed once a step for all layers (e.g. how decode splits the keys)
    plan: Any = None
