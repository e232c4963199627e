"""The plan of a step's decode attention: how keys are split over programs, and launch parameters.

An entry is a sequence of the step. Adjacent entries of the same row (request) at consecutive
positions, which verify drafts, form a run. Up to `queries` entries of a run are planned as one:
their keys are read once, for all of their queries.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv.quantized import Cache, QuantizedKV
from kernels.launch.device import KIB, shared_memory, stages_within
from kernels.launch.pdl import num_sms

TILE = 64  # split sizes are multiples of this
MIN_SPLIT = 64  # keys
CUTS = 8  # maximum mean number of splits per program; `cut` takes 3 for many entries

# Estimated costs in units of keys: per split of a program, per split to be merged, and once if
# anything is merged. Measured on an H200; they need not be exact.
WALK_COST, MERGE_COST, MERGE_ONCE = 96, 64, 192
MIN_ROWS = 16  # queries of a tile, the minimum for tensor cores
TAIL = 4  # estimate: the last program ends 1 / TAIL of a split later than the average program


class DecodeLaunch(NamedTuple):
    keys: int  # keys of a tile
    num_warps: int
    num_stages: int
    per_sm: int  # programs per multiprocessor
    merge: int = 4096  # elements of the tile that merges splits


def _decode_launch(pairs: int, sms: int, dims: int, element_size: int) -> DecodeLaunch:
    """Return launch parameters for an unquantised cache, from measurements with mixed lengths.

    pairs: entries * kv heads.
    dims: the padded head size.

    With at most one pair per multiprocessor, programs are few, and long tiles keep enough bytes in
    flight. With up to two pairs, many small programs balance entries of different lengths.
    """
    if dims > 256:  # tiles of more keys do not fit
        return DecodeLaunch(16, 4, 2, 1)
    if dims > 128 or element_size > 2:
        return DecodeLaunch(32, 4, 2, 2)
    if sms < 2 * pairs <= 2 * sms:
        return DecodeLaunch(128, 4, 3, 1)
    if sms < pairs <= 2 * sms:
        return DecodeLaunch(32, 2, 3, 4)
    if pairs <= 12 * sms:
        return DecodeLaunch(64, 4, 4, 2)
    return DecodeLaunch(32, 4, 3, 4)


def _quantized_launch(pairs: int, sms: int, dims: int) -> DecodeLaunch:
    """Return launch parameters for a quantised cache, from a sweep on an H200.

    pairs: entries * kv heads; the sweep had 32 to 512 entries of 8 heads.
    dims: the padded head size.

    Small programs start on the next keys sooner, and divide the work of dequantising.
    """
    if dims > 256:
        return DecodeLaunch(32, 4, 2, 1)
    if dims > 128:
        return DecodeLaunch(64, 4, 2, 2)
    if pairs <= sms:
        return DecodeLaunch(128, 4, 4, 1)
    if pairs <= 2 * sms:
        return DecodeLaunch(128, 4, 3, 2)
    return DecodeLaunch(64, 2, 3, 4)


@dataclass(slots=True)
class DecodePlan:
    """The splits of one step, and scratch memory that the step's layers use one after the other."""

    # [2] int32: number of splits; counter from which programs take (split, kv head) pairs
    count: Tensor
    # A row for each split, [max splits, 8] int32: first entry of the split's run, first key, end
    # key, number of the run's splits, row of the run's first split, position of the run's first
    # query, number of the run's queries. No split has keys after that position.
    items: Tensor
    # [num_entries, 3] int32: row of the first split of the entry's run, number of the run's splits,
    # index of the entry in the run
    entries: Tensor
    arrived: Tensor  # [num_entries, num_kv_heads] int32: finished splits; zero between layers
    # [max splits * queries, num_heads, head_dim] float32: outputs before the merge
    partial: Tensor
    # [max splits * queries, num_heads] float32: log2 of the sum of exponentials
    partial_lse: Tensor
    # Whether the split that finishes last merges its entry's splits. Otherwise `_merge_kernel` does
    # in another launch, which is faster for few entries, as these have many splits.
    last_merges: bool
    shape: DecodeLaunch
    queries: int = 1  # maximum of consecutive entries of one request that share splits


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _runs(kv_len, rows, index, num_entries, length, QUERIES: tl.constexpr):
    """Find runs: consecutive entries of one request, such as a token and its draft tokens.

    Returns each entry's index in its run, and the number of entries from there to the run's end.
    Longer runs are cut after QUERIES entries.
    """
    real = index < num_entries
    row = tl.load(rows + index, mask=real, other=-1)
    before = real & (index > 0)
    follows = tl.load(rows + index - 1, mask=before, other=-2) == row
    follows &= tl.load(kv_len + index - 1, mask=before, other=0) + 1 == length
    place = index - tl.associative_scan(tl.where(follows, 0, index), 0, _later)
    count = tl.full(index.shape, 1, tl.int32)
    for ahead in tl.static_range(1, QUERIES):
        after = index + ahead < num_entries
        joins = tl.load(rows + index + ahead, mask=after, other=-2) == row
        joins &= tl.load(kv_len + index + ahead, mask=after, other=0) == length + ahead
        count += joins.to(tl.int32)
    return place % QUERIES, count


# Values that depend on the number of entries are not specialised: a step may have a number of
# entries for which no kernel was compiled at the start. 20 parameters or more: a struct for the 13
# constants would have only one user.
@triton.jit(
    do_not_specialize=["fill", "merge_once"],
    do_not_specialize_on_alignment=["kv_len", "rows", "arrived", "counted", "decodes"],
)
def _plan_kernel(
    kv_len,
    rows,
    counted,
    items,
    entries,
    arrived,
    decodes,
    fill,
    merge_once,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    CUTS: tl.constexpr,
    TAIL: tl.constexpr,
    WALK_COST: tl.constexpr,
    MERGE_COST: tl.constexpr,
    ENTRIES: tl.constexpr,
    HEADS: tl.constexpr,
    WRITE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    QUERIES: tl.constexpr,
):
    entry = tl.program_id(0)
    index = tl.arange(0, ENTRIES)
    num_entries = tl.load(decodes)
    length = tl.load(kv_len + index, mask=index < num_entries, other=0)
    real = index < num_entries  # not padding; below also: the first entry of its run
    runs = num_entries
    leader, place, queries = entry, 0, 1
    if QUERIES > 1:
        places, counts = _runs(kv_len, rows, index, num_entries, length, QUERIES)
        real &= places == 0
        runs = tl.sum(real.to(tl.int32), axis=0)
        length = tl.where(real, length, 0)
        place = tl.sum(tl.where(index == entry, places, 0), axis=0)
        leader = entry - place
        queries = tl.sum(tl.where(index == leader, counts, 0), axis=0)
    start_key = 0
    if WINDOW:
        start_key = tl.maximum(tl.load(kv_len + entry) - WINDOW, 0)
        length = tl.minimum(length, WINDOW)
    if CHUNK:
        start_key = tl.maximum(tl.load(kv_len + entry) - 1, 0) // CHUNK * CHUNK
        length = length - tl.maximum(length - 1, 0) // CHUNK * CHUNK
    # Try several split sizes: that of unsplit entries, and those that give each program 1 .. CUTS
    # splits. Choose the size with the shortest estimated time: programs process equal shares of
    # the keys, and the last program ends later by a part of a split.
    total = tl.sum(length, axis=0)
    longest = tl.max(length, axis=0)
    size = tl.maximum(tl.cdiv(longest, TILE) * TILE, MIN_SPLIT)
    best = 1 << 30
    for cuts in tl.static_range(0, CUTS + 1):
        if cuts > 0:
            tried = tl.cdiv(tl.cdiv(total, fill * cuts), TILE) * TILE
            tried = tl.maximum(tried, MIN_SPLIT)
        else:
            tried = size
        count = tl.sum(tl.where(real, tl.maximum(tl.cdiv(length, tried), 1), 0), axis=0)
        walk = tl.minimum(tried, longest)
        end = tl.where(count <= fill, walk, tl.maximum(walk, total // fill + walk // TAIL))
        end += tl.cdiv(count, fill) * WALK_COST
        merges = merge_once + tl.cdiv(count, fill) * MERGE_COST
        end += tl.where(count > runs, merges, 0)
        # The workspace has room for this many splits.
        better = (end < best) & (count <= fill * CUTS + num_entries)
        size = tl.where(better, tried, size)
        best = tl.where(better, end, best)
    splits = tl.where(real, tl.maximum(tl.cdiv(length, size), 1), 0)
    mine = tl.sum(tl.where(index == leader, splits, 0), axis=0)  # 0 for padding entries
    own_length = tl.sum(tl.where(index == leader, length, 0), axis=0)
    before = (length > own_length) | ((length == own_length) & (index < leader))
    first = tl.sum(tl.where(before, splits, 0), axis=0)
    even = (
        tl.cdiv(tl.cdiv(own_length, tl.maximum(mine, 1)), TILE) * TILE
    )  # the size of this entry's splits, reduced to equal sizes so that no split is empty
    listed = tl.where(entry == leader, mine, 0)
    for start in range(0, listed, WRITE):
        split = start + tl.arange(0, WRITE)
        target = items + (first + split) * 8
        mask = split < listed
        tl.store(target, entry, mask=mask)
        tl.store(target + 1, start_key + split * even, mask=mask)
        last = start_key + tl.minimum((split + 1) * even, own_length)
        tl.store(target + 2, last, mask=mask)
        tl.store(target + 3, mine, mask=mask)
        tl.store(target + 4, first, mask=mask)
        tl.store(target + 5, start_key + own_length - 1, mask=mask)
        tl.store(target + 6, queries, mask=mask)
    tl.store(entries + entry * 3, first)
    tl.store(entries + entry * 3 + 1, mine)
    tl.store(entries + entry * 3 + 2, place)
    heads = tl.arange(0, HEADS)
    tl.store(arrived + entry * NUM_KV_HEADS + heads, 0, mask=heads < NUM_KV_HEADS)
    if entry == 0:
        tl.store(counted, tl.sum(splits, axis=0))
        tl.store(counted + 1, 0)


def plan(
    kv_len: Tensor,  # [num_entries] int32
    num_heads: int,
    k_cache: Cache,  # any layer's: [num_blocks, num_kv_heads, block_size, head_dim]
    max_kv_len: int,
    decodes: Tensor,  # [1] int32: the leading entries that are decodes
    window: int = 0,
    chunk: int = 0,
    rows: Tensor | None = None,  # [num_entries] int32: the requests' rows; None: no runs
) -> DecodePlan:
    """Return the plan that splits the keys of a step's decodes over programs.

    Keys outside a decode's sliding window (`window`) or chunk (`chunk`) are left out.

    A run is planned as one entry if a tile has room for several queries, the cache is not
    quantised, and `window` and `chunk` are 0.
    """
    sms = num_sms(kv_len.device)
    _, num_kv_heads, _, head_dim = k_cache.shape
    pairs = kv_len.shape[0] * num_kv_heads
    dims = triton.next_power_of_2(head_dim)
    if isinstance(k_cache, QuantizedKV):
        rows = None
        shape, element_size = _quantized_launch(pairs, sms, dims), 1  # upper bound for 4 bits
    else:
        element_size = k_cache.element_size()
        shape = _decode_launch(pairs, sms, dims, element_size)
    stage = 2 * shape.keys * dims * element_size
    room = shared_memory(kv_len.device) - 8 * KIB  # 8 KiB for queries and layout conversions
    shape = shape._replace(num_stages=stages_within(room, shape.num_stages, stage))
    if window or chunk or 2 * num_heads > MIN_ROWS * num_kv_heads:
        rows = None
    sizes = (num_heads, num_kv_heads, head_dim)
    return cut(kv_len, sizes, shape, 2 * pairs > sms, max_kv_len, decodes, window, chunk, rows)


def cut(
    kv_len: Tensor,
    sizes: tuple[int, int, int],
    shape: DecodeLaunch,
    last_merges: bool,
    max_kv_len: int,
    decodes: Tensor,
    window: int = 0,
    chunk: int = 0,
    rows: Tensor | None = None,
) -> DecodePlan:
    """Return the plan that splits the keys of a step's decodes over the programs of a launch.

    sizes: number of query heads, number of groups of heads (a program computes one group), elements
        of a head's result.
    last_merges: see DecodePlan.
    rows: the requests' rows, [num_entries] int32; None: runs are not planned as one entry.
    """
    num_heads, num_kv_heads, head_dim = sizes
    queries = 1 if rows is None else MIN_ROWS * num_kv_heads // num_heads
    num_entries = kv_len.shape[0]
    device = kv_len.device
    fill = max(1, num_sms(device) * shape.per_sm // num_kv_heads)
    cuts = CUTS if num_entries <= 256 else 3
    seen = min(max_kv_len, window or chunk or max_kv_len)
    most = min(fill * cuts, num_entries * triton.cdiv(seen, MIN_SPLIT)) + num_entries
    result = DecodePlan(
        count=torch.empty(2, dtype=torch.int32, device=device),
        items=torch.empty((most, 8), dtype=torch.int32, device=device),
        entries=torch.empty((num_entries, 3), dtype=torch.int32, device=device),
        arrived=torch.empty((num_entries, num_kv_heads), dtype=torch.int32, device=device),
        partial=torch.empty(
            (most * queries, num_heads, head_dim), dtype=torch.float32, device=device
        ),
        partial_lse=torch.empty((most * queries, num_heads), dtype=torch.float32, device=device),
        last_merges=last_merges,
        shape=shape,
        queries=queries,
    )
    _plan_kernel[(num_entries,)](
        kv_len,
        kv_len if rows is None else rows,
        result.count,
        result.items,
        result.entries,
        result.arrived,
        decodes,
        fill,
        # `_merge_kernel` is launched in any case, so its launch is no reason to avoid splits.
        MERGE_ONCE if result.last_merges else 0,
        NUM_KV_HEADS=num_kv_heads,
        TILE=TILE,
        MIN_SPLIT=MIN_SPLIT,
        CUTS=cuts,
        TAIL=TAIL,
        WALK_COST=WALK_COST,
        MERGE_COST=MERGE_COST,
        ENTRIES=max(32, triton.next_power_of_2(num_entries)),
        HEADS=triton.next_power_of_2(num_kv_heads),
        WRITE=128,
        WINDOW=window,
        CHUNK=chunk,
        QUERIES=queries,
        num_warps=4,
    )
    return result
