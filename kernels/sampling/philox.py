"""The noise of sampling: standard Gumbel variables that depend only on (seed, choice, position,
token id).

Philox4x32-10 (Salmon et al. 2011) with key = the seed's two words, counter = (index, position,
choice, stream). A random word per token would cost more than reading the logits, so there are two
levels. Tokens are split into groups of 64. Each token has an independent E ~ Exp(1), and the
exponential distribution is memoryless:

    the smallest E of a group is Exp(1) / 64, and each token (lane) is equally likely to have it;
    every other E is the smallest plus an Exp(1); gumbel(token) = -log(E(token)).

So one word per group (stream 1) bounds the noise of 64 tokens. Only groups that can contain the
sampled token need a word per token (stream 0), so the CPU skips nearly all groups. The joint
distribution is exactly that of independent variables.

    token   = block * 4096 + word * 1024 + q * 64 + col       word < 4, q < 16, col < 64
    group   = block * 64 + col                                lane in the group = word * 16 + q
    stream 0: counter index = block * 1024 + q * 64 + col     output word = word
    stream 1: counter index = group // 4                      output word = group % 4

A group's word has the lane in its low 6 bits and a uniform number in the other 26. The smallest E
is 2**-33, so gumbel <= 22.9; ties between tokens are as rare as with 32 bits per token.
This module is the NumPy version: the CPU path, and the oracle for the Triton version in
`choose.py`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENS_PER_BLOCK = 4096
GROUPS_PER_BLOCK = 64
LANES = 64  # tokens per group

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_BELOW_ONE = np.float32(1 - 2**-24)

U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def philox4x32(seeds: I64, c0: Any, c1: Any, c2: Any, c3: int) -> tuple[U64, U64, U64, U64]:
    """Return the four output words of Philox4x32-10, each in a uint64. All arguments broadcast;
    counters are < 2**32.
    """
    key = np.asarray(seeds, np.int64).view(np.uint64)
    k0, k1 = key & _LOW, key >> _32
    shape = np.broadcast_shapes(key.shape, np.shape(c0), np.shape(c1), np.shape(c2))

    def word(c: Any) -> U64:
        return np.array(np.broadcast_to(np.asarray(c).astype(np.uint64) & _LOW, shape))

    x0, x1, x2, x3 = word(c0), word(c1), word(c2), word(c3)
    p0, p1 = np.empty_like(x0), np.empty_like(x0)
    for r in range(10):
        np.multiply(x0, _M0, out=p0)
        np.multiply(x2, _M1, out=p1)
        # (x0, x1, x2, x3) = (hi1 ^ x1 ^ k0, lo1, hi0 ^ x3 ^ k1, lo0)
        np.right_shift(p1, _32, out=x0)
        x0 ^= x1
        x0 ^= (k0 + np.uint64(r * _W0 & 0xFFFFFFFF)) & _LOW
        np.right_shift(p0, _32, out=x2)
        x2 ^= x3
        x2 ^= (k1 + np.uint64(r * _W1 & 0xFFFFFFFF)) & _LOW
        np.bitwise_and(p1, _LOW, out=x1)
        np.bitwise_and(p0, _LOW, out=x3)
    return x0, x1, x2, x3


def group_minimum(words: U64) -> tuple[F32, I64]:
    """Return the smallest exponential variable of each group of 64 tokens, and its lane.

    words: Philox words of stream 1, one per group. The lane is the token's index in its group.
    """
    v = ((words >> np.uint64(6)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-26)
    return exponential(np.minimum(v, _BELOW_ONE)) * np.float32(1 / LANES), (
        words & np.uint64(LANES - 1)
    ).astype(np.int64)


def exponential(v: F32) -> F32:
    """Return -log(1 - v), accurate near 0, where the rare large Gumbel values come from."""
    series = np.float32(1 / 6)
    for n in (5, 4, 3, 2, 1):
        series = series * v + np.float32(1 / n)
    return np.where(v < np.float32(1 / 16), v * series, -np.log1p(-v)).astype(np.float32)


def token_exponential(words: U64) -> F32:
    """Return an Exp(1) variable for each token, to be added to its group's smallest variable.

    The token that has the group's smallest variable needs no such number.
    words: Philox words of stream 0, one per token.
    """
    return -np.log(words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33))


def group_noise(seeds: I64, choices: I64, positions: I64, num_blocks: int) -> tuple[F32, I64]:
    """Return each group's smallest exponential variable and its lane, [rows, num_blocks * 64] each.

    seeds, choices, positions: [rows], those of the token that each row samples.
    """
    index = np.arange(num_blocks * GROUPS_PER_BLOCK // 4)
    words = philox4x32(seeds[:, None], index, positions[:, None], choices[:, None], 1)
    return group_minimum(np.stack(words, -1).reshape(len(seeds), -1))


def group_of(tokens: I64) -> I64:
    """Return the index of the group that each token id belongs to."""
    return (tokens >> 12) * GROUPS_PER_BLOCK + (tokens & 63)


def group_tokens(groups: I64) -> I64:
    """Return the 64 token ids that share each group's noise word, [n, 64] in the order of lanes.

    groups: [n], indices of groups.
    """
    first = (groups >> 6) * TOKENS_PER_BLOCK + (groups & 63)
    return first[:, None] + np.arange(LANES) * 64


def lane_exponential(seeds: I64, choices: I64, positions: I64, groups: I64) -> F32:
    """Return `token_exponential` of the tokens of each group, [n, 64] in the order of lanes.

    All arguments are [n]; groups are indices of groups.
    """
    index = ((groups >> 6) * 1024 + (groups & 63))[:, None] + np.arange(16) * 64
    words = philox4x32(seeds[:, None], index, positions[:, None], choices[:, None], 0)
    return token_exponential(np.concatenate(words, 1))


def gumbel(seed: int, choice: int, position: int, vocab_size: int) -> F32:
    """Return the Gumbel noise of a whole vocabulary, [vocab_size]; for tests, as the definition."""
    ones = np.ones(1, np.int64)
    blocks = -(-vocab_size // TOKENS_PER_BLOCK)
    minimum, lane = group_noise(ones * seed, ones * choice, ones * position, blocks)
    groups = np.arange(blocks * GROUPS_PER_BLOCK)
    n = np.ones_like(groups)
    extra = lane_exponential(n * seed, n * choice, n * position, groups)
    extra[groups, lane[0]] = 0
    out = np.empty(blocks * TOKENS_PER_BLOCK, np.float32)
    out[group_tokens(groups)] = -np.log(minimum[0][:, None] + extra)
    return out[:vocab_size]
