"""DeltaRuleLayer: the base class of Gated DeltaNet and Kimi Delta Attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from engine.layers.build import Builder
from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.norm import Norm
from engine.layers.recurrent.runs import compute_runs
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta, LoraStep
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs


class DeltaRuleLayer(ABC):
    """A layer of one matmul, the delta rule, and another matmul.

    kv: the last inputs of the convolution, the states and, if the layer has them, the pending
        updates, of all rows.
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
        self,
        parts: Sequence[Tensor],
        lora: LoraStep | None,
        states: Sequence[Tensor],
        meta: AttentionMeta,
    ) -> Tensor:
        """Apply the delta rule to pieces of the first matmul's output; return the input of `out`.

        parts: the pieces, as views.
        states: the layer's states, as views of the cache.
        """

    def apply(
        self,
        rule: Callable[[DeltaInputs, AttentionMeta], Tensor],
        activations: Sequence[Tensor],
        states: Sequence[Tensor],
        meta: AttentionMeta,
    ) -> Tensor:
        """Run a delta rule on the activations x, z, a and b (`DeltaInputs`), and return its
        output."""

        def kernel(inputs: Sequence[Tensor], own: Sequence[Tensor], part: AttentionMeta) -> Tensor:
            x, z, a, b = inputs
            return rule(DeltaInputs(x, z, a, b, self.heads, *own), part)

        if meta.state_runs is not None:
            x, z, a, b = activations
            inputs = DeltaInputs(x, z, a, b, self.heads, *states)
            verified = self.kernels.verify_delta(inputs, meta)
            if verified is not None:
                return verified
        return compute_runs(kernel, activations, states, meta)

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
        states = [state for state in kv if isinstance(state, Tensor)]
        projected = self.into.forward(x, meta.lora, norm=norm)
        ends = accumulate(self.sizes, initial=0)
        parts = [projected[:, begin:end] for begin, end in pairwise(ends)]
        attended = self.attend(parts, meta.lora, states, meta)
        return self.out.forward(attended, meta.lora, residual=residual)
