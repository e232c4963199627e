"""DeltaLayer: what layers of the delta rule share: Gated DeltaNet, Kimi Delta Attention."""

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


class DeltaLayer(ABC):
    """One product in, the rule, one product out. kv: the last inputs of the convolution, the
    states, and what is not yet in these if it is written late, of all rows."""

    def __init__(self, build: Builder) -> None:
        self.kernels = build.kernels
        self.norms: tuple[Norm, ...] = ()
        self.stacks = ()
        self.into: Linear
        self.out: RowParallelLinear
        self.sizes: Sequence[int]  # of the parts of what `into` makes
        self.heads: DeltaHeads
        self.linears: tuple[Linear, ...]
        self.others: tuple[Parameter, ...]

    @property
    @abstractmethod
    def activations(self) -> int: ...

    @abstractmethod
    def attend(
        self, parts: Sequence[Tensor], lora: LoraStep | None, tail: Tensor, state: Tensor,
        meta: AttentionMeta, late: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """parts: of what `into` made, rows of longer ones."""

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [n, hidden] -> self(norm(x)) [n, hidden], added to residual and written over it if
        there is one."""
        tail, state, late = kv[0], kv[1], kv[2] if len(kv) > 2 else None
        assert isinstance(tail, Tensor) and isinstance(state, Tensor)
        assert late is None or isinstance(late, Tensor)
        made = self.into.forward(x, meta.lora, norm=norm)
        ends = accumulate(self.sizes, initial=0)
        parts = [made[:, begin:end] for begin, end in pairwise(ends)]
        found = self.attend(parts, meta.lora, tail, state, meta, late)
        return self.out.forward(found, meta.lora, residual=residual)
