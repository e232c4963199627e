"""PackedCuda, RoundedCuda: methods for packed weights on CUDA, and for quantisation on load.

The formats are in `engine.config.quant_formats`.
"""

from typing import Any

from torch import Tensor

from engine.config.quant_formats import QuantFormat
from engine.quantization.method import DenseCuda, DenseState, ExpertsSpec, LinearSpec
from engine.quantization.rounded.formats import cuda_format
from engine.quantization.rounded.quantize_rows import rounded
from kernels.dispatch import Kernels
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.packed import BLOCK, Format, PackedWeight

# number of weights that are quantised at once, with a few float32 temporaries each
_STEP = 16 << 20


class PackedCuda(DenseCuda):
    """The method for layers with packed weights; layers that `finish` has not packed are dense."""

    def apply(self, state: Any, x: Tensor) -> Tensor:
        if isinstance(state, PackedWeight):
            return self.kernels.packed_linear(x, state)
        return super().apply(state, x)

    def apply_norm(self, state: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if isinstance(state, PackedWeight):
            return self.kernels.packed_linear(x, state, norm=norm, eps=eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: Any, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        if isinstance(state, PackedWeight):
            return self.kernels.packed_linear(x, state, norm=norm, eps=eps, gate=gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: Any, x: Tensor, residual: Tensor) -> Tensor:
        if isinstance(state, PackedWeight):
            return self.kernels.packed_linear(x, state, residual=residual)
        return super().apply_add(state, x, residual)

    def takes_gate(self, state: Any, x: Tensor) -> bool:
        return isinstance(state, PackedWeight) and self.kernels.takes_gate(x, state)

    def apply_inner(self, state: Any, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        if isinstance(state, PackedWeight):
            return self.kernels.packed_linear(both, state, x_gate=gate, residual=residual)
        return super().apply_inner(state, both, gate, residual)

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        if isinstance(state, PackedExperts):
            return self.kernels.packed_experts(x, weights, ids, state, residual)
        return super().apply_experts(state, x, weights, ids, residual)

    def tune(self, states: Any, sizes: Any, add: bool) -> None:
        if not any(isinstance(state, PackedWeight) for state in states):
            super().tune(states, sizes, add)


class RoundedCuda(PackedCuda):
    """The method that quantises weights on load on CUDA.

    Matrices whose number of inputs is not a multiple of 32 stay unquantised.
    """

    def __init__(self, kernels: Kernels, quant: QuantFormat) -> None:
        super().__init__(kernels)
        self._quant = quant

    def form(self, name: str, width: int) -> Format | None:
        """Return a layer's format for rows of `width` inputs; None = the layer stays
        unquantised."""
        return None if width % BLOCK else cuda_format(self._quant, name, width)

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        form = self.form(spec.name, spec.in_features)
        if form is None:
            return super().packed_bytes(spec)
        shape = (spec.out_features, spec.in_features)
        return PackedWeight.num_bytes(form, *shape) + spec.dtype.itemsize * spec.bias * shape[0]

    def finish(self, state: DenseState) -> Any:
        form = self.form(state.name, state.weight.shape[1])
        if form is None:
            return super().finish(state)
        return _packed(form, state.weight, state.bias)

    def _expert_forms(self, size: int, hidden: int) -> tuple[Format, Format] | None:
        forms = self.form("experts", hidden), self.form("experts", size)
        return None if forms[0] is None or forms[1] is None else (forms[0], forms[1])

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        forms = self._expert_forms(spec.size, spec.hidden)
        if forms is None:
            return super().packed_experts_bytes(spec)
        total = 0
        for form, layer in zip(forms, (spec.one_gate_up, spec.one_down), strict=True):
            rows = spec.count * layer.out_features
            total += PackedWeight.num_bytes(form, rows, layer.in_features)
            total += spec.dtype.itemsize * rows * layer.bias
        return total

    def finish_experts(self, state: ExpertWeights) -> Any:
        hidden, size = state.down.shape[1:]
        forms = self._expert_forms(size, hidden)
        if forms is None:
            return super().finish_experts(state)
        gate_up, down = (
            _packed(form, weight.flatten(0, 1), None)
            for form, weight in zip(forms, (state.gate_up, state.down), strict=True)
        )
        biases = state.gate_up_bias, state.down_bias
        return PackedExperts(
            gate_up, down, *biases, state.act, state.limit, state.weigh_input, state.total
        )


def _packed(form: Format, weight: Tensor, bias: Tensor | None) -> PackedWeight:
    rows, width = weight.shape
    packed = PackedWeight(form, rows, width, bias, weight.device)
    step = max(64, _STEP // width // 64 * 64)
    return packed.fill_all(rounded(form, rows_of_step) for rows_of_step in weight.split(step))
