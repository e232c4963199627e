"""A layer of Gated DeltaNet between its projections (`kernels.recurrent.delta_rule`)."""

from itertools import accumulate

from torch import Tensor

from engine.architectures.recurrent.delta import Delta
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import Cache
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads


class GatedDelta:
    """kv: the last inputs of the convolution and the states, of all rows."""

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        delta = config.attention[build.layer].mixer
        assert isinstance(delta, Delta)
        self.delta, self.kernels = delta, build.kernels
        self.inner = delta.value_heads * delta.value_size
        self.sizes = (delta.channels, self.inner, delta.value_heads, delta.value_heads)
        sizes: tuple[int, ...] = self.sizes
        if len(build.stored("delta_in").names) == 2:
            sizes = (sizes[0] + sizes[1], sizes[2] + sizes[3])
        self.into = build.column("delta_in", sizes, config.hidden_size)
        self.out = build.row("delta_out", config.hidden_size, self.inner)
        conv = build.vector("delta_conv", delta.channels * delta.taps)
        decay = build.vector("delta_decay", delta.value_heads)
        bias = build.vector("delta_bias", delta.value_heads, std=0.0)
        norm = build.vector("delta_norm", delta.value_size, std=0.0)
        self.heads = DeltaHeads(
            delta.key_heads,
            delta.value_heads,
            delta.key_size,
            delta.value_size,
            conv.tensor.view(delta.channels, delta.taps),
            decay.tensor,
            bias.tensor,
            norm.tensor,
            config.norm_eps,
        )
        self.linears = (self.into, self.out)
        self.norms: tuple[Norm, ...] = ()
        self.stacks = ()
        self.others: tuple[Parameter, ...] = (conv, decay, bias, norm)

    @property
    def activations(self) -> int:
        return 2 * self.into.spec.out_features + 4 * self.inner

    def forward(
        self,
        x: Tensor,
        kv: tuple[Cache, Cache],
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [n, hidden] -> self(norm(x)) [n, hidden], added to residual and written over it if
        there is one."""
        tail, state = kv
        assert isinstance(tail, Tensor) and isinstance(state, Tensor)
        made = self.into.forward(x, meta.lora, norm=norm)
        ends = list(accumulate(self.sizes))
        mixed, gate = made[:, : ends[0]], made[:, ends[0] : ends[1]]
        b, a = made[:, ends[1] : ends[2]], made[:, ends[2] :]
        found = self.kernels.gated_delta(mixed, gate, a, b, self.heads, tail, state, meta)
        return self.out.forward(found, meta.lora, residual=residual)
