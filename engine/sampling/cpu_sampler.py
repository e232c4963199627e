"""Sampling on the CPU, in NumPy: exact, without work that cannot change the result.

Logits are float32 [num_samples, vocab]; the parameters of sample s are those of row rows[s] in a
`ParameterRows`. NumPy's reductions over a vocabulary are vectorised, unlike torch's argmax and
sort.
"""

import math

import numpy as np
from numpy.typing import NDArray

from engine.sampling.parameter_rows import (
    BANNED,
    BIASED,
    FILTERED,
    PENALISED,
    SAMPLED,
    ParameterRows,
)
from kernels.cpu.argmax import argmax
from kernels.sampling import layout as word
from kernels.sampling import philox

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

FIRST_GROUPS = 4


def edit(x: F32, params: ParameterRows, row: int, position: int, history: I32) -> None:
    """Apply a row's bias, penalties and bans to its logits x [vocab], in place.

    position: the number of the request's tokens so far.
    history: [position] int32, the request's tokens so far.
    """
    words, floats, needs = params.words[row], params.floats[row], params.needs[row]
    num_prompt = int(words[word.NUM_PROMPT])
    if needs & BIASED:
        n = words[word.NUM_BIAS]
        x[words[word.BIAS_IDS :][:n]] += floats[word.BIAS_VALUES :][:n]
    if needs & PENALISED:
        # Repeated tokens are penalised once, as assignments through repeated indices write the same
        # value.
        repetition = floats[word.REPETITION]
        if repetition != 1:
            words_seen = history[history < x.size]  # excludes virtual tokens
            seen = x[words_seen]
            x[words_seen] = np.where(seen > 0, seen / repetition, seen * repetition)
        output, counts = np.unique(history[num_prompt:], return_counts=True)
        x[output] -= floats[word.PRESENCE] + counts.astype(np.float32) * floats[word.FREQUENCY]
    if needs & BANNED and position - num_prompt < words[word.MIN_TOKENS]:
        x[words[word.STOP_IDS :][: words[word.NUM_STOP]]] = -np.inf


def apply_masks(x: F32, mask_of: I32, masks: I32) -> None:
    """Set logits x [S, vocab] of tokens that grammars forbid to -inf, in place.

    mask_of, masks: see `engine.sampling.sampler.Masked`.
    """
    vocab = x.shape[1]
    for s, m in enumerate(mask_of.tolist()):
        if m < 0:
            continue
        bits = np.unpackbits(masks[m].view(np.uint8), bitorder="little")[:vocab]
        x[s, : len(bits)][bits == 0] = -np.inf
        x[s, len(bits) :] = -np.inf


def choose(
    x: F32, params: ParameterRows, rows: list[int], positions: I64
) -> tuple[I64, NDArray[np.bool_]]:
    """Choose a token for each row of edited logits x [num_samples, vocab].

    rows, positions: the row of each sample, and the position of its new token.
    Returns (tokens [num_samples], bad [num_samples]); a bad row has no valid token, and its token
    is 0. The logits of rows with filters are overwritten.
    """
    sampled = [s for s, row in enumerate(rows) if params.needs[row] & SAMPLED]
    if len(sampled) < len(rows):
        tokens, best = argmax(x)
    else:
        tokens, best = np.zeros(len(rows), np.int64), np.empty(len(rows), np.float32)
    if sampled:
        group_best = np.stack([_group_max(x[s]) for s in sampled])
        best[sampled] = group_best.max(1)
        for i, s in enumerate(sampled):
            if params.needs[rows[s]] & FILTERED and np.isfinite(best[s]):
                ids = _allowed(x[s], group_best[i], params.words[rows[s]])
                allowed = x[s, ids]
                x[s] = -np.inf
                x[s, ids] = allowed
                group_best[i] = -np.inf
                np.maximum.at(group_best[i], philox.group_of(ids), allowed)
        finite = np.flatnonzero(np.isfinite(best[sampled]))
        if len(finite):
            which = np.array(sampled)[finite]
            words = params.words[[rows[s] for s in which]]
            tokens[which] = _gumbel_argmax(x, which, group_best[finite], words, positions[which])
    bad = ~np.isfinite(best)  # the maximum is not finite if a row has NaN or +inf, or only -inf
    tokens[bad] = 0
    return tokens, bad


def _group_max(x: F32) -> F32:
    """Return the largest logit of x [vocab] in each of philox's token groups; NaN if one is NaN."""
    size = philox.TOKENS_PER_BLOCK
    whole = x.size // size * size
    out = np.full((-(-x.size // size), philox.GROUPS_PER_BLOCK), -np.inf, np.float32)
    if whole:
        np.max(
            x[:whole].reshape(-1, philox.LANES, philox.GROUPS_PER_BLOCK),
            axis=1,
            out=out[: whole // size],
        )
    if whole < x.size:
        tail = np.full(size, -np.inf, np.float32)
        tail[: x.size - whole] = x[whole:]
        np.max(tail.reshape(philox.LANES, philox.GROUPS_PER_BLOCK), axis=0, out=out[-1])
    return out.reshape(-1)


def _gumbel_argmax(x: F32, source: I64, group_best: F32, words: I32, positions: I64) -> I64:
    """Return the argmax over tokens of logit / temperature + gumbel: token ids [n].

    A group's best logit and smallest exponential noise give an upper bound of its scores. Groups
    with the highest bounds are computed first, then only those whose bound is not below the best
    score.

    source: [n], the rows of x to sample.
    """
    count, num_groups = group_best.shape
    floats = words.view(np.float32)
    scale = floats[:, word.INV_TEMPERATURE]
    seeds = np.ascontiguousarray(words[:, word.SEED : word.SEED + 2]).view(np.int64)[:, 0]
    choices = words[:, word.CHOICE].astype(np.int64)
    minimum, lanes = philox.group_noise(
        seeds, choices, positions, num_groups // philox.GROUPS_PER_BLOCK
    )
    bound = group_best * scale[:, None] - np.log(minimum)
    best = np.full(count, -np.inf, np.float32)
    tokens = np.zeros(count, np.int64)

    def compute(which: I64, groups: I64) -> None:
        """Compute the scores of the given groups of rows, and keep the best token of each row."""
        extra = philox.lane_exponential(seeds[which], choices[which], positions[which], groups)
        n = np.arange(len(which))
        extra[n, lanes[which, groups]] = 0
        noise = -np.log(minimum[which, groups][:, None] + extra)
        ids = philox.group_tokens(groups)
        inside = ids < x.shape[1]
        score = x[source[which][:, None], np.where(inside, ids, 0)] * scale[which][:, None] + noise
        score[~inside] = -np.inf
        lane = score.argmax(1)  # argmax returns the first of equals, as ids ascend with the lane
        score, ids = score[n, lane], ids[n, lane]
        for i, s, token in zip(which.tolist(), score.tolist(), ids.tolist(), strict=True):
            if s > best[i] or (s == best[i] and token < tokens[i]):
                best[i], tokens[i] = s, token
        bound[which, groups] = -np.inf

    few = min(FIRST_GROUPS, num_groups)
    first = np.argpartition(bound, num_groups - few, axis=1)[:, num_groups - few :]
    compute(np.repeat(np.arange(count), few), first.reshape(-1))
    # The slack of 1e-3 covers logarithms that differ in the last bit between bound and score.
    which, groups = np.nonzero(bound >= (best - 1e-3)[:, None])
    if len(which):
        compute(which, groups)
    return tokens


def top(x: F32, k: int, group_best: F32 | None = None) -> I64:
    """Return the ids of the k largest logits of x [vocab] without NaN: best first, ties by id."""
    group_best = _group_max(x) if group_best is None else group_best
    ids = np.arange(x.size)
    # at least k groups have a logit this large, so smaller ones are not needed
    if k < group_best.size:
        ids = np.flatnonzero(
            x >= np.partition(group_best, group_best.size - k)[group_best.size - k]
        )
    return ids[np.argsort(-x[ids], kind="stable")][:k]


def _allowed(x: F32, group_best: F32, words: I32) -> I64:
    """Return the ids of the tokens that remain after min_p, then top_k, then top_p.

    The largest logit must be finite.
    """
    floats = words.view(np.float32)
    scale, top_p, log_min_p = floats[[word.INV_TEMPERATURE, word.TOP_P, word.LOG_MIN_P]]
    top_k = int(words[word.TOP_K])
    best = group_best.max()
    if top_k:
        ids: I64 = top(x, top_k, group_best)
        ids = ids[(x[ids] - best) * scale >= log_min_p]
        if top_p < 1:
            mass = np.cumsum(np.exp((x[ids] - best) * scale), dtype=np.float64)
            ids = ids[: np.searchsorted(mass, top_p * mass[-1]) + 1]
        return ids
    gap = (x - best) * scale
    if top_p < 1:
        return _nucleus(x, gap, float(top_p), float(log_min_p))
    return np.flatnonzero(gap >= log_min_p)


def _nucleus(x: F32, gap: F32, top_p: float, log_min_p: float) -> I64:
    """Return the ids of the fewest most likely tokens with a share top_p of the probability.

    Only tokens with a gap of at least log_min_p count. Ties are broken by id. Sorting a flat
    distribution would take longer than all other work. So the function first searches for a lower
    bound of the last token's gap, and then bisects the gap's range until few tokens remain to be
    sorted.

    gap: difference of each log-probability from the largest, [vocab] in the order of x [vocab].
    """
    weight = np.exp(gap)
    if log_min_p > -np.inf:
        weight[gap < log_min_p] = 0
    needed = top_p * weight.sum(dtype=np.float64)
    low = -2.0
    while True:
        low = max(2 * low, log_min_p)
        ids = np.flatnonzero(gap >= low)
        # Below -128 a weight is 0 in float32.
        if weight[ids].sum(dtype=np.float64) >= needed or low == log_min_p or low < -128:
            break
    chosen: list[I64] = []
    mass, high = 0.0, 0.0
    while len(ids) > 256 and high - low > 1e-6:
        middle = (low + high) / 2
        above = gap[ids] >= middle
        upper = ids[above]
        more = weight[upper].sum(dtype=np.float64)
        if mass + more >= needed:
            ids, low = upper, middle
        else:
            ids, high, mass = ids[~above], middle, mass + more
            chosen.append(upper)
    ids = ids[np.argsort(-x[ids], kind="stable")]
    last = np.searchsorted(mass + np.cumsum(weight[ids], dtype=np.float64), needed)
    return np.concatenate([*chosen, ids[: last + 1]])


def logprobs(x: F32, token: int, k: int, scale: float = 1.0) -> tuple[float, int, I64, F32, float]:
    """Compute the log-probabilities of a token and of the top k from logits x [vocab] times scale.

    Returns (the token's log-probability, its rank from 1, ids of the top k, their
    log-probabilities, log-sum-exp of x * scale). If the logits are not finite, all values are NaN,
    and ids are the first k.
    """
    best = x.max()
    if not np.isfinite(best):
        return math.nan, 1, np.arange(k), np.full(k, np.nan, np.float32), math.nan
    gap = x - best
    if scale != 1:
        gap *= np.float32(scale)
    total = float(best) * scale + np.log(np.exp(gap).sum(dtype=np.float64))
    ids = top(x, k) if k else np.zeros(0, np.int64)
    return (
        float(float(x[token]) * scale - total),
        1 + int(np.count_nonzero(x > x[token])),
        ids,
        (x[ids].astype(np.float64) * scale - total).astype(np.float32),
        float(total),
    )
