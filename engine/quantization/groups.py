"""Groups: 16-bit weights rounded when they are loaded, to unsigned integers with a float scale and
offset for each group of inputs, on the CPU (DashInfer's InstantQuant)."""

from typing import Any, Literal

import torch
from torch import Tensor

from engine.quantization.method import DenseCpu, DenseState, LinearSpec, PackedState
from kernels.cpu import blocks
from kernels.cpu.blocks import PackedBlocks
from kernels.dispatch import Kernels
from kernels.packed import BLOCK, Format

_STEP = 4096  # rows that are rounded at once, a multiple of 64


class GroupsCpu(DenseCpu):
    """Activations in 8 bits with a scale for each 32. Matrices of odd sizes stay as they are."""

    def __init__(self, kernels: Kernels, bits: Literal[4, 8], group: int) -> None:
        """group: inputs; where it does not divide a row, the most below that do."""
        super().__init__(kernels)
        self._bits, self._group = bits, group

    def format(self, width: int) -> Format:
        """For rows of this width, a multiple of 32."""
        fitting = range(min(self._group, width), BLOCK, -BLOCK)
        group = next((group for group in fitting if width % group == 0), BLOCK)
        return Format(self._bits, group, torch.float32, offset="add")

    def _packs(self, outputs: int, width: int) -> bool:
        return width % BLOCK == 0 and blocks.fits(self.format(width), outputs, width)

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        shape = (spec.out_features, spec.in_features)
        if not self._packs(*shape):
            return super().packed_bytes(spec)
        return blocks.num_bytes(self.format(shape[1]), *shape, spec.bias)

    def finish(self, state: DenseState) -> Any:
        outputs, width = state.weight.shape
        if not self._packs(outputs, width):
            return super().finish(state)
        form = self.format(width)
        packed = PackedBlocks(form, outputs, width, state.bias)
        for begin in range(0, outputs, _STEP):
            packed.fill(begin, *rounded(form, state.weight[begin : begin + _STEP]))
        return PackedState(packed)


def rounded(form: Format, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [n, in] -> codes, scales and offsets as PackedBlocks.fill takes them. The ends of a
    group's range are exact but for float32's rounding, and no number is further off than half a
    scale."""
    rows, width = weight.shape
    groups = weight.float().view(rows, width // form.group, form.group)
    low, high = groups.aminmax(dim=-1)
    top = (1 << form.bits) - 1
    scale = ((high - low) / top).clamp_(min=1e-30)
    codes = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round_().clamp_(0, top)
    codes = codes.to(torch.uint8).view(rows, width)
    if form.bits == 4:
        both = codes.view(rows, -1, 2, 16)
        codes = (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)
    return codes, scale, low
