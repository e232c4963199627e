"""Matmuls of MoE experts with MXFP4 weights in fragments and bfloat16 x, on Hopper and later.

Codes are loaded from memory directly into the registers that tensor cores read
(`kernels.fragments`), 16 bytes per load, without shared memory and without barriers.

Nine instructions convert eight codes to four pairs of bfloat16 numbers, which are 2^-126 times the
codes' values. One more instruction per pair multiplies it by its scale. Scales are multiplied by
2^87 before, so that no product underflows, and sums by 2^40 at the end (`LOWERED`).

The weight is the left operand. The eight columns of the right operand are (token, expert) pairs:
either eight times the same pair, or pairs of one expert (`kernels.experts.fragments.dispatch`). x
is loaded directly into registers, too, because a thread's eight inputs are adjacent in memory.

The kernels are in Gluon, because Triton's own language does not control register layouts. No
interpreter runs Gluon, so tests need a GPU (`tests/kernels/test_experts.py`);
`tests/kernels/test_compile.py` only compiles the kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _decode() -> str:
    """Return PTX that decodes the four words in $16 to $19 and multiplies the codes by scales.

    $20 and $21 have two bfloat16 scales each. Pair p of word w is written to $(4 * p + w), divided
    by LOWERED.
    """
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
    """Return PTX that multiplies a tile by eight columns of x: $0 to $3 = product + $28 to $31.

    The tile's decoded pairs are in $4 to $19, in the order of `_decode`. The words of x are in $20
    to $23 for the first group of inputs, in $24 to $27 for the second.
    """
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
# Factor of finished sums: 2 * 2^126 / 2^87. The 2 is because scales are those of doubled e2m1
# numbers (`kernels.packed.E2M1`).
LOWERED = gl.constexpr(2.0**40)


@gluon.constexpr_function
def layout(SHARES, ROWS):
    """Return the register layout of [shares, rows of warps, lanes, elements of a lane].

    A row of warps computes its own outputs. Its SHARES warps divide the inputs among them.
    """
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [SHARES, ROWS, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _on(AXIS, LAYOUT):
    """Return the layout of a vector along one of the layout's four axes."""
    for axis in reversed([axis for axis in range(4) if axis != AXIS]):
        LAYOUT = gl.SliceLayout(axis, LAYOUT)
    return LAYOUT


@gluon.jit
def indices(SHARES: gl.constexpr, ROWS: gl.constexpr):
    """Return indices of share, row of warps, lane and element, each along its axis of `layout`."""
    L: gl.constexpr = layout(SHARES, ROWS)
    share = gl.arange(0, SHARES, layout=_on(0, L)).expand_dims(1).expand_dims(2).expand_dims(3)
    row = gl.arange(0, ROWS, layout=_on(1, L)).expand_dims(0).expand_dims(2).expand_dims(3)
    lane = gl.arange(0, 32, layout=_on(2, L)).expand_dims(0).expand_dims(1).expand_dims(3)
    at = gl.arange(0, 4, layout=_on(3, L)).expand_dims(0).expand_dims(1).expand_dims(2)
    return share, row, lane, at


@gluon.jit
def summed_indices(SHARES: gl.constexpr, ROWS: gl.constexpr):
    """Return indices of row of warps, lane and element for a tensor that was summed over shares."""
    S: gl.constexpr = gl.SliceLayout(0, layout(SHARES, ROWS))
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
    """Load the words and scales of COUNT tiles for this step along the inputs.

    Steps from `limit` on are masked.
    """
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
def start_loads(codes_at, scales_at, share, limit, COUNT: gl.constexpr, SHARES: gl.constexpr,
           AHEAD: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Load words and scales of the first AHEAD steps, before the loop of `products`."""
    words, scales = (), ()
    for step in gl.static_range(AHEAD):
        w, s = _bring(codes_at, scales_at, share + step * SHARES, limit, COUNT, EVEN)
        words, scales = words + w, scales + s
    return words, scales


@gluon.jit
def products(words, scales, codes_at, scales_at, x_at, share, limit,
              STEPS: gl.constexpr, COUNT: gl.constexpr, COLUMNS: gl.constexpr,
              SHARES: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr,
              EVEN: gl.constexpr):  # fmt: skip
    """Multiply COUNT tiles by COLUMNS times eight columns of x, over the inputs of a warp's share.

    Returns COUNT * COLUMNS tensors of partial sums, each [SHARES, ROWS, 32, 4].
    """
    L: gl.constexpr = layout(SHARES, ROWS)
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
def find(starts, block, EXPERTS: gl.constexpr, BLOCK: gl.constexpr, PAIRS: gl.constexpr,
          WARPS: gl.constexpr):  # fmt: skip
    """Find the expert and the pairs of a block; see `kernels.experts.grouped._find`."""
    expert = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    exists = expert < EXPERTS
    first = gl.load(starts + expert, mask=exists, other=0)
    behind = gl.load(starts + expert + 1, mask=exists, other=0)
    blocks = (behind - first + PAIRS - 1) // PAIRS
    ends = gl.associative_scan(blocks, 0, _add)
    before = (ends <= block) & exists
    index = gl.sum(before.to(gl.int32), axis=0)
    skipped = gl.sum(gl.where(before, blocks, 0), axis=0)
    here = expert == index
    place = gl.sum(gl.where(here, first, 0), axis=0) + (block - skipped) * PAIRS
    return index, place, gl.sum(gl.where(here, behind, 0), axis=0)
