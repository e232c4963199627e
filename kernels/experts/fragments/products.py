"""Experts in MXFP4 whose codes lie as a warp's matrix instruction takes them
(`kernels.fragments`), for bfloat16 on Hopper and later: codes go from memory into the
registers that the matrix units read them from, with no shared memory and no barrier between, 16
bytes a load.

Eight codes become four pairs of bfloat16 numbers in nine instructions, 2^-126 times what they stand
for, and one more each gives them their scale. Scales are multiplied by 2^87 before, so that no
product is below float32's range, and sums by 2^40 in the end, which doubles them as the table does.

The weight is the left operand. Columns are pairs of a token and its expert: of one pair all eight
columns are the same (`few_fragments`), else they are one expert's (`grouped_fragments`). x comes
straight into registers too, from a multiprocessor's cache: a thread's eight inputs are neighbours.

This is Gluon, because Triton's own language has no say in where numbers lie; no interpreter runs
it, so that its tests need a GPU (`tests/kernels/test_experts.py`) and
`tests/kernels/test_compile.py` only compiles it.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.experts.gate import code, gated
from kernels.experts.grouped import Sorted, by_expert
from kernels.experts.reference import PackedExperts
from kernels.fragments import GROUP, INPUTS, ROWS
from kernels.gemm.packed.codes import E2M1_CODE, code_of
from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.packed import PackedWeight


def _decode() -> str:
    """PTX: of the four words in $16 to $19 and their scales, two bfloat16 numbers each in $20 and
    $21, all pairs of codes times their scale, lifted: pair p of word w in $(4 * p + w)."""
    lines = ["{ .reg .b32 r, l, z, k, s, t; mov.b32 z, 0x80008000; mov.b32 k, 0x6b006b00;"]
    for word in range(4):
        w, pair = f"${16 + word}", [f"${4 * p + word}" for p in range(4)]
        half = "0x1010" if word % 2 == 0 else "0x3232"
        lines += [
            f"prmt.b32 s, ${20 + word // 2}, 0, {half}; fma.rn.bf16x2 s, s, k, z;",
            f"and.b32 t, {w}, 0x81c081c0; fma.rn.bf16x2 {pair[0]}, t, s, z;",
            f"shf.r.wrap.b32 r, {w}, {w}, 6;",
            f"and.b32 t, r, 0x81c081c0; fma.rn.bf16x2 {pair[1]}, t, s, z;",
            f"shl.b32 l, {w}, 4;",
            f"and.b32 t, l, 0x81c081c0; fma.rn.bf16x2 {pair[2]}, t, s, z;",
            f"shf.r.wrap.b32 r, {w}, {w}, 2; shl.b32 l, {w}, 6;",
            "and.b32 t, r, 0x81808180; lop3.b32 t, l, 0x00400040, t, 0xea;",
            f"fma.rn.bf16x2 {pair[3]}, t, s, z;",
        ]
    return " ".join([*lines, "}"])


def _multiply() -> str:
    """PTX: the product of a tile, pairs in $4 to $19 as `_decode` gives them, with eight columns of
    x, whose words are in $20 to $23 of the first group and in $24 to $27 of the second, plus $28 to
    $31, in $0 to $3."""
    lines = ["{ .reg .f32 a0, a1, a2, a3;"]
    total = ("$28", "$29", "$30", "$31")
    for step in range(4):
        group, late = step // 2, step % 2
        left = [4 + 4 * (2 * late + pair) + group + 2 * half for pair in (0, 1) for half in (0, 1)]
        right = [20 + 4 * group + 2 * late + at for at in (0, 1)]
        to = ("$0", "$1", "$2", "$3") if step == 3 else ("a0", "a1", "a2", "a3")
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{{', '.join(to)}}}, {{{', '.join(f'${at}' for at in left)}}}, "
            f"{{{', '.join(f'${at}' for at in right)}}}, {{{', '.join(total)}}};"
        )
        total = to
    return " ".join([*lines, "}"])


DECODE, MULTIPLY = gl.constexpr(_decode()), gl.constexpr(_multiply())
DECODED = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 6))
MULTIPLIED = gl.constexpr(",".join(["=f"] * 4 + ["r"] * 24 + ["f"] * 4))
LOWERED = gl.constexpr(2.0**40)  # 2 * 2^126 / 2^87: `E2M1` has numbers doubled


class Tile(NamedTuple):
    pairs: int  # a multiple of 8, of one expert; 8 stand for a lone one
    tiles: int  # of 16 outputs of a warp; of gate_up so many of the gate's and as many of the up's
    rows: int  # warps below each other
    shares: int  # of the inputs: warps that add up what they have
    ahead: int  # tiles of inputs that are on their way
    registers: int = 0  # of a thread at most, so that more programs fit; 0: as the compiler likes


class Tiles(NamedTuple):
    up: Tile
    down: Tile


# Tokens up to which pairs are multiplied one by one, and tiles for that. The warps of a program
# below each other are a token's experts in the second product.
MOST = 1
FEW = Tiles(Tile(8, 1, 2, 4, 3), Tile(8, 1, 8, 2, 6))
# The pairs that an expert has on average -> tiles, the first that fits.
TILES: tuple[tuple[float, Tiles], ...] = (
    (0.25, Tiles(Tile(8, 1, 2, 2, 4), Tile(8, 1, 4, 1, 4))),
    (1, Tiles(Tile(8, 1, 4, 1, 4), Tile(8, 1, 4, 1, 4))),
    (2, Tiles(Tile(8, 1, 4, 1, 4), Tile(8, 2, 4, 1, 3))),
    (4, Tiles(Tile(8, 1, 4, 1, 2), Tile(8, 2, 4, 1, 3))),
    (8, Tiles(Tile(16, 1, 8, 1, 1), Tile(16, 2, 8, 1, 1))),
    (16, Tiles(Tile(24, 2, 4, 1, 1), Tile(16, 2, 8, 1, 1))),
    (32, Tiles(Tile(40, 1, 8, 1, 1, 128), Tile(48, 2, 4, 1, 1))),
    (float("inf"), Tiles(Tile(64, 1, 4, 1, 1), Tile(64, 2, 4, 1, 1))),
)
# Where a row's numbers may not depend on how many rows there are.
FIXED = Tiles(Tile(16, 1, 4, 1, 2), Tile(16, 2, 4, 1, 2))


@gluon.constexpr_function
def _layout(SHARES, ROWS):
    """[shares, rows, lanes, a thread's]"""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [SHARES, ROWS, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _on(AXIS, LAYOUT):
    """Of a vector along this axis of four."""
    for axis in reversed([axis for axis in range(4) if axis != AXIS]):
        LAYOUT = gl.SliceLayout(axis, LAYOUT)
    return LAYOUT


@gluon.jit
def _indices(SHARES: gl.constexpr, ROWS: gl.constexpr):
    """Share, row of warps, lane and element, each along its axis."""
    L: gl.constexpr = _layout(SHARES, ROWS)
    share = gl.arange(0, SHARES, layout=_on(0, L)).expand_dims(1).expand_dims(2).expand_dims(3)
    row = gl.arange(0, ROWS, layout=_on(1, L)).expand_dims(0).expand_dims(2).expand_dims(3)
    lane = gl.arange(0, 32, layout=_on(2, L)).expand_dims(0).expand_dims(1).expand_dims(3)
    at = gl.arange(0, 4, layout=_on(3, L)).expand_dims(0).expand_dims(1).expand_dims(2)
    return share, row, lane, at


@gluon.jit
def _summed_indices(SHARES: gl.constexpr, ROWS: gl.constexpr):
    """Row of warps, lane and element, each along its axis of what is summed over the shares."""
    S: gl.constexpr = gl.SliceLayout(0, _layout(SHARES, ROWS))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
    lane = lane.expand_dims(0).expand_dims(2)
    at = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, S)))
    at = at.expand_dims(0).expand_dims(1)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
    return row.expand_dims(1).expand_dims(2), lane, at


@gluon.jit
def _decoded(words, scales):
    return gl.inline_asm_elementwise(
        DECODE, DECODED, [words, scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _multiplied(pairs, first, second, acc):
    return gl.inline_asm_elementwise(
        MULTIPLY, MULTIPLIED, [pairs[0], pairs[1], pairs[2], pairs[3], first, second, acc],
        dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _bring(codes_at, scales_at, step, limit, COUNT: gl.constexpr, EVEN: gl.constexpr):
    """The words and scales of COUNT tiles at this step along the inputs; none from limit on."""
    words, scales = (), ()
    has = step < limit
    for tile in gl.static_range(COUNT):
        words = words + (  # noqa: RUF005
            gl.load(codes_at[tile] + step * 128, mask=has, eviction_policy="evict_first"),
        )
        if EVEN:
            scales = scales + (gl.load(scales_at[tile] + step * 32, mask=has),)  # noqa: RUF005
        else:
            scales = scales + (  # noqa: RUF005
                gl.load(scales_at[tile] + step * 32, mask=has, other=0),
            )
    return words, scales


@gluon.jit
def _start(codes_at, scales_at, share, limit, COUNT: gl.constexpr, SHARES: gl.constexpr,
           AHEAD: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """What is on its way before the loop."""
    words, scales = (), ()
    for step in gl.static_range(AHEAD):
        w, s = _bring(codes_at, scales_at, share + step * SHARES, limit, COUNT, EVEN)
        words, scales = words + w, scales + s
    return words, scales


@gluon.jit
def _products(words, scales, codes_at, scales_at, x_at, share, limit,
              STEPS: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr,
              SHARES: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr,
              EVEN: gl.constexpr):  # fmt: skip
    """Sums [SHARES, ROWS, 32, 4] of COUNT tiles and COLUMNS times eight columns."""
    L: gl.constexpr = _layout(SHARES, ROWS)
    acc = ()
    for _ in gl.static_range(COUNT * COLUMNS):
        acc = acc + (gl.zeros([SHARES, ROWS, 32, 4], gl.float32, layout=L),)  # noqa: RUF005
    for start in range(0, (STEPS + SHARES - 1) // SHARES, AHEAD):
        next_words, next_scales = (), ()
        xs = ()
        for ahead in gl.static_range(AHEAD):
            here = share + (start + ahead) * SHARES
            if not EVEN:
                here = gl.minimum(here, STEPS - 1)
            for column in gl.static_range(COLUMNS):
                xs = xs + (  # noqa: RUF005
                    gl.load(x_at[column] + here * 32),
                    gl.load(x_at[column] + here * 32 + 16),
                )
        for ahead in gl.static_range(AHEAD):
            sums = ()
            for tile in gl.static_range(COUNT):
                pairs = _decoded(words[ahead * COUNT + tile], scales[ahead * COUNT + tile])
                for column in gl.static_range(COLUMNS):
                    sums = sums + (  # noqa: RUF005
                        _multiplied(
                            pairs,
                            xs[2 * (ahead * COLUMNS + column)],
                            xs[2 * (ahead * COLUMNS + column) + 1],
                            acc[tile * COLUMNS + column],
                        ),
                    )
            acc = sums
            step = share + (start + AHEAD + ahead) * SHARES
            w, s = _bring(codes_at, scales_at, step, limit, COUNT, EVEN)
            next_words, next_scales = next_words + w, next_scales + s
        words, scales = next_words, next_scales
    return acc


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find(starts, block, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, PAIRS: gl.constexpr,
          WARPS: gl.constexpr):  # fmt: skip
    """As `kernels.experts.grouped._find`."""
    expert = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    exists = expert < EXPERTS
    first = gl.load(starts + expert, mask=exists, other=0)
    behind = gl.load(starts + expert + 1, mask=exists, other=0)
    blocks = (behind - first + PAIRS - 1) // PAIRS
    ends = gl.associative_scan(blocks, 0, _add)
    before = (ends <= block) & exists
    found = gl.sum(before.to(gl.int32), axis=0)
    skipped = gl.sum(gl.where(before, blocks, 0), axis=0)
    here = expert == found
    place = gl.sum(gl.where(here, first, 0), axis=0) + (block - skipped) * PAIRS
    return found, place, gl.sum(gl.where(here, behind, 0), axis=0)


@gluon.jit
def _fragments_up_kernel(
    x,  # [tokens, WIDTH] in words of two numbers
    weights,  # [pairs]
    ids,  # [pairs]: LONE; else the order that `sort` gives
    starts,
    codes,  # int32, of gate_up: [EXPERTS * 2 * SIZE / 16, STEPS, 32, 4]; without gates half
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, 2 * SIZE]
    inner,  # [pairs, SIZE]: in the order of ids, or sorted
    limit,
    LONE: gl.constexpr,  # a program has one pair
    OTHERS: gl.constexpr,  # LONE: pairs of expert EXPERTS are another rank's
    EXPERTS: gl.constexpr,
    CHOSEN: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    WEIGH: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,  # times eight pairs
    TILES: gl.constexpr,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    HALVES: gl.constexpr = 1 if ACT == 4 else 2  # 4: without gates
    COUNT: gl.constexpr = HALVES * TILES
    STEPS: gl.constexpr = WIDTH // 64
    EVEN: gl.constexpr = STEPS % (SHARES * AHEAD) == 0
    EACH: gl.constexpr = SIZE // 16  # tiles
    blocks: gl.constexpr = (EACH + ROWS * TILES - 1) // (ROWS * TILES)
    share, row, lane, at = _indices(SHARES, ROWS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = gl.program_id(0) % blocks
    if LONE:
        place = gl.program_id(0) // blocks
        behind = place + 1
        expert = gl.load(ids + place)
        steps = STEPS
        if OTHERS:
            steps = gl.where(expert < EXPERTS, STEPS, 0)
            expert = gl.minimum(expert, EXPERTS - 1)
    else:
        expert, place, behind = _find(
            starts, gl.program_id(0) // blocks, EXPERTS, BLOCK, 8 * COLUMNS, SHARES * ROWS
        )
        if expert == EXPERTS:
            return
        steps = STEPS
    x_at = ()
    for column in gl.static_range(COLUMNS):
        if LONE:
            token = place // CHOSEN + lane * 0
        else:
            pair = gl.load(ids + gl.minimum(place + column * 8 + lane // 4, behind - 1))
            token = pair // CHOSEN
        x_at = x_at + (x + token.to(gl.int64) * (WIDTH // 2) + lane % 4 * 4 + at,)  # noqa: RUF005
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum((block * ROWS + row) * TILES + tile, EACH - 1)
        for half in gl.static_range(HALVES):
            source = (expert.to(gl.int64) * HALVES + half) * EACH + mine
            codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
            scales_at = scales_at + (  # noqa: RUF005
                scale + source * (STEPS * 32) + (lane // 4 * 4 + at),
            )
    words, scales = _start(codes_at, scales_at, share, steps, COUNT, SHARES, AHEAD, EVEN)
    acc = _products(
        words, scales, codes_at, scales_at, x_at, share, steps,
        STEPS, COUNT, COLUMNS, SHARES, ROWS, AHEAD, EVEN,
    )  # fmt: skip
    row3, lane3, at3 = _summed_indices(SHARES, ROWS)
    for tile in gl.static_range(TILES):
        out = ((block * ROWS + row3) * TILES + tile) * 16 + lane3 // 4 + at3 // 2 * 8
        has = out < SIZE
        source = expert.to(gl.int64) * (HALVES * SIZE) + out
        for column in gl.static_range(COLUMNS):
            sorted_at = place + column * 8 + lane3 % 4 * 2 + at3 % 2
            mask = has & (sorted_at < behind)
            gate = gl.sum(acc[HALVES * tile * COLUMNS + column], axis=0) * LOWERED
            if HALVES == 2:
                up = gl.sum(acc[(HALVES * tile + 1) * COLUMNS + column], axis=0) * LOWERED
            else:
                up = gate
            if WEIGH:
                if LONE:
                    weight = gl.load(weights + sorted_at, mask=mask, other=0.0)
                else:
                    pair = gl.load(ids + sorted_at, mask=mask, other=0)
                    weight = gl.load(weights + pair, mask=mask, other=0.0)
                gate = gate * weight
                up = up * weight
            if BIAS:
                gate += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
                if HALVES == 2:
                    up += gl.load(bias + source + SIZE, mask=mask, other=0.0).to(gl.float32)
            value = gated(gate, up, limit, ACT).to(inner.dtype.element_ty)
            gl.store(inner + sorted_at.to(gl.int64) * SIZE + out, value, mask=mask)


@gluon.jit
def _fragments_down_kernel(
    inner,  # [pairs, SIZE], in sorted order, in words of two numbers
    weights,  # [pairs]
    order,
    starts,
    codes,  # int32, of down: [EXPERTS * WIDTH / 16, STEPS, 32, 4]
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, WIDTH]
    given,  # [pairs, WIDTH]
    EXPERTS: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    WEIGH: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    ROWS: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    STEPS: gl.constexpr = SIZE // 64
    EVEN: gl.constexpr = STEPS % (SHARES * AHEAD) == 0
    EACH: gl.constexpr = WIDTH // 16
    blocks: gl.constexpr = (EACH + ROWS * TILES - 1) // (ROWS * TILES)
    share, row, lane, at = _indices(SHARES, ROWS)
    block = gl.program_id(0) % blocks
    # Sorted before the launch before this one.
    expert, place, behind = _find(
        starts, gl.program_id(0) // blocks, EXPERTS, BLOCK, 8 * COLUMNS, SHARES * ROWS
    )
    if expert == EXPERTS:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    x_at = ()
    for column in gl.static_range(COLUMNS):
        pair = gl.minimum(place + column * 8 + lane // 4, behind - 1)
        x_at = x_at + (inner + pair.to(gl.int64) * (SIZE // 2) + lane % 4 * 4 + at,)  # noqa: RUF005
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum((block * ROWS + row) * TILES + tile, EACH - 1)
        source = expert.to(gl.int64) * EACH + mine
        codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
        scales_at = scales_at + (scale + source * (STEPS * 32) + (lane // 4 * 4 + at),)  # noqa: RUF005
    words, scales = _start(codes_at, scales_at, share, STEPS, TILES, SHARES, AHEAD, EVEN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = _products(
        words, scales, codes_at, scales_at, x_at, share, STEPS,
        STEPS, TILES, COLUMNS, SHARES, ROWS, AHEAD, EVEN,
    )  # fmt: skip
    row3, lane3, at3 = _summed_indices(SHARES, ROWS)
    for tile in gl.static_range(TILES):
        out = ((block * ROWS + row3) * TILES + tile) * 16 + lane3 // 4 + at3 // 2 * 8
        has = out < WIDTH
        for column in gl.static_range(COLUMNS):
            sorted_at = place + column * 8 + lane3 % 4 * 2 + at3 % 2
            mask = has & (sorted_at < behind)
            pair = gl.load(order + sorted_at, mask=mask, other=0)
            y = gl.sum(acc[tile * COLUMNS + column], axis=0) * LOWERED
            if BIAS:
                source = expert.to(gl.int64) * WIDTH + out
                y += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
            if not WEIGH:
                y *= gl.load(weights + pair, mask=mask, other=0.0)
            y = y.to(given.dtype.element_ty)
            gl.store(given + pair.to(gl.int64) * WIDTH + out, y, mask=mask)


@gluon.jit
def _fragments_few_down_kernel(
    inner,  # [tokens * CHOSEN, SIZE] in words of two numbers
    weights,  # [tokens * CHOSEN]
    ids,
    codes,  # int32, of down: [EXPERTS * WIDTH / 16, STEPS, 32, 4]
    scale,  # int16 [.., STEPS, 8, 4]
    bias,  # [EXPERTS, WIDTH]
    residual,  # [tokens, WIDTH]
    out,  # [tokens, WIDTH]
    OTHERS: gl.constexpr,  # pairs of expert EXPERTS are another rank's
    EXPERTS: gl.constexpr,
    CHOSEN: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    WEIGH: gl.constexpr,
    ADD: gl.constexpr,
    PLACES: gl.constexpr,  # a power of two, at least CHOSEN: a warp each, and share
    TILES: gl.constexpr,
    SHARES: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    L: gl.constexpr = _layout(SHARES, PLACES)
    STEPS: gl.constexpr = SIZE // 64
    EVEN: gl.constexpr = STEPS % (SHARES * AHEAD) == 0
    EACH: gl.constexpr = WIDTH // 16
    share, place, lane, at = _indices(SHARES, PLACES)
    token = gl.program_id(1)
    pair = token * CHOSEN + gl.minimum(place, CHOSEN - 1)
    # The choice is there since before the launch before this one.
    expert = gl.load(ids + pair)
    steps = gl.where(place < CHOSEN, STEPS, 0)
    if OTHERS:
        steps = gl.where(expert < EXPERTS, steps, 0)
        expert = gl.minimum(expert, EXPERTS - 1)
    x_at = (inner + pair.to(gl.int64) * (SIZE // 2) + (lane % 4 * 4 + at),)
    codes_at, scales_at = (), ()
    for tile in gl.static_range(TILES):
        mine = gl.minimum(gl.program_id(0) * TILES + tile, EACH - 1)
        source = expert.to(gl.int64) * EACH + mine
        codes_at = codes_at + (codes + source * (STEPS * 128) + (lane * 4 + at),)  # noqa: RUF005
        scales_at = scales_at + (scale + source * (STEPS * 32) + (lane // 4 * 4 + at),)  # noqa: RUF005
    words, scales = _start(codes_at, scales_at, share, steps, TILES, SHARES, AHEAD, EVEN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = _products(
        words, scales, codes_at, scales_at, x_at, share, steps,
        STEPS, TILES, 1, SHARES, PLACES, AHEAD, EVEN,
    )  # fmt: skip
    place3, lane3, at3 = _summed_indices(SHARES, PLACES)
    pair3 = token * CHOSEN + gl.minimum(place3, CHOSEN - 1)
    exists = place3 < CHOSEN
    expert3 = gl.load(ids + pair3)
    if OTHERS:
        exists = exists & (expert3 < EXPERTS)
    T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, L))
    lane2 = gl.arange(0, 32, layout=gl.SliceLayout(1, T)).expand_dims(1)
    at2 = gl.arange(0, 4, layout=gl.SliceLayout(0, T)).expand_dims(0)
    for tile in gl.static_range(TILES):
        first = (gl.program_id(0) * TILES + tile) * 16
        y = gl.sum(acc[tile], axis=0) * LOWERED
        if BIAS:
            source = expert3.to(gl.int64) * WIDTH + first + lane3 // 4 + at3 // 2 * 8
            mask = exists & (first + lane3 // 4 + at3 // 2 * 8 < WIDTH)
            y += gl.load(bias + source, mask=mask, other=0.0).to(gl.float32)
        if not WEIGH:
            y *= gl.load(weights + pair3)
        # What is not there has read another's inner numbers, which need not be any.
        total = gl.sum(gl.where(exists, y, 0.0), axis=0)
        mine = first + lane2 // 4 + at2 // 2 * 8
        mask = (mine < WIDTH) & (lane2 % 4 == 0) & (at2 % 2 == 0)
        place_out = token.to(gl.int64) * WIDTH + mine
        if ADD:
            total += gl.load(residual + place_out, mask=mask, other=0.0).to(gl.float32)
        gl.store(out + place_out, total.to(out.dtype.element_ty), mask=mask)


def _words(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _options(weight: PackedWeight, tile: Tile, x: Tensor) -> dict[str, Any]:
    return {
        "TILES": tile.tiles,
        "SHARES": tile.shares,
        "AHEAD": tile.ahead,
        "num_warps": tile.rows * tile.shares,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **pdl(x.device),
    }


def _up(
    x: Tensor, weights: Tensor, ids: Tensor, order: Sorted | None, stack: PackedExperts, tile: Tile
) -> Tensor:
    """act(gate) * up of each pair: [pairs, size], in the order of ids if there is no other."""
    weight = stack.gate_up
    pairs, experts, size = ids.numel(), stack.count, stack.down.shape[1]
    inner = x.new_empty((pairs, size))
    blocks = pairs if order is None else min(pairs, experts) + pairs // tile.pairs
    _fragments_up_kernel[(blocks * triton.cdiv(size, ROWS * tile.rows * tile.tiles),)](
        _words(x),
        weights,
        ids if order is None else order.order,
        None if order is None else order.starts,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.gate_up_bias,
        inner,
        stack.limit,
        LONE=order is None,
        OTHERS=stack.total > 0,
        EXPERTS=experts,
        CHOSEN=ids.shape[1],
        SIZE=size,
        WIDTH=weight.shape[1],
        ACT=code(stack.act),
        BIAS=stack.gate_up_bias is not None,
        WEIGH=stack.weigh_input,
        BLOCK=triton.next_power_of_2(experts),
        COLUMNS=tile.pairs // 8,
        ROWS=tile.rows,
        **_options(weight, tile, x),
    )
    return inner


def few_fragments_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, tile: Tile
) -> Tensor:
    """act(gate) * up of each pair: [tokens * chosen, size]."""
    return _up(x, weights, ids, None, stack, tile)


def few_fragments_down(
    inner: Tensor,  # of few_fragments_up
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tile: Tile,  # rows: a warp for each of a token's experts, whatever it says
) -> Tensor:
    """[tokens, hidden]: the weighted sum of each token's experts."""
    weight = stack.down
    tokens, chosen = ids.shape
    width, size = stack.gate_up.shape[1], weight.shape[1]
    out = inner.new_empty((tokens, width)) if residual is None else residual
    places = triton.next_power_of_2(chosen)
    _fragments_few_down_kernel[(triton.cdiv(width, ROWS * tile.tiles), tokens)](
        _words(inner),
        weights,
        ids,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.down_bias,
        residual,
        out,
        OTHERS=stack.total > 0,
        EXPERTS=stack.count,
        CHOSEN=chosen,
        SIZE=size,
        WIDTH=width,
        BIAS=stack.down_bias is not None,
        WEIGH=stack.weigh_input,
        ADD=residual is not None,
        PLACES=places,
        **_options(weight, tile._replace(rows=places), inner),
    )
    return out


def fragments_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """act(gate) * up of each pair: [pairs, size], in sorted order."""
    return _up(x, weights, ids, pairs, stack, tile)


def fragments_down(
    inner: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """inner of `fragments_up` -> what each pair's expert gives, weighted: [pairs, hidden], in the
    order of ids."""
    weight = stack.down
    count, experts, width = ids.numel(), stack.count, stack.gate_up.shape[1]
    given = inner.new_empty((count, width))
    blocks = min(count, experts) + count // tile.pairs
    _fragments_down_kernel[(blocks * triton.cdiv(width, ROWS * tile.rows * tile.tiles),)](
        _words(inner),
        weights,
        pairs.order,
        pairs.starts,
        weight.codes,
        weight.scale.view(torch.int16),
        stack.down_bias,
        given,
        EXPERTS=experts,
        SIZE=weight.shape[1],
        WIDTH=width,
        BIAS=stack.down_bias is not None,
        WEIGH=stack.weigh_input,
        BLOCK=triton.next_power_of_2(experts),
        COLUMNS=tile.pairs // 8,
        ROWS=tile.rows,
        **_options(weight, tile, inner),
    )
    return given


def fragments_fit(stack: PackedExperts, dtype: torch.dtype) -> bool:
    """Whether the kernels are made for these: MXFP4 whose scales bfloat16 has, whole tiles, and x
    of this dtype."""
    size, hidden = stack.down.shape[1], stack.gate_up.shape[1]
    each = stack.gate_up.shape[0] // stack.count
    return (
        dtype == torch.bfloat16
        and all(map(_form_fits, (stack.gate_up, stack.down)))
        and each % ROWS == size % ROWS == hidden % ROWS == 0
        and size % INPUTS == hidden % INPUTS == 0
    )


def _form_fits(weight: PackedWeight) -> bool:
    form = weight.form
    return (
        code_of(weight) == E2M1_CODE
        and (form.group, form.rows, form.offset) == (GROUP, 1, "none")
        and form.scale == torch.bfloat16
        and weight.codes.is_cuda
        and torch.cuda.get_device_capability(weight.codes.device)[0] == 9  # where it was swept
    )


def few_fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels.reference.Kernels.packed_experts`; of a few tokens, of which there is one at
    least."""
    tiles = tiles or FEW
    inner = few_fragments_up(x, weights, ids, stack, tiles.up)
    return few_fragments_down(inner, weights, ids, stack, residual, tiles.down)


def grouped_fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels.reference.Kernels.packed_experts`; of any number of tokens."""
    tiles = tiles or tiles_for(ids.numel(), stack.total or stack.count)
    return by_expert(
        x, weights, ids, stack, stack.count, residual, fragments_up, fragments_down, tiles
    )


def tiles_for(pairs: int, experts: int) -> Tiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None
) -> Tensor:
    """See `kernels.reference.Kernels.packed_experts`: pair by pair, or grouped by expert."""
    few = 0 < x.shape[0] <= MOST
    return (few_fragments if few else grouped_fragments)(x, weights, ids, stack, residual)
