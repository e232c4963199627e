"""Edits of logits before sampling, in place: bias, penalties, bans of end tokens, grammar masks.

The functions must run in this order: add_bias, penalise, ban, apply_masks (`SamplingParams`).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import layout
from kernels.sampling.choose import load_float

_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_NUM_PROMPT = tl.constexpr(layout.NUM_PROMPT)
_MIN_TOKENS = tl.constexpr(layout.MIN_TOKENS)
_NUM_BIAS = tl.constexpr(layout.NUM_BIAS)
_NUM_STOP = tl.constexpr(layout.NUM_STOP)
_BIAS_IDS = tl.constexpr(layout.BIAS_IDS)
_BIAS_VALUES = tl.constexpr(layout.BIAS_VALUES)
_STOP_IDS = tl.constexpr(layout.STOP_IDS)
_NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
# A token's word in `penalise`'s scratch: this flag if the prompt has it, plus its output count.
_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def _bias_kernel(logits, stride, rows, words, vocab, SIZE: tl.constexpr):
    s = tl.program_id(0)
    words += tl.load(rows + s) * _NUM_WORDS
    count = tl.load(words + _NUM_BIAS)
    if count > 0:
        i = tl.arange(0, SIZE)
        ids = tl.load(words + _BIAS_IDS + i, mask=i < count, other=vocab)
        mask = (ids >= 0) & (ids < vocab)
        bias = tl.load(words + _BIAS_VALUES + i, mask=mask, other=0).to(tl.float32, bitcast=True)
        pointer = logits + s.to(tl.int64) * stride + ids
        x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointer, (x + bias).to(logits.dtype.element_ty), mask=mask)


def add_bias(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Add the rows' logit_bias to logits [S, vocab] in place.

    rows, words: see `kernels.sampling.choose`.
    """
    if len(rows):
        _bias_kernel[(len(rows),)](
            logits, logits.stride(0), rows, words, logits.shape[1],
            SIZE=triton.next_power_of_2(layout.MAX_BIAS), num_warps=2,
        )  # fmt: skip


@triton.jit
def _ban_kernel(logits, stride, rows, positions, words, vocab, SIZE: tl.constexpr):
    s = tl.program_id(0)
    words += tl.load(rows + s) * _NUM_WORDS
    count = tl.load(words + _NUM_STOP)
    produced = tl.load(positions + s) - tl.load(words + _NUM_PROMPT)
    if (count > 0) & (produced < tl.load(words + _MIN_TOKENS)):
        i = tl.arange(0, SIZE)
        ids = tl.load(words + _STOP_IDS + i, mask=i < count, other=vocab)
        banned = tl.full([SIZE], float("-inf"), logits.dtype.element_ty)
        mask = (ids >= 0) & (ids < vocab)
        tl.store(logits + s.to(tl.int64) * stride + ids, banned, mask=mask)


def ban(logits: Tensor, rows: Tensor, positions: Tensor, words: Tensor) -> None:
    """Set the logits of end tokens to -inf, in place, for rows with fewer than min_tokens tokens.

    logits: [S, vocab]. rows, positions, words: as for `kernels.sampling.choose.choose`.
    """
    if len(rows):
        _ban_kernel[(len(rows),)](
            logits, logits.stride(0), rows, positions, words, logits.shape[1],
            SIZE=triton.next_power_of_2(layout.MAX_STOP), num_warps=2,
        )  # fmt: skip


@triton.jit
def _mask_kernel(logits, stride, mask_of, masks, num_words, vocab, BLOCK: tl.constexpr):
    s = tl.program_id(1)
    m = tl.load(mask_of + s)
    if m >= 0:
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        mask = masks + m.to(tl.int64) * num_words
        words = tl.load(mask + ids // 32, mask=ids // 32 < num_words, other=0)
        forbidden = ((words >> (ids % 32)) & 1) == 0
        banned = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
        tl.store(logits + s.to(tl.int64) * stride + ids, banned, mask=inside & forbidden)


def apply_masks(logits: Tensor, mask_of: Tensor, masks: Tensor) -> None:
    """Set the logits [S, vocab] of tokens that a grammar forbids to -inf, in place.

    It must run before `filter_thresholds`. Without filters it need not run, as `choose` applies
    masks itself.

    mask_of: [S] int32, index of each row's mask, -1 for none.
    masks: [M, W] int32. Token t is allowed if bit t % 32 of word t // 32 is 1. Tokens after the
        last word are forbidden.
    """
    if len(logits):
        vocab = logits.shape[1]
        block = 4096
        _mask_kernel[(triton.cdiv(vocab, block), len(logits))](
            logits, logits.stride(0), mask_of, masks, masks.shape[1], vocab,
            BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def _penalty_kernel(
    logits,
    stride,
    rows,
    positions,
    words,
    tokens,
    tokens_stride,
    scratch,
    vocab,
    APPLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count tokens in scratch, or with APPLY edit the logits of counted tokens.

    The first launch counts each token of prompt and output. In the second launch (APPLY), a program
    exchanges a token's count for 0, and edits the logit if the count was not 0. So each logit is
    edited once, and the scratch is zero again.
    """
    s = tl.program_id(1)
    row = tl.load(rows + s)
    words += row * _NUM_WORDS
    repetition = load_float(words + _REPETITION)
    presence = load_float(words + _PRESENCE)
    frequency = load_float(words + _FREQUENCY)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        length = tl.load(positions + s)
        start = tl.program_id(0) * BLOCK
        if start < length:
            i = start + tl.arange(0, BLOCK)
            mask = i < length
            ids = tl.load(tokens + row * tokens_stride + i, mask=mask, other=0)
            mask = mask & (ids >= 0) & (ids < vocab)
            counters = scratch + s.to(tl.int64) * vocab + ids
            if APPLY:
                zero = tl.zeros([BLOCK], tl.int32)
                counts = tl.atomic_xchg(counters, zero, mask=mask, sem="relaxed")
                mask = mask & (counts != 0)
                pointer = logits + s.to(tl.int64) * stride + ids
                x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
                x = tl.where(x > 0, x / repetition, x * repetition)
                times = (counts & (_PROMPT - 1)).to(tl.float32)
                x -= tl.where(times > 0, presence, 0.0) + times * frequency
                tl.store(pointer, x.to(logits.dtype.element_ty), mask=mask)
            else:
                num_prompt = tl.load(words + _NUM_PROMPT)
                ones = tl.full([BLOCK], 1, tl.int32)
                tl.atomic_add(counters, ones, mask=mask & (i >= num_prompt), sem="relaxed")
                if repetition != 1:
                    flag = tl.full([BLOCK], _PROMPT, tl.int32)
                    tl.atomic_or(counters, flag, mask=mask & (i < num_prompt), sem="relaxed")


def penalise(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    words: Tensor,
    tokens: Tensor,
    scratch: Tensor,
) -> None:
    """Apply repetition, presence and frequency penalties to logits [S, vocab] in place.

    Repetition penalties count tokens of prompt and output, the others tokens of the output.

    tokens: [max_rows, max_len] int32, prompt and output; row rows[s] has positions[s] tokens.
    scratch: [n, vocab] int32, zero before and after the call; n rows of logits are processed at a
        time.
    """
    block = 1024
    chunk, vocab = scratch.shape
    for first in range(0, len(rows), chunk):
        part = slice(first, first + chunk)
        x = logits[part]
        grid = (triton.cdiv(tokens.shape[1], block), x.shape[0])
        for apply in (False, True):
            _penalty_kernel[grid](
                x, x.stride(0), rows[part], positions[part], words, tokens, tokens.stride(0),
                scratch, vocab, APPLY=apply, BLOCK=block, num_warps=4,
            )  # fmt: skip
