"""A layer of Gated DeltaNet between its projections (`kernels.recurrent.delta_rule`)."""

from itertools import accumulate

from torch import Tensor

from engine.architectures.recurrent.delta import Delta
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads


class GatedDelta:
    """kv: the last inputs of the convolution and the states, of all rows."""

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        delta = config.attention[build.layer].mixer
        assert isinstance(delta, Delta)
        own = delta.of_rank(build.group.size)
        self.kernels = build.kernels
        self.inner = own.value_heads * own.value_size
        self.sizes = (own.channels, self.inner, own.value_heads, own.value_heads)
        keys, values = delta.key_heads * delta.key_size, delta.value_heads * delta.value_size
        mixed = (keys, keys, values)
        sizes = (*mixed, values, delta.value_heads, delta.value_heads)
        names = len(build.stored("delta_in").names)
        stored = {2: (4, 2), 4: (3, 1, 1, 1), 6: (1,) * 6}[names]
        self.into = build.column("delta_in", sizes, config.hidden_size, stored=stored)
        self.out = build.row("delta_out", config.hidden_size, values)
        heads = [build.group.part(delta.value_heads, "heads")]
        taps = [each * delta.taps for each in mixed]
        conv = build.vector(
            "delta_conv", *taps, ranges=[build.group.part(each, "channels") for each in taps]
        )
        decay = build.vector("delta_decay", delta.value_heads, ranges=heads)
        bias = build.vector("delta_bias", delta.value_heads, ranges=heads, std=0.0)
        norm = build.vector("delta_norm", delta.value_size, std=0.0)
        self.heads = DeltaHeads(
            own.key_heads,
            own.value_heads,
            own.key_size,
            own.value_size,
            conv.tensor.view(own.channels, own.taps),
            decay.tensor,
            bias.tensor,
            norm.tensor,
            config.norm_eps if delta.norm_eps is None else delta.norm_eps,
            2.0 if delta.negative else 1.0,
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
        kv: KV,
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
