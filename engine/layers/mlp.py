"""Mlp: the MLP of a decoder layer, with or without a gate."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Xielu:
    """The xIELU activation, with learnt parameters in each layer; see `Kernels.xielu`."""

    def __init__(self, build: Builder) -> None:
        self.kernels = build.kernels
        parameter = build.numbers("activation", ("alpha_p", "alpha_n", "beta", "eps"))
        self.numbers = parameter.tensor
        self.parameters: tuple[Parameter, ...] = (parameter,)

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.xielu(x, self.numbers)


class Mlp:
    """The MLP down(act(gate(x)) * up(x)), or down(act(up(x))) if the checkpoint has no gate."""

    def __init__(self, build: Builder, prefix: str = "", size: int = 0) -> None:
        """Build the MLP of the builder's layer.

        prefix: the prefix of its names in the record's tensors.
        size: the inner width; 0 = that of the layer in the config.
        """
        config = build.config
        hidden, bias = config.hidden_size, config.mlp_bias
        inter = size or config.mlp_size(build.layer)
        self.gated = build.has(f"{prefix}gate_up")
        self.act, self.kernels = config.hidden_act, build.kernels
        name, sizes = ("gate_up", (inter, inter)) if self.gated else ("up", (inter,))
        self.up = build.column(f"{prefix}{name}", sizes, hidden, bias=bias)
        self.down = build.row(f"{prefix}down", hidden, inter, bias=bias)
        self.linears = (self.up, self.down)
        self.norms = ()
        self.stacks = ()
        self.others: tuple[Parameter, ...] = ()
        self.factors: Tensor | None = None  # factors on the rows of gate and up; None = none
        if self.gated and config.mlp_factors != (1.0, 1.0):
            factors = torch.tensor(config.mlp_factors, dtype=torch.float32, device=build.device)
            self.gate = build.kernels.GATES[self.act]
            self.factors = factors.repeat_interleave(self.up.spec.out_features // 2)
        self.plain: Callable[[Tensor], Tensor]
        if build.has("activation"):
            xielu = Xielu(build)
            self.plain, self.others = xielu, xielu.parameters
        else:
            self.plain = partial(build.kernels.activation, name=self.act)

    @property
    def activations(self) -> int:
        return self.up.spec.out_features + self.down.spec.in_features

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
        if self.factors is not None:
            both = self.up.forward(x, meta.lora, norm=norm)
            inner = self.gate(self.kernels.scale_columns(both, self.factors))
        elif self.gated and self.down.takes_gate(x, meta.lora):
            both = self.up.forward(x, norm=norm)
            return self.down.inner(both, self.act, residual)
        elif self.gated:
            inner = self.up.forward(x, meta.lora, norm=norm, gate=self.act)
        else:
            inner = self.plain(self.up.forward(x, meta.lora, norm=norm))
        return self.down.forward(inner, meta.lora, residual=residual)
