"""Linear methods for weights that the checkpoint stores quantised.

Weights are packed once while loading. A matrix without a kernel, for example of an odd size or on a
machine without a compiler, is dequantised to the model's 16 bits instead.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, assert_never

import torch
from torch import Tensor

from engine.config.quantized import KEY, Quantized
from engine.errors import ConfigError
from engine.quantization.layouts.byte_layouts import EightBitLayout, FourBitFloats, Nf4Layout
from engine.quantization.layouts.layout import GgufLayout, IntegerLayout, Layout
from engine.quantization.layouts.sparse import SparseLayout
from engine.quantization.method import (
    DenseState,
    EmbeddingTable,
    ExpertsSpec,
    LinearMethod,
    LinearSpec,
    Part,
)
from engine.weights.parameter import Parameter, Source
from kernels.dispatch import Kernels
from kernels.packed import Format

logger = logging.getLogger("manta.engine")

STEP = 4096  # number of rows that are decoded at once, a multiple of 64


def layout_of(quantized: Quantized, part: Part, device: torch.device) -> Layout | None:
    """Return the layout of a quantised matrix; None if its kind has no layout for such a part.

    Raises ConfigError if ranks would split a group or block of the format.
    """
    if part.stack is not None:
        # Never transposed: blocks run along inputs, even where 16-bit experts are stored as [in,
        # out].
        scheme = None if quantized.method == "gguf" else quantized.scheme(part.name)
        if scheme is None or scheme.kind != "mxfp4":
            return None
        return FourBitFloats(part, scheme, device)
    if part.transposed:
        return None
    if quantized.method == "gguf":
        return GgufLayout(part, quantized.types[part.name], device)
    scheme = quantized.scheme(part.name)
    assert scheme is not None
    match scheme.kind:
        case "fp8" | "int8" | "llm-int8":
            return EightBitLayout(part, scheme, device)
        case "sparse":
            return SparseLayout(part, device)
        case "nvfp4" | "mxfp4":
            return FourBitFloats(part, scheme, device)
        case "nf4":
            return Nf4Layout(part, scheme, device) if isinstance(part.rows, tuple) else None
        case "gptq" | "awq" | "packed":
            return IntegerLayout(part, scheme, device) if isinstance(part.rows, tuple) else None
    assert_never(scheme.kind)


@dataclass(slots=True)
class LinearPiece:
    """A piece of a layer: consecutive parts of equal format, or unquantised ones.

    layouts: the parts' layouts; empty for unquantised parts.
    """

    spec: LinearSpec
    layouts: list[Layout]
    state: Any = None  # after loading the result of `Stored.pack`, or the dense method's state
    # int32 [in], the permutation of inputs in `state`; None = unchanged
    order: Tensor | None = None

    @property
    def form(self) -> Format:
        return self.layouts[0].form

    @property
    def ordered(self) -> bool:
        return any(layout.ordered for layout in self.layouts)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x [n, in] with its columns permuted as the packed weights expect."""
        return x if self.order is None else x.index_select(1, self.order)


@dataclass(slots=True)
class StoredState:
    pieces: list[LinearPiece]
    bias: Tensor | None = None  # the layer's bias while loading


@dataclass(frozen=True, slots=True)
class _Kept:
    """The dense method's state of unquantised experts."""

    state: Any


class Stored(LinearMethod):
    """The method for weights that are quantised in the checkpoint.

    A subclass for each device defines how pieces are packed and applied.

    quantized: the checkpoint's quantisation.
    dense: the method for unquantised matrices.
    """

    TABLES = False  # whether rows of packed states can be read, so that embeddings can be packed

    def __init__(self, kernels: Kernels, quantized: Quantized, dense: LinearMethod) -> None:
        super().__init__(kernels)
        self._quantized = quantized
        self._dense = dense
        self._said: set[str] = set()

    # ---- Defined by subclasses

    @abstractmethod
    def fits(self, form: Format, outputs: int, width: int) -> bool:
        """Whether a kernel supports a matrix [outputs, width] of a format."""

    @abstractmethod
    def bytes_of(self, form: Format, outputs: int, width: int, bias: bool) -> int:
        """Return the bytes of a packed matrix [outputs, width] of a format."""

    @abstractmethod
    def pack(self, piece: LinearPiece, bias: Tensor | None) -> Any:
        """Repack loaded weights for the device's kernels, and return the packed state."""

    def packs(self, piece: LinearPiece) -> bool:
        spec = piece.spec
        if not piece.layouts or any(layout.dequantises for layout in piece.layouts):
            return False
        return self.fits(piece.form, spec.out_features, spec.in_features)

    # ---- Loading

    @staticmethod
    def whole(state: StoredState) -> bool:
        """Whether the layer is a single packed matrix without a permutation of inputs.

        Only such layers fuse norm, gate or residual with the matmul.
        """
        return len(state.pieces) == 1 and state.pieces[0].order is None

    def create(self, spec: LinearSpec) -> tuple[Any, Sequence[Parameter]]:
        pieces = self._pieces(spec)
        parameters: list[Parameter] = []
        bias = None
        if spec.bias:
            bias = torch.empty(spec.out_features, dtype=spec.dtype, device=spec.device)
            sources = tuple(
                Source(f"{part.name}.bias", (part.out_features,), rows=part.rows)
                for part in spec.parts
            )
            parameters.append(Parameter(f"{spec.name}.bias", bias, sources))
        for piece in pieces:
            if piece.layouts:
                for layout in piece.layouts:
                    parameters += layout.parameters.values()
            else:
                piece.state, filled = self._dense.create(piece.spec)
                parameters += filled
        return StoredState(pieces, bias), parameters

    def _pieces(self, spec: LinearSpec) -> list[LinearPiece]:
        pieces: list[LinearPiece] = []
        layouts = [(part, self._layout(part, spec.device)) for part in spec.parts]
        for form, group in groupby(layouts, lambda each: each[1] and each[1].form):
            members = list(group)
            parts = tuple(part for part, _ in members)
            name = f"{spec.name}.{len(pieces)}"
            piece_spec = replace(spec, name=name, parts=parts, bias=False)
            pieces.append(LinearPiece(piece_spec, [layout for _, layout in members if layout]))
            assert (form is None) == (not pieces[-1].layouts)
        return pieces

    def _layout(self, part: Part, device: torch.device) -> Layout | None:
        quantized = self._quantized
        if quantized.keeps(part.name):
            return None
        layout = layout_of(quantized, part, device)
        if layout is None:
            raise ConfigError(
                f"{part.name}: {quantized.name} weights cannot be put in another order, nor be "
                "those of all experts in one tensor but for MXFP4",
                param=KEY,
            )
        return layout

    def finish(self, state: StoredState) -> StoredState:
        state.pieces = [
            part
            for piece in state.pieces
            for part in (_grouped(piece) if self.packs(piece) and piece.ordered else [piece])
        ]
        biases: Sequence[Tensor | None] = [None] * len(state.pieces)
        if state.bias is not None:
            biases = state.bias.split([piece.spec.out_features for piece in state.pieces])
        for piece, bias in zip(state.pieces, biases, strict=True):
            bias = None if bias is None else bias.clone()
            if self.packs(piece):
                piece.state = self.pack(piece, bias)
            else:
                dense = piece.state
                if piece.layouts:
                    self._log_dequantised(piece)
                    dense = DenseState(_dequantised(piece.layouts, piece.spec.dtype), None)
                dense.bias = bias
                piece.state = self._dense.finish(dense)
            piece.layouts = []
        state.bias = None
        return state

    def dequantised(self, state: StoredState) -> Tensor:
        """Dequantise a layer to one matrix in the model's dtype."""
        weights = []
        for piece in state.pieces:
            if piece.layouts:
                self._log_dequantised(piece)
                weights.append(_dequantised(piece.layouts, piece.spec.dtype))
            else:
                weights.append(piece.state.weight)
            piece.layouts, piece.state = [], None
        return torch.cat(weights)

    def _log_dequantised(self, piece: LinearPiece) -> None:
        """Warn, once for each format, that weights are dequantised and need more memory."""
        name = piece.spec.parts[0].name
        scheme = None if self._quantized.method == "gguf" else self._quantized.scheme(name)
        kind = self._quantized.name if scheme is None else scheme.name
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(
                "%s: weights in %s have no GEMM here and are dequantised to %s",
                name,
                kind,
                str(piece.spec.dtype).removeprefix("torch."),
            )

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        total = 0
        for piece in self._pieces(replace(spec, device=torch.device("meta"))):
            shape = (piece.spec.out_features, piece.spec.in_features)
            if self.packs(piece):
                # an upper bound, as each part may have another permutation
                order = 4 * spec.in_features * piece.ordered
                total += self.bytes_of(piece.form, *shape, spec.bias) + order
                continue
            piece_spec = replace(piece.spec, bias=spec.bias)
            packed = self._dense.packed_bytes(piece_spec)
            if packed is None:
                packed = spec.dtype.itemsize * (shape[0] * shape[1] + shape[0] * spec.bias)
            total += packed
        return total

    def table(self, spec: LinearSpec, virtual: int, head: tuple[int, int] | None) -> EmbeddingTable:
        quantized = self._quantized
        if quantized.method != "gguf" or quantized.keeps(spec.parts[0].name):
            return super().table(spec, virtual, head)  # integer formats do not quantise embeddings
        return _StoredEmbedding(self, spec, virtual, head)

    def packs_rows(self, piece: LinearPiece, rows: tuple[int, int]) -> bool:
        """Whether a range of a packed matrix's rows can be used as a separate packed matrix."""
        first, end = rows
        spec = piece.spec
        return first % 64 == 0 and self.fits(piece.form, end - first, spec.in_features)

    # ---- Experts: subclasses define how they store quantised experts

    @abstractmethod
    def create_stored_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]: ...

    @abstractmethod
    def finish_stored_experts(self, state: Any) -> Any: ...

    @abstractmethod
    def stored_experts_bytes(self, spec: ExpertsSpec) -> int | None: ...

    @abstractmethod
    def apply_stored_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor: ...

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        if not self._keeps_experts(spec):
            return self.create_stored_experts(spec)
        state, parameters = self._dense.create_experts(spec)
        return _Kept(state), parameters

    def _keeps_experts(self, spec: ExpertsSpec) -> bool:
        """Whether all experts of the layer are unquantised."""
        names = (source.name.removesuffix(".weight") for source in (*spec.gate_up, *spec.down))
        return all(self._quantized.keeps(name) for name in names)

    def finish_experts(self, state: Any) -> Any:
        if not isinstance(state, _Kept):
            return self.finish_stored_experts(state)
        return _Kept(self._dense.finish_experts(state.state))

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        if self._keeps_experts(spec):
            return self._dense.packed_experts_bytes(spec)
        return self.stored_experts_bytes(spec)

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        if isinstance(state, _Kept):
            return self._dense.apply_experts(state.state, x, weights, ids, residual)
        return self.apply_stored_experts(state, x, weights, ids, residual)

    # ---- Matmuls

    @abstractmethod
    def apply_piece(self, piece: LinearPiece, x: Tensor) -> Tensor:
        """Multiply x by a piece's weights; return the outputs [n, out].

        x: [n, in], as `LinearPiece.inputs` returns it: already permuted.
        """

    def apply(self, state: StoredState, x: Tensor) -> Tensor:
        pieces = state.pieces
        if len(pieces) == 1:
            return self.apply_piece(pieces[0], pieces[0].inputs(x))
        out = x.new_empty(x.shape[0], sum(piece.spec.out_features for piece in pieces))
        column = 0
        for piece in pieces:
            self.apply_into(piece, piece.inputs(x), out, column)
            column += piece.spec.out_features
        return out

    def apply_into(self, piece: LinearPiece, x: Tensor, out: Tensor, column: int) -> None:
        """Write the result of `apply_piece` into columns of out [n, outputs], from `column` on."""
        out[:, column : column + piece.spec.out_features] = self.apply_piece(piece, x)


class _StoredEmbedding(EmbeddingTable):
    """The embedding of a quantised checkpoint, packed if possible so that a tied head can use it.

    The table is dequantised if adapters have rows after the vocabulary, or if this rank's rows of
    the head cannot be a separate packed matrix (`Stored.packs_rows`).
    """

    def __init__(
        self, method: Stored, spec: LinearSpec, virtual: int, head: tuple[int, int] | None
    ) -> None:
        self._method, self._spec, self._head = method, spec, head
        (self._piece,) = method._pieces(spec)
        self._packs = method.TABLES and method.packs(self._piece) and not virtual
        if self._packs and head is not None:
            self._packs = method.packs_rows(self._piece, head)
        self.lookup = torch.empty(0, spec.in_features, dtype=spec.dtype, device=spec.device)
        if not self._packs:
            rows = spec.out_features + virtual
            self.lookup = torch.empty(rows, spec.in_features, dtype=spec.dtype, device=spec.device)
        self.embedding = self.lookup[: spec.out_features]
        self.parameters = list(self._piece.layouts[0].parameters.values())
        self.loading_bytes = sum(parameter.tensor.nbytes for parameter in self.parameters)
        self.num_parameters = spec.num_parameters
        self.num_bytes = self.embedding.nbytes
        if self._packs:
            self.num_bytes = method.bytes_of(
                self._piece.form, spec.out_features, spec.in_features, False
            )
        else:
            self.loading_bytes += self.embedding.nbytes

    def finish(self) -> None:
        self.parameters = []
        if self._packs:
            self._method.finish(StoredState([self._piece]))
        else:
            at = 0
            for values in _values(self._piece.layouts):
                self.embedding[at : at + len(values)] = values
                at += len(values)
            self._piece.layouts = []

    def forward(self, ids: Tensor) -> Tensor:
        if self._packs:
            return self._piece.state.rows(ids.long())
        return super().forward(ids)

    def head(self) -> tuple[LinearMethod, Any] | None:
        if not self._packs or self._head is None:
            return None
        piece = self._piece
        if piece.state is not None and self._head != (0, self._spec.out_features):
            piece = replace(piece, state=piece.state.view_outputs(*self._head))
        return self._method, StoredState([piece])


def _grouped(piece: LinearPiece) -> list[LinearPiece]:
    """Split a loaded piece into pieces with a common permutation that makes groups contiguous.

    Parts that need different permutations become different pieces. A part without such a
    permutation is marked to be dequantised.
    """
    if not all(layout.ordered for layout in piece.layouts):
        for layout in piece.layouts:
            layout.dequantises |= layout.ordered
        return [piece]
    groups: list[LinearPiece] = []
    for part, layout in zip(piece.spec.parts, piece.layouts, strict=True):
        order = layout.order = layout.grouped_order()
        if order is None:
            layout.dequantises = True
        elif torch.equal(order, torch.arange(len(order), dtype=torch.int32, device=order.device)):
            order = None
        before = groups[-1] if groups else None
        if (
            before
            and before.layouts[0].dequantises == layout.dequantises
            and _same(before.order, order)
        ):
            before.spec = replace(before.spec, parts=(*before.spec.parts, part))
            before.layouts.append(layout)
        else:
            groups.append(LinearPiece(replace(piece.spec, parts=(part,)), [layout], order=order))
    return groups


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _values(layouts: list[Layout]) -> Iterator[Tensor]:
    for layout in layouts:
        yield from layout.values(STEP)


def _dequantised(layouts: list[Layout], dtype: torch.dtype) -> Tensor:
    return torch.cat([values.to(dtype) for values in _values(layouts)])
