"""Attention over paged latents for decodes: sequences (entries) with one query token.

Keys are split over programs as in attention/decode.py, with the same plan and merge.

A latent is read once for all heads, as their key and as their value. Its tile stays in shared
memory between the two matmuls, so a program computes as many heads as fit into registers. Hopper's
wgmma multiplies 64 rows at once. With 64 heads the rows are heads. With 17 to 32 heads the rows are
latents, so that no row is wasted. With up to 16 heads, instructions with 16 rows are used.
On Hopper, specialized_decode.py computes groups of 33 to 64 heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.decode import item_of, merge
from kernels.attention.decode_plan import DecodeLaunch, DecodePlan, cut
from kernels.attention.inputs import AbsorbedInputs
from kernels.attention.shapes import MOST_HEADS, LatentHeads, LatentTile, head_parts
from kernels.launch.device import KIB, shared_memory
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import AttentionMeta


def parts_within(num_heads: int, cache: Tensor) -> int:
    """Return the number of equal groups of heads such that each group's queries fit into two thirds
    of the device's shared memory."""
    row = cache.shape[3] * cache.element_size()
    most = MOST_HEADS
    while most > 16 and most * row > shared_memory(cache.device) * 2 // 3:
        most //= 2
    return head_parts(num_heads, most)


@triton.jit
def scores_once(query, rotated, latent, shared, known):
    """Compute the scores [rows, keys] such that no two warps compute the same score.

    known: always True, but passed as a run-time value so that the compiler keeps the branch.

    If Triton 3.6 sees that the result of one matmul is an operand of another, it divides only the
    rows of the first among warps: with 64 rows, eight warps would compute each score twice. The
    branch hides the dependency from Triton. The else branch never runs.
    """
    if known:
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        turned = tl.dot(rotated, tl.trans(shared), input_precision="ieee")
    else:
        score = tl.dot(rotated, tl.trans(shared), input_precision="ieee")
        turned = score
    return score + turned


@triton.jit
def latent_tile(
    query, rotated, latent, shared, seen, top, denominator, acc, scale_log2, known,
):  # fmt: skip
    """Add one tile of keys to a program's running softmax, with one row a head.

    seen: mask of the keys that each row sees, [rows, keys] or [1, keys].
    known: see `scores_once`. Float32 scores need no branch: the matrix unit takes no float32.
    """
    if latent.dtype.primitive_bitwidth == 16:
        score = scores_once(query, rotated, latent, shared, known) * scale_log2
    else:
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(rotated, tl.trans(shared), score, input_precision="ieee") * scale_log2
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(latent.dtype), latent, acc, input_precision="ieee")
    return new_top, denominator, acc


@triton.jit
def few_heads_tile(
    query, rotated, latent, shared, seen, top, denominator, acc, scale_log2,
):  # fmt: skip
    """Add one tile of keys to a program's running softmax, with one column a head.

    seen: mask of the visible keys, [keys, 1].
    acc: [elements, heads].
    """
    score = tl.dot(latent, tl.trans(query), input_precision="ieee")
    score = tl.dot(shared, tl.trans(rotated), score, input_precision="ieee") * scale_log2
    score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=0))
    weight = tl.exp2(score - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(weight, axis=0)
    acc = acc * shrink[None, :]
    acc = tl.dot(tl.trans(latent), weight.to(latent.dtype), acc, input_precision="ieee")
    return new_top, denominator, acc


@triton.jit(
    do_not_specialize=["table_stride", "head_stride"],
    do_not_specialize_on_alignment=["block_table", "counted", "items"],
)
def _latent_decode_kernel(
    absorbed,  # [heads, tokens, RANK]
    q,  # [tokens, heads, HEAD_DIM]: the last ROPE elements are rotated
    cache,
    out,  # [tokens, heads, RANK]
    block_table,
    counted,
    items,
    partial,
    partial_lse,
    scale_log2,
    table_stride,
    head_stride,  # of absorbed
    HEADS: tl.constexpr,  # `LatentHeads`
    TILE: tl.constexpr,  # `LatentTile`
    FEW: tl.constexpr,  # heads are columns
    ALIGNED: tl.constexpr,  # 16 divides head_stride
    PDL: tl.constexpr,
):
    RANKS: tl.constexpr = TILE.ranks
    ROWS: tl.constexpr = TILE.rows
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, RANKS)
    rotary = tl.arange(0, TILE.ropes)
    keys = tl.arange(0, TILE.keys)
    row_mask = rows < HEADS.group
    dim_mask = dims < HEADS.rank
    rotary_mask = rotary < HEADS.rope
    tile_mask = row_mask[:, None] & dim_mask[None, :]
    NUM_HEADS: tl.constexpr = HEADS.parts * HEADS.group
    KEPT: tl.constexpr = HEADS.rank + HEADS.rope
    if ALIGNED:
        head_stride = head_stride // 16 * 16
    programs = tl.num_programs(0)
    pairs = tl.load(counted) * HEADS.parts
    work = tl.program_id(0)
    entry, begin, end = item_of(items, work // HEADS.parts, work < pairs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while work < pairs:
        item = work // HEADS.parts
        heads = work % HEADS.parts * HEADS.group + rows
        table = block_table + entry * table_stride
        splits = tl.load(items + item * 8 + 3)
        from_absorbed = absorbed + heads[:, None].to(tl.int64) * head_stride + entry * HEADS.rank
        query = tl.load(from_absorbed + dims[None, :], mask=tile_mask, other=0.0)
        from_q = (
            q
            + (entry * NUM_HEADS + heads[:, None]) * HEADS.head_dim
            + (HEADS.head_dim - HEADS.rope)
        )
        rotated_mask = row_mask[:, None] & rotary_mask[None, :]
        rotated = tl.load(from_q + rotary[None, :], mask=rotated_mask, other=0.0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([RANKS, ROWS] if FEW else [ROWS, RANKS], tl.float32)
        # As in decode.py, load block ids one tile ahead, and take the next pair early.
        position = begin + keys
        page = tl.load(table + position // HEADS.block_size, mask=position < end, other=0)
        next_work = pairs
        if programs < pairs:
            next_work = programs + tl.atomic_add(counted + 1, 1, sem="relaxed") % pairs
        next_item = item_of(items, next_work // HEADS.parts, next_work < pairs)
        for start in range(begin, end, TILE.keys):
            position = start + keys
            seen = position < end
            offset = (page.to(tl.int64) * HEADS.block_size + position % HEADS.block_size) * KEPT
            position += TILE.keys
            page = tl.load(table + position // HEADS.block_size, mask=position < end, other=0)
            there = seen[:, None] & dim_mask[None, :]
            latent = tl.load(cache + offset[:, None] + dims[None, :], mask=there, other=0.0)
            there = seen[:, None] & rotary_mask[None, :]
            shared = tl.load(
                cache + offset[:, None] + (HEADS.rank + rotary)[None, :], mask=there, other=0.0
            )
            if FEW:
                top, denominator, acc = few_heads_tile(
                    query, rotated, latent, shared, seen[:, None], top, denominator, acc,
                    scale_log2,
                )  # fmt: skip
            else:
                top, denominator, acc = latent_tile(
                    query, rotated, latent, shared, seen[None, :], top, denominator, acc,
                    scale_log2, start < end,
                )  # fmt: skip
        if FEW:
            acc = tl.trans(acc)
        # A padding entry may have no key at all: 0 / 1 instead of 0 / 0.
        denominator = tl.where(denominator > 0.0, denominator, 1.0)
        acc = acc / denominator[:, None]
        if splits == 1:
            where = (entry * NUM_HEADS + heads)[:, None] * HEADS.rank + dims[None, :]
            tl.store(out + where, acc.to(out.dtype.element_ty), mask=tile_mask)
        else:
            at = item.to(tl.int64) * NUM_HEADS + heads
            tl.store(partial + at[:, None] * HEADS.rank + dims[None, :], acc, mask=tile_mask)
            tl.store(partial_lse + at, top + tl.log2(denominator), mask=row_mask)
        work = next_work
        entry, begin, end = next_item


def few_heads(group: int, element_size: int) -> bool:
    """Whether heads are the columns of a program's matmuls, not the rows.

    Only for 16-bit elements. On an H200, 64 entries of 4,096 latents with 20 heads took 220
    microseconds with heads as columns, 321 as rows. With 16 heads, and the surrounding matmuls,
    they took 114.1 as columns, 107.7 as rows.
    """
    return 16 < group <= 32 and element_size == 2


def _launch(entries: int, rows: int, rank: int, element_size: int, sms: int) -> DecodeLaunch:
    """Return the decode launch that was fastest in measurements on an H200.

    rows: padded heads of a program, which has rows x rank results in registers.

    Microseconds for 64 entries of 4,096 latents, and for one entry of 32,768:

        16 heads, two small programs per multiprocessor   95   31
        16 heads, one program with more tiles in flight  115   24
        20 heads, tiles of 64 keys                       220   48
        20 heads, tiles of 16 keys                       231   39
        128 heads, tiles of 64 keys                      319   60
        128 heads, tiles of 32 keys                      337   58
    """
    if element_size > 2:
        return DecodeLaunch(16, 8, 2, 1)
    many = 4 * entries > sms
    if rows * rank <= 16 * 512:
        return DecodeLaunch(32, 4, 3, 2) if many else DecodeLaunch(32, 4, 4, 1)
    if rows == 32 and not many:
        return DecodeLaunch(16, 8, 4, 1)
    if rows * rank <= 32 * 512 or many:
        return DecodeLaunch(64, 8, 2, 1)
    return DecodeLaunch(32, 8, 3, 1)


def _fitting(launch: DecodeLaunch, rows: int, cache: Tensor) -> DecodeLaunch:
    """Return the launch with its stages limited to the shared memory that queries leave free.

    A tile gets fewer keys where shared memory has no room for two tiles.
    """
    row = cache.shape[3] * cache.element_size()
    room = shared_memory(cache.device) - rows * row - 4 * KIB
    while launch.keys > 16 and room < 2 * launch.keys * row:
        launch = launch._replace(keys=launch.keys // 2)
    return launch._replace(num_stages=max(1, min(launch.num_stages, room // (launch.keys * row))))


def merge_pieces(out: Tensor) -> int:
    """Return the number of programs that share a head's elements in a merge (`decode.merge`).

    Several programs share a head if heads are too few to occupy all multiprocessors, and if rank is
    a power of two, so that equal shares cover a head exactly.
    """
    tokens, num_heads, rank = out.shape
    return 4 if tokens * num_heads <= 512 and rank & (rank - 1) == 0 else 1


def aligned(absorbed: Tensor) -> bool:
    """Whether a kernel may read absorbed queries with 16-byte loads."""
    return absorbed.stride(0) % 16 == 0


def plan_latent(
    kv_len: Tensor,  # [num_entries] int32
    num_heads: int,
    rank: int,
    cache: Tensor,  # any layer's
    max_kv_len: int,
    decodes: Tensor,  # [1] int32: the leading entries that are decodes
) -> DecodePlan:
    """Return the plan that splits the latents of a step's decodes over programs."""
    parts = parts_within(num_heads, cache)
    rows = max(16, triton.next_power_of_2(num_heads // parts))
    entries, sms = kv_len.shape[0], num_sms(kv_len.device)
    shape = _fitting(_launch(entries, rows, rank, cache.element_size(), sms), rows, cache)
    return cut(kv_len, (num_heads, parts, rank), shape, False, max_kv_len, decodes)


def latent_decode(inputs: AbsorbedInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Compute attention over latents of the entries that meta.plan lists, of one token each.

    The result is softmax(scale (absorbed c^T + q_rotated k^T)) c over an entry's latents c and
    rotary keys k.

    out: [tokens, num_heads, rank]; rows of other tokens are not written.
    """
    absorbed, q, cache, scale = inputs
    plan: DecodePlan = meta.plan
    num_heads, _, rank = absorbed.shape
    head_dim, block_size = q.shape[2], cache.shape[2]
    rope = cache.shape[3] - rank
    parts = parts_within(num_heads, cache)
    shape = plan.shape
    ranks = max(16, triton.next_power_of_2(rank))
    _latent_decode_kernel[(num_sms(q.device) * shape.per_sm,)](
        absorbed,
        q,
        cache,
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
            rank=rank,
            rope=rope,
            head_dim=head_dim,
            block_size=block_size,
        ),
        TILE=LatentTile(
            rows=max(16, triton.next_power_of_2(num_heads // parts)),
            ranks=ranks,
            ropes=max(16, triton.next_power_of_2(rope)),
            keys=shape.keys,
        ),
        FEW=few_heads(num_heads // parts, cache.element_size()),
        ALIGNED=aligned(absorbed),
        **pdl(q.device),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    merge(out, plan, merge_pieces(out))
