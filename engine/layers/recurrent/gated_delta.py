"""A layer of Gated DeltaNet (`kernels.recurrent.delta_rule`)."""

from collections.abc import Sequence

from torch import Tensor

from engine.architectures.recurrent.delta_net import DeltaNet
from engine.layers.build import Builder
from engine.layers.recurrent.delta_layer import DeltaRuleLayer
from kernels.metadata import AttentionMeta, LoraStep
from kernels.recurrent.delta_rule import DeltaHeads


class GatedDelta(DeltaRuleLayer):
    def __init__(self, build: Builder) -> None:
        super().__init__(build)
        config = build.config
        assert build.layer is not None
        mixer = config.attention[build.layer].mixer
        assert isinstance(mixer, DeltaNet)
        own = mixer.of_rank(build.group.size)
        self.inner = own.value_heads * own.value_size
        self.sizes = (own.channels, self.inner, own.value_heads, own.value_heads)
        keys, values = mixer.key_heads * mixer.key_size, mixer.value_heads * mixer.value_size
        mixed = (keys, keys, values)
        sizes = (*mixed, values, mixer.value_heads, mixer.value_heads)
        names = len(build.stored("delta_in").names)
        stored = {2: (4, 2), 4: (3, 1, 1, 1), 6: (1,) * 6}[names]
        self.into = build.column("delta_in", sizes, config.hidden_size, stored=stored)
        self.out = build.row("delta_out", config.hidden_size, values)
        heads = [build.group.part(mixer.value_heads, "heads")]
        taps = [size * mixer.taps for size in mixed]
        conv = build.vector(
            "delta_conv", *taps, ranges=[build.group.part(size, "channels") for size in taps]
        )
        decay = build.vector("delta_decay", mixer.value_heads, ranges=heads)
        bias = build.vector("delta_bias", mixer.value_heads, ranges=heads, std=0.0)
        norm = build.vector("delta_norm", mixer.value_size, std=0.0)
        self.heads = DeltaHeads(
            own.key_heads,
            own.value_heads,
            own.key_size,
            own.value_size,
            conv.tensor.view(own.channels, own.taps),
            decay.tensor,
            bias.tensor,
            norm.tensor,
            config.norm_eps if mixer.norm_eps is None else mixer.norm_eps,
            2.0 if mixer.negative else 1.0,
        )
        self.linears = (self.into, self.out)
        self.others = (conv, decay, bias, norm)

    @property
    def activations(self) -> int:
        return 2 * self.into.spec.out_features + 4 * self.inner

    def attend(
        self,
        parts: Sequence[Tensor],
        lora: LoraStep | None,
        states: Sequence[Tensor],
        meta: AttentionMeta,
    ) -> Tensor:
        mixed, gate, b, a = parts
        return self.apply(self.kernels.gated_delta, (mixed, gate, a, b), states, meta)
