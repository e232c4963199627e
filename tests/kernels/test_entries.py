"""Blocks of queries: how many programs prefill attention launches, beside how many have work."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from kernels.metadata import AttentionMeta

QUERIES = 32  # rows of 128, four query heads a KV head


def step(num_decodes: int, chunks: list[int], *, graph: bool = False) -> AttentionMeta:
    lengths = [1] * num_decodes + chunks
    starts = [0, *accumulate(lengths)]
    empty = torch.zeros(len(lengths), dtype=torch.int32)
    return AttentionMeta(
        positions=empty,
        slots=empty,
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=empty[:, None],
        num_decodes=num_decodes,
        max_kv_len=max(lengths),
        query_start_host=None if graph else starts,
    )


def numbered(meta: AttentionMeta, first: int) -> set[int]:
    """The numbers of blocks with queries, as `entry_of` counts them."""
    starts = meta.query_start.tolist()
    blocks = set[int]()
    for entry, (begin, end) in list(enumerate(pairwise(starts)))[first:]:
        at = (begin - starts[first]) // QUERIES + entry - first
        blocks |= set(range(at, at + -(-(end - begin) // QUERIES)))
    return blocks


@pytest.mark.parametrize("num_decodes", [0, 1, 31, 300])
def test_surplus_is_one_block_an_entry(num_decodes: int) -> None:
    """Bugs: a block that no program has; programs for decodes, which another kernel computes."""
    rng = random.Random(num_decodes)
    for count in (1, 2, 17, 64):
        chunks = [rng.choice([1, 31, 32, 33, rng.randint(1, 700)]) for _ in range(count)]
        meta = step(num_decodes, chunks)
        tokens = num_decodes + sum(chunks)
        blocks = numbered(meta, num_decodes)
        launched = meta.most_blocks(tokens, QUERIES, decodes=False)
        assert max(blocks) < launched <= len(blocks) + count + 1
        everything = meta.most_blocks(tokens, QUERIES, decodes=True)
        assert max(numbered(meta, 0)) < everything


def test_a_graph_has_blocks_for_any_lengths() -> None:
    """Bug: a graph that was captured with more decodes than a later step has."""
    for num_decodes in (0, 7, 64):
        meta = step(num_decodes, [5] * (64 - num_decodes), graph=True)
        tokens = 64 + 512
        assert meta.most_blocks(tokens, QUERIES, decodes=False) == tokens // QUERIES + 64 + 1
