"""top_k, top_p and min_p without sorting: a search for the smallest logit that passes the filters.

There is one program per row. Each pass reads the row, which stays in L2, and shrinks the interval
that contains the threshold by a factor of four. A few passes suffice, since the search ends once
the interval contains a single token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import layout
from kernels.sampling.choose import load_float

_INV_TEMPERATURE = tl.constexpr(layout.INV_TEMPERATURE)
_TOP_K = tl.constexpr(layout.TOP_K)
_TOP_P = tl.constexpr(layout.TOP_P)
_LOG_MIN_P = tl.constexpr(layout.LOG_MIN_P)
_NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
_NO_ID = tl.constexpr(2**31 - 1)
_VALUE_PASSES = tl.constexpr(6)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Map float32 to int32 keys with the same order.

    SHIFT: the number of low bits to drop, those that a 16-bit float does not have.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the float32 of a key, an int64 scalar; the inverse of `_key`."""
    order = key << SHIFT
    order = tl.where(key < 0, order | ((1 << SHIFT) - 1), order).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    logits, vocab, best, scale, log_min_p, p1, p2, p3, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the tokens with keys >= p1, p2 and p3, and sum their unnormalised probabilities.

    Tokens that min_p removes are left out. best: the row's largest logit. scale: 1 / temperature.
    Returns three counts, then three sums.
    """
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
    """Search for the largest key such that the tokens with this or a larger key are enough.

    They are enough if their count is at least need_count, and the sum of their probabilities
    (mass) at least need_mass.

    lo, hi: the interval [lo, hi) that contains the key. Each pass divides it by four: first in
        equal steps of the logit, later in equal steps of the key, which is sure to terminate.
    count_lo, mass_lo: count and mass of tokens with keys >= lo.

    The search stops once [lo, hi) contains one token or the count is exact. Returns lo, (count,
    mass) of keys >= lo, and (count, mass) of keys >= hi.
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
    scale = load_float(words + _INV_TEMPERATURE)
    top_k = tl.load(words + _TOP_K)
    top_p = load_float(words + _TOP_P)
    log_min_p = load_float(words + _LOG_MIN_P)
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
        # Rows with NaN or +inf have no meaningful count; `choose` reports them as bad.
        if count > 0:
            mass = tl.sum(masses)
            lo = _key(tl.min(smallest), SHIFT).to(tl.int64)
            end = _key(best, SHIFT).to(tl.int64) + 1
            ties = count * 0  # number of tokens with key lo to keep, lowest ids first; 0: all
            if (top_k > 0) & (top_k < count):
                lo, count, mass, count_hi, mass_hi = _search(
                    logits,
                    vocab,
                    best,
                    scale,
                    log_min_p,
                    lo,
                    count,
                    mass,
                    end,
                    top_k,
                    0.0,
                    SHIFT,
                    BLOCK,
                )
                if count > top_k:
                    ties = top_k - count_hi
                    mass = mass_hi + (mass - mass_hi) * (ties / (count - count_hi))
                    count = top_k
            if top_p < 1:
                need = mass * top_p
                old = lo
                lo, count, mass, count_hi, mass_hi = _search(
                    logits,
                    vocab,
                    best,
                    scale,
                    log_min_p,
                    lo,
                    count,
                    mass,
                    end,
                    0,
                    need,
                    SHIFT,
                    BLOCK,
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
    """Return each row's threshold by min_p, then top_k, then top_p, for edited logits [S, vocab].

    rows, words: see `kernels.sampling.choose`.
    Returns (threshold [S] float32, cut [S] int32). Tokens with logit > threshold pass, and those
    with logit == threshold and id <= cut. Rows without filters get -inf and 2**31 - 1.
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
