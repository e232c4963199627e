"""StoredCuda: the method for weights that are quantised in the checkpoint, on CUDA."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.config.quantized import Quantized
from engine.quantization.method import ExpertsSpec
from engine.quantization.rounded.cuda import PackedCuda
from engine.quantization.stored import stored_experts
from engine.quantization.stored.base import STEP, LinearPiece, Stored, StoredState
from engine.weights.parameter import Parameter
from kernels.dispatch import Kernels
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.packed import BLOCK, E2M1, Decoded, Format, PackedWeight


class StoredCuda(Stored):
    """The method for weights that are quantised in the checkpoint, on CUDA.

    The embedding is dequantised to 16 bits, as no kernel looks up rows of packed weights.
    """

    def __init__(self, kernels: Kernels, quantized: Quantized) -> None:
        super().__init__(kernels, quantized, PackedCuda(kernels))

    def fits(self, form: Format, outputs: int, width: int) -> bool:
        return width % form.group == 0 and width % 32 == 0 and outputs % form.rows == 0

    def bytes_of(self, form: Format, outputs: int, width: int, bias: bool) -> int:
        return PackedWeight.num_bytes(self._kept(form, width), outputs, width) + 2 * outputs * bias

    def pack(self, piece: LinearPiece, bias: Tensor | None) -> PackedWeight:
        """Pack the weight of a piece, with 16-bit scales if these are exact."""
        spec, form = piece.spec, self._kept(piece.form, piece.spec.in_features)
        shape = (spec.out_features, spec.in_features)
        try:
            packed = PackedWeight(form, *shape, bias, spec.device)
            return packed.fill_all(_checked(piece, form.scale))
        except _Rounds:
            packed = PackedWeight(piece.form, *shape, bias, spec.device)
            return packed.fill_all(_decoded(piece))

    def _kept(self, form: Format, width: int) -> Format:
        """Return the format in which stored weights are packed.

        Scales become float16 for integers in groups (not GGUF's) and bfloat16 for MXFP4. Others
        keep their dtype.

        width: the number of inputs.
        """
        integers = self._quantized.method != "gguf" and form.code == "int" and not form.table
        if integers and form.group < width:
            return replace(form, scale=torch.float16)
        # MXFP4: its scales are powers of two, which bfloat16 represents exactly.
        powers = form.group == BLOCK and form.table == E2M1
        return replace(form, scale=torch.bfloat16) if powers else form

    # ---- Experts: one matrix has all experts of a layer

    def create_stored_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        biases, parameters = stored_experts.biases(spec)
        gate_up, down = stored_experts.all_experts(spec)
        first, filled = self.create(gate_up)
        second, more = self.create(down)
        return _Loading(spec, first, second, *biases), (*parameters, *filled, *more)

    def _packs_all(self, *pieces: list[LinearPiece]) -> bool:
        """Whether all experts can be packed; otherwise all of them are dequantised.

        The kernel for experts needs a single format, and inputs without a permutation.
        """
        return all(
            len(layer_pieces) == 1 and self.packs(layer_pieces[0]) and not layer_pieces[0].ordered
            for layer_pieces in pieces
        )

    def stored_experts_bytes(self, spec: ExpertsSpec) -> int:
        layers = stored_experts.all_experts(replace(spec, device=torch.device("meta")))
        total = stored_experts.biases_bytes(spec)
        if self._packs_all(*(self._pieces(layer) for layer in layers)):
            return total + sum(self.packed_bytes(layer) or 0 for layer in layers)
        return total + spec.dtype.itemsize * sum(layer.num_parameters for layer in layers)

    def finish_stored_experts(self, state: "_Loading") -> ExpertWeights | PackedExperts:
        spec, both = state.spec, (state.gate_up, state.down)
        biases = state.gate_up_bias, state.down_bias
        fields = (*biases, spec.act, spec.limit, spec.weigh_input, spec.total)
        if self._packs_all(*(layer.pieces for layer in both)):
            gate_up, down = (self.finish(layer).pieces[0].state for layer in both)
            stack = PackedExperts(gate_up, down, *fields)
            self.kernels.order_experts(stack, spec.dtype)
            return stack
        gate_up, down = (
            self.dequantised(layer).unflatten(0, (spec.count, -1)).contiguous() for layer in both
        )
        return ExpertWeights(gate_up, down, *fields)

    def apply_stored_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        return self._dense.apply_experts(state, x, weights, ids, residual)

    # ---- Matmuls

    def apply_piece(self, piece: LinearPiece, x: Tensor) -> Tensor:
        return self._dense.apply(piece.state, x)

    def apply_norm(self, state: StoredState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if self.whole(state):
            return self._dense.apply_norm(state.pieces[0].state, x, norm, eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: StoredState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        if self.whole(state):
            return self._dense.apply_norm_gated(state.pieces[0].state, x, norm, eps, gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: StoredState, x: Tensor, residual: Tensor) -> Tensor:
        if self.whole(state):
            return self._dense.apply_add(state.pieces[0].state, x, residual)
        return super().apply_add(state, x, residual)

    def takes_gate(self, state: StoredState, x: Tensor) -> bool:
        return self.whole(state) and self._dense.takes_gate(state.pieces[0].state, x)

    def apply_inner(
        self, state: StoredState, both: Tensor, gate: str, residual: Tensor | None
    ) -> Tensor:
        if self.whole(state):
            return self._dense.apply_inner(state.pieces[0].state, both, gate, residual)
        return super().apply_inner(state, both, gate, residual)


@dataclass(slots=True)
class _Loading:
    """The state of a layer's experts while weights load, until `finish_stored_experts`."""

    spec: ExpertsSpec
    gate_up: StoredState
    down: StoredState
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class _Rounds(Exception):
    """The error for a scale that its 16-bit type cannot hold exactly."""


def _decoded(piece: LinearPiece) -> Iterator[Decoded]:
    for layout in piece.layouts:
        yield from layout.decoded(STEP)


def _checked(piece: LinearPiece, dtype: torch.dtype) -> Iterator[Decoded]:
    for codes, scale, offset in _decoded(piece):
        for part in (scale, offset):
            if part is not None and not torch.equal(part.to(dtype).to(part.dtype), part):
                raise _Rounds
        yield codes, scale, offset
