"""Linear: a matrix made and applied by a LinearMethod; whole, or one rank's rows or columns."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import LinearMethod, LinearSpec, Part
from engine.weights.parameter import Parameter
from kernels.metadata import LoraLinear, LoraStep


class Linear:
    """x [n, in] -> [n, out]. Parts of several checkpoint matrices are merged along the output."""

    def __init__(self, spec: LinearSpec, method: LinearMethod) -> None:
        self.spec = spec
        self.method = method
        self.lora: LoraLinear | None = None  # its place in the adapters' tables
        self.state: Any
        self.parameters: Sequence[Parameter]
        self.state, self.parameters = method.create(spec)

    def __call__(self, x: Tensor) -> Tensor:
        return self.method.apply(self.state, x)

    def after_norm(
        self, x: Tensor, norm: Tensor, eps: float, lora: LoraStep | None = None
    ) -> Tensor:
        """self(rms_norm(x))."""
        if lora is None and not self._apart:
            return self.method.apply_norm(self.state, x, norm, eps)
        x = self.method.kernels.rms_norm(x, norm, eps)
        y = self.method.apply(self.state, x)
        return y if lora is None else self.with_adapters(y, x, lora)

    def gated_after_norm(
        self, x: Tensor, norm: Tensor, eps: float, gate: str, lora: LoraStep | None = None
    ) -> Tensor:
        """gate(self(rms_norm(x))) -> [n, out / 2]; the gate's rows come before the up's."""
        if lora is None and not self._apart:
            return self.method.apply_norm_gated(self.state, x, norm, eps, gate)
        kernels = self.method.kernels
        x = kernels.rms_norm(x, norm, eps)
        gate_up = self.method.apply(self.state, x)
        if lora is None:
            return kernels.GATES[gate](gate_up)
        assert self.lora is not None
        return kernels.lora_gated(gate_up, x, self.lora, lora, gate)

    @property
    def _apart(self) -> bool:
        """A token without an adapter shall have the same numbers in a step with adapters, where the
        norm cannot ride along with the product, and in one without."""
        return self.lora is not None and self.method.kernels.DETERMINISTIC

    def with_adapters(self, y: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """y, which is self(x), with each token's adapter added; written over y."""
        assert self.lora is not None
        return self.method.kernels.lora_add(y, x, self.lora, lora)

    def finish(self) -> None:
        """Call once all parameters are filled."""
        self.state = self.method.finish(self.state)
        self.parameters = ()


class RowParallelLinear(Linear):
    """Each rank holds columns of the matrix and the outputs are summed; rank 0 adds the bias."""

    def __init__(self, spec: LinearSpec, method: LinearMethod, group: TensorParallelGroup) -> None:
        super().__init__(spec, method)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.method.apply(self.state, x))

    def add(self, x: Tensor, residual: Tensor, lora: LoraStep | None = None) -> Tensor:
        """residual + self(x), written over residual."""
        if self.group.size == 1:
            residual = self.method.apply_add(self.state, x, residual)
            return residual if lora is None else self.with_adapters(residual, x, lora)
        if lora is not None:  # of a sharded layer both are partial sums
            y = self.with_adapters(self.method.apply(self.state, x), x, lora)
            return residual.add_(self.group.all_reduce(y))
        return residual.add_(self(x))


class LinearFactory:
    """What all linear layers of a model share. Sizes passed in are those of the whole model."""

    def __init__(
        self,
        method: LinearMethod,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.method = method
        self.group = group
        self.dtype = dtype
        self.device = device

    def column(
        self,
        name: str,
        sources: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        unit: int = 1,
    ) -> Linear:
        """Output features are divided among the ranks.

        sources: (checkpoint name, output features), merged in this order.
        unit: features that stay together (head_dim); a source with fewer units than ranks is
            copied.
        """
        parts = []
        for theirs, features in sources:
            begin, end = self.group.part_or_copy(features // unit, f"{theirs} rows")
            parts.append(
                Part(theirs, features, in_features, (begin * unit, end * unit), (0, in_features))
            )
        spec = LinearSpec(name, tuple(parts), bias, self.dtype, self.device)
        return Linear(spec, self.method)

    def row(
        self, name: str, source: str, out_features: int, in_features: int, *, bias: bool = False
    ) -> RowParallelLinear:
        """Input features are divided among the ranks."""
        columns = self.group.part(in_features, f"{source} columns")
        part = Part(source, out_features, in_features, (0, out_features), columns)
        bias = bias and self.group.rank == 0
        spec = LinearSpec(name, (part,), bias, self.dtype, self.device)
        return RowParallelLinear(spec, self.method, self.group)
