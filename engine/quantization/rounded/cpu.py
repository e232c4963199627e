"""RoundedCpu: quantises 16-bit weights to 8 or 4 bits on load, on the CPU.

Weights are integers with a scale and an offset for each group of inputs (DashInfer's InstantQuant),
or with a scale for each output. Activations are quantised to 8 bits with a scale for each 32
elements.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.config.quant_formats import QuantFormat
from engine.errors import ConfigError
from engine.quantization.cpu import DenseCpu, PackedState
from engine.quantization.method import DenseState, LinearSpec
from engine.quantization.rounded.formats import cpu_format
from engine.quantization.rounded.quantize_rows import rounded
from engine.weights.parameter import Parameter
from kernels.cpu.codegen.compiler import check
from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.gemm import blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.dispatch import Kernels
from kernels.packed import BLOCK, Format

logger = logging.getLogger("manta.engine")

_STEP = 4096  # number of rows that are quantised at once, a multiple of 64


class RoundedCpu(DenseCpu):
    """The method that quantises weights on load on the CPU.

    Matrices of sizes without a kernel stay unquantised.
    """

    def __init__(self, kernels: Kernels, quant: QuantFormat) -> None:
        super().__init__(kernels)
        self._quant = quant
        # shapes of matrices that stayed unquantised, which were logged
        self._dense_shapes: set[tuple[int, int]] = set()

    def format(self, width: int) -> Format:
        """Return the format for rows of `width` inputs, a multiple of 32."""
        return cpu_format(self._quant, width)

    def _packs(self, outputs: int, width: int) -> bool:
        return width % BLOCK == 0 and blocks.fits(self.format(width), outputs, width)

    def create(self, spec: LinearSpec) -> tuple[DenseState, Sequence[Parameter]]:
        if spec.device.type == "cpu":
            try:
                check()
            except CompilerUnavailable as error:
                raise ConfigError(
                    f"quantization {self._quant.name!r}: {error}; set quantization: none",
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
            self._log_dense(state.weight)
            return super().finish(state)
        form = self.format(width)
        packed = PackedBlocks(form, outputs, width, state.bias)
        for begin in range(0, outputs, _STEP):
            packed.fill(begin, *rounded(form, state.weight[begin : begin + _STEP]))
        return PackedState(packed)

    def _log_dense(self, weight: Tensor) -> None:
        """Warn, once for each shape, that matrices without a kernel stay unquantised."""
        outputs, width = weight.shape
        if (outputs, width) not in self._dense_shapes:
            self._dense_shapes.add((outputs, width))
            logger.warning(
                "quantization %s has no GEMM here for matrices [%d, %d], which stay in %s",
                self._quant.name,
                outputs,
                width,
                str(weight.dtype).removeprefix("torch."),
            )
