"""A layer of Mamba-2 between its projections (`kernels.recurrent.mamba2`)."""

from itertools import accumulate

from torch import Tensor

from engine.architectures.recurrent.mamba2 import Mamba2
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import Cache
from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba2 import Mamba2Heads


class Mamba2Mixer:
    """out(norm(mamba2(x, B, C, dt) * silu(gate))), each group of heads normed on its own.

    kv: the last inputs of the convolution and the states, of all rows.
    """

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        mixer = config.attention[build.layer].mixer
        assert isinstance(mixer, Mamba2)
        self.mixer, self.kernels, self.eps = mixer, build.kernels, config.norm_eps
        self.sizes = (mixer.inner, mixer.channels, mixer.heads)
        self.into = build.column("mamba_in", self.sizes, config.hidden_size, bias=mixer.bias)
        self.out = build.row("mamba_out", config.hidden_size, mixer.inner, bias=mixer.bias)
        conv = build.vector("mamba_conv", mixer.channels * mixer.taps)
        decay = build.vector("mamba_decay", mixer.heads)
        skip = build.vector("mamba_skip", mixer.heads, std=0.0)
        bias = build.vector("mamba_bias", mixer.heads, std=0.0)
        self.others: tuple[Parameter, ...] = (conv, decay, skip, bias)
        conv_bias: Tensor | None = None
        if mixer.conv_bias:
            made = build.vector("mamba_conv_bias", mixer.channels, std=0.0)
            conv_bias, self.others = made.tensor, (*self.others, made)
        self.norm: Tensor | None = None
        if build.has("mamba_norm"):
            made = build.vector("mamba_norm", mixer.inner, std=0.0)
            self.norm, self.others = made.tensor, (*self.others, made)
        self.heads = Mamba2Heads(
            mixer.heads,
            mixer.head_size,
            mixer.groups,
            mixer.state_size,
            conv.tensor.view(mixer.channels, mixer.taps),
            conv_bias,
            decay.tensor,
            skip.tensor,
            bias.tensor,
            mixer.limits,
        )
        self.linears = (self.into, self.out)
        self.norms: tuple[Norm, ...] = ()
        self.stacks = ()

    @property
    def activations(self) -> int:
        return self.into.spec.out_features + self.mixer.channels + 6 * self.mixer.inner

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
        gate, mixed, dt = made[:, : ends[0]], made[:, ends[0] : ends[1]], made[:, ends[1] :]
        found = self.kernels.mamba2(mixed, dt, self.heads, tail, state, meta).flatten(1)
        found = self.kernels.gated_norm(found, gate, self.norm, self.mixer.groups, self.eps)
        return self.out.forward(found, meta.lora, residual=residual)
