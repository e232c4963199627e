"""MoE experts with e4m3 weights and activations: one scale per output and per token.

A separate launch quantises the activations between the two matmuls, with one scale per (token,
expert) pair. This cannot be fused with the first matmul, because its programs compute only some
outputs of a pair. A scale for only some outputs would have to be applied inside the second matmul's
loop.
"""

from torch import Tensor

from kernels.experts.grouped import Scales, Tile, Tiles, by_expert, grouped_down, grouped_up
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.sorting import Sorted
from kernels.gemm.packed.codes import bytes_fit
from kernels.gemm.packed.round_rows import E4M3, round_rows
from kernels.launch.device import compute_capability
from kernels.packed import PackedWeight

# (maximum mean number of pairs per expert, tiles), like `grouped.TILES`: the fastest of a sweep of
# bench.kernels.experts on an H200, at 1 to 4,096 tokens with 8 of 128 experts each. Even for a
# single token these tiles are faster than `few_packed`, which does not group pairs by expert.
TILES: tuple[tuple[float, Tiles], ...] = (
    (0.1, Tiles(Tile(16, 64, 256, 4, 4, swap=True), Tile(16, 64, 256, 4, 3, tma=True, swap=True))),
    (10, Tiles(Tile(16, 64, 256, 4, 3, swap=True), Tile(16, 128, 128, 4, 3, tma=True, swap=True))),
    (24, Tiles(Tile(32, 64, 128, 4, 3, swap=True), Tile(32, 128, 128, 4, 3, tma=True, swap=True))),
    (96, Tiles(Tile(64, 64, 128, 4, 3, swap=True), Tile(64, 128, 128, 4, 3, tma=True))),
    (float("inf"), Tiles(Tile(128, 128, 128, 8, 4), Tile(128, 256, 128, 8, 4))),
)


def tiles_for(pairs: int, experts: int) -> Tiles:
    return next(tiles for most, tiles in TILES if pairs / experts <= most)


def rounded_fits(x: Tensor, stack: PackedExperts) -> bool:
    """Whether `rounded_experts` supports x and the experts.

    Weights must be e4m3 with one scale per output, in a format that also quantises x. x must have
    16 bits, on a device with e4m3 matmuls.
    """
    return x.dtype.itemsize == 2 and all(
        bytes_fit(weight) and weight.form.rounds_experts(compute_capability(x.device))
        for weight in (stack.gate_up, stack.down)
    )


def _as_floats(stack: PackedExperts) -> ExpertWeights:
    """Return the stack with its codes viewed as e4m3 numbers, without a copy."""

    def codes_of(weight: PackedWeight) -> Tensor:
        return weight.codes.view(E4M3).unflatten(0, (stack.count, -1))

    return ExpertWeights(
        codes_of(stack.gate_up),
        codes_of(stack.down),
        stack.gate_up_bias,
        stack.down_bias,
        stack.act,
        stack.limit,
        stack.weigh_input,
        stack.total,
    )


def rounded_up(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """Return act(gate) * up of each pair in the order of `pairs`: [pairs, size], in x's dtype."""
    rows, scales = round_rows(x)
    both = Scales(scales, stack.gate_up.scale, x.dtype)
    return grouped_up(rows, weights, ids, _as_floats(stack), pairs, tile, both)


def rounded_down(
    inner: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, pairs: Sorted, tile: Tile
) -> Tensor:
    """Return each (token, expert) pair's weighted result in the order of ids: [pairs, hidden].

    inner: the result of `rounded_up`.
    """
    rows, scales = round_rows(inner)
    both = Scales(scales, stack.down.scale, inner.dtype)
    return grouped_down(rows, weights, ids, _as_floats(stack), pairs, tile, both)


def rounded_experts(
    x: Tensor,  # [tokens, hidden], any number of them
    weights: Tensor,
    ids: Tensor,
    stack: PackedExperts,
    residual: Tensor | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts; `rounded_fits` must be true.

    Arguments are those of `Kernels.packed_experts`.
    """
    tiles = tiles or tiles_for(ids.numel(), stack.total or stack.count)
    return by_expert(x, weights, ids, stack, stack.count, residual, rounded_up, rounded_down, tiles)
