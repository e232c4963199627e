"""LinearMethod: the interface of a storage format of weights, with its matmuls.

Each kind of quantisation is a subclass, which `registry` chooses. ``create`` allocates the weights
and names their checkpoint tensors. ``finish`` packs the weights after loading. ``apply`` is the
matmul, on the hot path.
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
    """A checkpoint matrix [out, in] in a (merged) layer, of which this rank holds rows x columns.

    out_features, in_features: the size of the whole matrix.
    rows, columns: the rows and columns of this rank, rows in the layer's order; columns are a
        half-open range.
    """

    name: str  # name of the matrix, without ".weight"
    out_features: int
    in_features: int
    rows: Rows
    columns: tuple[int, int]
    transposed: bool = False  # whether the checkpoint stores [in, out]
    # (index, count) of this matrix in a tensor that stacks several; None = a separate tensor
    stack: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The description of a linear layer: names, shapes and dtypes.

    parts: the checkpoint's matrices, stacked along rows; all have the same columns.
    """

    name: str
    parts: tuple[Part, ...]
    bias: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def out_features(self) -> int:
        """The number of rows on this rank."""
        return sum(num_rows(part.rows) for part in self.parts)

    @property
    def in_features(self) -> int:
        """The number of columns on this rank."""
        columns = self.parts[0].columns
        return columns[1] - columns[0]

    @property
    def num_parameters(self) -> int:
        return self.out_features * (self.in_features + self.bias)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The description of this rank's experts of a layer: shapes and sources.

    size: the inner width of an expert.
    gate_up: sources, one expert after the other; rows of a gate come before those of up.
    down: sources, one expert after the other.
    gate_up_bias, down_bias: sources of the biases, expert by expert; () without biases.
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
        """The spec of one expert's gate and up projection, or of only up."""
        rows = up_rows(self.size, self.act)
        return self._one(rows, self.hidden, bool(self.gate_up_bias))

    @property
    def one_down(self) -> LinearSpec:
        return self._one(self.hidden, self.size, bool(self.down_bias))

    def _one(self, rows: int, columns: int, bias: bool) -> LinearSpec:
        part = Part(self.name, rows, columns, (0, rows), (0, columns))
        return LinearSpec(self.name, (part,), bias, self.dtype, self.device)


class LinearMethod(ABC):
    """A storage format of linear layers' weights, with the matmuls for it.

    Subclasses define `create` and `apply`, and override the operations that they fuse with the
    GEMM.
    """

    FROM_DENSE = False  # whether `create` loads the weights of an unquantised checkpoint

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @abstractmethod
    def create(self, spec: LinearSpec) -> tuple[Any, Sequence[Parameter]]:
        """Allocate a layer; return (state for `apply`, parameters that loading fills)."""

    def finish(self, state: Any) -> Any:
        """Pack the state, once after loading; return the state for `apply` from then on."""
        return state

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        """Return the bytes of the state after `finish`; None = the same as after `create`."""
        return None

    def replaces(self, packed_bytes: int | None) -> bool:
        """Whether `finish` replaces the tensors of `create`, which then exist only while loading.

        packed_bytes: the result of `packed_bytes` or `packed_experts_bytes`.
        """
        return self.FROM_DENSE and packed_bytes is not None

    @abstractmethod
    def apply(self, state: Any, x: Tensor) -> Tensor:
        """Multiply x [n, in]; return [n, out]. On CUDA this must be capturable in a CUDA graph."""

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        """Allocate the experts of a layer; return (state, parameters that loading fills).

        Raises ConfigError if the method cannot store experts.
        """
        raise ConfigError(
            f"{spec.name}: this kind of quantized weights has no kernels for mixtures of experts; "
            "take a checkpoint in 16 bits, or set quantization: none for a .gguf file",
            param="quantization",
        )

    def finish_experts(self, state: Any) -> Any:
        """Pack the experts' state, once after loading; return the state for `apply_experts`."""
        return state

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        """Return the bytes after `finish_experts`; None = the same as after `create_experts`."""
        return None

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of each token's experts; arguments: see `Kernels.experts`."""
        raise NotImplementedError

    def tune(self, states: Sequence[Any], sizes: Sequence[int], add: bool) -> None:  # noqa: B027
        """Find the fastest kernels of `apply` for states of one shape, before graphs are captured.

        A method without alternatives does nothing.

        sizes: the numbers of rows of x.
        add: whether to tune `apply_add` instead of `apply`.
        """

    def table(
        self, spec: LinearSpec, virtual: int, head: tuple[int, int] | None
    ) -> "EmbeddingTable":
        """Create the embedding table.

        virtual: the number of rows after the vocabulary, for adapters.
        head: the half-open range of rows of this rank's part of the LM head, if the head is tied to
            the embedding; else None.
        """
        return EmbeddingTable(spec, virtual)

    def apply_norm(self, state: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return apply(rms_norm(x)), [n, out]. norm, eps: the norm's weight and epsilon."""
        return self.apply(state, self.kernels.rms_norm(x, norm, eps))

    def apply_norm_gated(
        self, state: Any, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        """Return gate(apply(rms_norm(x))), [n, out / 2].

        norm, eps: the norm's weight and epsilon.
        gate: a key of kernels.*.GATES.
        """
        return self.kernels.GATES[gate](self.apply_norm(state, x, norm, eps))

    def apply_act(self, state: Any, x: Tensor, act: str) -> Tensor:
        """Return act(apply(x)), [n, out]. act: a name that `Kernels.activation` takes."""
        return self.kernels.activation(self.apply(state, x), act)

    def apply_add(self, state: Any, x: Tensor, residual: Tensor) -> Tensor:
        """Add apply(x) to residual in place, and return the residual."""
        return residual.add_(self.apply(state, x))

    def apply_post_norms(
        self,
        states: tuple[Any, Any, Any],
        attended: Tensor,
        residual: Tensor,
        norms: tuple[LayerNormParts, LayerNormParts],
        act: str,
    ) -> Tensor | None:
        """Compute the rest of a post-norm layer after attention, over residual [n, hidden] in
        place.

        Returns None, and writes nothing, if the caller has to compute the operations one by one,
        with the same result.

        states: the states of the linear layers out, up and down.
        attended: the attention's result, which is the input of `out`.
        norms: the norms after attention and after the MLP.
        act: a key of `Kernels.activation`.
        """
        return None

    def takes_gate(self, state: Any, x: Tensor) -> bool:
        """Whether `apply_inner` is faster than a separate gate and `apply`, for x's number of
        rows."""
        return False

    def apply_inner(self, state: Any, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        """Return apply(gate(both)) for both [n, 2 * in].

        gate: a key of kernels.*.GATES.
        residual: if given, the result is added to it in place.
        """
        x = self.kernels.GATES[gate](both)
        return self.apply(state, x) if residual is None else self.apply_add(state, x, residual)


class EmbeddingTable:
    """The embedding table, in the model's dtype.

    lookup: [vocab + virtual, hidden]; the rows after the vocabulary belong to adapters.
    embedding: the first rows of lookup, [vocab, hidden].
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
        """Return the embeddings [n, hidden] of ids [n], which may have any integer dtype."""
        return embedding(ids, self.lookup)

    def head(self) -> "tuple[LinearMethod, Any] | None":
        """Return (method, state) of a tied LM head that uses the finished table.

        None if the head uses the rows of `embedding` with the method for dense weights.
        """
        return None


@dataclass(slots=True)
class DenseState:
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    name: str = ""  # name of the layer


class Dense(LinearMethod):
    """The method for unquantised weights in the model's dtype, in the checkpoint's layout."""

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
    """The method for unquantised weights on CUDA, which fuses norm, gate and residual with the
    matmul."""

    def tune(self, states: Sequence[DenseState], sizes: Sequence[int], add: bool) -> None:
        self.kernels.tune_linear([state.weight for state in states], sizes, add)

    def apply_norm(self, state: DenseState, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.kernels.norm_linear(x, norm, eps, state.weight, state.bias)

    def apply_norm_gated(
        self, state: DenseState, x: Tensor, norm: Tensor, eps: float, gate: str
    ) -> Tensor:
        return self.kernels.norm_gated_linear(x, norm, eps, state.weight, state.bias, gate)

    def apply_act(self, state: DenseState, x: Tensor, act: str) -> Tensor:
        return self.kernels.linear_act(x, state.weight, state.bias, act)

    def apply_add(self, state: DenseState, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.linear_add(x, state.weight, state.bias, residual)
