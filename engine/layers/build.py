"""Builder: creates the linear layers and norms that an architecture's record describes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from engine.architectures import CheckpointTensor
from engine.config.model_config import ModelConfig
from engine.layers.linear import LatentProjection, Linear, RowParallelLinear
from engine.layers.norm import LayerNorm, Norm, RMSNorm
from engine.layers.routes import RouteTap
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.quantization.by_layer import LayerMethods
from engine.quantization.method import ExpertsSpec, LinearMethod, LinearSpec, Part
from engine.weights.parameter import Parameter, Rows, Source, as_rows
from kernels.dispatch import Kernels
from kernels.experts.routing import up_rows


@dataclass(frozen=True, slots=True)
class Builder:
    """The constructor of a model's layers on this rank, with their common settings.

    Methods take sizes of the whole model, not of this rank's part. The parameter `ours` is a name
    in the record's tensors. Ranges are half-open.

    method: the linear method of layers that `layer_methods` does not name.
    group: the ranks that divide the layers.
    layer: the number of the current decoder layer; None outside of layers.
    """

    config: ModelConfig
    kernels: Kernels
    method: LinearMethod
    group: TensorParallelGroup
    dtype: torch.dtype  # dtype of matrices
    activation_dtype: torch.dtype  # dtype of activations and norms
    device: torch.device
    stage: Stage = Stage()  # noqa: RUF009, it is frozen
    layer: int | None = None
    # whether each rank has some whole experts, instead of a part of each
    spread_experts: bool = False
    data_parallel_attention: bool = False  # whether each rank has all heads, for its own requests
    runs_on: str = "cuda"  # type of the device on which the model will run
    # Names of tensors, and of modules with all their tensors, that are only on other ranks.
    elsewhere: set[str] = field(default_factory=set)
    layer_methods: LayerMethods | None = None  # methods by the setting `quantization_layers`
    # at most one tensor: the output of a layer's experts, which the next layer adds
    # (`ExpertsAhead`)
    ahead: list[torch.Tensor] = field(default_factory=list)
    routes: RouteTap = field(default_factory=RouteTap)  # records the experts that routers choose

    def method_of(self, layer: str, names: Sequence[str]) -> LinearMethod:
        """Return the linear method of a layer whose matrix is made of the checkpoint's `names`."""
        if self.layer_methods is None:
            return self.method
        return self.layer_methods.of(layer, names)

    def at(self, layer: int) -> "Builder":
        return replace(self, layer=layer)

    def outline(self) -> "Builder":
        """Return a builder on the meta device, for parts that are only on other ranks or stages."""
        return replace(self, device=torch.device("meta"))

    def undivided(self) -> "Builder":
        """Return a builder for layers that are not divided among ranks."""
        return replace(self, group=TensorParallelGroup())

    @property
    def head_group(self) -> TensorParallelGroup:
        """The group that divides attention heads; a single rank with data-parallel attention."""
        return TensorParallelGroup() if self.data_parallel_attention else self.group

    def has(self, ours: str) -> bool:
        record = self.config.record
        if ours not in record.tensors:
            return False
        return self.layer is None or ours not in record.absent(self.config, self.layer)

    def stored(self, ours: str) -> CheckpointTensor:
        stored = self.config.record.tensors[ours]
        return stored if self.layer is None else stored.at(self.layer)

    def column(
        self,
        ours: str,
        sizes: Sequence[int],
        in_features: int,
        *,
        bias: bool = False,
        ranges: Sequence[tuple[int, int]] | None = None,
        stored: Sequence[int] = (),
    ) -> Linear:
        """Create a column-parallel linear layer: output features are divided among the ranks.

        sizes: output features of each piece; pieces are stacked along rows.
        ranges: the rows of each piece that this rank has; None = equal parts.
        stored: the number of pieces in each of the checkpoint's tensors; () = all pieces in one
            tensor, or one in each.
        """
        own_ranges = ranges or [self.group.part(size, f"{ours} rows") for size in sizes]
        parts = self._parts(ours, sizes, own_ranges, in_features, (0, in_features), stored)
        spec = self._spec(ours, parts, bias)
        return Linear(spec, self.method_of(spec.name, [part.name for part in parts]))

    def row(
        self,
        ours: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        columns: tuple[int, int] | None = None,
    ) -> RowParallelLinear:
        """Create a row-parallel linear layer: input features are divided among the ranks.

        columns: the range of columns that this rank has; None = an equal part.
        """
        columns = columns or self.group.part(in_features, f"{ours} columns")
        parts = self._parts(ours, (out_features,), [(0, out_features)], in_features, columns)
        if bias and self.group.rank:  # rank 0 adds the bias
            self.elsewhere.update(f"{part.name}.bias" for part in parts)
            bias = False
        spec = self._spec(ours, parts, bias)
        method = self.method_of(spec.name, [part.name for part in parts])
        return RowParallelLinear(spec, method, self.group)

    def norm(self, ours: str, size: int, *, of_residual: bool = False, scale: float = 1.0) -> Norm:
        """Create a norm of the kind in the config.

        of_residual: whether the norm's input is the residual. The residual is stored divided by
            residual_scale, so that blocks add to it unscaled, and the norm's eps is scaled
            accordingly.
        scale: a factor on the output.
        """
        config = self.config
        eps = config.norm_eps
        if of_residual:
            eps /= config.residual_scale**2
        names = self.stored(ours).names
        kind = f"{self._name(ours)}."
        weight = bias = None
        if names:
            weight = self._vector(
                f"{kind}weight", (f"{names[0]}.weight",), size, ours, config.norm_offset, scale
            )
            if config.norm_bias:
                bias = self._vector(f"{kind}bias", (f"{names[0]}.bias",), size, ours, 0.0, scale)
        if config.norm == "layer":
            return LayerNorm(self.kernels, weight, bias, eps)
        if weight is None:
            return self.unit_norm(size, eps)
        return RMSNorm(self.kernels, weight, eps)

    def latent_projection(
        self, ours: str, out_features: int, rank: int, rows: tuple[int, int]
    ) -> LatentProjection:
        """Create the layer that projects latents to keys and values.

        rows: the range of rows that this rank has.
        """
        parts = self._parts(ours, (out_features,), (rows,), rank, (0, rank))
        spec = self._spec(ours, parts, False)
        return LatentProjection(spec, self.method_of(spec.name, [part.name for part in parts]))

    def unit_norm(self, size: int, eps: float | None = None) -> RMSNorm:
        """Make an RMS norm without weights."""
        ones = torch.ones(size, dtype=self.activation_dtype, device=self.device)
        return RMSNorm(self.kernels, ones, self.config.norm_eps if eps is None else eps)

    def head_norm(self, ours: str, heads: int, size: int, kept: tuple[int, int]) -> Parameter:
        """Create this rank's norm weights, one for each element of its heads: [kept heads * size].

        The checkpoint stores one tensor for all heads, or one for each.

        kept: the range of heads that this rank has.
        """
        (name,) = self.stored(ours).names
        begin, end = kept
        shape = ((end - begin) * size,)
        tensor = torch.empty(shape, dtype=self.activation_dtype, device=self.device)
        if "{h}" in name:
            names = [f"{name.replace('{h}', str(head))}.weight" for head in range(heads)]
            sources = tuple(Source(stored, (size,)) for stored in names[begin:end])
            self.elsewhere.update([*names[:begin], *names[end:]])
        else:
            rows_of = self.stored(ours).rows
            whole = (heads * size,) if self.config.qk_norm == "flat" else (heads, size)
            order = None if rows_of is None else rows_of(self.config)
            order = np.arange(heads * size) if order is None else np.asarray(order)
            rows = as_rows(order[begin * size : end * size])
            sources = (Source(f"{name}.weight", whole, rows, flat=True),)
        return Parameter(f"{self._name(ours)}.weight", tensor, sources, std=0.0)

    def sinks(self, heads: int, kept: tuple[int, int]) -> Parameter:
        """Create this rank's attention sinks, a float32 vector with one for each of its heads.

        kept: the range of heads that this rank has.
        """
        (name,) = self.stored("sinks").names
        begin, end = kept
        tensor = torch.empty(end - begin, dtype=torch.float32, device=self.device)
        return Parameter(self._name("sinks"), tensor, (Source(name, (heads,), (begin, end)),))

    def kept(self, ours: str, out_features: int, in_features: int) -> Parameter:
        """Create a small matrix that is not divided among ranks, in the activations' dtype."""
        (name,) = self.stored(ours).names
        shape = (out_features, in_features)
        tensor = torch.empty(shape, dtype=self.activation_dtype, device=self.device)
        return Parameter(f"{self._name(ours)}.weight", tensor, (Source(f"{name}.weight", shape),))

    def router_bias(self) -> Parameter:
        (name,) = self.stored("router").names
        assert self.config.experts is not None
        count = self.config.experts.count
        tensor = torch.empty(count, dtype=self.activation_dtype, device=self.device)
        return Parameter(self._name("router.bias"), tensor, (Source(f"{name}.bias", (count,)),))

    def vector(
        self,
        ours: str,
        *sizes: int,
        ranges: Sequence[tuple[int, int]] | None = None,
        std: float = 0.02,
        scale: float = 1.0,
    ) -> Parameter:
        """Create a float32 vector that concatenates one or more of the checkpoint's vectors.

        sizes: the number of elements of each vector. The checkpoint stores them as separate
            tensors, or all in one tensor, of any shape.
        ranges: the range of each vector that this rank has; None = all.
        std, scale: see `Parameter`.
        """
        names, own_ranges = self.stored(ours).names, ranges or [(0, size) for size in sizes]
        length = sum(end - begin for begin, end in own_ranges)
        tensor = torch.empty(length, dtype=torch.float32, device=self.device)
        if len(names) == 1:
            starts = accumulate(sizes, initial=0)
            own = [
                np.arange(*own_range) + start
                for own_range, start in zip(own_ranges, starts, strict=False)
            ]
            rows = as_rows(np.concatenate(own))
            sources: tuple[Source, ...] = (Source(names[0], (sum(sizes),), rows, flat=True),)
        else:
            sources = tuple(
                Source(name, (size,), own_range, flat=True)
                for name, size, own_range in zip(names, sizes, own_ranges, strict=True)
            )
        return Parameter(self._name(ours), tensor, sources, std=std, scale=scale)

    def experts(self) -> ExpertsSpec:
        """Return the spec of this rank's experts of the layer: parts of all experts, or whole
        ones."""
        experts = self.config.experts
        assert experts is not None
        size, hidden = experts.size, self.config.hidden_size
        here = self.experts_here()
        # The ranks among which each expert is divided.
        group = TensorParallelGroup() if self.spread_experts else self.group
        begin, end = group.part(size, "expert columns")
        rows, own_rows = up_rows(size, experts.act), ((begin, end), (size + begin, size + end))
        both = (rows, hidden), own_rows[: rows // size], None
        columns = None if group.size == 1 else (begin, end)
        down = (hidden, size), ((0, hidden),), columns
        gate_up_bias: tuple[Source, ...] = ()
        down_bias: tuple[Source, ...] = ()
        if experts.bias:
            gate_up_bias = self._of_experts("experts_gate_up_bias", here, (rows,), both[1], None)
            down_bias = self._of_experts("experts_down_bias", here, (hidden,), down[1], None)
            if group.rank:  # rank 0 adds the bias
                self.elsewhere.update(source.name for source in down_bias)
                down_bias = ()
        return ExpertsSpec(
            self._name("experts"),
            len(here),
            end - begin,
            hidden,
            self._of_experts("experts_gate_up", here, *both),
            self._of_experts("experts_down", here, *down),
            gate_up_bias,
            down_bias,
            self.dtype,
            self.device,
            experts.act,
            experts.limit,
            experts.weigh_input,
            experts.count if self.spread_experts else 0,
        )

    def experts_here(self) -> range:
        """The indices of the experts on this rank, whole or in part."""
        assert self.config.experts is not None
        count = self.config.experts.count
        return range(*self.group.part(count, "experts")) if self.spread_experts else range(count)

    def _of_experts(
        self,
        ours: str,
        here: range,
        shape: tuple[int, ...],  # shape of an expert's matrix or vector
        kept: Sequence[tuple[int, int]],  # ranges of its rows
        columns: tuple[int, int] | None,
    ) -> tuple[Source, ...]:
        """Return the sources of all experts on this rank, one expert after the other.

        The checkpoint stores an expert's matrix as one tensor, or its pieces as separate tensors.

        here: the indices of this rank's experts.
        columns: the range of an expert's columns that this rank has; None = all.
        """
        assert self.config.experts is not None
        count, stored = self.config.experts.count, self.stored(ours)
        order = np.arange(shape[0]) if stored.rows is None else stored.rows(self.config)
        num_rows, of_row = shape[0] // len(stored.names), shape[1:]
        if len(stored.names) == 1:
            pieces = [np.concatenate([order[begin:end] for begin, end in kept])]
        else:
            pieces = [order[begin:end] % num_rows for begin, end in kept]
        on_disk = (num_rows, *of_row)[::-1] if stored.transposed else (num_rows, *of_row)
        sources = []
        for expert in range(count):
            for name, rows in zip(stored.names, pieces, strict=True):
                stacked = "{e}" not in name
                own = name.replace("{e}", str(expert))
                if expert not in here:
                    if not stacked:
                        self.elsewhere.add(own.removesuffix(".weight"))
                    continue
                sources.append(
                    Source(
                        own,
                        (count, *on_disk) if stacked else on_disk,
                        as_rows(rows),
                        columns,
                        stored.transposed,
                        at=expert if stacked else None,
                    )
                )
        return tuple(sources)

    def numbers(self, ours: str, names: Sequence[str]) -> Parameter:
        """Create a float32 vector of scalars that are stored as separate tensors.

        names: the suffixes of the tensors' names, after the checkpoint's name of `ours`.
        """
        (prefix,) = self.stored(ours).names
        tensor = torch.empty(len(names), dtype=torch.float32, device=self.device)
        sources = tuple(Source(f"{prefix}.{name}", (1,)) for name in names)
        return Parameter(self._name(ours), tensor, sources, std=0.0)

    def table(self, ours: str, rows: int, begin: int, end: int, width: int) -> Parameter:
        """Create rows [begin, end) of a lookup table with `rows` rows of `width` elements."""
        (name,) = self.stored(ours).names
        tensor = torch.empty(end - begin, width, dtype=self.dtype, device=self.device)
        source = Source(f"{name}.weight", (rows, width), (begin, end))
        return Parameter(f"{self._name(ours)}.weight", tensor, (source,))

    def _vector(
        self,
        name: str,
        stored: tuple[str],
        size: int,
        ours: str,
        offset: float,
        scale: float,
    ) -> Parameter:
        """Create the weight or bias of a norm; `stored` is the checkpoint's tensor.

        A vector with an offset or scale is float32, so that these are applied without loss.
        """
        dtype = self.activation_dtype if (offset, scale) == (0.0, 1.0) else torch.float32
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        order = self.stored(ours).rows
        rows = None if order is None else as_rows(order(self.config))
        source = Source(stored[0], (size,), rows)
        return Parameter(name, tensor, (source,), std=0.0, offset=offset, scale=scale)

    def _name(self, ours: str) -> str:
        return ours if self.layer is None else f"layers.{self.layer}.{ours}"

    def _spec(self, ours: str, parts: tuple[Part, ...], bias: bool) -> LinearSpec:
        return LinearSpec(self._name(ours), parts, bias, self.dtype, self.device)

    def _parts(
        self,
        ours: str,
        sizes: Sequence[int],
        kept: Sequence[tuple[int, int]],  # the rows to keep of each piece, half-open
        in_features: int,
        columns: tuple[int, int],
        counts: Sequence[int] = (),  # number of pieces in each tensor
    ) -> tuple[Part, ...]:
        """Return the rows and columns to load of each checkpoint tensor of a linear layer."""
        stored = self.stored(ours)
        order = np.arange(sum(sizes)) if stored.rows is None else stored.rows(self.config)
        starts = list(accumulate(sizes, initial=0))
        if not counts:
            counts = (1,) * len(sizes) if len(stored.names) > 1 else (len(sizes),)
        begins = list(accumulate(counts, initial=0))
        parts = []
        for name, begin, count in zip(stored.names, begins[:-1], counts, strict=True):
            pieces = range(begin, begin + count)
            first = starts[pieces[0]]
            rows: Rows = as_rows(
                np.concatenate(
                    [order[starts[p] + kept[p][0] : starts[p] + kept[p][1]] for p in pieces]
                )
                - first
            )
            size = sum(sizes[piece] for piece in pieces)
            parts.append(Part(name, size, in_features, rows, columns, stored.transposed))
        return tuple(parts)
