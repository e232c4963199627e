"""What kernels over chunks of an entry's tokens share.

A step's chunks have a slot each, by which what kernels hand on is laid out. The host knows how many
slots there are at most, and not which are used: a program finds its slot's entry by binary search.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta

CHUNK = 64  # tokens
ENTRIES = 16  # that are walked at once, at most


class Launch(NamedTuple):
    num_warps: int
    num_stages: int


class PassLaunch(NamedTuple):
    columns: int  # of a state, or rows, a program
    num_warps: int
    num_stages: int


def num_slots(num_tokens: int, meta: AttentionMeta) -> int:
    """Return an upper bound of the slots of a step's chunks.

    Each entry, and the padding behind the last, may leave its last chunk part empty.
    """
    return num_tokens // CHUNK + num_chunked(meta) + 1


def num_chunked(meta: AttentionMeta) -> int:
    """Return the most entries that are not decodes. CUDA graphs do not know which entries are."""
    entries = int(meta.kv_len.shape[0])
    return entries if meta.num_decodes == entries else entries - meta.num_decodes


@triton.jit
def slot_of(query_start, counts, num_tokens, index, CHUNK: tl.constexpr):
    """Find the chunk of a slot.

    Returns the entry, its first token in the step, the chunk's first among these, and how many
    these
    are. The entry behind the last is what pads.
    """
    num_entries = tl.load(counts + 1)
    entry, begin, first = entry_of(query_start, tl.load(counts), num_entries, index, CHUNK)
    length = num_tokens - begin
    if entry < num_entries:
        length = tl.load(query_start + entry + 1) - begin
    return entry, begin, first, length


@triton.jit
def first_slot(query_start, counts, entry, CHUNK: tl.constexpr):
    """Return the first slot of an entry."""
    first_entry = tl.load(counts)
    origin = tl.load(query_start + first_entry)
    return (tl.load(query_start + entry) - origin) // CHUNK + entry - first_entry


@triton.jit
def softplus(x):
    """Compute softplus as torch does: x itself from 20 on."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def decays(total, SIZE: tl.constexpr):
    """total [SIZE]: sums of logarithms -> [SIZE, SIZE]: what is left at i of what was at j <= i;
    0 above the diagonal."""
    at = tl.arange(0, SIZE)
    return tl.where(at[:, None] >= at[None, :], tl.exp(total[:, None] - total[None, :]), 0.0)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a matrix [SIZE, SIZE] that is 0 on its diagonal and above; SIZE is 64.

    The blocks of 16 on the diagonal are inverted row by row, all at once: powers of `lower` would
    grow beyond what float32 can cancel. With these as D and the rest as L, D L is 0 from its fourth
    power on, so that the inverse is (1 + (D L)^2) (1 - D L) D.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    blocks = tl.arange(0, BLOCKS)
    inner = tl.arange(0, 16)
    same = tl.reshape(blocks[:, None] == blocks[None, :], [BLOCKS, 1, BLOCKS, 1])
    by_block = tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16])
    diagonal = tl.sum(tl.where(same, by_block, 0.0), axis=2)
    solved = tl.where(inner[:, None] == inner[None, :], 1.0, 0.0)[None, :, :] + diagonal * 0.0
    for row in range(1, 16):
        here = (inner == row)[None, :, None]
        weights = tl.sum(tl.where(here, diagonal, 0.0), axis=1)
        others = tl.sum(weights[:, :, None] * solved, axis=1)
        solved -= tl.where(here, others[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [SIZE, SIZE])
    rest = tl.reshape(tl.where(same, 0.0, by_block), [SIZE, SIZE])
    once = tl.dot(inverse, rest, input_precision=PRECISION)
    twice = tl.dot(once, once, input_precision=PRECISION)
    inverse -= tl.dot(once, inverse, input_precision=PRECISION)
    return inverse + tl.dot(twice, inverse, input_precision=PRECISION)
