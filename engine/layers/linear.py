"""Linear: a matrix made and applied by a LinearMethod; whole, or one rank's rows or columns.

A caller names what stands before and behind the product (norm, gate, residual, adapters), and here
is decided what rides along with it. What does not fit is launched apart, with the same result.

The method is `forward` and not `__call__`, here and in the blocks: for `__call__` Python makes a
tuple and a dict of the arguments each time, which with nine calls a layer was half of what an eager
layer cost beside its kernels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.layers.norm import Norm, RMSNorm
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import DenseState, LinearMethod, LinearSpec
from engine.weights.parameter import Parameter, Unit
from kernels.metadata import LoraLinear, LoraStep


class Linear:
    """A linear layer: x [n, in] -> [n, out]. Parts of several checkpoint matrices are merged along
    the output."""

    adaptable = True  # adapters may change it

    def __init__(self, spec: LinearSpec, method: LinearMethod) -> None:
        self.spec = spec
        self.method = method
        self.lora: LoraLinear | None = None  # its place in the adapters' tables
        self.state: Any
        self.parameters: Sequence[Parameter]
        self.state, self.parameters = method.create(spec)
        self.loading_bytes = sum(parameter.tensor.nbytes for parameter in self.parameters)
        self.transient = method.replaces(method.packed_bytes(spec))
        if self.transient:
            for parameter in self.parameters:
                parameter.release()

    @property
    def unit(self) -> Unit:
        return Unit([*self.parameters], self.finish, self.transient)

    @property
    def num_bytes(self) -> int:
        """The bytes of the layer once finished."""
        packed = self.method.packed_bytes(self.spec)
        return self.loading_bytes if packed is None else packed

    def forward(
        self,
        x: Tensor,
        lora: LoraStep | None = None,
        *,
        norm: Norm | None = None,
        gate: str | None = None,
    ) -> Tensor:
        """gate(self(norm(x))); with a gate [n, out / 2], its rows come before the up's."""
        method, state = self.method, self.state
        if norm is not None:
            # A token without an adapter shall have the same numbers in a step with adapters, where
            # the norm cannot ride along, and in one without.
            apart = self.lora is not None and method.kernels.DETERMINISTIC
            if lora is None and not apart and isinstance(norm, RMSNorm) and not norm.is_ahead(x):
                if gate is None:
                    return method.apply_norm(state, x, norm.weight, norm.eps)
                return method.apply_norm_gated(state, x, norm.weight, norm.eps, gate)
            x = norm(x)
        y = method.apply(state, x)
        kernels = method.kernels
        if lora is not None:
            assert self.lora is not None
            if gate is not None and len(self.lora.outs) == 2:
                return kernels.lora_gated(y, x, self.lora, lora, gate)
            y = self._adapted(y, x, lora)
        return y if gate is None else kernels.GATES[gate](y)

    def _adapted(self, y: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """y, which is self(x), with each token's adapter added; written over y."""
        assert self.lora is not None
        return self.method.kernels.lora_add(y, x, self.lora, lora)

    def finish(self) -> None:
        """Pack the layer; call once all parameters are filled."""
        self.state = self.method.finish(self.state)
        self.parameters = ()


class RowParallelLinear(Linear):
    """A linear layer of which each rank holds columns; rank 0 adds the bias.

    The outputs of all ranks are added by an all-reduce.
    """

    def __init__(self, spec: LinearSpec, method: LinearMethod, group: TensorParallelGroup) -> None:
        super().__init__(spec, method)
        self.group = group
        self.then: RMSNorm | None = None  # see `add_reduced`

    def takes_gate(self, x: Tensor, lora: LoraStep | None) -> bool:
        """Whether the gate before it, for as many rows as x has, is better left to `inner`.
        Adapters read what the gate gives."""
        return lora is None and self.method.takes_gate(self.state, x)

    def inner(self, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        """self(gate(both)) of both [n, 2 * in], or residual + that, written over residual."""
        if residual is not None and self.group.size == 1:
            return self.method.apply_inner(self.state, both, gate, residual)
        return self._summed(self.method.apply_inner(self.state, both, gate, None), residual)

    def forward(  # type: ignore[override]  # nothing stands before it that could ride along
        self, x: Tensor, lora: LoraStep | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """self(x), or residual + self(x) written over residual."""
        if residual is not None and self.group.size == 1:  # else its place is behind the sum
            y = self.method.apply_add(self.state, x, residual)
            return y if lora is None else self._adapted(y, x, lora)
        y = self.method.apply(self.state, x)
        if lora is not None:  # of a sharded layer both are partial sums
            y = self._adapted(y, x, lora)
        return self._summed(y, residual)

    def _summed(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """All-reduce y, this rank's part; a residual is written over with the residual plus the
        sum."""
        if residual is None:
            return self.group.all_reduce(y)
        return add_reduced(self.group, y, residual, self.then)


def add_reduced(
    group: TensorParallelGroup, x: Tensor, residual: Tensor, then: RMSNorm | None
) -> Tensor:
    """Return residual + the all-reduce of x, written over residual.

    then: the norm that reads the residual next, with nothing added in between.
    """
    if then is not None:
        normed = group.norm_reduced(x, residual, then.weight, then.eps)
        if normed is not None:
            then.ahead = residual, normed
            return residual
    return group.add_reduced(x, residual)


class HeadProducts(Linear):
    """The layer that makes keys and values of a latent, kept as numbers.

    Decodes multiply queries by one part of the matrix, and what was attended by the other, so that
    no key or value is made. Adapters cannot change the layer, as every token of a step would need a
    matrix of its own.
    """

    adaptable = False

    def __init__(self, spec: LinearSpec, method: LinearMethod) -> None:
        super().__init__(spec, method)
        self.weight: Tensor  # [out, rank] of the model's dtype, from `finish` on

    @property
    def num_bytes(self) -> int:
        return self.spec.out_features * self.spec.in_features * self.spec.dtype.itemsize

    @torch.no_grad()
    def finish(self) -> None:
        """Make `weight` of the method's state: a matmul with the identity, or the dense weight
        itself."""
        super().finish()
        spec = self.spec
        if isinstance(self.state, DenseState):
            self.weight = self.state.weight
        else:
            kind = torch.float32 if spec.device.type == "cpu" else spec.dtype
            ones = torch.eye(spec.in_features, dtype=kind, device=spec.device)
            self.weight = self.method.apply(self.state, ones).t().to(spec.dtype).contiguous()
        self.state = None
