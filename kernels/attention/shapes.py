"""The constants of attention kernels: sizes of a cache's heads and pages, and options of scores."""

from typing import NamedTuple

MOST_HEADS = 64  # most heads of a program over latents


class Heads(NamedTuple):
    """The heads of a layer and the pages of its cache, as one `tl.constexpr`.

    num_kv_heads: heads of keys and values.
    group: query heads of a head of keys.
    head_dim: elements of a head.
    block_size: tokens of a page.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int


class LatentHeads(NamedTuple):
    """The heads of a layer over latents and the pages of its cache, as one `tl.constexpr`.

    parts: groups of heads that programs share out.
    group: heads of a part.
    rank: elements of a latent.
    rope: elements of the rotary part, which heads share.
    head_dim: elements of a head's query.
    block_size: tokens of a page.
    """

    parts: int
    group: int
    rank: int
    rope: int
    head_dim: int
    block_size: int


def head_parts(num_heads: int, most: int = MOST_HEADS) -> int:
    """Return into how many equal parts heads over latents are cut, each of at most `most`."""
    parts = -(-num_heads // most)
    while num_heads % parts:
        parts += 1
    return parts


class LatentTile(NamedTuple):
    """The tile of a program over latents, as one `tl.constexpr`.

    rows: heads, or queries times heads, padded to what the matrix units take.
    ranks, ropes: `rank` and `rope` of `LatentHeads`, padded.
    keys: tokens of a tile.
    """

    rows: int
    ranks: int
    ropes: int
    keys: int


class Scores(NamedTuple):
    """The rule by which scores are made and keys are seen, as one `tl.constexpr`.

    softcap: whether scores are capped with tanh; `scale_log2` is then scale / softcap.
    sinks: whether a logit without a key joins each head's softmax.
    slopes: whether a head's scores fall with the distance (ALiBi).
    window: tokens that a query sees, itself included; 0: all before it.
    chunk: tokens of a chunk, where a query sees its own chunk alone; 0: no chunks.
    last_keys: each query has a last key, which may lie after it.
    """

    softcap: bool
    sinks: bool
    slopes: bool
    window: int = 0
    chunk: int = 0
    last_keys: bool = False
