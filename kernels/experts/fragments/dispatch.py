"""The launches for MoE experts whose codes are in fragments (`kernels.fragments`).

The functions decide which weights are converted to fragments, and whether (token, expert) pairs are
multiplied one by one or grouped by expert.
"""

import torch
from torch import Tensor

from kernels.experts.fragments.down import few_fragments_down, fragments_down
from kernels.experts.fragments.tiles import FEW, FIXED, MOST, FragmentTiles, tiles_for
from kernels.experts.fragments.up import few_fragments_up, fragments_up
from kernels.experts.grouped import by_expert
from kernels.experts.reference import PackedExperts
from kernels.fragments import GROUP, INPUTS, ROWS
from kernels.gemm.packed.codes import E2M1_CODE, code_of
from kernels.launch.device import HOPPER, compute_capability
from kernels.packed import PackedWeight


def fragments_fit(stack: PackedExperts, dtype: torch.dtype) -> bool:
    """Whether the fragment kernels support the stack and x of this dtype.

    The kernels need MXFP4 with bfloat16 scales, sizes of whole tiles, bfloat16 x, and Hopper."""
    size, hidden = stack.down.shape[1], stack.gate_up.shape[1]
    rows = stack.gate_up.shape[0] // stack.count
    return (
        dtype == torch.bfloat16
        and all(map(_form_fits, (stack.gate_up, stack.down)))
        and rows % ROWS == size % ROWS == hidden % ROWS == 0
        and size % INPUTS == hidden % INPUTS == 0
    )


def _form_fits(weight: PackedWeight) -> bool:
    form = weight.form
    return (
        code_of(weight) == E2M1_CODE
        and (form.group, form.rows, form.offset) == (GROUP, 1, "none")
        and form.scale == torch.bfloat16
        and weight.codes.is_cuda
        and compute_capability(weight.codes.device)[0] == HOPPER[0]  # tiles were tuned for Hopper
    )


def in_fragments(x: Tensor, stack: PackedExperts) -> bool:
    """Whether the experts' codes are stored in MMA operand order (`kernels.fragments`).

    x: not used; it is a parameter because `Candidate.fits` is called with it.
    """
    return stack.gate_up.in_fragments


def few_fragments_fit(x: Tensor, stack: PackedExperts) -> bool:
    """Whether to use `few_fragments`: codes are in fragments, and x has 1 to MOST tokens."""
    return stack.gate_up.in_fragments and 0 < x.shape[0] <= MOST


def few_fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None,
    tiles: FragmentTiles | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, for one or a few tokens.

    Arguments are those of `Kernels.packed_experts`.
    """
    tiles = tiles or FEW
    inner = few_fragments_up(x, weights, ids, stack, tiles.up)
    return few_fragments_down(inner, weights, ids, stack, residual, tiles.down)


def grouped_fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None,
    tiles: FragmentTiles | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, for any number of tokens.

    Arguments are those of `Kernels.packed_experts`.
    """
    tiles = tiles or tiles_for(ids.numel(), stack.total or stack.count)
    return by_expert(
        x, weights, ids, stack, stack.count, residual, fragments_up, fragments_down, tiles
    )


def fixed_fragments(
    x: Tensor, weights: Tensor, ids: Tensor, stack: PackedExperts, residual: Tensor | None
) -> Tensor:
    """Return the result of `grouped_fragments` with FIXED tiles, so that it is batch-invariant."""
    return grouped_fragments(x, weights, ids, stack, residual, FIXED)
