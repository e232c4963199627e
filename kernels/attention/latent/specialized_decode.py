"""Warp-specialised decode attention of many heads over paged latents, on Hopper.

The results are those of latent/decode.py.

With 64 heads per program the matmuls take longer than the memory reads, so the tensor cores must
wait neither for exponentials nor for memory. One warp, the producer, lets the tensor memory
accelerator (TMA) copy latents into one of two buffers. A first warpgroup (four warps) multiplies
the latents by the queries, which gives 64 x 64 scores. Then it multiplies the softmax weights by
the first half of the latents' elements. A second warpgroup reads the weights from shared memory,
and multiplies them by the other half. So one warpgroup's matmul runs while the other computes
exponentials. The kernel is in Gluon, as Triton's own language gives all warps the same work. No
interpreter runs Gluon.

Checked against float64. Timed on an H200 with Triton 3.6 beside the kernel of latent/decode.py, in
microseconds per call with its merge:

    heads  keys         here   decode.py  others
    128    64 x 4,096   154    319        134 (FlashMLA)
    128    1 x 32,768   33     58         43 (FlashAttention 3)
    64     1 x 32,768   26.4   47
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention.candidates import (
    LATENT_KEYS,
    LATENT_ROWS,
    LATENT_SIZES,
    takes_specialized_decode,
)
from kernels.attention.decode import merge
from kernels.attention.decode_plan import DecodePlan
from kernels.attention.inputs import AbsorbedInputs, latent_form
from kernels.attention.latent.decode import aligned, merge_pieces
from kernels.attention.shapes import LatentHeads, head_parts
from kernels.launch.device import compute_capability
from kernels.launch.hopper import (
    PIECE,
    SWIZZLED,
    barrier,
    clear_rows_from,
    load_box,
    load_rows,
    reinterpret,
)
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta

ROWS, KEYS = LATENT_ROWS, LATENT_KEYS
RANK, ROPE = LATENT_SIZES
HALF = RANK // 2
WIDE = PIECE  # elements of a row that the TMA copies at once
PLACES = 2  # buffers for tiles in shared memory
REGISTERS = 208  # registers per thread of the warpgroup that runs `_half`
COPIES = 56  # registers per thread of the producer


@gluon.jit
def _copy_tiles(
    cache, block_table, table_stride, listed, tiles, barriers,
    PARTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Copy tiles of latents, page by page, into free shared-memory buffers."""
    counted, items = listed
    first, second, shared = tiles
    full_first, full_second, free_first, free_second, _weighed, _taken = barriers
    BOXES: gl.constexpr = KEYS // BOX
    WIDE: gl.constexpr = 64
    pairs = gl.load(counted) * PARTS
    step = 0
    for work in range(gl.program_id(0), pairs, gl.num_programs(0)):
        item = items + work // PARTS * 8
        table = block_table + gl.load(item).to(gl.int64) * table_stride
        begin = gl.load(item + 1)
        end = gl.load(item + 2)
        for start in range(begin, end, KEYS):
            rows = ()
            for box in gl.static_range(BOXES):
                position = start + box * BOX
                page = gl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
                rows = rows + (page * BLOCK_SIZE + position % BLOCK_SIZE,)  # noqa: RUF005
            place = step % PLACES
            turn = (step // PLACES & 1) ^ 1
            mbarrier.wait(free_first.index(place), turn)
            ready = full_first.index(place)
            mbarrier.expect(ready, KEYS * 4 * WIDE * 2)
            for wide in gl.static_range(4):
                for box in gl.static_range(BOXES):
                    to = first.index((place * 4 + wide) * BOXES + box)
                    load_box(cache, [rows[box], wide * WIDE], ready, to)
            mbarrier.wait(free_second.index(place), turn)
            ready = full_second.index(place)
            mbarrier.expect(ready, KEYS * 5 * WIDE * 2)
            for wide in gl.static_range(4):
                for box in gl.static_range(BOXES):
                    to = second.index((place * 4 + wide) * BOXES + box)
                    at = [rows[box], (wide + 4) * WIDE]
                    load_box(cache, at, ready, to)
            for box in gl.static_range(BOXES):
                to = shared.index(place * BOXES + box)
                load_box(cache, [rows[box], 8 * WIDE], ready, to)
            step += 1


@gluon.jit
def _store(
    acc, denominator, out, partial, item, entry, splits, heads, begin,
    row_mask, NUM_HEADS: gl.constexpr, RANK: gl.constexpr, HALF: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    dims = begin + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))
    acc = acc / denominator[:, None]
    if splits == 1:
        where = (entry * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
        gl.store(out + where, acc.to(out.dtype.element_ty), mask=row_mask[:, None])
    else:
        where = (item.to(gl.int64) * NUM_HEADS + heads)[:, None] * RANK + dims[None, :]
        gl.store(partial + where, acc, mask=row_mask[:, None])


@gluon.jit
def _listed(at):
    """Load a split of the plan: its entry, first key, end key, and the entry's number of splits.

    at: pointer to the split's row in `DecodePlan.items`.
    """
    entry = gl.load(at).to(gl.int64)
    return entry, gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def _half(
    out, partial, listed, values, handed, barriers,
    PARTS: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Run the second warpgroup: multiply softmax weights by the second half of latents' elements.

    The weights come from the first warpgroup (`_scores`) through shared memory.
    """
    counted, items = listed
    weights, shrinks = handed
    full, free, weighed, taken = barriers
    HALF: gl.constexpr = RANK // 2
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    NUM_HEADS: gl.constexpr = PARTS * GROUP
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    pairs = gl.load(counted) * PARTS
    step = 0  # processed tiles
    gone = 0  # processed splits; each uses the barriers once more, to pass its denominators on
    for work in range(gl.program_id(0), pairs, gl.num_programs(0)):
        item = work // PARTS
        entry, begin, end, splits = _listed(items + item * 8)
        acc = gl.zeros([ROWS, HALF], gl.float32, layout=OUT)
        for _start in range(begin, end, KEYS):
            place = step % PLACES
            mbarrier.wait(weighed, step + gone & 1)
            shrink = shrinks.load(gl.SliceLayout(1, OUT))
            acc = acc * shrink[:, None]
            # The other warpgroup has waited for this copy, but only a wait of this warpgroup makes
            # the copied data visible here.
            mbarrier.wait(full.index(place), step // PLACES & 1)
            acc = warpgroup_mma(weights, values.index(place), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(taken, count=1)
            mbarrier.arrive(free.index(place), count=1)
            step += 1
        mbarrier.wait(weighed, step + gone & 1)
        denominator = shrinks.load(gl.SliceLayout(1, OUT))
        barrier()
        mbarrier.arrive(taken, count=1)
        gone += 1  # noqa: SIM113 (range only, in Gluon)
        heads = work % PARTS * GROUP + rows
        _store(
            acc, denominator, out, partial, item, entry, splits, heads, HALF, rows < GROUP,
            NUM_HEADS, RANK, HALF, OUT,
        )  # fmt: skip


@gluon.jit
def _read(
    to, pointer, stride, heads, row_mask, BEGIN: gl.constexpr, COLUMNS: gl.constexpr,
    WHOLE: gl.constexpr,
):  # fmt: skip
    columns = BEGIN + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, WHOLE))
    where = heads.to(gl.int64)[:, None] * stride + columns[None, :]
    mask = row_mask[:, None] & (columns >= 0)[None, :]
    load_rows(to, pointer + where, mask=mask)


@gluon.jit
def _score_first(
    query, tile, ROWS: gl.constexpr, KEYS: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """Start the matmul of scores [heads, latents] over the first half of the elements."""
    zero = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(query, tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _score_rest(score, q_second, q_shared, second, shared):
    score = warpgroup_mma(q_second, second.permute((1, 0)), score, is_async=True)
    return warpgroup_mma(q_shared, shared.permute((1, 0)), score, is_async=True)


@gluon.jit
def _cut(pieces_first, pieces_second, shared, place, count, KEYS: gl.constexpr):
    """Write zeros after the first `count` latents of a split's last tile."""
    PIECES: gl.constexpr = 4
    for piece in range(PIECES):
        clear_rows_from(pieces_first.index(place * PIECES + piece), count, KEYS)
        clear_rows_from(pieces_second.index(place * PIECES + piece), count, KEYS)
    clear_rows_from(shared.index(place), count, KEYS)
    fence_async_shared()
    barrier()


class SpecializedTile(NamedTuple):
    """The tile of a program, as one `gl.constexpr`."""

    box: int  # rows that the TMA copies at once
    rows: int  # heads, padded
    keys: int  # tokens of a tile
    places: int  # buffers for tiles in shared memory
    registers: int  # registers per thread of the warpgroup that runs `_half`
    copies: int  # registers per thread of the producer


@gluon.jit
def _scores(
    absorbed, q, out, partial, partial_lse, scale_log2, head_stride,
    listed, queries, tiles, pieces, handed, barriers,
    HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Run the first warpgroup: scores, softmax weights, and the first half of the results.

    The matmul for the next tile's scores starts before this tile's matmul with values has ended.
    """
    counted, items = listed
    q_first, q_second, q_shared = queries
    first, second, shared = tiles
    pieces_first, pieces_second = pieces
    weights, shrinks = handed
    full_first, full_second, free_first, _free_second, weighed, taken = barriers
    HALF: gl.constexpr = HEADS.rank // 2
    NUM_HEADS: gl.constexpr = HEADS.parts * HEADS.group
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    score_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    q_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WHOLE))
    pairs = gl.load(counted) * HEADS.parts
    step = 0  # processed tiles
    gone = 0  # processed splits; after each one more exchange passes on the denominators
    for work in range(gl.program_id(0), pairs, gl.num_programs(0)):
        item = work // HEADS.parts
        entry, begin, end, splits = _listed(items + item * 8)
        head = work % HEADS.parts * HEADS.group
        row_mask = q_rows < HEADS.group
        from_absorbed = absorbed + entry * HEADS.rank
        barrier()  # all threads have finished with the previous queries
        _read(q_first, from_absorbed, head_stride, head + q_rows, row_mask, 0, HALF, WHOLE)
        _read(q_second, from_absorbed, head_stride, head + q_rows, row_mask, HALF, HALF, WHOLE)
        from_q = q + entry * NUM_HEADS * HEADS.head_dim + (HEADS.head_dim - HEADS.rope)
        _read(q_shared, from_q, HEADS.head_dim, head + q_rows, row_mask, 0, HEADS.rope, WHOLE)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        denominator = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ROWS, HALF], gl.float32, layout=OUT)
        place = step % PLACES
        turn = step // PLACES & 1
        some = begin < end
        mbarrier.wait(full_first.index(place), turn, pred=some)
        mbarrier.wait(full_second.index(place), turn, pred=some)
        if some & (begin + KEYS > end):
            _cut(pieces_first, pieces_second, shared, place, end - begin, KEYS)
        score = _score_first(q_first, first.index(place), ROWS, KEYS, SCORES)
        score = _score_rest(score, q_second, q_shared, second.index(place), shared.index(place))
        for start in range(begin, end, KEYS):
            place = step % PLACES
            scores = warpgroup_mma_wait(0, deps=[score])
            if start + KEYS > end:
                scores = gl.where((start + keys < end)[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=1) * scale_log2)
            weight = gl.exp2(scores * scale_log2 - new_top[:, None])
            shrink = gl.exp2(top - new_top)
            top = new_top
            taking = weight.to(q.dtype.element_ty)
            mbarrier.wait(taken, (step + gone & 1) ^ 1)
            weights.store(taking)
            shrinks.store(shrink)
            fence_async_shared()
            barrier()
            mbarrier.arrive(weighed, count=1)
            denominator = denominator * shrink + gl.sum(weight, axis=1)
            after = start + KEYS
            other = (step + 1) % PLACES
            other_turn = (step + 1) // PLACES & 1
            if (after < end) & (after + KEYS > end):
                mbarrier.wait(full_first.index(other), other_turn)
                mbarrier.wait(full_second.index(other), other_turn)
                _cut(pieces_first, pieces_second, shared, other, end - after, KEYS)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            acc = warpgroup_mma(weights, first.index(place), acc, is_async=True)
            # Compute scores of the next tile. After the last tile these are unused scores of stale
            # keys.
            mbarrier.wait(full_first.index(other), other_turn, pred=after < end)
            score = _score_first(q_first, first.index(other), ROWS, KEYS, SCORES)
            # `taking` is a dependency only because of ptxas: without it ptxas allocates registers
            # differently for 64 heads, which was not timed.
            acc = warpgroup_mma_wait(1, deps=[acc, taking])[0]
            barrier()
            mbarrier.arrive(free_first.index(place), count=1)
            mbarrier.wait(full_second.index(other), other_turn, pred=after < end)
            score = _score_rest(score, q_second, q_shared, second.index(other), shared.index(other))
            step += 1
        warpgroup_mma_wait(0, deps=[score])
        # A padding entry may have no key at all: 0 / 1 instead of 0 / 0.
        denominator = gl.where(denominator > 0.0, denominator, 1.0)
        mbarrier.wait(taken, (step + gone & 1) ^ 1)
        shrinks.store(denominator)
        barrier()
        mbarrier.arrive(weighed, count=1)
        gone += 1  # noqa: SIM113 (range only, in Gluon)
        if splits > 1:
            where = item.to(gl.int64) * NUM_HEADS + head + score_rows
            gl.store(partial_lse + where, top + gl.log2(denominator), mask=score_rows < HEADS.group)
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        _store(
            acc, gl.convert_layout(denominator, gl.SliceLayout(1, OUT)), out, partial, item, entry,
            splits, head + rows, 0, rows < HEADS.group, NUM_HEADS, HEADS.rank, HALF, OUT,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_stride", "head_stride"],
    do_not_specialize_on_alignment=["block_table", "counted", "items"],
)
def _latent_specialized_kernel(
    absorbed,  # [heads, tokens, RANK]
    q,  # [tokens, heads, HEAD_DIM]: the last ROPE elements are rotated
    cache,  # a descriptor of [blocks * BLOCK_SIZE, RANK + ROPE]
    out,  # [tokens, heads, RANK]
    block_table,
    counted,
    items,
    partial,
    partial_lse,
    scale_log2,
    table_stride,
    head_stride,  # stride of absorbed's heads, a multiple of 16
    HEADS: gl.constexpr,  # `LatentHeads`
    TILE: gl.constexpr,  # `SpecializedTile`
    PDL: gl.constexpr,
):
    BLOCK_SIZE: gl.constexpr = HEADS.block_size
    GROUP: gl.constexpr = HEADS.group
    PARTS: gl.constexpr = HEADS.parts
    RANK: gl.constexpr = HEADS.rank
    ROPE: gl.constexpr = HEADS.rope
    BOX: gl.constexpr = TILE.box
    COPIES: gl.constexpr = TILE.copies
    KEYS: gl.constexpr = TILE.keys
    PLACES: gl.constexpr = TILE.places
    REGISTERS: gl.constexpr = TILE.registers
    ROWS: gl.constexpr = TILE.rows
    HALF: gl.constexpr = RANK // 2
    SWIZZLED: gl.constexpr = cache.layout
    BOXES: gl.constexpr = KEYS // BOX
    WIDES: gl.constexpr = HALF // 64
    dtype: gl.constexpr = q.dtype.element_ty
    head_stride = head_stride // 16 * 16
    q_first = gl.allocate_shared_memory(dtype, [ROWS, HALF], SWIZZLED)
    q_second = gl.allocate_shared_memory(dtype, [ROWS, HALF], SWIZZLED)
    q_shared = gl.allocate_shared_memory(dtype, [ROWS, ROPE], SWIZZLED)
    first = gl.allocate_shared_memory(dtype, [PLACES, KEYS, HALF], SWIZZLED)
    second = gl.allocate_shared_memory(dtype, [PLACES, KEYS, HALF], SWIZZLED)
    shared = gl.allocate_shared_memory(dtype, [PLACES, KEYS, ROPE], SWIZZLED)
    weights = gl.allocate_shared_memory(dtype, [ROWS, KEYS], SWIZZLED)
    shrinks = gl.allocate_shared_memory(
        gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    full_first = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    full_second = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free_first = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free_second = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full_first.index(place), count=1)
        mbarrier.init(full_second.index(place), count=1)
        mbarrier.init(free_first.index(place), count=1)
        mbarrier.init(free_second.index(place), count=1)
    mbarrier.init(weighed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    barrier()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # A tile in shared memory consists of panels of 64 columns and all rows.
    listed = (counted, items)
    queries = (q_first, q_second, q_shared)
    tiles = (first, second, shared)
    pieces = (
        reinterpret(first, dtype, [PLACES * WIDES, KEYS, 64], SWIZZLED),
        reinterpret(second, dtype, [PLACES * WIDES, KEYS, 64], SWIZZLED),
    )
    boxes = (
        reinterpret(first, dtype, [PLACES * WIDES * BOXES, BOX, 64], SWIZZLED),
        reinterpret(second, dtype, [PLACES * WIDES * BOXES, BOX, 64], SWIZZLED),
        reinterpret(shared, dtype, [PLACES * BOXES, BOX, 64], SWIZZLED),
    )
    handed = (weights, shrinks)
    barriers = (full_first, full_second, free_first, free_second, weighed, taken)
    of_second = (full_second, free_second, weighed, taken)
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    absorbed, q, out, partial, partial_lse, scale_log2, head_stride,
                    listed, queries, tiles, pieces, handed, barriers,
                    HEADS, ROWS, KEYS, PLACES,
                ),
            ),
            (
                _half,
                (
                    out, partial, listed, second, handed, of_second,
                    PARTS, GROUP, RANK, ROWS, KEYS, PLACES,
                ),
            ),
            (
                _copy_tiles,
                (
                    cache, block_table, table_stride, listed, boxes, barriers,
                    PARTS, BLOCK_SIZE, BOX, KEYS, PLACES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, COPIES],
    )  # fmt: skip


def specialized_decode_fits(inputs: AbsorbedInputs, meta: AttentionMeta) -> bool:
    """Whether `specialized_decode` supports the inputs: see `takes_specialized_decode`."""
    device = inputs.q.device
    if device.type != "cuda" or not aligned(inputs.absorbed):
        return False
    return takes_specialized_decode(latent_form(inputs), compute_capability(device))


def specialized_decode(inputs: AbsorbedInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention over latents of the step's decodes into their rows of out.

    Arguments and result are those of `latent_decode`; `specialized_decode_fits` must be true.
    """
    absorbed, q, cache, scale = inputs
    plan: DecodePlan = meta.plan
    num_heads = absorbed.shape[0]
    parts = head_parts(num_heads)
    block_size = cache.shape[2]
    box = min(KEYS, block_size)
    flat = cache.view(-1, RANK + ROPE)
    _latent_specialized_kernel[(num_sms(q.device),)](
        absorbed,
        q,
        TensorDescriptor.from_tensor(flat, [box, WIDE], SWIZZLED),
        out,
        meta.block_table,
        plan.count,
        plan.items,
        plan.partial,
        plan.partial_lse,
        scale * 1.4426950408889634,
        meta.block_table.stride(0),
        absorbed.stride(0),
        HEADS=LatentHeads(
            parts=parts,
            group=num_heads // parts,
            rank=RANK,
            rope=ROPE,
            head_dim=q.shape[2],
            block_size=block_size,
        ),
        TILE=SpecializedTile(
            box=box, rows=ROWS, keys=KEYS, places=PLACES, registers=REGISTERS, copies=COPIES
        ),
        **pdl(q.device),
        num_warps=4,
        maxnreg=168,
    )
    merge(out, plan, merge_pieces(out))
