"""A layer of Mamba-1 (`kernels.recurrent.mamba1`) as in Jamba, with norms of time steps, B and
C."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.architectures.recurrent.jamba import Mamba1
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.recurrent.runs import compute_runs
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba1 import Mamba1Inputs


class Mamba1Mixer:
    """The layer out(scan(x, step(dt), B, C) * silu(gate)).

    x is the output of a convolution; dt, B and C are projections of x, each with a norm.

    kv: the last inputs of the convolution, and the states, of all rows.
    """

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        mixer = config.attention[build.layer].mixer
        assert isinstance(mixer, Mamba1)
        self.mixer, self.kernels = mixer, build.kernels
        inner, size = mixer.channels, mixer.state_size
        self.sizes = (mixer.rank, size, size)
        self.into = build.column("mamba_in", (inner, inner), config.hidden_size, bias=mixer.bias)
        self.select = build.column("mamba_select", self.sizes, inner)
        self.step = build.column("mamba_step", (inner,), mixer.rank, bias=True)
        self.out = build.row("mamba_out", config.hidden_size, inner, bias=mixer.bias)
        conv = build.vector("mamba_conv", inner * mixer.taps)
        rates = build.vector("mamba_decay", inner * size)
        rates = replace(rates, changed=_rates, fill=_drawn)
        skip = build.vector("mamba_skip", inner, std=0.0)
        self.others: tuple[Parameter, ...] = (conv, rates, skip)
        self.conv, self.conv_bias = conv.tensor.view(inner, mixer.taps), None
        self.rates, self.skip = rates.tensor.view(inner, size), skip.tensor
        if mixer.conv_bias:
            bias = build.vector("mamba_conv_bias", inner, std=0.0)
            self.conv_bias, self.others = bias.tensor, (*self.others, bias)
        names = ("mamba_step_norm", "mamba_b_norm", "mamba_c_norm")
        self.norms: tuple[Norm, ...] = tuple(
            build.norm(name, width) for name, width in zip(names, self.sizes, strict=True)
        )
        self.linears = (self.into, self.select, self.step, self.out)
        self.stacks = ()

    @property
    def activations(self) -> int:
        return 7 * self.mixer.channels + 2 * sum(self.sizes)

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
        tail, state = kv
        assert isinstance(tail, Tensor) and isinstance(state, Tensor)
        projected = self.into.forward(x, meta.lora, norm=norm)
        mixed, gate = projected.chunk(2, dim=1)

        def conv(inputs: Sequence[Tensor], own: Sequence[Tensor], part: AttentionMeta) -> Tensor:
            weights, bias = self.conv, self.conv_bias
            return self.kernels.causal_conv(inputs[0], weights, bias, own[0], part, silu=True)

        own = compute_runs(conv, [mixed], [tail], meta)
        selected = self.select.forward(own.to(x.dtype), meta.lora).split(self.sizes, dim=1)
        dt, b, c = (part.contiguous() for part in selected)
        for_dt, for_b, for_c = self.norms
        dt, b, c = self.step.forward(dt, meta.lora, norm=for_dt), for_b(b), for_c(c)

        def scan(inputs: Sequence[Tensor], own: Sequence[Tensor], part: AttentionMeta) -> Tensor:
            x, dt, b, c, gate = inputs
            every = Mamba1Inputs(x, dt, b, c, self.rates, self.skip, gate, own[0])
            return self.kernels.mamba1(every, part)

        scanned = compute_runs(scan, [own, dt, b, c, gate], [state], meta)
        return self.out.forward(scanned, meta.lora, residual=residual)


def _rates(logarithms: Tensor) -> Tensor:
    """Replace A_log by -exp(A_log) in place, and return it."""
    return logarithms.exp_().neg_()


def _drawn(tensor: Tensor, generator: torch.Generator) -> None:
    _rates(tensor.normal_(0.0, 0.02, generator=generator))
