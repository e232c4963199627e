"""Stored weights on CUDA."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.config.quantized import Quantized
from engine.quantization.rounded_cuda import PackedCuda
from engine.quantization.stored import STEP, LinearPiece, Stored, StoredState
from kernels.dispatch import Kernels
from kernels.packed import Decoded, Format, PackedWeight


class StoredCuda(Stored):
    """The embedding is expanded to 16 bits: tokens look up rows of it."""

    def __init__(self, kernels: Kernels, quantized: Quantized) -> None:
        super().__init__(kernels, quantized, PackedCuda(kernels))

    def fits(self, form: Format, outputs: int, width: int) -> bool:
        return width % form.group == 0 and width % 32 == 0 and outputs % form.rows == 0

    def bytes_of(self, form: Format, outputs: int, width: int, bias: bool) -> int:
        return PackedWeight.num_bytes(self._kept(form, width), outputs, width) + 2 * outputs * bias

    def pack(self, piece: LinearPiece, bias: Tensor | None) -> PackedWeight:
        """With scales of 16 bits if these are the same numbers; nearly all files have such."""
        spec, form = piece.spec, self._kept(piece.form, piece.spec.in_features)
        shape = (spec.out_features, spec.in_features)
        try:
            packed = PackedWeight(form, *shape, bias, spec.device)
            return packed.fill_all(_checked(piece, form.scale))
        except _Rounds:
            packed = PackedWeight(piece.form, *shape, bias, spec.device)
            return packed.fill_all(_decoded(piece))

    def _kept(self, form: Format, width: int) -> Format:
        """Integers by group of GPTQ and its like have 16-bit scales; others are float32 numbers."""
        integers = self._quantized.method != "gguf" and form.code == "int" and not form.table
        return replace(form, scale=torch.float16) if integers and form.group < width else form

    def apply_piece(self, piece: LinearPiece, x: Tensor) -> Tensor:
        return self._dense.apply(piece.state, x)

    def apply_norm(self, state: StoredState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if len(state.pieces) == 1:
            return self._dense.apply_norm(state.pieces[0].state, x, norm, eps)
        return super().apply_norm(state, x, norm, eps)

    def apply_norm_gated(
        self, state: StoredState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        if len(state.pieces) == 1:
            return self._dense.apply_norm_gated(state.pieces[0].state, x, norm, eps, gate)
        return super().apply_norm_gated(state, x, norm, eps, gate)

    def apply_add(self, state: StoredState, x: Tensor, residual: Tensor) -> Tensor:
        if len(state.pieces) == 1:
            return self._dense.apply_add(state.pieces[0].state, x, residual)
        return super().apply_add(state, x, residual)


class _Rounds(Exception):
    """A scale is no number of the type that it should be kept in."""


def _decoded(piece: LinearPiece) -> Iterator[Decoded]:
    for layout in piece.layouts:
        yield from layout.decoded(STEP)


def _checked(piece: LinearPiece, dtype: torch.dtype) -> Iterator[Decoded]:
    for codes, scale, offset in _decoded(piece):
        for part in (scale, offset):
            if part is not None and not torch.equal(part.to(dtype).to(part.dtype), part):
                raise _Rounds
        yield codes, scale, offset
