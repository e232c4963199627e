"""LinearMethod: how a linear layer keeps its weight and multiplies by it.

Each way to quantise weights is a subclass, which `registry` chooses. ``create`` allocates the
weights and says which checkpoint tensors fill them; ``finish`` packs them once they are loaded;
``apply`` is the hot path.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.errors import ConfigError
from engine.weights.parameter import Parameter, Rows, Source, num_rows
from kernels.dispatch import Kernels
from kernels.experts.reference import ExpertWeights
from kernels.experts.routing import up_rows

# Weight, bias and eps of a layer norm.
LayerNormParts = tuple[Tensor | None, Tensor | None, float]


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix [out, in] of a (merged) layer, of which this rank holds rows x columns.

    rows: the rows of this rank, in the order of the layer.
    """

    name: str  # without ".weight"
    out_features: int
    in_features: int
    rows: Rows
    columns: tuple[int, int]
    transposed: bool = False  # the checkpoint has [in, out]
    # (its number, how many): the checkpoint keeps so many in one tensor
    stack: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The names, shapes and dtypes of a linear layer, before it has weights.

    parts: the matrices that are stacked along rows; all have the same columns.
    """

    name: str
    parts: tuple[Part, ...]
    bias: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def out_features(self) -> int:
        """Rows on this rank."""
        return sum(num_rows(part.rows) for part in self.parts)

    @property
    def in_features(self) -> int:
        """Columns on this rank."""
        columns = self.parts[0].columns
        return columns[1] - columns[0]

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The shapes and sources of this rank's experts of a layer, before they have weights.

    size: the inner width.
    sources: one expert after the other; for gate_up the rows of the gate, if there is one, come
        before those of up. Biases have no sources where the model has no biases.
    act, limit, weigh_input, total: see `ExpertWeights`.
    """

    name: str
    count: int
    size: int
    hidden: int
    gate_up: tuple[Source, ...]
    down: tuple[Source, ...]
    gate_up_bias: tuple[Source, ...]
    down_bias: tuple[Source, ...]
    dtype: torch.dtype
    device: torch.device
    act: str
    limit: float
    weigh_input: bool
    total: int = 0

    @property
    def num_parameters(self) -> int:
        return self.count * (self.one_gate_up.num_parameters + self.one_down.num_parameters)

    @property
    def one_gate_up(self) -> LinearSpec:
        """The layer of one expert's gate and up; without a gate, of the up alone."""
        rows = up_rows(self.size, self.act)
        return self._one(rows, self.hidden, bool(self.gate_up_bias))

    @property
    def one_down(self) -> LinearSpec:
        return self._one(self.hidden, self.size, bool(self.down_bias))

    def _one(self, rows: int, columns: int, bias: bool) -> LinearSpec:
        part = Part(self.name, rows, columns, (0, rows), (0, columns))
        return LinearSpec(self.name, (part,), bias, self.dtype, self.device)


class LinearMethod(ABC):
    """The way in which linear layers keep and apply their weights.

    Subclasses define `create` and `apply`, and override what they can fuse with the GEMM.
    """

    FROM_DENSE = False  # made of weights as an unquantized checkpoint has them

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def create(self, spec: LinearSpec) -> tuple[Any, Sequence[Parameter]]:
        """Allocate a layer. Returns the state that `apply` takes, and the parameters that loading
        fills."""

    def finish(self, state: Any) -> Any:
        """Pack the state, once after loading; returns the state to apply from then on."""
        return state

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        """The bytes that the result of `finish` takes on the device; None where `create` allocated
        them."""
        return None

    def replaces(self, packed_bytes: int | None) -> bool:
        """Whether `finish` replaces the tensors of `create`, which then need memory only while
        weights load.

        packed_bytes: what `packed_bytes` or `packed_experts_bytes` returned.
        """
        return self.FROM_DENSE and packed_bytes is not None

    @abstractmethod
    def apply(self, state: Any, x: Tensor) -> Tensor:
        """Compute x [n, in] -> [n, out]. On CUDA this must be capturable in a CUDA graph."""

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        """Allocate the experts of a layer, as `create` does for a linear layer.

        Raises ConfigError where a method has no way to keep experts.
        """
        raise ConfigError(
            f"{spec.name}: this kind of quantized weights has no kernels for mixtures of experts; "
            "take a checkpoint in 16 bits, or set quantization: none for a .gguf file",
            param="quantization",
        )

    def finish_experts(self, state: Any) -> Any:
        """Pack the experts' state, as `finish` does for a linear layer."""
        return state

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        """The bytes that `finish_experts` makes, None where `create_experts` allocated them."""
        return None

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Apply the experts that the router chose; see `Kernels.experts`."""
        raise NotImplementedError

    def tune(self, states: Sequence[Any], sizes: Sequence[int], add: bool) -> None:  # noqa: B027
        """Look for a faster `apply` for states of one shape, before CUDA graphs with them are
        captured.

        sizes: numbers of rows of x.
        add: whether to tune `apply_add`.
        A method without a choice leaves this empty.
        """

    def table(
        self, spec: LinearSpec, virtual: int, head: tuple[int, int] | None
    ) -> "EmbeddingTable":
        """Make the table of the embedding.

        virtual: the number of rows behind the vocabulary.
        head: the range of rows that this rank multiplies by, where the head is the embedding.
        """
        return EmbeddingTable(spec, virtual)

    def apply_norm(self, state: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Compute apply(rms_norm(x))."""
        return self.apply(state, self.kernels.rms_norm(x, norm, eps))

    def apply_norm_gated(
        self, state: Any, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        """Compute gate(apply(rms_norm(x))) -> [n, out / 2]. gate: a key of kernels.*.GATES."""
        return self.kernels.GATES[gate](self.apply_norm(state, x, norm, eps))

    def apply_add(self, state: Any, x: Tensor, residual: Tensor) -> Tensor:
        """Compute residual + apply(x), written over residual."""
        return residual.add_(self.apply(state, x))

    def apply_post_norms(
        self,
        states: tuple[Any, Any, Any],
        attended: Tensor,
        residual: Tensor,
        norms: tuple[LayerNormParts, LayerNormParts],
        act: str,
    ) -> Tensor | None:
        """Compute the rest of a post-norm layer behind attention, written over residual [n,
        hidden].

        Returns None, with nothing written, where the steps have to be computed one by one. The
        numbers are the same.
        states: the states of out, up and down.
        act: a key of `Kernels.activation`.
        """
        return None

    def takes_gate(self, state: Any, x: Tensor) -> bool:
        """Whether `apply_inner` costs less than a gate and `apply`, for as many rows as x has."""
        return False

    def apply_inner(self, state: Any, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        """Compute apply(gate(both)) of both [n, 2 * in], added to residual if there is one.

        gate: a key of kernels.*.GATES.
        """
        x = self.kernels.GATES[gate](both)
        return self.apply(state, x) if residual is None else self.apply_add(state, x, residual)


class EmbeddingTable:
    """The table of embeddings that token ids look up, in the model's dtype.

    lookup: [vocab + virtual, hidden]; the rows behind the vocabulary belong to adapters.
    embedding: its first rows, [vocab, hidden].
    """

    def __init__(self, spec: LinearSpec, virtual: int) -> None:
        vocab, hidden = spec.out_features, spec.in_features
        self.lookup = torch.empty(vocab + virtual, hidden, dtype=spec.dtype, device=spec.device)
        self.embedding = self.lookup[:vocab]
        source = Source(f"{spec.parts[0].name}.weight", (vocab, hidden))
        self.parameters = [Parameter(f"{spec.name}.weight", self.embedding, (source,))]
        self.loading_bytes = self.num_bytes = self.embedding.nbytes
        self.num_parameters = spec.num_parameters

    def finish(self) -> None:
        """Pack the table, once its parameters are filled."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of ids [n] -> [n, hidden], in any dtype."""
        return embedding(ids, self.lookup)

    def head(self) -> "tuple[LinearMethod, Any] | None":
        """Return a method and a state that multiply by the head's rows of the finished table.

        None: the method for dense weights multiplies by them.
        """
        return None


@dataclass(slots=True)
class DenseState:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    name: str = ""  # of the layer


class Dense(LinearMethod):
    """The method for dense weights, as the checkpoint has them, in the model's dtype."""

    FROM_DENSE = True

    def create(self, spec: LinearSpec) -> tuple[DenseState, Sequence[Parameter]]:
        weight = torch.empty(
            spec.out_features, spec.in_features, dtype=spec.dtype, device=spec.device
        )
        sources = tuple(
            Source(
                f"{part.name}.weight",
                (part.in_features, part.out_features)
                if part.transposed
                else (part.out_features, part.in_features),
                rows=part.rows,
                columns=part.columns,
                transpose=part.transposed,
            )
            for part in spec.parts
        )
        parameters = [Parameter(f"{spec.name}.weight", weight, sources)]
        bias = None
        if spec.bias:
            bias = torch.empty(spec.out_features, dtype=spec.dtype, device=spec.device)
            sources = tuple(
                Source(f"{part.name}.bias", (part.out_features,), rows=part.rows)
                for part in spec.parts
            )
            parameters.append(Parameter(f"{spec.name}.bias", bias, sources))
        return DenseState(weight, bias, spec.name), parameters

    def apply(self, state: Any, x: Tensor) -> Tensor:
        return self.kernels.linear(x, state.weight, state.bias)

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        parameters = []

        def stacked(what: str, sources: tuple[Source, ...], *shape: int) -> Tensor:
            tensor = torch.empty(spec.count, *shape, dtype=spec.dtype, device=spec.device)
            rows = tensor.view(spec.count * shape[0], *shape[1:])
            parameters.append(Parameter(f"{spec.name}.{what}", rows, sources))
            return tensor

        size, hidden, rows = spec.size, spec.hidden, spec.one_gate_up.out_features
        stack = ExpertWeights(
            stacked("gate_up", spec.gate_up, rows, hidden),
            stacked("down", spec.down, hidden, size),
            stacked("gate_up_bias", spec.gate_up_bias, rows) if spec.gate_up_bias else None,
            stacked("down_bias", spec.down_bias, hidden) if spec.down_bias else None,
            spec.act,
            spec.limit,
            spec.weigh_input,
            spec.total,
        )
        return stack, parameters

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        return self.kernels.experts(x, weights, ids, state, residual)


class DenseCuda(Dense):
    """The dense method on CUDA: norm, gate and residual are fused with the matmul."""

    def tune(self, states: Sequence[DenseState], sizes: Sequence[int], add: bool) -> None:
        self.kernels.tune_linear([state.weight for state in states], sizes, add)

    def apply_norm(self, state: DenseState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.kernels.norm_linear(x, norm, eps, state.weight, state.bias)

    def apply_norm_gated(
        self, state: DenseState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        return self.kernels.norm_gated_linear(x, norm, eps, state.weight, state.bias, gate)

    def apply_add(self, state: DenseState, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.linear_add(x, state.weight, state.bias, residual)
