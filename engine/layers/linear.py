"""Linear: a matrix made and applied by a LinearMethod; whole, or one rank's rows or columns.

A caller names what comes before and behind the matmul (norm, gate, residual, adapters). Linear
decides what is fused with it; the rest is launched apart, with the same result.

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
    """A linear layer x [n, in] -> [n, out], whose output merges several checkpoint matrices.

    transient: whether parameters have memory only while weights load.
    """

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
        """Compute gate(self(norm(x))). With a gate, [n, out / 2]: the gate's rows come before the
        up's."""
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
        """Add each token's adapter to y = self(x), written over y."""
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
        """Whether the gate before this layer is better left to `inner`, for as many rows as x has.

        Adapters read the gate's output.
        """
        return lora is None and self.method.takes_gate(self.state, x)

    def inner(self, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        """Compute self(gate(both)) of both [n, 2 * in]; with a residual, add it in place."""
        if residual is not None and self.group.size == 1:
            return self.method.apply_inner(self.state, both, gate, residual)
        return self._summed(self.method.apply_inner(self.state, both, gate, None), residual)

    def forward(  # type: ignore[override]  # nothing stands before it that could ride along
        self, x: Tensor, lora: LoraStep | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """Compute self(x); with a residual, add that to it in place."""
        if residual is not None and self.group.size == 1:  # else its place is behind the sum
            y = self.method.apply_add(self.state, x, residual)
            return y if lora is None else self._adapted(y, x, lora)
        y = self.method.apply(self.state, x)
        if lora is not None:  # of a sharded layer both are partial sums
            y = self._adapted(y, x, lora)
        return self._summed(y, residual)

    def _summed(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """All-reduce y, this rank's part; with a residual, add the sum to it in place."""
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


class LatentProjection(Linear):
    """The layer that projects a latent to keys and values (MLA), kept as dense numbers.

    Decodes multiply queries by one part of the matrix, and the attended latents by the other, so
    that no key or value is made. Adapters cannot change the layer, as every token of a step would
    need a matrix of its own.
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
        """Compute `weight` from the method's state: a matmul with the identity, or the dense weight
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
