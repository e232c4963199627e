"""A layer of Kimi Delta Attention (`Kernels.kimi_delta`)."""

from collections.abc import Sequence

from torch import Tensor

from engine.architectures.recurrent.kimi import Kimi
from engine.layers.build import Builder
from engine.layers.recurrent.delta_layer import DeltaRuleLayer
from kernels.metadata import AttentionMeta, LoraStep
from kernels.recurrent.delta_rule import DeltaHeads


class KimiDelta(DeltaRuleLayer):
    def __init__(self, build: Builder) -> None:
        super().__init__(build)
        config = build.config
        assert build.layer is not None
        kimi = config.attention[build.layer].mixer
        assert isinstance(kimi, Kimi)
        own = kimi.of_rank(build.group.size)
        inner, whole = kimi.heads * kimi.size, (0, kimi.rank)
        self.inner = own.heads * own.size
        self.sizes = (3 * self.inner, own.heads, own.rank, own.rank)
        heads, channels = (build.group.part(n, "heads") for n in (kimi.heads, inner))
        sizes = (inner, inner, inner, kimi.heads, kimi.rank, kimi.rank)
        ranges = (channels, channels, channels, heads, whole, whole)
        self.into = build.column("kimi_in", sizes, config.hidden_size, ranges=ranges)
        self.decays = build.column("kimi_decays", (inner,), kimi.rank)
        self.gates = build.column("kimi_gates", (inner,), kimi.rank)
        self.out = build.row("kimi_out", config.hidden_size, inner)
        taps = inner * kimi.taps
        conv = build.vector("kimi_conv", *[taps] * 3, ranges=[build.group.part(taps, "taps")] * 3)
        decay = build.vector("kimi_decay", kimi.heads, ranges=[heads])
        bias = build.vector("kimi_bias", inner, ranges=[channels], std=0.0)
        norm = build.vector("kimi_norm", kimi.size, std=0.0)
        self.heads = DeltaHeads(
            own.heads,
            own.heads,
            own.size,
            own.size,
            conv.tensor.view(3 * self.inner, own.taps),
            decay.tensor,
            bias.tensor,
            norm.tensor,
            config.norm_eps,
            by_key=True,
        )
        self.linears = (self.into, self.decays, self.gates, self.out)
        self.others = (conv, decay, bias, norm)

    @property
    def activations(self) -> int:
        return 2 * self.into.spec.out_features + 8 * self.inner

    def attend(
        self,
        parts: Sequence[Tensor],
        lora: LoraStep | None,
        states: Sequence[Tensor],
        meta: AttentionMeta,
    ) -> Tensor:
        mixed, b, narrow_a, narrow_z = parts
        a = self.decays.forward(narrow_a.contiguous(), lora)
        z = self.gates.forward(narrow_z.contiguous(), lora)
        return self.apply(self.kernels.kimi_delta, (mixed, z, a, b), states, meta)
