"""Linear methods for the CPU: dense weights, packed where that is faster, and 8-bit weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.quantization.linear_experts import ExpertsApart, apply_apart
from engine.quantization.method import (
    Dense,
    DenseState,
    ExpertsSpec,
    LayerNormParts,
    LinearSpec,
)
from engine.weights.parameter import Parameter
from kernels.cpu.codegen.compiler import has_int8
from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.gemm.dense import PackedInt8, PackedLinear
from kernels.cpu.gemm.linear import Packed, pack
from kernels.cpu.gemm.panels import GATES, Panels
from kernels.cpu.post_norm import rest_of_layer
from kernels.experts.reference import ExpertWeights


@dataclass(slots=True)
class PackedState:
    multiply: Panels | Packed


class DenseCpu(Dense):
    """The method for unquantised weights on the CPU, with float32 activations.

    Weights are packed where that is faster.
    """

    def finish(self, state: DenseState) -> Any:
        packed = pack(state.weight, state.bias)
        if packed is None or (
            self.kernels.DETERMINISTIC and not isinstance(packed, PackedLinear)
        ):  # in deterministic mode only this packed form is bit-exact
            return state
        return PackedState(packed)

    def finish_experts(self, state: ExpertWeights) -> ExpertsApart:
        biases: list[Sequence[Tensor | None]] = [
            [None] * len(state.down) if bias is None else list(bias)
            for bias in (state.gate_up_bias, state.down_bias)
        ]
        up, down = (
            [self.finish(DenseState(*tensors)) for tensors in zip(weight, bias, strict=True)]
            for weight, bias in zip((state.gate_up, state.down), biases, strict=True)
        )
        return ExpertsApart(up, down, state.act, state.limit, state.weigh_input)

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        total = 0
        for layer in (spec.one_gate_up, spec.one_down):
            packed = self.packed_bytes(layer)
            if packed is None:
                packed = layer.num_parameters * spec.dtype.itemsize
            total += spec.count * packed
        return total

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        return apply_apart(self, state, x, weights, ids, residual)

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        shape = (spec.out_features, spec.in_features)
        if PackedLinear.fits(*shape):
            return PackedLinear.num_bytes(*shape, spec.bias, spec.dtype.itemsize)
        if self.kernels.DETERMINISTIC or spec.dtype == torch.float32:
            return None
        return 2 * shape[0] * shape[1] + 4 * shape[0] * spec.bias

    def apply(self, state: Any, x: Tensor) -> Tensor:
        if isinstance(state, PackedState):
            return state.multiply(x)
        return super().apply(state, x.to(state.weight.dtype)).to(x.dtype)

    def apply_norm(self, state: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if isinstance(state, PackedState) and isinstance(state.multiply, Panels):
            return state.multiply.after_norm(x, norm, eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: Any, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        packed = isinstance(state, PackedState) and isinstance(state.multiply, Panels)
        if packed and gate in GATES:
            return state.multiply.gated_after_norm(x, norm, eps, gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: Any, x: Tensor, residual: Tensor) -> Tensor:
        if isinstance(state, PackedState) and isinstance(state.multiply, Panels):
            return state.multiply.add_to_residual(x, residual)
        return super().apply_add(state, x, residual)

    def apply_post_norms(
        self,
        states: tuple[Any, Any, Any],
        attended: Tensor,
        residual: Tensor,
        norms: tuple[LayerNormParts, LayerNormParts],
        act: str,
    ) -> Tensor | None:
        matmuls = [state.multiply for state in states if isinstance(state, PackedState)]
        packed = [matmul for matmul in matmuls if isinstance(matmul, PackedLinear)]
        # Activations separately: not all layers are packed, or torch has to compute them row by row
        # in deterministic mode.
        if len(packed) < len(states) or self.kernels.DETERMINISTIC:
            return None
        out, up, down = packed
        return rest_of_layer(attended, residual, (out, up, down), norms, act)


class Int8Cpu(DenseCpu):
    """The method that quantises weights to 8 bits on load, with a scale for each output.

    Activations are quantised to 16-bit integers with a scale for each row. Matrices of sizes
    without a kernel stay unquantised.
    """

    def create(self, spec: LinearSpec) -> tuple[DenseState, Sequence[Parameter]]:
        if spec.device.type == "cpu" and not has_int8():
            raise ConfigError(
                "quantization 'int8' needs an x86-64 processor with AVX512-VNNI, or an AArch64 "
                "processor with dot products (asimddp)",
                param="quantization",
            )
        return super().create(spec)

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        shape = (spec.out_features, spec.in_features)
        if not PackedInt8.fits(*shape):
            return super().packed_bytes(spec)
        return PackedInt8.num_bytes(*shape, spec.bias)

    def finish(self, state: DenseState) -> Any:
        if not PackedInt8.fits(*state.weight.shape):
            return super().finish(state)
        try:
            return PackedState(PackedInt8(state.weight, state.bias))
        except CompilerUnavailable as error:
            raise ConfigError(f"quantization 'int8': {error}", param="quantization") from error
