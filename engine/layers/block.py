"""Block: the interface of the parts of a decoder layer, such as attention or an MLP."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta

if TYPE_CHECKING:
    from engine.layers.experts import Stack


class Block(Protocol):
    """A part of a decoder layer: attention, a recurrent mixer, an MLP or a mixture of experts."""

    @property
    def linears(self) -> Sequence[Linear]: ...
    @property
    def stacks(self) -> "Sequence[Stack]": ...
    @property
    def norms(self) -> Sequence[Norm]: ...
    @property
    def others(self) -> Sequence[Parameter]:
        """The parameters outside of linear layers, experts and norms."""
        ...

    @property
    def activations(self) -> int:
        """The peak activation elements for each token, not counting the residual and its norm."""
        ...

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)) of x [n, hidden], in the same shape.

        residual: if given, self(norm(x)) is added to it in place, and the residual is returned.
        """
        ...
