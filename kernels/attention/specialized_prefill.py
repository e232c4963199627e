"""Warp-specialised prefill attention over paged keys and values on Hopper.

The results are those of prefill.py.

A work item is 128 rows: queries of one sequence (an entry of the step), times the query heads that
share a key head. Two warpgroups compute 64 rows each. One warp, the producer, only lets the tensor
memory accelerator (TMA) copy keys, values and queries to shared memory, page by page. A warpgroup
issues the GEMM of the next tile's scores, then the GEMM of this tile's values, and computes
exponentials while the second GEMM runs. So the tensor cores wait for neither memory nor
exponentials (FlashAttention 3, arXiv:2407.08608, section 3). Tiles of keys are processed from the
diagonal towards the first key.

One program per multiprocessor takes work items from a shared queue, longest first. The producer is
one item ahead: it finds the item's entry, writes its parameters to shared memory for the
warpgroups, and copies the queries while the warpgroups compute. The kernel is in Gluon, as Triton's
own language gives all warps the same work. No interpreter runs Gluon.

TFLOP/s on an H100 with Triton 3.6, random normal data, timed in turns (bench/notes/engine-gpu.md):

    heads, size     prompt     here   prefill.py   cuDNN
    32 / 8 of 128    8,192      620          483     605
    32 / 8 of 128   32,768      624          469     609
    16 / 8 of 256    8,192      695          385     624
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.candidates import PREFILL_KEYS, takes_specialized_prefill
from kernels.attention.decode import LOG2E
from kernels.attention.inputs import AttentionInputs, attention_form
from kernels.attention.shapes import Heads, Scores
from kernels.kv.quantized import QuantizedKV
from kernels.launch.device import compute_capability
from kernels.launch.hopper import PIECE, SWIZZLED, barrier, clear_rows_from, load_box, reinterpret
from kernels.launch.pdl import num_sms
from kernels.metadata import AttentionMeta

ROWS = 128  # rows of a work item
MAX_REGISTERS = 168  # a thread's registers, on average of three warpgroups


class PrefillTile(NamedTuple):
    """A program's shared memory and registers, as one `tl.constexpr`.

    keys: keys of a tile.
    places: buffers for tiles of keys in shared memory, and as many for tiles of values.
    slots: buffers for tiles of queries in shared memory.
    box: keys that the TMA copies at once.
    registers: registers per thread of the two computing warpgroups.
    producer_registers: registers per thread of the producer.
    """

    keys: int
    places: int
    slots: int
    box: int = 16
    registers: int = 240
    producer_registers: int = 24


# Head size -> its tile. With heads of 64 a tile's exponentials take longer than its GEMMs:
# prefill.py, with twice as many warps a multiprocessor, is as fast (0.84 to 1.04 of it).
TILES = {128: PrefillTile(PREFILL_KEYS[128], 2, 2), 256: PrefillTile(PREFILL_KEYS[256], 2, 1)}


@gluon.jit
def _entry_of(query_start, first_entry, num_entries, index, QUERIES: gl.constexpr):
    """Return the entry of a block of queries, the entry's first token, and the block's first query.

    The function is `kernels.launch.entries.entry_of` for Gluon kernels.
    """
    origin = gl.load(query_start + first_entry)
    low = first_entry
    high = num_entries
    while low < high:
        middle = (low + high + 1) // 2
        blocks_before = (gl.load(query_start + middle) - origin) // QUERIES + middle - first_entry
        if blocks_before <= index:
            low = middle
        else:
            high = middle - 1
    begin = gl.load(query_start + low)
    first = (index - ((begin - origin) // QUERIES + low - first_entry)) * QUERIES
    return low, begin, first


@gluon.jit
def _first_key(position, WINDOW: gl.constexpr, CHUNK: gl.constexpr):
    """Return the position of the first key that the query at `position` sees; may be negative."""
    if CHUNK:
        return position // CHUNK * CHUNK
    return position - (WINDOW - 1)


@gluon.jit
def _produce(
    q, k_cache, v_cache, block_table, table_stride, query_start, kv_len, counts, queue, num_tokens,
    blocks, boxes, handed, barriers,
    LAYER: gl.constexpr, TILE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Run the producer: take work items, and copy their queries, keys and values to free buffers.

    The items' parameters are written to `handed` for the warpgroups.
    """
    HEADS: gl.constexpr = LAYER.num_kv_heads
    GROUP: gl.constexpr = LAYER.group
    DIM: gl.constexpr = LAYER.head_dim
    BLOCK_SIZE: gl.constexpr = LAYER.block_size
    BOX: gl.constexpr = TILE.box
    KEYS: gl.constexpr = TILE.keys
    PLACES: gl.constexpr = TILE.places
    SLOTS: gl.constexpr = TILE.slots
    WINDOW: gl.constexpr = SCORES.window
    CHUNK: gl.constexpr = SCORES.chunk
    QUERIES: gl.constexpr = 128 // GROUP
    q_boxes, k_boxes, v_boxes = boxes
    full_q, free_q, full_k, free_k, full_v, free_v = barriers
    BOXES: gl.constexpr = KEYS // BOX
    PIECES: gl.constexpr = DIM // 64
    TILE_BYTES: gl.constexpr = KEYS * DIM * 2
    FIELDS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=FIELDS)
    first_entry = gl.load(counts)
    num_entries = gl.load(counts + 1)
    total = blocks * HEADS
    step = 0  # processed tiles
    work = 0
    at = gl.atomic_add(queue, 1)
    while at < total:
        head = at % HEADS
        index = blocks - 1 - at // HEADS
        entry, begin, first = _entry_of(query_start, first_entry, num_entries, index, QUERIES)
        query_len = num_tokens - begin  # padding after the last entry gets zeros
        length = 0
        if entry < num_entries:
            query_len = gl.load(query_start + entry + 1) - begin
            length = gl.load(kv_len + entry)
        if first < query_len:
            first_position = length - query_len + first
            end = gl.minimum(first_position + QUERIES, length)
            high = gl.cdiv(end, KEYS)
            lowest = 0
            if WINDOW or CHUNK:
                lowest = gl.maximum(_first_key(first_position, WINDOW, CHUNK), 0)
            low = lowest // KEYS
            if entry >= num_entries:
                low = high
            slot = work % SLOTS
            mbarrier.wait(free_q.index(slot), (work // SLOTS & 1) ^ 1)
            fields = gl.where(field == 0, high - low, high)
            fields = gl.where(field == 2, end, fields)
            fields = gl.where(field == 3, first_position, fields)
            fields = gl.where(field == 4, begin + first, fields)
            fields = gl.where(field == 5, query_len - first, fields)
            fields = gl.where(field == 6, head, fields)
            handed.index(slot).store(fields)
            barrier()
            ready = full_q.index(slot)
            mbarrier.expect(ready, 128 * DIM * 2)
            for half in gl.static_range(2):
                token = begin + first + half * (QUERIES // 2)
                for piece in gl.static_range(PIECES):
                    for of_group in gl.static_range(GROUP):
                        column = (head * GROUP + of_group) * DIM + piece * 64
                        q_box = ((slot * 2 + half) * PIECES + piece) * GROUP + of_group
                        load_box(q, [token, column], ready, q_boxes.index(q_box))
            work += 1
            table = block_table + entry.to(gl.int64) * table_stride
            for tile in range(high - low):
                start = (high - 1 - tile) * KEYS
                rows = ()
                for box in gl.static_range(BOXES):
                    position = start + box * BOX
                    seen = (position < end) & (position + BOX > lowest)
                    page = gl.load(table + position // BLOCK_SIZE, mask=seen, other=0)
                    row = (page * HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
                    row = gl.where(seen, row, -BOX)  # out of bounds: the TMA writes zeros
                    rows = rows + (row,)  # noqa: RUF005
                place = step % PLACES
                phase = (step // PLACES & 1) ^ 1
                mbarrier.wait(free_k.index(place), phase)
                ready = full_k.index(place)
                mbarrier.expect(ready, TILE_BYTES)
                for box in gl.static_range(BOXES):
                    for piece in gl.static_range(PIECES):
                        to = k_boxes.index((place * PIECES + piece) * BOXES + box)
                        load_box(k_cache, [rows[box], piece * 64], ready, to)
                mbarrier.wait(free_v.index(place), phase)
                ready = full_v.index(place)
                mbarrier.expect(ready, TILE_BYTES)
                for box in gl.static_range(BOXES):
                    for piece in gl.static_range(PIECES):
                        to = v_boxes.index((place * PIECES + piece) * BOXES + box)
                        load_box(v_cache, [rows[box], piece * 64], ready, to)
                step += 1
        at = gl.atomic_add(queue, 1)
    if gl.atomic_add(queue + 1, 1) == gl.num_programs(0) - 1:  # the last: ready for the next launch
        gl.store(queue, 0)
        gl.store(queue + 1, 0)
    slot = work % SLOTS
    mbarrier.wait(free_q.index(slot), (work // SLOTS & 1) ^ 1)
    handed.index(slot).store(gl.where(field == 0, -1, 0))  # no more work
    barrier()
    mbarrier.arrive(full_q.index(slot), count=1)


@gluon.jit
def _field(fields, which: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(fields.slice(which, 1).load(ONE), axis=0)


@gluon.jit
def _masked(
    score, start, row_position, KEYS: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    PRODUCT: gl.constexpr,
):  # fmt: skip
    """Return the scores of the keys from `start` on, with -inf where a row does not see a key."""
    position = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, PRODUCT))
    score = gl.where(position[None, :] <= row_position[:, None], score, float("-inf"))
    if WINDOW or CHUNK:
        first = _first_key(row_position, WINDOW, CHUNK)
        score = gl.where(position[None, :] >= first[:, None], score, float("-inf"))
    return score


@gluon.jit
def _weigh(score, top, denominator, scale_log2):
    """Return a tile's softmax weights, the rows' new maxima and denominators, and the factor by
    which earlier sums must be scaled."""
    new_top = gl.maximum(top, gl.max(score, axis=1) * scale_log2)
    weight = gl.exp2(score * scale_log2 - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weight, new_top, denominator * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def _attend(
    out, sinks, scale_log2, queries, tiles, handed, barriers,
    HALF: gl.constexpr, LAYER: gl.constexpr, TILE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Run a computing warpgroup: attention of one half of each work item's rows.

    Row r is query r % (QUERIES / 2) of this half, and head r // (QUERIES / 2) of the group.
    """
    HEADS: gl.constexpr = LAYER.num_kv_heads
    GROUP: gl.constexpr = LAYER.group
    DIM: gl.constexpr = LAYER.head_dim
    KEYS: gl.constexpr = TILE.keys
    PLACES: gl.constexpr = TILE.places
    SLOTS: gl.constexpr = TILE.slots
    WINDOW: gl.constexpr = SCORES.window
    CHUNK: gl.constexpr = SCORES.chunk
    QUERIES: gl.constexpr = 128 // GROUP
    keys, values, value_pieces = tiles
    full_q, free_q, full_k, free_k, full_v, free_v = barriers
    LOWEST: gl.constexpr = -1.0e30  # below all scores, and finite: no inf - inf
    PIECES: gl.constexpr = DIM // 64
    OWN: gl.constexpr = QUERIES // 2
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    score_row = gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
    out_row = gl.arange(0, 64, layout=gl.SliceLayout(1, WHOLE))
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, WHOLE))
    zero = gl.zeros([64, KEYS], gl.float32, layout=PRODUCT)
    step = 0  # processed tiles
    work = 0
    count = 0
    while count >= 0:
        slot = work % SLOTS
        mbarrier.wait(full_q.index(slot), work // SLOTS & 1)
        fields = handed.index(slot)
        count = _field(fields, 0)
        if count >= 0:
            high = _field(fields, 1)
            end = _field(fields, 2)
            first_position = _field(fields, 3)
            first_token = _field(fields, 4)
            num_queries = _field(fields, 5)
            head = _field(fields, 6)
            query = queries.index(slot * 2 + HALF)
            # Rows after the last query see the same keys as the last query.
            own = gl.minimum(HALF * OWN + score_row % OWN, num_queries - 1)
            row_position = first_position + own
            lowest_position = first_position + HALF * OWN
            acc = gl.zeros([64, DIM], gl.float32, layout=OUT)
            top = gl.full([64], LOWEST, gl.float32, layout=gl.SliceLayout(1, PRODUCT))
            denominator = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, PRODUCT))
            if SCORES.sinks:  # a sink is like a key with a value of zero
                top = gl.load(sinks + head * GROUP + score_row // OWN) * LOG2E
                denominator += 1.0
            if count > 0:
                start = (high - 1) * KEYS
                place = step % PLACES
                mbarrier.wait(full_k.index(place), step // PLACES & 1)
                key = keys.index(place).permute((1, 0))
                score = warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
                if start + KEYS > end:  # zero the values after the entry's last key
                    mbarrier.wait(full_v.index(place), step // PLACES & 1)
                    for piece in gl.static_range(PIECES):
                        clear_rows_from(
                            value_pieces.index(place * PIECES + piece), end - start, KEYS
                        )
                    fence_async_shared()
                    barrier()
                score = warpgroup_mma_wait(0, deps=[score])
                barrier()
                mbarrier.arrive(free_k.index(place), count=1)
                score = _masked(score, start, row_position, KEYS, WINDOW, CHUNK, PRODUCT)
                weight, top, denominator, _ = _weigh(score, top, denominator, scale_log2)
                weights = gl.convert_layout(weight.to(dtype), WEIGHTS)
                for tile in range(1, count):
                    start = (high - 1 - tile) * KEYS
                    after = (step + 1) % PLACES
                    mbarrier.wait(full_k.index(after), (step + 1) // PLACES & 1)
                    key = keys.index(after).permute((1, 0))
                    score = warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
                    mbarrier.wait(full_v.index(place), step // PLACES & 1)
                    acc = warpgroup_mma(weights, values.index(place), acc, is_async=True)
                    score = warpgroup_mma_wait(1, deps=[score])
                    barrier()
                    mbarrier.arrive(free_k.index(after), count=1)
                    hidden = start + KEYS > lowest_position + 1
                    if WINDOW or CHUNK:
                        highest_position = lowest_position + (OWN - 1)
                        hidden = hidden | (start < _first_key(highest_position, WINDOW, CHUNK))
                    if hidden:
                        score = _masked(score, start, row_position, KEYS, WINDOW, CHUNK, PRODUCT)
                    weight, top, denominator, shrink = _weigh(score, top, denominator, scale_log2)
                    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
                    barrier()
                    mbarrier.arrive(free_v.index(place), count=1)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
                    weights = gl.convert_layout(weight.to(dtype), WEIGHTS)
                    step += 1
                    place = after
                mbarrier.wait(full_v.index(place), step // PLACES & 1)
                acc = warpgroup_mma(weights, values.index(place), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                barrier()
                mbarrier.arrive(free_v.index(place), count=1)
                step += 1
            denominator = gl.where(denominator > 0.0, denominator, 1.0)  # padding rows become 0 / 1
            acc = acc / gl.convert_layout(denominator, gl.SliceLayout(1, OUT))[:, None]
            # Convert the layout through the queries' buffer, which is no longer read, so that each
            # thread stores 16 bytes at once.
            query.store(acc.to(dtype))
            barrier()
            result = query.load(WHOLE)
            fence_async_shared()
            barrier()
            mbarrier.arrive(free_q.index(slot), count=1)
            index = HALF * OWN + out_row % OWN
            token = (first_token + index).to(gl.int64)
            at = (token * (HEADS * GROUP) + head * GROUP + out_row // OWN) * DIM
            gl.store(out + at[:, None] + dims[None, :], result, mask=(index < num_queries)[:, None])
            work += 1


@gluon.jit(
    do_not_specialize=["table_stride", "num_tokens", "blocks"],
    do_not_specialize_on_alignment=["block_table", "query_start", "kv_len", "counts"],
)
def _prefill_specialized_kernel(
    q,  # a descriptor of [num_tokens, num_heads * DIM]
    k_cache,  # a descriptor of [num_blocks * HEADS * BLOCK_SIZE, DIM]
    v_cache,  # a descriptor of that shape
    out,  # [num_tokens, num_heads, DIM]
    block_table,
    query_start,
    kv_len,
    counts,
    queue,  # two counters, zero between launches: work items taken, programs finished
    sinks,  # [num_heads] float32, if SINKS
    scale_log2,
    table_stride,
    num_tokens,
    blocks,  # upper bound of the number of blocks of QUERIES queries
    LAYER: gl.constexpr,  # `Heads`
    TILE: gl.constexpr,  # `PrefillTile`
    SCORES: gl.constexpr,  # `Scores`
):
    GROUP: gl.constexpr = LAYER.group
    DIM: gl.constexpr = LAYER.head_dim
    BOX: gl.constexpr = TILE.box
    KEYS: gl.constexpr = TILE.keys
    PLACES: gl.constexpr = TILE.places
    SLOTS: gl.constexpr = TILE.slots
    PIECES: gl.constexpr = DIM // 64
    BOXES: gl.constexpr = KEYS // BOX
    SWIZZLED: gl.constexpr = k_cache.layout
    dtype: gl.constexpr = out.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [SLOTS * 2, 64, DIM], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [PLACES, KEYS, DIM], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [PLACES, KEYS, DIM], SWIZZLED)
    handed = gl.allocate_shared_memory(
        gl.int32, [SLOTS, 8], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    full_q = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free_q = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    full_k = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free_k = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free_v = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full_q.index(slot), count=1)
        mbarrier.init(free_q.index(slot), count=2)
    for place in gl.static_range(PLACES):
        mbarrier.init(full_k.index(place), count=1)
        mbarrier.init(full_v.index(place), count=1)
        mbarrier.init(free_k.index(place), count=2)
        mbarrier.init(free_v.index(place), count=2)
    fence_async_shared()
    barrier()
    # A tile in shared memory consists of panels: 64 elements of all rows, then the next 64.
    boxes = (
        reinterpret(queries, dtype, [SLOTS * 2 * PIECES * GROUP, 64 // GROUP, 64], SWIZZLED),
        reinterpret(keys, dtype, [PLACES * PIECES * BOXES, BOX, 64], SWIZZLED),
        reinterpret(values, dtype, [PLACES * PIECES * BOXES, BOX, 64], SWIZZLED),
    )
    value_pieces = reinterpret(values, dtype, [PLACES * PIECES, KEYS, 64], SWIZZLED)
    tiles = (keys, values, value_pieces)
    barriers = (full_q, free_q, full_k, free_k, full_v, free_v)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out, sinks, scale_log2, queries, tiles, handed, barriers,
                    0, LAYER, TILE, SCORES,
                ),
            ),
            (
                _attend,
                (
                    out, sinks, scale_log2, queries, tiles, handed, barriers,
                    1, LAYER, TILE, SCORES,
                ),
            ),
            (
                _produce,
                (
                    q, k_cache, v_cache, block_table, table_stride, query_start, kv_len, counts,
                    queue, num_tokens, blocks, boxes, handed, barriers, LAYER, TILE, SCORES,
                ),
            ),
        ],
        [4, 1],
        [TILE.registers, TILE.producer_registers],
    )  # fmt: skip


def specialized_prefill_fits(inputs: AttentionInputs, meta: AttentionMeta) -> bool:
    """Whether `specialized_prefill` supports the inputs: see `takes_specialized_prefill`."""
    q, k_cache = inputs.q, inputs.k_cache
    if isinstance(k_cache, QuantizedKV) or not q.is_cuda or meta.last_keys is not None:
        return False
    plain = q.dtype == k_cache.dtype and k_cache.is_contiguous()
    form = attention_form(inputs)
    return plain and takes_specialized_prefill(form, compute_capability(q.device))


@lru_cache
def _queue(device: torch.device) -> Tensor:
    """Return a device's work counters, shared by all launches, which run one after the other."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def specialized_prefill(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention of the step's chunks into their rows of out.

    Arguments and result are those of `prefill.attention_prefill`; `specialized_prefill_fits` must
    be true.
    """
    q, k_cache, v_cache, scale, _, sinks, _ = inputs
    assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
    num_tokens, num_heads, dim = q.shape
    _, heads, block_size, _ = k_cache.shape
    group = num_heads // heads
    tile = TILES[dim]
    tile = tile._replace(box=min(tile.keys, block_size))
    blocks = meta.most_blocks(num_tokens, ROWS // group, decodes=False)
    _prefill_specialized_kernel[(min(num_sms(q.device), blocks * heads),)](
        TensorDescriptor.from_tensor(
            q.view(num_tokens, num_heads * dim), [ROWS // 2 // group, PIECE], SWIZZLED
        ),
        TensorDescriptor.from_tensor(k_cache.view(-1, dim), [tile.box, PIECE], SWIZZLED),
        TensorDescriptor.from_tensor(v_cache.view(-1, dim), [tile.box, PIECE], SWIZZLED),
        out,
        meta.block_table,
        meta.query_start,
        meta.kv_len,
        meta.counts,
        _queue(q.device),
        q if sinks is None else sinks,
        scale * LOG2E.value,
        meta.block_table.stride(0),
        num_tokens,
        blocks,
        LAYER=Heads(heads, group, dim, block_size),
        TILE=tile,
        SCORES=Scores(False, sinks is not None, False, meta.window, meta.chunk),
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
