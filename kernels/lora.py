"""y += B (A x) for tokens with different LoRA adapters: two launches for each layer.

    shrink   partial[k, part, i] = A[:, columns of split k] x    rows sorted by adapter
    expand   y[token] += B (sum over k of partial)               fused with an MLP's gate

A part is one of the linear layers that are fused into a layer. Tokens are sorted by adapter slot,
in tiles of one slot each (`kernels.metadata.LoraStep`). So a program reads one adapter's matrices
once for all its rows. Programs end at once for tiles without an adapter, for parts that the adapter
does not change, and beyond the adapter's rank. A table has each matrix's address and rank, so
adapters are not padded to the largest rank. Launch shapes depend only on the number of tokens, and
all other values are read from fixed addresses, so CUDA graphs can capture both kernels. Splits are
added in a fixed order.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, pdl
from kernels.metadata import LoraLinear, LoraStep

# Ranks, and offsets into a slab, are multiples of this. Kernels declare so with multiple_of;
# otherwise the compiler would load the matrices two bytes at a time.
UNIT = 16
MAX_PARTS = 3  # maximum number of parts of a layer, such as q, k and v

# LoraStep.tiles follows one int32 per token in memory, so its alignment varies. Kernels do not
# specialise on this alignment; otherwise warm-up would have to compile both cases.


@triton.jit(
    do_not_specialize=["first_part", "num_tokens"],
    do_not_specialize_on_alignment=["tiles"],
)
def _shrink_kernel(
    x,  # [num_tokens, K]
    order,
    tiles,
    slab,
    slot_stride,
    table,
    table_stride,
    first_part,
    partial,  # [SPLITS, PARTS, num_tokens, MAX_RANK] float32
    num_tokens,
    K: tl.constexpr,
    SPAN: tl.constexpr,  # columns per split, a multiple of BLOCK_K
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1) % PARTS
    rank_block = tl.program_id(1) // PARTS
    split = tl.program_id(2)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    entry = table + tl.maximum(slot, 0) * table_stride + (first_part + part) * 4
    rank = tl.multiple_of(tl.load(entry), 16)
    a = slab + slot.to(tl.int64) * slot_stride + tl.load(entry + 1).to(tl.int64) * 16
    row = tl.arange(0, BLOCK_M)
    valid = row < count
    token = tl.load(order + first + row, mask=valid, other=0).to(tl.int64)
    if PDL:
        gdc_wait()  # all programs wait; otherwise the kernel could end before its predecessor
        gdc_launch_dependents()
    if slot < 0:
        return
    if rank_block * BLOCK_R >= rank:
        return
    r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = split * SPAN + tl.arange(0, BLOCK_K)
    x_at = x + token[:, None] * K + k[None, :]
    a_at = a + r[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        inside = k + start < K
        xs = tl.load(x_at + start, mask=valid[:, None] & inside[None, :], other=0.0)
        weights = tl.load(a_at + start, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(xs, weights, acc, input_precision="ieee")
    position = ((split * PARTS + part) * num_tokens + first + row).to(tl.int64)
    out = partial + position[:, None] * MAX_RANK + r[None, :]
    tl.store(out, acc, mask=valid[:, None] & (r < rank)[None, :])


@triton.jit
def _columns_of(b, column, inside, start, rank, BLOCK_R: tl.constexpr):
    """Load a block of B [out, rank], transposed: [BLOCK_R, columns], from rank `start` on."""
    r = start + tl.arange(0, BLOCK_R)
    mask = inside[None, :] & (r < rank)[:, None]
    return tl.load(b + column[None, :] * rank + r[:, None], mask=mask, other=0.0)


@triton.jit
def _pieces(
    partial, position, valid, start, rank, stride,
    SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load the results of shrink, [SPLITS, BLOCK_M, BLOCK_R], from rank `start` on.

    stride: elements between splits.

    All splits are loaded at once. With one load per split, each addition would wait for its load.
    """
    r = start + tl.arange(0, BLOCK_R)
    there = valid[:, None] & (r < rank)[None, :]
    at = partial + position[:, None] * MAX_RANK + r[None, :]
    split = tl.arange(0, SPLITS)[:, None, None]
    return tl.load(at[None, :, :] + split * stride, mask=there[None, :, :], other=0.0)


@triton.jit
def _delta(
    pieces, weights, partial, b, position, valid, column, inside, rank, stride,
    SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the adapter's contribution to y: (sum over splits of partial) @ B^T.

    pieces, weights: results of shrink and B for the first BLOCK_R ranks, already loaded.
    Returns [BLOCK_M, BLOCK_N].
    """
    s = tl.sum(pieces, 0).to(weights.dtype)
    acc = tl.dot(s, weights, input_precision="ieee")
    if MAX_RANK > BLOCK_R:
        for start in range(BLOCK_R, rank, BLOCK_R):
            weights = _columns_of(b, column, inside, start, rank, BLOCK_R)
            pieces = _pieces(
                partial, position, valid, start, rank, stride, SPLITS, MAX_RANK, BLOCK_R
            )
            acc = tl.dot(tl.sum(pieces, 0).to(weights.dtype), weights, acc, input_precision="ieee")
    return acc


# 20 parameters: ten are tensors and numbers of the launch; the constants have no natural groups.
@triton.jit(
    do_not_specialize=["first_part", "num_tokens"],
    do_not_specialize_on_alignment=["tiles"],
)
def _expand_kernel(
    y,  # [num_tokens, N0 + N1 + N2], added to in place
    order,
    tiles,
    slab,
    slot_stride,
    table,
    table_stride,
    first_part,
    partial,
    num_tokens,
    N0: tl.constexpr,  # output features of each part
    N1: tl.constexpr,
    N2: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    # The part of this block of columns; no block spans two parts.
    BLOCKS0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    part = (block >= BLOCKS0).to(tl.int32) + (block >= BLOCKS0 + BLOCKS1).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, BLOCKS0, BLOCKS0 + BLOCKS1))
    size = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
    offset = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    if N0 % 16 == 0 and N1 % 16 == 0:
        offset = tl.multiple_of(offset, 16)
    entry = table + tl.maximum(slot, 0) * table_stride + (first_part + part) * 4
    rank = tl.multiple_of(tl.where(slot >= 0, tl.load(entry), 0), 16)
    b = slab + slot.to(tl.int64) * slot_stride + tl.load(entry + 2).to(tl.int64) * 16
    column = (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < size
    row = tl.arange(0, BLOCK_M)
    valid = row < count
    token = tl.load(order + first + row, mask=valid, other=0).to(tl.int64)
    # Load B before gdc_wait, so that the load overlaps with shrink.
    weights = _columns_of(b, column, inside, 0, rank, BLOCK_R)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if rank == 0:
        return
    # All loads come before the first use, so that their latencies overlap.
    stride = (num_tokens * PARTS).to(tl.int64) * MAX_RANK
    position = (part * num_tokens + first + row).to(tl.int64)
    pieces = _pieces(partial, position, valid, 0, rank, stride, SPLITS, MAX_RANK, BLOCK_R)
    at = y + token[:, None] * (N0 + N1 + N2) + (offset + column)[None, :]
    mask = valid[:, None] & inside[None, :]
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    delta = _delta(
        pieces, weights, partial, b, position, valid, column, inside, rank, stride,
        SPLITS, MAX_RANK, BLOCK_R,
    )  # fmt: skip
    tl.store(at, (old + delta).to(y.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["first_part", "num_tokens"],
    do_not_specialize_on_alignment=["tiles"],
)
def _expand_gated_kernel(
    gate_up,  # [num_tokens, 2 * N]
    out,  # [num_tokens, N]
    order,
    tiles,
    slab,
    slot_stride,
    table,
    table_stride,
    first_part,
    partial,
    num_tokens,
    N: tl.constexpr,
    GELU: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    entry = table + tl.maximum(slot, 0) * table_stride + first_part * 4
    gate_rank = tl.multiple_of(tl.where(slot >= 0, tl.load(entry), 0), 16)
    up_rank = tl.multiple_of(tl.where(slot >= 0, tl.load(entry + 4), 0), 16)
    home = slab + slot.to(tl.int64) * slot_stride
    gate_b = home + tl.load(entry + 2).to(tl.int64) * 16
    up_b = home + tl.load(entry + 6).to(tl.int64) * 16
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    row = tl.arange(0, BLOCK_M)
    valid = row < count
    token = tl.load(order + first + row, mask=valid, other=0).to(tl.int64)
    # Load B before gdc_wait, so that the load overlaps with shrink.
    gate_weights = _columns_of(gate_b, column, inside, 0, gate_rank, BLOCK_R)
    up_weights = _columns_of(up_b, column, inside, 0, up_rank, BLOCK_R)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if count == 0:
        return
    # All loads come before the first use, so that their latencies overlap.
    stride = (num_tokens * 2).to(tl.int64) * MAX_RANK
    gate_at = (first + row).to(tl.int64)
    up_at = gate_at + num_tokens
    gate_pieces = _pieces(partial, gate_at, valid, 0, gate_rank, stride, SPLITS, MAX_RANK, BLOCK_R)
    up_pieces = _pieces(partial, up_at, valid, 0, up_rank, stride, SPLITS, MAX_RANK, BLOCK_R)
    mask = valid[:, None] & inside[None, :]
    at = gate_up + token[:, None] * (2 * N) + column[None, :]
    gate_base = tl.load(at, mask=mask, other=0.0)
    up_base = tl.load(at + N, mask=mask, other=0.0)
    gate = gate_base.to(tl.float32)
    up = up_base.to(tl.float32)
    if gate_rank > 0:
        gate += _delta(
            gate_pieces, gate_weights, partial, gate_b, gate_at, valid, column, inside, gate_rank,
            stride, SPLITS, MAX_RANK, BLOCK_R,
        )  # fmt: skip
    if up_rank > 0:
        up += _delta(
            up_pieces, up_weights, partial, up_b, up_at, valid, column, inside, up_rank,
            stride, SPLITS, MAX_RANK, BLOCK_R,
        )  # fmt: skip
    if GELU:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    result = (gate * up).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * N + column[None, :], result, mask=mask)


# Classes of step sizes: (maximum tokens, rows of a tile, splits for layers with one part, splits
# for other layers). Small tiles waste little on adapters with few tokens; large tiles read matrices
# less often. Splits occupy the device if there are few tiles. There are only four classes, because
# kernels are compiled for each class.
CLASSES = ((128, 16, 8, 8), (512, 32, 8, 4), (2048, 64, 4, 2), (1 << 30, 64, 1, 1))


# Tiles are small below MEAN_ROWS rows per slot on average, in steps of up to MOST_SMALL tokens.
# Most requests tend to use a few of the adapters, so the other slots have a row or two.
MEAN_ROWS, MOST_SMALL = 64, 1024

BLOCK_N = 128  # columns per program of expand
WIDE_N = 256  # columns per program without a gate, for steps of the second class


def _most_small(slots: int) -> int:
    """Return the largest number of tokens of a step for which tiles have CLASSES[0]'s size."""
    return min(MEAN_ROWS * slots, MOST_SMALL)


def tile_rows(num_tokens: int, slots: int) -> int:
    """Return the rows of a tile for a step that may use `slots` adapter slots."""
    if num_tokens <= _most_small(slots):
        return CLASSES[0][1]
    return next(rows for most, rows, *_ in CLASSES if num_tokens <= most)


def num_splits(num_tokens: int, parts: int, columns: int) -> int:
    """Return the number of splits (split-K) of the shrink kernel's sums over a layer's inputs.

    parts: the number of linear layers that are fused into this layer.
    columns: the number of the layer's inputs; a split has at least 256 of them.
    """
    splits = next(splits for most, _, *splits in CLASSES if num_tokens <= most)[parts > 1]
    while splits * 256 > columns and splits > 1:
        splits //= 2
    return splits


def warm_up_sizes(num_tokens: int, slots: int) -> list[int]:
    """Return sizes of warm-up steps that compile all kernels for steps of up to num_tokens."""
    smallest = {1, _most_small(slots) + 1, *(most + 1 for most, *_ in CLASSES)}
    return sorted(size for size in smallest if size <= num_tokens)


def partial_size(num_tokens: int, max_rank: int, deterministic: bool = False) -> int:
    """Return the number of elements of `LoraStep.partial` for steps of up to num_tokens."""
    if deterministic:
        most = max(p * num_splits(1, p, 1 << 20) for p in range(1, MAX_PARTS + 1))
        return num_tokens * most * _padded_rank(max_rank)
    most = max(
        min(num_tokens, limit) * parts * num_splits(min(num_tokens, limit), parts, 1 << 20)
        for limit, *_ in CLASSES
        for parts in range(1, MAX_PARTS + 1)
    )
    return most * _padded_rank(max_rank)


def _padded_rank(max_rank: int) -> int:
    return triton.cdiv(max_rank, UNIT) * UNIT


def _rank_block(max_rank: int, most: int = 64) -> int:
    return min(16 if max_rank <= 16 else 32 if max_rank <= 32 else 64, most)


def _expand_rank_block(step: LoraStep) -> int:
    """Return the number of ranks per iteration of the expand kernel.

    The number is smaller for small tiles, whose many splits are all held in registers.
    """
    return _rank_block(step.max_rank, 32 if step.block_m <= 32 else 64)


def lora_shrink(x: Tensor, layer: LoraLinear, step: LoraStep) -> int:
    """Multiply x by the A of each row's adapter, into step.partial; return the number of splits."""
    num_tokens, columns = x.shape
    parts = len(layer.outs)
    splits = num_splits(1 if step.deterministic else num_tokens, parts, columns)
    block_r = _rank_block(step.max_rank)
    block_k = 128 if step.block_m <= 32 and block_r <= 32 else 64
    rank_blocks = triton.cdiv(step.max_rank, block_r)
    _shrink_kernel[(step.tiles.shape[0], parts * rank_blocks, splits)](
        x,
        step.order,
        step.tiles,
        step.slab,
        step.slab.stride(0),
        step.table,
        step.table.stride(0),
        layer.first_part,
        step.partial,
        num_tokens,
        K=columns,
        SPAN=triton.cdiv(triton.cdiv(columns, splits), block_k) * block_k,
        PARTS=parts,
        MAX_RANK=_padded_rank(step.max_rank),
        BLOCK_M=step.block_m,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
        **pdl(x.device),
    )
    return splits


def lora_add(y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
    """Add B (A x) of each token's adapter to y [num_tokens, out] in place, and return y.

    Arguments are those of `Kernels.lora_add`. y and x are contiguous; a layer has at most three
    parts.
    """
    splits = lora_shrink(x, layer, step)
    outs = (*layer.outs, 0, 0)[:MAX_PARTS]
    wide = CLASSES[0][0] < x.shape[0] <= CLASSES[1][0] and step.block_m <= 32
    columns = WIDE_N if wide else BLOCK_N
    blocks = sum(triton.cdiv(size, columns) for size in outs)
    _expand_kernel[(step.tiles.shape[0], blocks)](
        y,
        step.order,
        step.tiles,
        step.slab,
        step.slab.stride(0),
        step.table,
        step.table.stride(0),
        layer.first_part,
        step.partial,
        x.shape[0],
        N0=outs[0],
        N1=outs[1],
        N2=outs[2],
        SPLITS=splits,
        PARTS=len(layer.outs),
        MAX_RANK=_padded_rank(step.max_rank),
        BLOCK_M=step.block_m,
        BLOCK_N=columns,
        BLOCK_R=_expand_rank_block(step),
        num_warps=4 if step.block_m <= 32 else 8,
        num_stages=1,  # the loop over ranks usually has one iteration
        **pdl(x.device),
    )
    return y


def lora_gated(gate_up: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep, gate: str) -> Tensor:
    """Return gate(gate_up + B (A x)) of all tokens, [num_tokens, size] (`Kernels.lora_gated`)."""
    splits = lora_shrink(x, layer, step)
    size = layer.outs[0]
    assert layer.outs == (size, size)
    out = gate_up.new_empty((x.shape[0], size))
    _expand_gated_kernel[(step.tiles.shape[0], triton.cdiv(size, BLOCK_N))](
        gate_up,
        out,
        step.order,
        step.tiles,
        step.slab,
        step.slab.stride(0),
        step.table,
        step.table.stride(0),
        layer.first_part,
        step.partial,
        x.shape[0],
        N=size,
        GELU=gate == "gelu_pytorch_tanh",
        SPLITS=splits,
        MAX_RANK=_padded_rank(step.max_rank),
        BLOCK_M=step.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_R=_expand_rank_block(step),
        num_warps=4 if step.block_m <= 32 else 8,
        num_stages=1,  # the loop over ranks usually has one iteration
        **pdl(x.device),
    )
    return out
