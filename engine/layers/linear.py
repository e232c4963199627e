"""Linear: a linear layer of a LinearMethod; whole, or one rank's rows or columns.

The caller passes the operations before and after the matmul (norm, gate, residual, adapters).
Linear decides which of these are fused with the matmul. The others are separate launches with the
same result.
The method is `forward` and not `__call__`, here and in the blocks. For `__call__` Python creates a
tuple and a dict of the arguments each time. With nine calls a layer this was half of an eager
layer's cost outside the kernels.
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

    adaptable = True  # whether adapters may change the layer

    def __init__(self, spec: LinearSpec, method: LinearMethod) -> None:
        self.spec = spec
        self.method = method
        # the layer's position in the adapters' tables; None = adapters are not supported
        self.lora: LoraLinear | None = None
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
        """The bytes of the layer after `finish`."""
        packed = self.method.packed_bytes(self.spec)
        return self.loading_bytes if packed is None else packed

    def forward(
        self,
        x: Tensor,
        lora: LoraStep | None = None,
        *,
        norm: Norm | None = None,
        gate: str | None = None,
        act: str | None = None,
    ) -> Tensor:
        """Return gate(self(norm(x))) or act(self(norm(x))), [n, out].

        gate: the activation of a gated MLP. The output is then [n, out / 2]; the matrix has the
            gate's rows first, then the up projection's.
        act: a name that `Kernels.activation` takes; not with a gate or adapters.
        """
        method, state = self.method, self.state
        if norm is not None:
            # In deterministic mode a token without an adapter must have the same result in steps
            # with and without adapters, and steps with adapters cannot fuse the norm.
            apart = self.lora is not None and method.kernels.DETERMINISTIC
            if lora is None and not apart and isinstance(norm, RMSNorm) and not norm.is_ahead(x):
                if gate is not None:
                    return method.apply_norm_gated(state, x, norm.weight, norm.eps, gate)
                y = method.apply_norm(state, x, norm.weight, norm.eps)
                return y if act is None else method.kernels.activation(y, act)
            x = norm(x)
        if act is not None:
            assert lora is None
            return method.apply_act(state, x, act)
        y = method.apply(state, x)
        kernels = method.kernels
        if lora is not None:
            assert self.lora is not None
            if gate is not None and len(self.lora.outs) == 2:
                return kernels.lora_gated(y, x, self.lora, lora, gate)
            y = self._adapted(y, x, lora)
        return y if gate is None else kernels.GATES[gate](y)

    def _adapted(self, y: Tensor, x: Tensor, lora: LoraStep) -> Tensor:
        """Add the output of each token's adapter to y = self(x) in place, and return y."""
        assert self.lora is not None
        return self.method.kernels.lora_add(y, x, self.lora, lora)

    def finish(self) -> None:
        """Pack the layer; called once all parameters are filled."""
        self.state = self.method.finish(self.state)
        self.parameters = ()


class RowParallelLinear(Linear):
    """A linear layer of which each rank has some columns.

    An all-reduce adds the outputs of all ranks. Rank 0 adds the bias.
    """

    def __init__(self, spec: LinearSpec, method: LinearMethod, group: TensorParallelGroup) -> None:
        super().__init__(spec, method)
        self.group = group
        self.then: RMSNorm | None = None  # see `add_reduced`

    def takes_gate(self, x: Tensor, lora: LoraStep | None) -> bool:
        """Whether `inner`, which fuses the preceding gate, should be used for x's number of rows.

        A step with adapters cannot fuse the gate, because adapters read the gate's output.
        """
        return lora is None and self.method.takes_gate(self.state, x)

    def inner(self, both: Tensor, gate: str, residual: Tensor | None) -> Tensor:
        """Return self(gate(both)) of both [n, 2 * in], summed over all ranks.

        residual: if given, the sum is added to it in place, and the residual is returned.
        """
        if residual is not None and self.group.size == 1:
            return self.method.apply_inner(self.state, both, gate, residual)
        return self._summed(self.method.apply_inner(self.state, both, gate, None), residual)

    def forward(  # type: ignore[override]  # without a fused norm or gate
        self, x: Tensor, lora: LoraStep | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        """Return self(x), summed over all ranks.

        residual: if given, the sum is added to it in place, and the residual is returned.
        """
        # with several ranks, the residual is added after the all-reduce instead
        if residual is not None and self.group.size == 1:
            y = self.method.apply_add(self.state, x, residual)
            return y if lora is None else self._adapted(y, x, lora)
        y = self.method.apply(self.state, x)
        if lora is not None:  # with several ranks, y and the adapter's output are partial sums
            y = self._adapted(y, x, lora)
        return self._summed(y, residual)

    def _summed(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """Return the all-reduce of y, this rank's part of the output.

        residual: if given, the sum is added to it in place, and the residual is returned.
        """
        if residual is None:
            return self.group.all_reduce(y)
        return add_reduced(self.group, y, residual, self.then)


def add_reduced(
    group: TensorParallelGroup, x: Tensor, residual: Tensor, then: RMSNorm | None
) -> Tensor:
    """Add the all-reduce of x to residual in place, and return residual.

    then: the norm that reads the residual next, which the same kernel may compute.
    """
    if then is not None:
        normed = group.norm_reduced(x, residual, then.weight, then.eps)
        if normed is not None:
            then.ahead = residual, normed
            return residual
    return group.add_reduced(x, residual)


class LatentProjection(Linear):
    """The layer that projects latents to keys and values (MLA), as a dense matrix.

    Decodes multiply queries by one part of the matrix, and attention's result by the other, so that
    keys and values are never computed. Adapters cannot change the layer, as each token of a step
    would need a different matrix.
    """

    adaptable = False

    def __init__(self, spec: LinearSpec, method: LinearMethod) -> None:
        super().__init__(spec, method)
        self.weight: Tensor  # [out, rank] in the model's dtype, set by `finish`

    @property
    def num_bytes(self) -> int:
        return self.spec.out_features * self.spec.in_features * self.spec.dtype.itemsize

    @torch.no_grad()
    def finish(self) -> None:
        """Set the dense `weight`; a quantised weight is dequantised by a matmul with the
        identity."""
        super().finish()
        spec = self.spec
        if isinstance(self.state, DenseState):
            self.weight = self.state.weight
        else:
            kind = torch.float32 if spec.device.type == "cpu" else spec.dtype
            ones = torch.eye(spec.in_features, dtype=kind, device=spec.device)
            self.weight = self.method.apply(self.state, ones).t().to(spec.dtype).contiguous()
        self.state = None
