"""Sampling in Triton: no sort, no host synchronisation, every launch of a shape fixed by its arguments' shapes.

    add_bias, penalise, ban     edit the logits in place                          rows that ask
    filter_thresholds           top_k, top_p, min_p -> the smallest logit kept     rows that ask
    choose                      argmax of logit / temperature + gumbel             one pass, 4,096 tokens a program
    logprobs                    log-probability, rank and top k of raw logits      rows that ask

words is the table of `sampling_layout` on the device; entry s has the parameters of row rows[s]. The noise is that of
`philox`, whose NumPy form says how it is made. A row's result depends on that row alone, whatever the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import philox
from kernels import sampling_layout as layout

BLOCK = philox.TOKENS_PER_BLOCK

_INV_TEMPERATURE = tl.constexpr(layout.INV_TEMPERATURE)
_TOP_K = tl.constexpr(layout.TOP_K)
_TOP_P = tl.constexpr(layout.TOP_P)
_LOG_MIN_P = tl.constexpr(layout.LOG_MIN_P)
_REPETITION = tl.constexpr(layout.REPETITION)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_SEED = tl.constexpr(layout.SEED)
_CHOICE = tl.constexpr(layout.CHOICE)
_NUM_PROMPT = tl.constexpr(layout.NUM_PROMPT)
_MIN_TOKENS = tl.constexpr(layout.MIN_TOKENS)
_NUM_BIAS = tl.constexpr(layout.NUM_BIAS)
_NUM_STOP = tl.constexpr(layout.NUM_STOP)
_LOGPROBS = tl.constexpr(layout.LOGPROBS)
_BIAS_IDS = tl.constexpr(layout.BIAS_IDS)
_BIAS_VALUES = tl.constexpr(layout.BIAS_VALUES)
_STOP_IDS = tl.constexpr(layout.STOP_IDS)
_NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
_NO_ID = tl.constexpr(2**31 - 1)
_PROMPT = tl.constexpr(1 << 30)  # flag beside the output count in penalise's scratch
_VALUE_PASSES = tl.constexpr(6)


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


# ---------------------------------------------------------------------------------------------- noise and choice


@triton.jit
def _group_noise(seed, choice, position, block):
    """(smallest exponential, lane that has it) of the block's 64 groups: [64] float32, [64] int32."""
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
    """x * scale + gumbel for a quarter of a block, [16, 64]; lane and minimum are of its columns."""
    extra = -tl.log(word.to(tl.float32) * (2.0**-32) + 2.0**-33)
    extra = tl.where(lane[None, :] == lanes, 0.0, extra)
    return x * scale - tl.log(minimum[None, :] + extra)


@triton.jit
def _load_quarter(logits, ids, vocab):
    return tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _kept(x, ids, threshold, cut):
    return tl.where((x > threshold) | ((x == threshold) & (ids <= cut)), x, float("-inf"))


@triton.jit
def _best_of_block_kernel(
    logits,
    stride,
    rows,
    positions,
    words,
    thresholds,  # [S] float32
    cuts,  # [S] int32
    best,  # [S, num_blocks] float32; NaN = a logit is NaN or +inf
    best_ids,  # [S, num_blocks] int32
    vocab,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
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
    # inf - inf and nan - nan are NaN: a finite x, and the -inf of a banned token, give a plain False.
    wrong = (x0 != x0) | (x1 != x1) | (x2 != x2) | (x3 != x3)
    largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    wrong = wrong | (largest == float("inf"))
    is_wrong = tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0)

    if SAMPLED:
        scale = _float(words + _INV_TEMPERATURE)
        if scale > 0:
            if FILTERED:
                threshold = tl.load(thresholds + s)
                cut = tl.load(cuts + s)
                x0 = _kept(x0, i0, threshold, cut)
                x1 = _kept(x1, i1, threshold, cut)
                x2 = _kept(x2, i2, threshold, cut)
                x3 = _kept(x3, i3, threshold, cut)
                largest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
            # Most blocks have nothing that a filter keeps: no noise for them.
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
def _best_of_row_kernel(best, best_ids, tokens, bad, num_blocks, NUM_BLOCKS: tl.constexpr):
    s = tl.program_id(0)
    i = tl.arange(0, NUM_BLOCKS)
    score = tl.load(best + s * num_blocks + i, mask=i < num_blocks, other=float("-inf"))
    ids = tl.load(best_ids + s * num_blocks + i, mask=i < num_blocks, other=_NO_ID)
    wrong = tl.max((score != score).to(tl.int32), axis=0)
    largest = tl.max(score, axis=0)
    token = tl.min(tl.where(score == largest, ids, _NO_ID), axis=0)
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
) -> tuple[Tensor, Tensor]:
    """Edited logits [S, vocab] -> (tokens [S] int64, bad [S] bool). Equal scores: the lowest id. Bad rows get token 0.

    sampled: some row may have a temperature. filters: what `filter_thresholds` returned.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    bad = torch.empty(count, dtype=torch.bool, device=logits.device)
    thresholds, cuts = filters if filters is not None else (best, ids)
    if count:
        _best_of_block_kernel[(blocks, count)](
            logits,
            logits.stride(0),
            rows,
            positions,
            words,
            thresholds,
            cuts,
            best,
            ids,
            vocab,
            SAMPLED=sampled,
            FILTERED=filters is not None,
            num_warps=4,
        )
        _best_of_row_kernel[(count,)](
            best, ids, tokens, bad, blocks, NUM_BLOCKS=triton.next_power_of_2(blocks), num_warps=1
        )
    return tokens, bad


# -------------------------------------------------------------------------------------------------------- filters


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """float32 -> int32 that orders alike. SHIFT drops the bits that a 16-bit float does not have."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The inverse of _key, of an int64 scalar."""
    order = key << SHIFT
    order = tl.where(key < 0, order | ((1 << SHIFT) - 1), order).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, vocab, best, scale, log_min_p, p1, p2, p3, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Number and mass of the tokens (that min_p leaves) with keys from p1, p2 and p3 up."""
    i = tl.arange(0, BLOCK)
    c1 = tl.zeros([BLOCK], tl.int32)
    c2 = tl.zeros([BLOCK], tl.int32)
    c3 = tl.zeros([BLOCK], tl.int32)
    m1 = tl.zeros([BLOCK], tl.float32)
    m2 = tl.zeros([BLOCK], tl.float32)
    m3 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32)
        key = _key(x, SHIFT)
        gap = (x - best) * scale
        weight = tl.exp(gap)
        valid = (gap >= log_min_p) & (x > float("-inf"))
        in1 = valid & (key >= p1)
        in2 = valid & (key >= p2)
        in3 = valid & (key >= p3)
        c1 += in1.to(tl.int32)
        c2 += in2.to(tl.int32)
        c3 += in3.to(tl.int32)
        m1 += tl.where(in1, weight, 0.0)
        m2 += tl.where(in2, weight, 0.0)
        m3 += tl.where(in3, weight, 0.0)
    return tl.sum(c1), tl.sum(c2), tl.sum(c3), tl.sum(m1), tl.sum(m2), tl.sum(m3)


@triton.jit
def _search(
    logits,
    vocab,
    best,
    scale,
    log_min_p,
    lo,
    count_lo,
    mass_lo,
    hi,
    need_count,
    need_mass,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key from which there are need_count tokens and need_mass mass.

    Narrows [lo, hi) fourfold a pass, count_lo and mass_lo being those from lo up and none from hi up; evenly by
    value at first, where logits lie, then by key, which ends. Stops as soon as [lo, hi) holds one token, or the
    count is exact. Returns lo, (count, mass) from lo up and (count, mass) from hi up.
    """
    count_hi = count_lo * 0
    mass_hi = mass_lo * 0
    passes = count_lo * 0
    while (hi - lo > 1) & (count_lo - count_hi > 1) & (count_lo != need_count):
        if passes < _VALUE_PASSES:
            low = _value(lo, SHIFT)
            step = (_value(hi - 1, SHIFT) - low) * 0.25
            p1 = _key(low + step, SHIFT).to(tl.int64)
            p2 = _key(low + step * 2, SHIFT).to(tl.int64)
            p3 = _key(low + step * 3, SHIFT).to(tl.int64)
        else:
            p1 = lo + (hi - lo) // 4
            p2 = lo + (hi - lo) // 2
            p3 = lo + (hi - lo) // 4 * 3
        passes += 1
        p1 = tl.minimum(tl.maximum(p1, lo + 1), hi - 1)
        p2 = tl.minimum(tl.maximum(p2, p1), hi - 1)
        p3 = tl.minimum(tl.maximum(p3, p2), hi - 1)
        c1, c2, c3, m1, m2, m3 = _above(
            logits, vocab, best, scale, log_min_p, p1, p2, p3, SHIFT, BLOCK
        )
        if (c3 >= need_count) & (m3 >= need_mass):
            lo, count_lo, mass_lo = p3, c3, m3
        elif (c2 >= need_count) & (m2 >= need_mass):
            lo, count_lo, mass_lo = p2, c2, m2
            hi, count_hi, mass_hi = p3, c3, m3
        elif (c1 >= need_count) & (m1 >= need_mass):
            lo, count_lo, mass_lo = p1, c1, m1
            hi, count_hi, mass_hi = p2, c2, m2
        else:
            hi, count_hi, mass_hi = p1, c1, m1
    return lo, count_lo, mass_lo, count_hi, mass_hi


@triton.jit
def _filter_kernel(
    logits,
    stride,
    rows,
    words,
    thresholds,
    cuts,
    vocab,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0)
    words += tl.load(rows + s) * _NUM_WORDS
    scale = _float(words + _INV_TEMPERATURE)
    top_k = tl.load(words + _TOP_K)
    top_p = _float(words + _TOP_P)
    log_min_p = _float(words + _LOG_MIN_P)
    tl.store(thresholds + s, float("-inf"))
    tl.store(cuts + s, _NO_ID)
    if (scale > 0) & ((top_k > 0) | (top_p < 1) | (log_min_p > float("-inf"))):
        logits += s.to(tl.int64) * stride
        i = tl.arange(0, BLOCK)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf"))
            largest = tl.maximum(largest, x.to(tl.float32))
        best = tl.max(largest)

        smallest = tl.full([BLOCK], float("inf"), tl.float32)
        counts = tl.zeros([BLOCK], tl.int32)
        masses = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf"))
            x = x.to(tl.float32)
            gap = (x - best) * scale
            valid = (gap >= log_min_p) & (x > float("-inf"))
            smallest = tl.minimum(smallest, tl.where(valid, x, float("inf")))
            counts += valid.to(tl.int32)
            masses += tl.where(valid, tl.exp(gap), 0.0)
        count = tl.sum(counts)
        # A row that is not finite has no count here or nonsense; `choose` flags it whatever comes out.
        if count > 0:
            mass = tl.sum(masses)
            lo = _key(tl.min(smallest), SHIFT).to(tl.int64)
            end = _key(best, SHIFT).to(tl.int64) + 1
            ties = count * 0  # of the tokens at lo: keep the first so many; 0 = all
            if (top_k > 0) & (top_k < count):
                lo, count, mass, count_hi, mass_hi = _search(
                    logits, vocab, best, scale, log_min_p, lo, count, mass, end, top_k, 0.0, SHIFT, BLOCK
                )
                if count > top_k:
                    ties = top_k - count_hi
                    mass = mass_hi + (mass - mass_hi) * (ties / (count - count_hi))
                    count = top_k
            if top_p < 1:
                need = mass * top_p
                old = lo
                lo, count, mass, count_hi, mass_hi = _search(
                    logits, vocab, best, scale, log_min_p, lo, count, mass, end, 0, need, SHIFT, BLOCK
                )
                if lo != old:
                    ties = ties * 0
                inside = count - count_hi
                if inside > 1:
                    share = (need - mass_hi) / (mass - mass_hi) * inside
                    wanted = tl.minimum(tl.maximum(tl.ceil(share).to(tl.int32), 1), inside)
                    if (wanted < inside) | (ties > 0):
                        ties = wanted
                elif ties > 0:
                    ties = inside
            tl.store(thresholds + s, _value(lo, SHIFT))
            if ties > 0:
                cut = vocab - 1
                seen = ties * 0
                start = ties * 0
                while (seen < ties) & (start < vocab):
                    x = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf"))
                    same = (_key(x.to(tl.float32), SHIFT) == lo).to(tl.int32)
                    rank = seen + tl.cumsum(same, axis=0)
                    at = tl.min(tl.where((rank == ties) & (same > 0), start + i, _NO_ID), axis=0)
                    cut = tl.minimum(cut, at)
                    seen += tl.sum(same)
                    start += BLOCK
                tl.store(cuts + s, cut)


def filter_thresholds(logits: Tensor, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Edited logits [S, vocab] -> (threshold [S] float32, cut [S] int32): min_p, then top_k, then top_p keep the
    tokens with logit > threshold, and those equal to it with id <= cut. -inf and 2**31 - 1 for rows without filters.
    """
    count, vocab = logits.shape
    thresholds = torch.empty(count, dtype=torch.float32, device=logits.device)
    cuts = torch.empty(count, dtype=torch.int32, device=logits.device)
    shift = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[logits.dtype]
    if count:
        _filter_kernel[(count,)](
            logits, logits.stride(0), rows, words, thresholds, cuts, vocab,
            SHIFT=shift, BLOCK=4096, num_warps=16,
        )  # fmt: skip
    return thresholds, cuts


# ---------------------------------------------------------------------------------------------------------- edits


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
    """logit_bias, in place on logits [S, vocab]."""
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
    """-inf for the end tokens of rows below their min_tokens, in place on logits [S, vocab]."""
    if len(rows):
        _ban_kernel[(len(rows),)](
            logits, logits.stride(0), rows, positions, words, logits.shape[1],
            SIZE=triton.next_power_of_2(layout.MAX_STOP), num_warps=2,
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
    """First launch: count each token of the history. Second: whoever takes a token's count, leaving 0, edits its
    logit; so each is edited once, and the scratch is clean again."""
    s = tl.program_id(1)
    row = tl.load(rows + s)
    words += row * _NUM_WORDS
    repetition = _float(words + _REPETITION)
    presence = _float(words + _PRESENCE)
    frequency = _float(words + _FREQUENCY)
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
                found = tl.atomic_xchg(counters, zero, mask=mask, sem="relaxed")
                mask = mask & (found != 0)
                pointer = logits + s.to(tl.int64) * stride + ids
                x = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
                x = tl.where(x > 0, x / repetition, x * repetition)
                times = (found & (_PROMPT - 1)).to(tl.float32)
                x -= tl.where(times > 0, presence, 0.0) + times * frequency
                tl.store(pointer, x.to(logits.dtype.element_ty), mask=mask)
            else:
                num_prompt = tl.load(words + _NUM_PROMPT)
                one = tl.full([BLOCK], 1, tl.int32)
                tl.atomic_add(counters, one, mask=mask & (i >= num_prompt), sem="relaxed")
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
    """Repetition (prompt and output), presence and frequency (output) penalties, in place on logits [S, vocab].

    tokens: [max_rows, max_len] int32, of which entry s has positions[s]. scratch: [n, vocab] int32, all zero, and
    all zero again afterwards; n rows are done at a time.
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


# ------------------------------------------------------------------------------------------------------- logprobs


@triton.jit
def _next_best(x, ids, last, last_id):
    """The best of x after (last, last_id) in the order of value, then id: (value, id); id 2**31 - 1 = no more."""
    after = ((x < last) | ((x == last) & (ids > last_id))) & (ids != _NO_ID)
    value = tl.max(tl.where(after, x, float("-inf")), axis=0)
    return value, tl.min(tl.where(after & (x == value), ids, _NO_ID), axis=0)


@triton.jit
def _logprob_block_kernel(
    logits,
    stride,
    rows,
    words,
    targets,
    stats,  # [S, num_blocks, 3] float32: largest logit, sum of exponentials from there, logits above the target's
    tops,  # [S, num_blocks, K] float32
    top_ids,  # [S, num_blocks, K] int32
    vocab,
    ALL: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    s = tl.program_id(1)
    asked = True
    if not ALL:
        asked = tl.load(words + tl.load(rows + s) * _NUM_WORDS + _LOGPROBS) >= 0
    if asked:
        logits += s.to(tl.int64) * stride
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        target = tl.load(logits + tl.load(targets + s)).to(tl.float32)
        best = tl.max(x, axis=0)
        total = tl.sum(tl.where(x > float("-inf"), tl.exp(x - best), 0.0), axis=0)
        out = s.to(tl.int64) * tl.num_programs(0) + block
        tl.store(stats + out * 3, best)
        tl.store(stats + out * 3 + 1, total)
        tl.store(stats + out * 3 + 2, tl.sum((x > target).to(tl.float32), axis=0))
        ids = tl.where(ids < vocab, ids, _NO_ID)
        value = best * 0 + float("inf")
        token = block * 0 - 1
        for j in range(K):
            value, token = _next_best(x, ids, value, token)
            tl.store(tops + out * K + j, value)
            tl.store(top_ids + out * K + j, token)


@triton.jit
def _logprob_row_kernel(
    logits,
    stride,
    rows,
    words,
    targets,
    stats,
    tops,
    top_ids,
    logprob,  # [S] float32
    rank,  # [S] int64
    out_ids,  # [S, K] int64
    out_logprobs,  # [S, K] float32
    num_blocks,
    ALL: tl.constexpr,
    K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_TOPS: tl.constexpr,
):
    s = tl.program_id(0)
    asked = True
    if not ALL:
        asked = tl.load(words + tl.load(rows + s) * _NUM_WORDS + _LOGPROBS) >= 0
    if asked:
        i = tl.arange(0, NUM_BLOCKS)
        mask = i < num_blocks
        base = stats + (s.to(tl.int64) * num_blocks + i) * 3
        largest = tl.load(base, mask=mask, other=float("-inf"))
        sums = tl.load(base + 1, mask=mask, other=0.0)
        best = tl.max(largest, axis=0)
        total = tl.sum(tl.where(largest > float("-inf"), sums * tl.exp(largest - best), 0.0), axis=0)
        total = best + tl.log(total)
        target = tl.load(logits + s.to(tl.int64) * stride + tl.load(targets + s)).to(tl.float32)
        tl.store(logprob + s, target - total)
        above = tl.load(base + 2, mask=mask, other=0.0)
        tl.store(rank + s, tl.sum(above, axis=0).to(tl.int64) + 1)
        if K > 0:
            j = tl.arange(0, NUM_TOPS)
            mask = j < num_blocks * K
            base = s.to(tl.int64) * num_blocks * K + j
            x = tl.load(tops + base, mask=mask, other=float("-inf"))
            ids = tl.load(top_ids + base, mask=mask, other=_NO_ID)
            value = best * 0 + float("inf")
            token = s * 0 - 1
            for n in range(K):
                value, token = _next_best(x, ids, value, token)
                tl.store(out_logprobs + s.to(tl.int64) * K + n, value - total)
                tl.store(out_ids + s.to(tl.int64) * K + n, tl.where(token == _NO_ID, 0, token))


def logprobs(
    logits: Tensor,
    targets: Tensor,
    k: int,
    rows: Tensor | None = None,
    words: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw logits [S, vocab] and a token for each, [S] int64 -> (log-probability [S] float32, rank from 1 [S] int64,
    ids of the k most likely [S, k] int64 with equals by id, their log-probabilities [S, k] float32).

    rows and words: skip rows that did not ask, whose results are left undefined. Without them every row is done.
    """
    count, vocab = logits.shape
    k = min(k, vocab)
    block = 4096
    blocks = triton.cdiv(vocab, block)
    device = logits.device
    stats = torch.empty(count, blocks, 3, dtype=torch.float32, device=device)
    tops = torch.empty(count, blocks, k, dtype=torch.float32, device=device)
    top_ids = torch.empty(count, blocks, k, dtype=torch.int32, device=device)
    logprob = torch.empty(count, dtype=torch.float32, device=device)
    rank = torch.empty(count, dtype=torch.int64, device=device)
    out_ids = torch.empty(count, k, dtype=torch.int64, device=device)
    out_logprobs = torch.empty(count, k, dtype=torch.float32, device=device)
    everything = rows is None or words is None
    which, table = (targets, targets) if everything else (rows, words)
    if count:
        _logprob_block_kernel[(blocks, count)](
            logits, logits.stride(0), which, table, targets, stats, tops, top_ids, vocab,
            ALL=everything, K=k, BLOCK=block, num_warps=4,
        )  # fmt: skip
        _logprob_row_kernel[(count,)](
            logits, logits.stride(0), which, table, targets, stats, tops, top_ids,
            logprob, rank, out_ids, out_logprobs, blocks,
            ALL=everything, K=k, NUM_BLOCKS=triton.next_power_of_2(blocks),
            NUM_TOPS=triton.next_power_of_2(max(1, blocks * k)), num_warps=4,
        )  # fmt: skip
    return logprob, rank, out_ids, out_logprobs
