"""Log-probabilities of raw or processed logits, by a kernel per block of a row and one per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import layout
from kernels.sampling.choose import kept, load_float

_LOGPROBS = tl.constexpr(layout.LOGPROBS)
_PROCESSED = tl.constexpr(layout.PROCESSED)
_INV_TEMPERATURE = tl.constexpr(layout.INV_TEMPERATURE)
_NUM_WORDS = tl.constexpr(layout.NUM_WORDS)
_NO_ID = tl.constexpr(2**31 - 1)
_USUAL = 32  # maximum k (alternatives) for which kernels are shared; each larger k has its own


@triton.jit
def _next_best(x, ids, last, last_id):
    """Return the next smaller (value, id) after (last, last_id); equal values are ordered by id.

    The id is 2**31 - 1 if there is no such token.
    """
    after = ((x < last) | ((x == last) & (ids > last_id))) & (ids != _NO_ID)
    value = tl.max(tl.where(after, x, float("-inf")), axis=0)
    return value, tl.min(tl.where(after & (x == value), ids, _NO_ID), axis=0)


@triton.jit
def _wants(words, row, PROCESSED: tl.constexpr):
    """Return whether a row requests log-probabilities of this kind, and the factor of its logits.

    PROCESSED: whether the kind is processed, not raw. The factor is 1 / temperature if so, else 1.
    """
    words += row * _NUM_WORDS
    wants = (tl.load(words + _LOGPROBS) >= 0) & ((tl.load(words + _PROCESSED) != 0) == PROCESSED)
    scale = load_float(words + _INV_TEMPERATURE)
    return wants, tl.where(PROCESSED & (scale > 0), scale, 1.0)


# k is not a constexpr: requests ask for any number up to 32, and the first request with each number
# would wait for two kernels to compile.
@triton.jit(do_not_specialize=["k"])
def _logprob_block_kernel(
    logits,
    stride,
    rows,
    words,
    thresholds,  # [S] float32
    cuts,  # [S] int32
    targets,
    # [S, num_blocks, 3] float32: largest logit, sum of exp(x - largest), logits above target
    stats,
    tops,  # [S, num_blocks, k] float32
    top_ids,  # [S, num_blocks, k] int32
    vocab,
    k,
    ALL: tl.constexpr,
    PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    s = tl.program_id(1)
    asked = True
    scale = 1.0
    if not ALL:
        asked, scale = _wants(words, tl.load(rows + s), PROCESSED)
    if asked:
        logits += s.to(tl.int64) * stride
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        target = tl.load(logits + tl.load(targets + s)).to(tl.float32)
        if PROCESSED:
            x = kept(x, ids, tl.load(thresholds + s), tl.load(cuts + s))
        best = tl.max(x, axis=0)
        total = tl.sum(tl.where(x > float("-inf"), tl.exp((x - best) * scale), 0.0), axis=0)
        out = s.to(tl.int64) * tl.num_programs(0) + block
        tl.store(stats + out * 3, best)
        tl.store(stats + out * 3 + 1, total)
        tl.store(stats + out * 3 + 2, tl.sum((x > target).to(tl.float32), axis=0))
        ids = tl.where(ids < vocab, ids, _NO_ID)
        value = best * 0 + float("inf")
        token = block * 0 - 1
        for j in range(k):
            value, token = _next_best(x, ids, value, token)
            tl.store(tops + out * k + j, value)
            tl.store(top_ids + out * k + j, token)


# num_blocks is not specialised either; it is 1 for small vocabularies.
@triton.jit(do_not_specialize=["k", "num_blocks"])
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
    totals,  # [S] float32
    rank,  # [S] int64
    out_ids,  # [S, k] int64
    out_logprobs,  # [S, k] float32
    num_blocks,
    k,
    ALL: tl.constexpr,
    PROCESSED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_TOPS: tl.constexpr,
):
    s = tl.program_id(0)
    asked = True
    scale = 1.0
    if not ALL:
        asked, scale = _wants(words, tl.load(rows + s), PROCESSED)
    if asked:
        i = tl.arange(0, NUM_BLOCKS)
        mask = i < num_blocks
        base = stats + (s.to(tl.int64) * num_blocks + i) * 3
        largest = tl.load(base, mask=mask, other=float("-inf"))
        sums = tl.load(base + 1, mask=mask, other=0.0)
        best = tl.max(largest, axis=0)
        total = tl.sum(
            tl.where(largest > float("-inf"), sums * tl.exp((largest - best) * scale), 0.0),
            axis=0,
        )
        # Subtract the largest logit first, which loses fewer bits than log-sum-exp of whole logits.
        total = tl.log(total)
        target = tl.load(logits + s.to(tl.int64) * stride + tl.load(targets + s)).to(tl.float32)
        tl.store(logprob + s, (target - best) * scale - total)
        tl.store(totals + s, best * scale + total)
        above = tl.load(base + 2, mask=mask, other=0.0)
        tl.store(rank + s, tl.sum(above, axis=0).to(tl.int64) + 1)
        if k > 0:
            j = tl.arange(0, NUM_TOPS)
            some = j < num_blocks * k
            place = s.to(tl.int64) * num_blocks * k + j
            x = tl.load(tops + place, mask=some, other=float("-inf"))
            ids = tl.load(top_ids + place, mask=some, other=_NO_ID)
            value = best * 0 + float("inf")
            token = s * 0 - 1
            for n in range(k):
                value, token = _next_best(x, ids, value, token)
                tl.store(out_logprobs + s.to(tl.int64) * k + n, (value - best) * scale - total)
                tl.store(out_ids + s.to(tl.int64) * k + n, tl.where(token == _NO_ID, 0, token))


def logprobs(
    logits: Tensor,
    targets: Tensor,
    k: int,
    rows: Tensor | None = None,
    words: Tensor | None = None,
    *,
    filters: tuple[Tensor, Tensor] | None = None,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute log-probabilities of raw logits, or with filters of processed ones.

    logits: [S, vocab]. targets: [S] int64, a token for each row. k: number of alternatives.
    rows, words: the requests' parameters, as in `choose`. Rows that did not request log-
        probabilities of this kind (raw or processed) are skipped: their results are not written.
        None: compute all rows, raw.
    filters: from `filter_thresholds`. Logits are then edited logits; they are divided by the rows'
        temperatures, and tokens that do not pass the filters are left out.
    out: the results of an earlier call, to which the results of this call are written.
    Returns the targets' log-probabilities [S] float32 and ranks from 1 [S] int64; ids [S, k] int64
    and log-probabilities [S, k] float32 of the k most likely tokens, equals by id; log of the sum
    of exp(logits) [S] float32.
    """
    count, vocab = logits.shape
    block = 4096
    blocks = triton.cdiv(vocab, block)
    device = logits.device
    if out is None:
        k = min(k, vocab)
        out = (
            torch.empty(count, dtype=torch.float32, device=device),
            torch.empty(count, dtype=torch.int64, device=device),
            torch.empty(count, k, dtype=torch.int64, device=device),
            torch.empty(count, k, dtype=torch.float32, device=device),
            torch.empty(count, dtype=torch.float32, device=device),
        )
    logprob, rank, out_ids, out_logprobs, totals = out
    k = out_ids.shape[1]
    stats = torch.empty(count, blocks, 3, dtype=torch.float32, device=device)
    tops = torch.empty(count, blocks, k, dtype=torch.float32, device=device)
    top_ids = torch.empty(count, blocks, k, dtype=torch.int32, device=device)
    everything = rows is None or words is None
    which, table = (targets, targets) if everything else (rows, words)
    processed = filters is not None
    thresholds, cuts = filters if filters is not None else (logprob, targets)
    if count:
        _logprob_block_kernel[(blocks, count)](
            logits, logits.stride(0), which, table, thresholds, cuts, targets, stats, tops, top_ids,
            vocab, k, ALL=everything, PROCESSED=processed, BLOCK=block, num_warps=8,
        )  # fmt: skip
        _logprob_row_kernel[(count,)](
            logits, logits.stride(0), which, table, targets, stats, tops, top_ids,
            logprob, totals, rank, out_ids, out_logprobs, blocks,
            k, ALL=everything, PROCESSED=processed, NUM_BLOCKS=triton.next_power_of_2(blocks),
            NUM_TOPS=triton.next_power_of_2(blocks * max(_USUAL, k)), num_warps=4,
        )  # fmt: skip
    return out
