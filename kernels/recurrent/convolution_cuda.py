"""Depthwise causal convolutions on CUDA.

A program computes some channels of some tokens of an entry (a request's sequence in the step).
Kernels of recurrent layers call `convolved` (one token) or `convolved_rows` (tiles of tokens) to
fuse the convolution, and `keep_tail` to save the last inputs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.entries import entry_of
from kernels.metadata import AttentionMeta

BLOCK = 512  # channels per program of one token
TILE_TOKENS, TILE_CHANNELS = 32, 128  # tokens and channels per program of several tokens
_TICKETS = 1 << 17  # counters that are allocated at once, before any CUDA graph is captured


def tickets(device: torch.device, count: int) -> Tensor:
    """Return at least `count` int32 counters of arrived programs, for `comes_last`.

    The counters are zero between launches, as kernels reset them.
    """
    return _zeros(device, max(_TICKETS, triton.next_power_of_2(count)))


@lru_cache
def _zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def comes_last(arrived, shared):
    """Whether this is the last of `shared` programs to arrive at the counter `arrived`.

    The last program may overwrite memory that all of them have read.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == shared - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def convolved(
    x, tail, conv, bias, token, ago, before, channels, mask, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, order=None,
):  # fmt: skip
    """Return the convolution of some channels at one token, [channels] float32.

    token: the token's index in the step.
    bias: None for no bias.
    ago: the number of the entry's tokens before this token.
    before: the number of the request's tokens before the entry.
    order: pointer to each token's row in x; None: row i is token i.
    """
    total = (channels * 0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=mask, other=0.0)
    far = ago + channels * 0
    has_tail = mask & (before + channels * 0 > 0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = mask & (far >= back)
        place = token - back
        if order is not None:
            place = tl.load(order + place, mask=ago >= back, other=0)
        seen = tl.load(x + place * x_stride + channels, mask=own, other=0.0)
        # The tail's last row is the token directly before the entry.
        old = has_tail & (far < back)
        at = (ago + TAPS - 1 - back) * CHANNELS
        before_tail = tl.load(tail + at + channels, mask=old, other=0.0)
        weight = tl.load(conv + channels * TAPS + tap, mask=mask, other=0.0)
        total += (seen.to(tl.float32) + before_tail) * weight
    return total


@triton.jit
def convolved_rows(
    x, tail, conv, bias, first_token, first, length, before, channels, mask, x_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return the convolution of some channels at ROWS tokens of an entry, [ROWS, channels].

    first: index of the first token in the entry; first_token (int64): its index in the step.
    length: tokens of the entry; rows beyond it get zeros plus the bias.
    bias, before: as in `convolved`.
    """
    rows = tl.arange(0, ROWS)
    ago = first + rows
    there = ago < length
    base = x + first_token * x_stride
    total = tl.zeros([ROWS, channels.shape[0]], tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=mask, other=0.0)[None, :]
    # Add the oldest tap first, so that sums equal those of `convolved` wherever a chunk begins.
    if (first == 0) & (before > 0):
        for tap in tl.static_range(TAPS - 1):
            old = (there & (ago < TAPS - 1 - tap))[:, None] & mask[None, :]
            at = ((ago + tap) * CHANNELS)[:, None] + channels[None, :]
            old_input = tl.load(tail + at, mask=old, other=0.0)
            total += (
                old_input * tl.load(conv + channels * TAPS + tap, mask=mask, other=0.0)[None, :]
            )
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        own = (there & (ago >= back))[:, None] & mask[None, :]
        at = ((rows - back) * x_stride)[:, None] + channels[None, :]
        seen = tl.load(base + at, mask=own, other=0.0).to(tl.float32)
        total += seen * tl.load(conv + channels * TAPS + tap, mask=mask, other=0.0)[None, :]
    return total


@triton.jit
def keep_tail(
    x, tail, begin, end, before, channels, mask, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, order=None,
):  # fmt: skip
    """Write some channels of an entry's tail: the last inputs, which the next tokens need.

    begin, end (int64): the entry's range of tokens.
    order: as in `convolved`.

    All other programs must have read the old tail.
    """
    has_tail = mask & (before + channels * 0 > 0)
    # In ascending order each old input is read before its row is overwritten.
    for place in tl.static_range(TAPS - 1):
        token = end - (TAPS - 1) + place
        own = token - begin + channels * 0 >= 0
        row = token
        if order is not None:
            row = tl.load(order + token, mask=token >= begin, other=0)
        new = tl.load(x + row * x_stride + channels, mask=mask & own, other=0.0)
        at = (end - begin + place) * CHANNELS
        old = tl.load(tail + at + channels, mask=has_tail & (own == 0), other=0.0)
        tl.store(tail + place * CHANNELS + channels, new.to(tl.float32) + old, mask=mask)


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _conv_few_kernel(
    x, conv, bias, tail, out, rows, query_start, kv_len, counts, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve token by token, for entries of about one token each."""
    entry = tl.program_id(0)
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    if entry >= tl.load(counts + 1):  # padding
        for token in range(begin, end):
            zeros = tl.zeros([BLOCK], tl.float32)
            tl.store(out + token * CHANNELS + channels, zeros, mask=mask)
        return
    before = tl.load(kv_len + entry) - (end - begin)  # 0 if the request begins
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    for token in range(begin, end):
        total = convolved(
            x, tail, conv, bias, token, token - begin, before, channels, mask, x_stride,
            CHANNELS, TAPS,
        )  # fmt: skip
        tl.store(out + token * CHANNELS + channels, total, mask=mask)


# x_stride is specialised, as a model has few values of it: a stride divisible by 16 allows loads of
# 16 bytes.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _conv_kernel(
    x, conv, bias, tail, out, rows, query_start, kv_len, counts, x_stride, num_tokens,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convolve ROWS tokens of an entry, or write zeros for padding tokens."""
    num_entries = tl.load(counts + 1)
    entry, begin, first = entry_of(query_start, 0, num_entries, tl.program_id(1), ROWS)
    length = num_tokens - begin
    if entry < num_entries:
        length = tl.load(query_start + entry + 1) - begin
    if first >= length:
        return
    first_token = (begin + first).to(tl.int64)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if entry < num_entries:
        before = tl.load(kv_len + entry) - length  # 0 if the request begins
        tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
        total = convolved_rows(
            x, tail, conv, bias, first_token, first, length, before, channels, mask, x_stride,
            ROWS, CHANNELS, TAPS,
        )  # fmt: skip
    tokens = tl.arange(0, ROWS)
    there = (first + tokens < length)[:, None] & mask[None, :]
    into = out + first_token * CHANNELS + tokens[:, None] * CHANNELS + channels[None, :]
    tl.store(into, total, mask=there)


@triton.jit(
    do_not_specialize=["x_stride"],
    do_not_specialize_on_alignment=["rows", "query_start", "kv_len", "counts"],
)
def _tail_kernel(
    x, tail, rows, query_start, kv_len, counts, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write an entry's tail; launched after all kernels that read the old tail."""
    entry = tl.program_id(0)
    begin = tl.load(query_start + entry).to(tl.int64)
    end = tl.load(query_start + entry + 1).to(tl.int64)
    if (entry >= tl.load(counts + 1)) | (begin == end):
        return
    before = tl.load(kv_len + entry) - (end - begin)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    tail += tl.load(rows + entry).to(tl.int64) * (TAPS - 1) * CHANNELS
    keep_tail(x, tail, begin, end, before, channels, mask, x_stride, CHANNELS, TAPS)


def keep_tails(x: Tensor, taps: int, tail: Tensor, meta: AttentionMeta) -> None:
    """Write the tails (last inputs) of all entries' convolutions.

    All kernels that read the old tails must be launched before.
    """
    assert meta.rows is not None and meta.counts is not None
    channels = tail.shape[2]
    _tail_kernel[(meta.kv_len.shape[0], triton.cdiv(channels, BLOCK))](
        x,
        tail,
        meta.rows,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        x.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        BLOCK=BLOCK,
        num_warps=4,
    )


def causal_conv(
    x: Tensor, conv: Tensor, bias: Tensor | None, tail: Tensor, meta: AttentionMeta
) -> Tensor:
    """Return the causal convolution [num_tokens, channels] float32; write the last inputs to tail.

    Arguments are those of `Kernels.causal_conv`. Rows of x may have any stride.
    """
    assert meta.rows is not None and meta.counts is not None
    channels, taps = conv.shape
    entries = meta.kv_len.shape[0]
    out = tail.new_empty(x.shape[0], channels)
    where = (meta.rows, meta.query_start, meta.kv_len, meta.counts)
    if x.shape[0] == entries:
        _conv_few_kernel[(entries, triton.cdiv(channels, BLOCK))](
            x,
            conv,
            bias,
            tail,
            out,
            *where,
            x.stride(0),
            CHANNELS=channels,
            TAPS=taps,
            BLOCK=BLOCK,
            num_warps=4,
        )
    else:
        # This upper bound holds for any lengths, which the host need not know: the last tile of
        # each entry, and of the padding, may be partly empty.
        tiles = x.shape[0] // TILE_TOKENS + entries + 1
        _conv_kernel[(triton.cdiv(channels, TILE_CHANNELS), tiles)](
            x,
            conv,
            bias,
            tail,
            out,
            *where,
            x.stride(0),
            x.shape[0],
            CHANNELS=channels,
            TAPS=taps,
            BLOCK=TILE_CHANNELS,
            ROWS=TILE_TOKENS,
            num_warps=4,
        )
    keep_tails(x, taps, tail, meta)
    return out
