"""DeltaRuleLayer: the base class of Gated DeltaNet and Kimi Delta Attention."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from engine.layers.build import Builder
from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta, LoraStep
from kernels.recurrent.delta_rule import DeltaHeads


class DeltaRuleLayer(ABC):
    """A layer of one matmul, the delta rule, and another matmul.

    kv: for all rows the last inputs of the convolution, the states and, if the layer has them, the
        pending updates.
    """

    def __init__(self, build: Builder) -> None:
        self.kernels = build.kernels
        self.norms: tuple[Norm, ...] = ()
        self.stacks = ()
        self.into: Linear
        self.out: RowParallelLinear
        self.sizes: Sequence[int]  # widths of the pieces of the first matmul's output
        self.heads: DeltaHeads
        self.linears: tuple[Linear, ...]
        self.others: tuple[Parameter, ...]

    @property
    @abstractmethod
    def activations(self) -> int: ...

    @abstractmethod
    def attend(
        self, parts: Sequence[Tensor], lora: LoraStep | None, tail: Tensor, state: Tensor,
        meta: AttentionMeta, pending_updates: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Apply the delta rule; return the input of `out`.

        parts: the pieces of the first matmul's output, as views.
        tail: the last inputs of the convolution.
        """

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute self(norm(x)) of x [n, hidden].

        residual: if given, residual + self(norm(x)) is written over it.
        """
        tail, state, pending_updates = kv[0], kv[1], kv[2] if len(kv) > 2 else None
        assert isinstance(tail, Tensor) and isinstance(state, Tensor)
        assert pending_updates is None or isinstance(pending_updates, Tensor)
        projected = self.into.forward(x, meta.lora, norm=norm)
        ends = accumulate(self.sizes, initial=0)
        parts = [projected[:, begin:end] for begin, end in pairwise(ends)]
        attended = self.attend(parts, meta.lora, tail, state, meta, pending_updates)
        return self.out.forward(attended, meta.lora, residual=residual)
