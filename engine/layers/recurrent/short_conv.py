"""A layer with a short convolution between two gates (`kernels.recurrent.convolution`)."""

from collections.abc import Sequence

from torch import Tensor

from engine.architectures.recurrent.lfm2 import ShortConv
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.recurrent.runs import compute_runs
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class GatedConvolution:
    """The layer out(c * conv(b * x)).

    kv: (last inputs b * x of the convolution of all rows, the same tensor).
    """

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        mixer = config.attention[build.layer].mixer
        assert isinstance(mixer, ShortConv)
        own = build.group.part(mixer.channels, "channels")
        self.kernels, self.channels = build.kernels, own[1] - own[0]
        sizes = (mixer.channels,) * 3
        self.into = build.column("conv_in", sizes, config.hidden_size, bias=mixer.bias)
        self.out = build.row("conv_out", config.hidden_size, mixer.channels, bias=mixer.bias)
        taps = mixer.taps
        conv = build.vector("conv", mixer.channels * taps, ranges=[(own[0] * taps, own[1] * taps)])
        self.conv = conv.tensor.view(-1, taps)
        self.others: tuple[Parameter, ...] = (conv,)
        self.bias: Tensor | None = None
        if mixer.bias:
            bias = build.vector("conv_bias", mixer.channels, ranges=[own], std=0.0)
            self.bias, self.others = bias.tensor, (conv, bias)
        self.linears = (self.into, self.out)
        self.norms: tuple[Norm, ...] = ()
        self.stacks = ()

    @property
    def activations(self) -> int:
        return 7 * self.channels

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
        tail = kv[0]
        assert isinstance(tail, Tensor)
        projected, size = self.into.forward(x, meta.lora, norm=norm), self.channels
        b, c, inner = projected[:, :size], projected[:, size : 2 * size], projected[:, 2 * size :]

        def conv(inputs: Sequence[Tensor], own: Sequence[Tensor], part: AttentionMeta) -> Tensor:
            x, before, behind = inputs
            return self.kernels.short_conv(x, before, behind, self.conv, self.bias, own[0], part)

        mixed = compute_runs(conv, [inner, b, c], [tail], meta)
        return self.out.forward(mixed.to(x.dtype), meta.lora, residual=residual)
