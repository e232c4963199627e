"""Helpers of kernels that process the tokens of an entry (a request's sequence in the step) in
chunks.

Each chunk of a step has a slot: its index in the intermediate tensors. The host knows only an upper
bound of the number of slots. Programs find their slot's entry by binary search.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta

CHUNK = 64  # tokens per chunk
ENTRIES = 16  # maximum number of entries that are processed at once


class Launch(NamedTuple):
    num_warps: int
    num_stages: int


class PassLaunch(NamedTuple):
    columns: int  # columns of a state (Mamba-2: rows) per program
    num_warps: int
    num_stages: int


def num_slots(num_tokens: int, meta: AttentionMeta) -> int:
    """Return an upper bound of the number of slots in a step.

    The last chunk of each entry, and of the padding after the last entry, may be partly empty.
    """
    return num_tokens // CHUNK + num_chunked(meta) + 1


def num_chunked(meta: AttentionMeta) -> int:
    """Return an upper bound of the number of entries that are not decodes.

    In a CUDA graph it is the number of all entries, as the number of decodes is not known.
    """
    entries = int(meta.kv_len.shape[0])
    return entries if meta.num_decodes == entries else entries - meta.num_decodes


@triton.jit
def slot_of(query_start, counts, num_tokens, index, CHUNK: tl.constexpr):
    """Find the chunk of slot `index`.

    Returns the entry, the entry's first token in the step, the chunk's first token in the entry,
    and the entry's number of tokens. Padding tokens count as an entry after the last one.
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
    """Compute softplus as torch does: x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def decays(total, SIZE: tl.constexpr):
    """Return the decay from each token j to token i >= j, [SIZE, SIZE], and 0 above the diagonal.

    total: [SIZE], cumulative sums of log decays.
    """
    at = tl.arange(0, SIZE)
    return tl.where(at[:, None] >= at[None, :], tl.exp(total[:, None] - total[None, :]), 0.0)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (1 + lower)^-1 for a strictly lower triangular matrix [SIZE, SIZE] with SIZE = 64.

    The diagonal blocks of 16 x 16 are inverted row by row, in parallel, as powers of `lower` would
    exceed float32's precision. Let D be these inverses and L the blocks below the diagonal. As
    (D L)^4 = 0, the inverse is (1 + (D L)^2) (1 - D L) D.
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
    off_diagonal = tl.reshape(tl.where(same, 0.0, by_block), [SIZE, SIZE])
    once = tl.dot(inverse, off_diagonal, input_precision=PRECISION)
    twice = tl.dot(once, once, input_precision=PRECISION)
    inverse -= tl.dot(once, inverse, input_precision=PRECISION)
    return inverse + tl.dot(twice, inverse, input_precision=PRECISION)
