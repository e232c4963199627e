"""Bidirectional attention over whole texts or pictures without a cache, as Triton kernels.

A program computes one head of consecutive queries of one text. It processes the text's keys from
the first to the last, so results are batch-invariant. A head whose size is not a power of two is
computed in two parts: 72 elements as 64 and 16, not as 128.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.entries import entry_of


class TextTile(NamedTuple):
    """The tile of a program, as one `tl.constexpr`.

    queries, keys: tokens of a tile.
    dims, more: padded elements of a head's first and second part; more = 0: no second part.
    """

    queries: int
    keys: int
    dims: int
    more: int


@triton.jit
def _walk(
    query,
    query_more,
    k,
    v,
    begin,
    end,
    length,
    position,
    top,
    denominator,
    acc,
    acc_more,
    scale_log2,
    stride,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,  # `TextTile`
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Update a running softmax with keys [begin, end) of one text.

    k, v: pointers to the head of the text's first token.
    """
    KEYS: tl.constexpr = TILE.keys
    keys = tl.arange(0, KEYS)
    dims = tl.arange(0, TILE.dims)
    for start in range(begin, end, KEYS):
        places = start + keys
        where = places[:, None] * stride + dims[None, :]
        seen = (places < length)[:, None]
        key = tl.load(k + where, mask=seen, other=0.0) if MASKED else tl.load(k + where)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if TILE.more > 0:
            more = TILE.dims + tl.arange(0, TILE.more)
            where_more = places[:, None] * stride + more[None, :]
            mask_more = (more < HEAD_DIM)[None, :]
            if MASKED:
                mask_more = mask_more & seen
            key_more = tl.load(k + where_more, mask=mask_more, other=0.0)
            score = tl.dot(query_more, tl.trans(key_more), score, input_precision="ieee")
        if MASKED:
            score = tl.where((places < length)[None, :], score, float("-inf"))
            if WINDOW > 0:
                near = tl.abs(position[:, None] - places[None, :]) <= WINDOW
                score = tl.where(near, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale_log2)
        base = new_top
        if MASKED and WINDOW > 0:  # rows that have seen no key yet
            base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight = tl.exp2(score * scale_log2 - base[:, None])
        shrink = tl.exp2(top - base)
        denominator = denominator * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        value = tl.load(v + where, mask=seen, other=0.0) if MASKED else tl.load(v + where)
        weight = weight.to(value.dtype)
        acc = tl.dot(weight, value, acc, input_precision="ieee")
        if TILE.more > 0:
            acc_more = acc_more * shrink[:, None]
            value_more = tl.load(v + where_more, mask=mask_more, other=0.0)
            acc_more = tl.dot(weight, value_more, acc_more, input_precision="ieee")
        top = new_top
    return top, denominator, acc, acc_more


@triton.jit(do_not_specialize=["num_texts"], do_not_specialize_on_alignment=["query_start"])
def _texts_kernel(
    qkv,
    out,
    query_start,
    num_texts,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,  # `TextTile`
    WINDOW: tl.constexpr,
):
    QUERIES: tl.constexpr = TILE.queries
    KEYS: tl.constexpr = TILE.keys
    DIMS: tl.constexpr = TILE.dims
    MORE: tl.constexpr = TILE.more
    STRIDE: tl.constexpr = 3 * NUM_HEADS * HEAD_DIM
    head = tl.program_id(0)
    text, begin, first = entry_of(query_start, 0, num_texts, tl.program_id(1), QUERIES)
    if text == num_texts:
        return
    length = tl.load(query_start + text + 1) - begin
    if first >= length:
        return
    position = first + tl.arange(0, QUERIES)
    dims = tl.arange(0, DIMS)
    own = (position < length)[:, None]
    base = qkv + begin.to(tl.int64) * STRIDE + head * HEAD_DIM
    k = base + NUM_HEADS * HEAD_DIM
    v = k + NUM_HEADS * HEAD_DIM
    query = tl.load(base + position[:, None] * STRIDE + dims[None, :], mask=own, other=0.0)
    query_more = query
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    acc_more = acc
    if MORE > 0:
        more = DIMS + tl.arange(0, MORE)
        own_more = own & (more < HEAD_DIM)[None, :]
        query_more = tl.load(
            base + position[:, None] * STRIDE + more[None, :], mask=own_more, other=0.0
        )
        acc_more = tl.zeros([QUERIES, MORE], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    denominator = tl.zeros([QUERIES], tl.float32)
    start = 0
    full = length // KEYS * KEYS
    end = length
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW, 0) // KEYS * KEYS
        end = tl.minimum(first + QUERIES + WINDOW, length)
        full = start
    top, denominator, acc, acc_more = _walk(
        query, query_more, k, v, start, full, length, position, top, denominator, acc, acc_more,
        scale_log2, STRIDE, HEAD_DIM, TILE, False, WINDOW,
    )  # fmt: skip
    top, denominator, acc, acc_more = _walk(
        query, query_more, k, v, full, end, length, position, top, denominator, acc, acc_more,
        scale_log2, STRIDE, HEAD_DIM, TILE, True, WINDOW,
    )  # fmt: skip
    result = out + (begin.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    where = position[:, None] * (NUM_HEADS * HEAD_DIM) + dims[None, :]
    acc = acc / denominator[:, None]
    tl.store(result + where, acc.to(out.dtype.element_ty), mask=own)
    if MORE > 0:
        where = position[:, None] * (NUM_HEADS * HEAD_DIM) + more[None, :]
        acc_more = acc_more / denominator[:, None]
        tl.store(result + where, acc_more.to(out.dtype.element_ty), mask=own_more)


@triton.jit
def _rotate_kernel(
    qkv,
    table,
    rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of the elements that are rotated
    DIMS: tl.constexpr,  # HALF padded
    HEADS: tl.constexpr,  # heads of a program
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIMS)
    valid = dims < HALF
    row = table + tl.load(rows + token).to(tl.int64) * (2 * HALF) + dims
    cos = tl.load(row, mask=valid, other=0.0)[None, :]
    sin = tl.load(row + HALF, mask=valid, other=0.0)[None, :]
    # A token's query heads are followed by its key heads, so one index covers both.
    where = qkv + token * (3 * NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + dims[None, :]
    mask = (heads < 2 * NUM_HEADS)[:, None] & valid[None, :]
    first = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(where + HALF, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=mask)


def rotate_texts(qkv: Tensor, cos_sin: Tensor, rows: Tensor, num_heads: int) -> None:
    """Rotate queries and keys of qkv [num_tokens, 3 * num_heads * head_dim] in place.

    cos_sin: [n, rotary_dim] float32, cosines, then sines.
    rows: [num_tokens] int32, each token's row in cos_sin.
    """
    half = cos_sin.shape[1] // 2
    heads = min(16, triton.next_power_of_2(2 * num_heads))
    _rotate_kernel[(len(qkv), triton.cdiv(2 * num_heads, heads))](
        qkv,
        cos_sin,
        rows,
        NUM_HEADS=num_heads,
        HEAD_DIM=qkv.shape[1] // (3 * num_heads),
        HALF=half,
        DIMS=triton.next_power_of_2(half),
        HEADS=heads,
    )


def text_tile(head_dim: int, element_size: int) -> TextTile:
    """Return the fastest tile on an H200, for heads of at least 16 elements."""
    dims = triton.next_power_of_2(head_dim + 1) // 2
    more = max(16, triton.next_power_of_2(head_dim - dims)) if head_dim > dims else 0
    if element_size > 2 or head_dim > 128:
        return TextTile(64, 32, dims, more)
    return TextTile(128, 64, dims, more)


def attend_texts(
    qkv: Tensor, query_start: Tensor, num_heads: int, scale: float, window: int = 0
) -> Tensor:
    """Return attention in both directions within each text, [num_tokens, num_heads * head_dim].

    qkv: [num_tokens, 3 * num_heads * head_dim], contiguous, with heads of at least 16 elements.
    query_start: int32, the first token of each text, then num_tokens.
    window: the tokens that a token sees on each side; 0 = its whole text.
    """
    num_tokens, width = qkv.shape
    head_dim, num_texts = width // (3 * num_heads), len(query_start) - 1
    tile = text_tile(head_dim, qkv.element_size())
    out = qkv.new_empty(num_tokens, width // 3)
    # The last block of queries of each text may be partly empty.
    _texts_kernel[(num_heads, num_tokens // tile.queries + num_texts)](
        qkv,
        out,
        query_start,
        num_texts,
        scale * 1.4426950408889634,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        TILE=tile,
        WINDOW=window,
        num_warps=8 if tile.queries > 64 else 4,
        num_stages=3 if tile.queries > 64 else 2,
    )
    return out
