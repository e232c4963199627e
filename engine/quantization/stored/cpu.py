"""StoredCpu: the method for weights that are quantised in the checkpoint, on the CPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.config.quantized import Quantized
from engine.quantization.cpu import DenseCpu
from engine.quantization.linear_experts import ExpertsApart, apply_apart
from engine.quantization.method import ExpertsSpec
from engine.quantization.stored import stored_experts
from engine.quantization.stored.base import STEP, LinearPiece, Stored, StoredState
from engine.weights.parameter import Parameter
from kernels.cpu.gemm import blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.cpu.gemm.panels import GATES
from kernels.dispatch import Kernels
from kernels.packed import Format


class StoredCpu(Stored):
    TABLES = True

    def __init__(self, kernels: Kernels, quantized: Quantized) -> None:
        super().__init__(kernels, quantized, DenseCpu(kernels))

    def fits(self, form: Format, outputs: int, width: int) -> bool:
        return blocks.fits(form, outputs, width)

    def bytes_of(self, form: Format, outputs: int, width: int, bias: bool) -> int:
        return blocks.num_bytes(form, outputs, width, bias)

    def pack(self, piece: LinearPiece, bias: Tensor | None) -> PackedBlocks:
        return _packed(piece, bias)

    # ---- Experts: each has separate layers

    def create_stored_experts(self, spec: ExpertsSpec) -> tuple[ExpertsApart, Sequence[Parameter]]:
        biases, filled = stored_experts.biases(spec)
        parameters = list(filled)
        states: tuple[list[Any], list[Any]] = ([], [])
        for number, both in enumerate(stored_experts.each_expert(spec)):
            for mine, layer, bias in zip(states, both, biases, strict=True):
                state, filled = self.create(stored_experts.apart(layer))
                state.bias = None if bias is None else bias[number]
                mine.append(state)
                parameters += filled
        return ExpertsApart(*states, spec.act, spec.limit, spec.weigh_input), parameters

    def finish_stored_experts(self, state: ExpertsApart) -> ExpertsApart:
        for layers in (state.gate_up, state.down):
            layers[:] = [self.finish(layer) for layer in layers]
        return state

    def stored_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        layers = (layer for both in stored_experts.each_expert(spec) for layer in both)
        sizes = [self.packed_bytes(layer) for layer in layers]
        return sum(size for size in sizes if size is not None)

    def apply_stored_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        return apply_apart(self, state, x, weights, ids, residual)

    # ---- Matmuls

    def apply_into(self, piece: LinearPiece, x: Tensor, out: Tensor, column: int) -> None:
        if isinstance(piece.state, PackedBlocks):
            piece.state.into(x, out, column)
        else:
            super().apply_into(piece, x, out, column)

    def apply_piece(self, piece: LinearPiece, x: Tensor) -> Tensor:
        if isinstance(piece.state, PackedBlocks):
            return piece.state(x)
        return self._dense.apply(piece.state, x)

    def apply_norm(self, state: StoredState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        packed = state.pieces[0].state
        if self.whole(state):
            if isinstance(packed, PackedBlocks):
                return packed.after_norm(x, norm, eps)
            return self._dense.apply_norm(packed, x, norm, eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: StoredState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        packed = state.pieces[0].state
        if self.whole(state) and gate in GATES:
            if isinstance(packed, PackedBlocks):
                return packed.gated_after_norm(x, norm, eps, gate)
            return self._dense.apply_norm_gated(packed, x, norm, eps, gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: StoredState, x: Tensor, residual: Tensor) -> Tensor:
        packed = state.pieces[0].state
        if self.whole(state):
            if isinstance(packed, PackedBlocks):
                return packed.add_to_residual(x, residual)
            return self._dense.apply_add(packed, x, residual)
        return super().apply_add(state, x, residual)


def _packed(piece: LinearPiece, bias: Tensor | None) -> PackedBlocks:
    packed = PackedBlocks(piece.form, piece.spec.out_features, piece.spec.in_features, bias)
    if all(layout.rows % 64 == 0 for layout in piece.layouts):
        at = 0
        for layout in piece.layouts:
            for decoded in layout.decoded(STEP):
                packed.fill(at, *decoded)
                at += len(decoded[0])
        return packed
    # The parts are joined before they are packed, because a panel of 64 rows may have rows of two.
    parts = list(zip(*(next(layout.decoded(layout.rows)) for layout in piece.layouts), strict=True))
    offset = (
        None if parts[2][0] is None else torch.cat([part for part in parts[2] if part is not None])
    )
    packed.fill(0, torch.cat(list(parts[0])), torch.cat(list(parts[1])), offset)
    return packed
