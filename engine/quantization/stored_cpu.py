"""Stored weights on the CPU, in panels of the format's own kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.config.quantized import Quantized
from engine.quantization.experts import ExpertsApart, apply_apart
from engine.quantization.method import DenseCpu, ExpertsSpec, LinearSpec, Part
from engine.quantization.stored import STEP, LinearPiece, Stored, StoredState
from engine.weights.parameter import Parameter, Source
from kernels.cpu import blocks
from kernels.cpu.blocks import PackedBlocks
from kernels.cpu.panels import GATES
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

    # ---- Experts: each has layers of its own

    def create_experts(self, spec: ExpertsSpec) -> tuple[ExpertsApart, Sequence[Parameter]]:
        both = self._experts(spec)
        if both is None:
            return super().create_experts(spec)
        parameters: list[Parameter] = []
        gate_up: list[Any] = []
        down: list[Any] = []
        for states, layers in zip((gate_up, down), both, strict=True):
            for layer in layers:
                state, filled = self.create(layer)
                states.append(state)
                parameters += filled
        return ExpertsApart(gate_up, down, spec.act, spec.limit, spec.weigh_input), parameters

    def _experts(self, spec: ExpertsSpec) -> list[list[LinearSpec]] | None:
        """Of gate and up, and of down. None: the checkpoint keeps all experts in one tensor."""
        found = []
        for name, sources, bias in (
            ("gate_up", spec.gate_up, spec.gate_up_bias),
            ("down", spec.down, spec.down_bias),
        ):
            if any(source.at is not None for source in sources):
                return None
            parts = [_part(source) for source in sources]
            each = len(parts) // spec.count
            found.append(
                [
                    LinearSpec(
                        f"{spec.name}.{number}.{name}",
                        tuple(parts[number * each : (number + 1) * each]),
                        bool(bias),
                        spec.dtype,
                        spec.device,
                    )
                    for number in range(spec.count)
                ]
            )
        return found

    def finish_experts(self, state: ExpertsApart) -> ExpertsApart:
        for layers in (state.gate_up, state.down):
            layers[:] = [self.finish(layer) for layer in layers]
        return state

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        sizes = [self.packed_bytes(layer) for both in self._experts(spec) or () for layer in both]
        return sum(size for size in sizes if size is not None)

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        return apply_apart(self, state, x, weights, ids, residual)

    # ---- Products

    def apply(self, state: StoredState, x: Tensor) -> Tensor:
        pieces = state.pieces
        if len(pieces) == 1:
            return self.apply_piece(pieces[0], x)
        out = x.new_empty(x.shape[0], sum(piece.spec.out_features for piece in pieces))
        column = 0
        for piece in pieces:
            size = piece.spec.out_features
            if isinstance(piece.state, PackedBlocks):
                piece.state.into(x, out, column)
            else:
                out[:, column : column + size] = self.apply_piece(piece, x)
            column += size
        return out

    def apply_piece(self, piece: LinearPiece, x: Tensor) -> Tensor:
        if isinstance(piece.state, PackedBlocks):
            return piece.state(x)
        return self._dense.apply(piece.state, x)

    def apply_norm(self, state: StoredState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        packed = state.pieces[0].state
        if len(state.pieces) == 1:
            if isinstance(packed, PackedBlocks):
                return packed.after_norm(x, norm, eps)
            return self._dense.apply_norm(packed, x, norm, eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: StoredState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        packed = state.pieces[0].state
        if len(state.pieces) == 1 and gate in GATES:
            if isinstance(packed, PackedBlocks):
                return packed.gated_after_norm(x, norm, eps, gate)
            return self._dense.apply_norm_gated(packed, x, norm, eps, gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: StoredState, x: Tensor, residual: Tensor) -> Tensor:
        packed = state.pieces[0].state
        if len(state.pieces) == 1:
            if isinstance(packed, PackedBlocks):
                return packed.add(x, residual)
            return self._dense.apply_add(packed, x, residual)
        return super().apply_add(state, x, residual)


def _part(source: Source) -> Part:
    out, width = source.shape[::-1] if source.transpose else source.shape
    return Part(
        source.name.removesuffix(".weight"),
        out,
        width,
        (0, out) if source.rows is None else source.rows,
        source.columns or (0, width),
        source.transpose,
    )


def _packed(piece: LinearPiece, bias: Tensor | None) -> PackedBlocks:
    packed = PackedBlocks(piece.form, piece.spec.out_features, piece.spec.in_features, bias)
    if all(layout.rows % 64 == 0 for layout in piece.layouts):
        at = 0
        for layout in piece.layouts:
            for decoded in layout.decoded(STEP):
                packed.fill(at, *decoded)
                at += len(decoded[0])
        return packed
    # A panel has rows of two parts.
    parts = list(zip(*(next(layout.decoded(layout.rows)) for layout in piece.layouts), strict=True))
    offset = (
        None if parts[2][0] is None else torch.cat([part for part in parts[2] if part is not None])
    )
    packed.fill(0, torch.cat(list(parts[0])), torch.cat(list(parts[1])), offset)
    return packed
