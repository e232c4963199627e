"""The constants of attention kernels: sizes of a cache's heads and pages, and options of scores."""

from typing import NamedTuple

MOST_HEADS = 64  # maximum number of heads per program in attention over latents


class Heads(NamedTuple):
    """The heads of a layer and the pages of its cache, as one `tl.constexpr`.

    num_kv_heads: heads of keys and values.
    group: query heads per head of keys.
    head_dim: elements of a head.
    block_size: tokens of a page.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int


class LatentHeads(NamedTuple):
    """The heads of a layer over latents and the pages of its cache, as one `tl.constexpr`.

    parts: number of groups of heads; a program computes one group.
    group: heads of a group.
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
    """Return the smallest number of equal groups of heads, each of at most `most` heads."""
    parts = -(-num_heads // most)
    while num_heads % parts:
        parts += 1
    return parts


class LatentTile(NamedTuple):
    """The tile of a program over latents, as one `tl.constexpr`.

    rows: heads, or queries times heads, padded to a size that tensor cores support.
    ranks, ropes: `rank` and `rope` of `LatentHeads`, padded to powers of two.
    keys: tokens of a tile.
    """

    rows: int
    ranks: int
    ropes: int
    keys: int


class Scores(NamedTuple):
    """The options of scores and the visibility of keys, as one `tl.constexpr`.

    softcap: whether scores are capped with tanh; `scale_log2` is then scale / softcap.
    sinks: whether a logit without a key joins each head's softmax.
    slopes: whether a head's scores fall with the distance (ALiBi).
    window: keys that a query sees, its own included; 0: all up to its own.
    chunk: tokens of a chunk; a query sees keys of its own chunk only; 0: no chunks.
    last_keys: whether each query has its own last visible key, which may be after it.
    """

    softcap: bool
    sinks: bool
    slopes: bool
    window: int = 0
    chunk: int = 0
    last_keys: bool = False
