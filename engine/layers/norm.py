"""RMSNorm, which can be fused with the next matmul, and LayerNorm, a separate launch."""

from typing import Protocol

from torch import Tensor

from engine.weights.parameter import Parameter
from kernels.dispatch import Kernels


class Norm(Protocol):
    parameters: tuple[Parameter, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [n, size] in new memory."""
        ...

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the norm of x to residual [n, size] in place, and return the residual."""
        return residual.add_(self(x))


class RMSNorm(Norm):
    """The RMS norm x / rms(x) * weight.

    weight: the weight; ones if the checkpoint has none.
    ahead: (residual, its norm), if the preceding all-reduce has computed both in one kernel.
    """

    def __init__(self, kernels: Kernels, weight: Parameter | Tensor, eps: float) -> None:
        self.kernels = kernels
        self.eps = eps
        self.parameters: tuple[Parameter, ...] = ()
        if isinstance(weight, Parameter):
            self.parameters, weight = (weight,), weight.tensor
        self.weight = weight
        self.ahead: tuple[Tensor, Tensor] | None = None

    def is_ahead(self, x: Tensor) -> bool:
        """Whether the preceding all-reduce has already computed the norm of x."""
        return self.ahead is not None and self.ahead[0] is x

    def __call__(self, x: Tensor) -> Tensor:
        if self.ahead is not None:
            (of, normed), self.ahead = self.ahead, None
            if of is x:
                return normed
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.kernels.norm_add(x, self.weight, self.eps, residual)


class LayerNorm(Norm):
    """The layer norm (x - mean) / deviation * weight + bias; weight and bias are optional."""

    def __init__(
        self, kernels: Kernels, weight: Parameter | None, bias: Parameter | None, eps: float
    ) -> None:
        self.kernels = kernels
        self.weight = None if weight is None else weight.tensor
        self.bias = None if bias is None else bias.tensor
        self.eps = eps
        self.parameters = tuple(parameter for parameter in (weight, bias) if parameter is not None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
