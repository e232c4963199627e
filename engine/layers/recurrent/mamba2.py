"""A layer of Mamba-2 (`kernels.recurrent.mamba2`)."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.architectures.recurrent.mamba2 import Mamba2
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.recurrent.runs import compute_runs
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba2 import Mamba2Heads


class Mamba2Mixer:
    """The layer out(norm(mamba2(x, B, C, dt) * silu(gate))), with a norm for each group of heads.

    Some models apply the gate after the norm.

    kv: the last inputs of the convolution, and the states, of all rows.
    """

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert build.layer is not None
        whole = config.attention[build.layer].mixer
        assert isinstance(whole, Mamba2)
        mixer = whole.of_rank(build.group.size)
        self.mixer, self.kernels, self.eps = mixer, build.kernels, config.norm_eps
        self.sizes = (mixer.inner, mixer.channels, mixer.heads)
        heads = [build.group.part(whole.heads, "heads")]
        inner = build.group.part(whole.inner, "channels")
        shared = whole.groups * whole.state_size
        # Groups are divided among ranks, but every rank has B and C if there is a single group.
        both = (0, shared) if whole.groups == 1 else build.group.part(shared, "groups")
        mixed, own_ranges = (whole.inner, shared, shared), (inner, both, both)
        sizes, ranges = (whole.inner, *mixed, whole.heads), (inner, *own_ranges, *heads)
        hidden = config.hidden_size
        self.into = build.column("mamba_in", sizes, hidden, bias=mixer.bias, ranges=ranges)
        self.out = build.row("mamba_out", hidden, whole.inner, bias=mixer.bias)
        taps = mixer.taps
        conv = build.vector(
            "mamba_conv",
            *(size * taps for size in mixed),
            ranges=[(begin * taps, end * taps) for begin, end in own_ranges],
        )
        decay = build.vector("mamba_decay", whole.heads, ranges=heads)
        skip = build.vector("mamba_skip", whole.heads, ranges=heads, std=0.0)
        bias = build.vector("mamba_bias", whole.heads, ranges=heads, std=0.0)
        self.others: tuple[Parameter, ...] = (conv, decay, skip, bias)
        conv_bias: Tensor | None = None
        if mixer.conv_bias:
            of_conv = build.vector("mamba_conv_bias", *mixed, ranges=own_ranges, std=0.0)
            conv_bias, self.others = of_conv.tensor, (*self.others, of_conv)
        self.norm: Tensor | None = None
        if mixer.normed:
            norm = build.vector(
                "mamba_norm", whole.inner, ranges=[inner], std=0.0, scale=mixer.out_factor
            )
            self.norm, self.others = norm.tensor, (*self.others, norm)
        # factors on the outputs of the first matmul; None = none
        self.factors: Tensor | None = None
        if mixer.factors:
            counts = torch.tensor([end - begin for begin, end in ranges])
            factors = torch.tensor(mixer.factors, dtype=torch.float32).repeat_interleave(counts)
            self.factors = factors.to(build.device)
        # factors on the inputs of the last matmul; None = none, or included in the norm's weight
        self.out_factors: Tensor | None = None
        if self.norm is None and mixer.out_factor != 1.0:
            factor = torch.full((mixer.inner,), mixer.out_factor, dtype=torch.float32)
            self.out_factors = factor.to(build.device)
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
        if self.factors is not None:
            projected = self.kernels.scale_columns(projected, self.factors)
        ends = list(accumulate(self.sizes))
        gate, mixed, dt = (
            projected[:, : ends[0]],
            projected[:, ends[0] : ends[1]],
            projected[:, ends[1] :],
        )

        def scan(inputs: Sequence[Tensor], own: Sequence[Tensor], part: AttentionMeta) -> Tensor:
            mixed, dt = inputs
            tail, state = own
            return self.kernels.mamba2(mixed, dt, self.heads, tail, state, part)

        scanned = compute_runs(scan, [mixed, dt], [tail, state], meta).view(len(x), -1)
        scanned = self.kernels.gated_norm(
            scanned, gate, self.norm, self.mixer.groups, self.eps, self.mixer.gate_last
        )
        if self.out_factors is not None:
            scanned = self.kernels.scale_columns(scanned, self.out_factors)
        return self.out.forward(scanned, meta.lora, residual=residual)
