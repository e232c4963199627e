"""Rounded: 16-bit weights rounded to 8 or 4 bits when they are loaded, on the CPU: whole numbers
with a scale and an offset for each group of inputs (DashInfer's InstantQuant), or with a scale an
output. Activations are rounded to 8 bits with a scale for each 32."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from engine.errors import ConfigError
from engine.quantization.method import DenseCpu, DenseState, LinearSpec, PackedState
from engine.quantization.rounded.rows import rounded
from engine.weights.parameter import Parameter
from kernels.cpu.codegen.compiler import CompilerUnavailable, check
from kernels.cpu.gemm import blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.dispatch import Kernels
from kernels.packed import BLOCK, Format

_STEP = 4096  # rows that are rounded at once, a multiple of 64


class RoundedCpu(DenseCpu):
    """The method that rounds weights on the CPU. Matrices of odd sizes stay as they are."""

    def __init__(self, kernels: Kernels, name: str, bits: Literal[4, 8], group: int = 0) -> None:
        """Set what weights are rounded to.

        name: the quantisation's name in the configuration.
        group: inputs that share a scale; where this does not divide a row, the most below that do;
            0: all of them, and no offset.
        """
        super().__init__(kernels)
        self._name, self._bits, self._group = name, bits, group

    def format(self, width: int) -> Format:
        """The format of rows of this width, a multiple of 32."""
        if not self._group:
            return Format(self._bits, width, torch.float32, zero=1 << (self._bits - 1))
        fitting = range(min(self._group, width), BLOCK, -BLOCK)
        group = next((group for group in fitting if width % group == 0), BLOCK)
        return Format(self._bits, group, torch.float32, offset="add")

    def _packs(self, outputs: int, width: int) -> bool:
        return width % BLOCK == 0 and blocks.fits(self.format(width), outputs, width)

    def create(self, spec: LinearSpec) -> tuple[DenseState, Sequence[Parameter]]:
        if spec.device.type == "cpu":
            try:
                check()
            except CompilerUnavailable as error:
                raise ConfigError(
                    f"quantization {self._name!r}: {error}; set quantization: none",
                    param="quantization",
                ) from error
        return super().create(spec)

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
