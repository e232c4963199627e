"""Samples tokens in Triton: the argmax of logit / temperature + Gumbel noise, in one pass over the
logits.

Sampling on the device has four modules. None of them sorts or waits for the device. Launch shapes
depend only on the arguments' shapes, and a row's result depends only on this row. Rows without the
parameters of a module are skipped, except in choose:

    edits      bias, penalties and bans, in place
    filters    top_k, top_p, min_p -> the smallest logit to keep
    choose     the sampled token; 4,096 tokens per program
    logprobs   log-probability, rank, top k, raw or processed

In all four, `words` [max_rows, words] is the device's table of sampling parameters (see `layout`);
the s-th row of logits has the parameters of row rows[s] of `words`. The noise is that of `philox`,
whose NumPy version defines it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import layout, philox

BLOCK = philox.TOKENS_PER_BLOCK

_INV_TEMPERATURE = tl.constexpr(layout.INV_TEMPERATURE)
_SEED = tl.constexpr(layout.SEED)
_CHOICE = tl.constexpr(layout.CHOICE)
_NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def load_float(pointer):
    """Load an int32 word and reinterpret its bits as a float32."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _group_noise(seed, choice, position, block):
    """Draw the smallest exponential variable of each of the block's 64 groups, and its lane.

    Returns ([64] float32, [64] int32); see `kernels.sampling.philox`.
    """
    index = block * 16 + tl.arange(0, 16)
    zero = index * 0
    r0, r1, r2, r3 = tl.philox(seed, index, zero + position, zero + choice, zero + 1)
    word = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [64])
    v = ((word >> 6).to(tl.float32) + 0.5) * (2.0**-26)
    v = tl.minimum(v, 1 - 2.0**-24)
    series = v * (1 / 6) + 1 / 5
    series = series * v + 1 / 4
    series = series * v + 1 / 3
    series = series * v + 1 / 2
    series = series * v + 1
    minimum = tl.where(v < 1 / 16, v * series, -tl.log(1 - v)) * (1 / 64)
    return minimum, (word & 63).to(tl.int32)


@triton.jit
def _noisy(x, word, scale, minimum, lane, lanes):
    """Return x * scale + Gumbel noise for a quarter of a block, [16, 64].

    x: [16, 64] logits; the columns are groups.
    word: [16, 64] Philox words of stream 0.
    minimum, lane: [64], the results of `_group_noise`.
    lanes: [16, 64], each token's lane in its group.
    """
    extra = -tl.log(word.to(tl.float32) * (2.0**-32) + 2.0**-33)
    extra = tl.where(lane[None, :] == lanes, 0.0, extra)
    return x * scale - tl.log(minimum[None, :] + extra)


@triton.jit
def _load_quarter(logits, ids, vocab):
    return tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def kept(x, ids, threshold, cut):
    """Return logits x, with -inf for tokens that the filters remove.

    threshold, cut: the row's results of `filter_thresholds`.
    """
    return tl.where((x > threshold) | ((x == threshold) & (ids <= cut)), x, float("-inf"))


@triton.jit
def _allowed(x, ids, mask, num_words):
    word = ids >> 5
    bits = tl.load(mask + word, mask=word < num_words, other=0)
    return tl.where(((bits >> (ids & 31)) & 1) != 0, x, float("-inf"))


@triton.jit
def _best_of_block_kernel(
    logits,
    stride,
    rows,
    positions,
    words,
    thresholds,  # [S] float32
    cuts,  # [S] int32
    mask_of,  # [S] int32
    masks,  # [M, num_words] int32
    num_words,
    best,  # [S, num_blocks] float32; NaN: a logit is NaN or +inf
    best_ids,  # [S, num_blocks] int32
    vocab,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    MASKED: tl.constexpr,
):
    block = tl.program_id(0)
    s = tl.program_id(1)
    row = tl.load(rows + s)
    logits += s.to(tl.int64) * stride
    words += row * _NUM_WORDS

    q = tl.arange(0, 16)[:, None]
    inner = q * 64 + tl.arange(0, 64)[None, :]
    i0 = block * 4096 + inner
    i1 = i0 + 1024
    i2 = i0 + 2048
    i3 = i0 + 3072
    x0 = _load_quarter(logits, i0, vocab)
    x1 = _load_quarter(logits, i1, vocab)
    x2 = _load_quarter(logits, i2, vocab)
    x3 = _load_quarter(logits, i3, vocab)
    if MASKED:
        m = tl.load(mask_of + s)
        if m >= 0:
            mask = masks + m.to(tl.int64) * num_words
            x0 = _allowed(x0, i0, mask, num_words)
            x1 = _allowed(x1, i1, mask, num_words)
            x2 = _allowed(x2, i2, mask, num_words)
            x3 = _allowed(x3, i3, mask, num_words)
    # A row with NaN or +inf is bad. -inf is allowed, as banned tokens have it.
    wrong = (x0 != x0) | (x1 != x1) | (x2 != x2) | (x3 != x3)
    largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    wrong = wrong | (largest == float("inf"))
    is_wrong = tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0)

    if SAMPLED:
        scale = load_float(words + _INV_TEMPERATURE)
        if scale > 0:
            if FILTERED:
                threshold = tl.load(thresholds + s)
                cut = tl.load(cuts + s)
                x0 = kept(x0, i0, threshold, cut)
                x1 = kept(x1, i1, threshold, cut)
                x2 = kept(x2, i2, threshold, cut)
                x3 = kept(x3, i3, threshold, cut)
                largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
            # After filters or masks most blocks have no allowed token, and need no noise.
            if tl.max(tl.max(largest, axis=1), axis=0) > float("-inf"):
                low = tl.load(words + _SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
                high = tl.load(words + _SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
                seed = (high << 32) | low
                choice = tl.load(words + _CHOICE)
                position = tl.load(positions + s).to(tl.int32)
                minimum, lane = _group_noise(seed, choice, position, block)
                index = block * 1024 + inner
                zero = index * 0
                r0, r1, r2, r3 = tl.philox(seed, index, zero + position, zero + choice, zero)
                x0 = _noisy(x0, r0, scale, minimum, lane, q)
                x1 = _noisy(x1, r1, scale, minimum, lane, q + 16)
                x2 = _noisy(x2, r2, scale, minimum, lane, q + 32)
                x3 = _noisy(x3, r3, scale, minimum, lane, q + 48)

    largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    score = tl.max(tl.max(largest, axis=1), axis=0)
    ids = tl.minimum(
        tl.minimum(tl.where(x0 == score, i0, _NO_ID), tl.where(x1 == score, i1, _NO_ID)),
        tl.minimum(tl.where(x2 == score, i2, _NO_ID), tl.where(x3 == score, i3, _NO_ID)),
    )
    out = s * tl.num_programs(0) + block
    tl.store(best + out, tl.where(is_wrong != 0, float("nan"), score))
    tl.store(best_ids + out, tl.min(tl.min(ids, axis=1), axis=0))


@triton.jit
def _best_of_row_kernel(
    best,
    best_ids,
    tokens,
    bad,
    num_blocks,
    row_stride,
    block_stride,
    first,
    PART: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Choose each row's best token from the results of its blocks.

    Writes the token [S] int64 and whether the row is bad [S]. With PART, for a part of the
    vocabulary whose ids begin at `first`, writes the best logit [S] to `tokens` and its id [S] to
    `bad` instead.
    """
    s = tl.program_id(0)
    i = tl.arange(0, NUM_BLOCKS)
    at = s * row_stride + i * block_stride
    score = tl.load(best + at, mask=i < num_blocks, other=float("-inf"))
    ids = tl.load(best_ids + at, mask=i < num_blocks, other=_NO_ID)
    wrong = tl.max((score != score).to(tl.int32), axis=0)
    largest = tl.max(score, axis=0)
    token = tl.min(tl.where(score == largest, ids, _NO_ID), axis=0)
    if PART:
        tl.store(tokens + s, tl.where(wrong != 0, float("nan"), largest))
        tl.store(bad + s, token + first)
    else:
        is_bad = (wrong != 0) | (largest == float("-inf"))
        tl.store(tokens + s, tl.where(is_bad, 0, token).to(tl.int64))
        tl.store(bad + s, is_bad)


def choose(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    words: Tensor,
    *,
    sampled: bool,
    filters: tuple[Tensor, Tensor] | None = None,
    masks: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of edited logits. Of equal scores the lowest id wins.

    logits: [S, vocab].
    rows, words: see the module. positions: [S], the sampled tokens' positions.
    sampled: whether any row may have a temperature above 0.
    filters: the result of `filter_thresholds`, or None.
    masks: (mask_of, masks) of `apply_masks`, or None; `choose` applies them itself.

    Returns (tokens [S] int64, bad [S] bool). A row with NaN or +inf, or without any finite logit,
    is bad and gets token 0.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    bad = torch.empty(count, dtype=torch.bool, device=logits.device)
    thresholds, cuts = filters if filters is not None else (best, ids)
    mask_of, allowed = masks if masks is not None else (ids, ids)
    if count:
        _best_of_block_kernel[(blocks, count)](
            logits,
            logits.stride(0),
            rows,
            positions,
            words,
            thresholds,
            cuts,
            mask_of,
            allowed,
            0 if masks is None else allowed.shape[1],
            best,
            ids,
            vocab,
            SAMPLED=sampled,
            FILTERED=filters is not None,
            MASKED=masks is not None,
            num_warps=8,
        )
        _best_of_row_kernel[(count,)](
            best,
            ids,
            tokens,
            bad,
            blocks,
            blocks,
            1,
            0,
            PART=False,
            NUM_BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1,
        )
    return tokens, bad


def best_of_part(logits: Tensor, rows: Tensor, words: Tensor, first: int) -> Tensor:
    """Return each row's largest logit in a shard of the vocabulary, for `best_of_parts`.

    logits: [S, part > 0], of the ids from `first` on. Returns [2, S] int32: the bits of the largest
    logit in float32, NaN if a logit is NaN or +inf, and the lowest id that has it.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    winners = torch.empty(2, count, dtype=torch.int32, device=logits.device)
    if count:
        _best_of_block_kernel[(blocks, count)](
            logits,
            logits.stride(0),
            rows,
            rows,
            words,
            best,
            ids,
            ids,
            ids,
            0,
            best,
            ids,
            vocab,
            SAMPLED=False,
            FILTERED=False,
            MASKED=False,
            num_warps=8,
        )
        _best_of_row_kernel[(count,)](
            best,
            ids,
            winners[0].view(torch.float32),
            winners[1],
            blocks,
            blocks,
            1,
            first,
            PART=True,
            NUM_BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1,
        )
    return winners


def best_of_parts(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each row's best token from the results of `best_of_part` for all vocabulary shards.

    parts: [parts, 2, S] int32, in the order of the vocabulary.
    Returns (tokens [S] int64, bad [S] bool), see `choose`.
    """
    number, _, count = parts.shape
    tokens = torch.empty(count, dtype=torch.int64, device=parts.device)
    bad = torch.empty(count, dtype=torch.bool, device=parts.device)
    if count:
        _best_of_row_kernel[(count,)](
            parts.view(torch.float32),
            parts[0, 1],
            tokens,
            bad,
            number,
            1,
            2 * count,
            0,
            PART=False,
            NUM_BLOCKS=triton.next_power_of_2(number),
            num_warps=1,
        )
    return tokens, bad
