"""Recurrent: the base class of both CPU back ends, for recurrent layers, norms, activations and
gates.

The class uses generated kernels if the machine supports them, and torch otherwise.
"""

from collections.abc import Callable

from torch import Tensor

from kernels.cpu import norm
from kernels.cpu.codegen import elements
from kernels.cpu.recurrent import convolution, delta_rule, mamba1, mamba2
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.reference import Kernels

Step = Callable[[list[Tensor], AttentionMeta], Tensor]


def _gated(name: str, gate_up: Tensor) -> Tensor | None:
    """Return f(first half) * second half of gate_up [n, 2 * size] for the activation f = `name`.

    Returns None if no kernel can be generated.
    """
    size = gate_up.shape[-1] // 2
    if gate_up.dim() != 2 or not elements.fits(gate_up):
        return None
    out = gate_up.new_empty(len(gate_up), size)
    return out if elements.apply(name, gate_up[:, :size], out, gate_up[:, size:]) else None


class Recurrent(Kernels):
    def _without(self, meta: AttentionMeta, rows: list[Tensor], step: Step) -> Tensor:
        """Return step(rows, meta): a layer in plain torch, for which no kernel can be generated.

        Deterministic mode overrides this method, and calls `step` for one token at a time.

        rows: the layer's input tensors, [num_tokens, ...] each.
        """
        return step(rows, meta)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = norm.rms_norm(x, weight, eps)
        return super().rms_norm(x, weight, eps) if normed is None else normed

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        normed = norm.layer_norm(x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps) if normed is None else normed

    def activation(self, x: Tensor, name: str) -> Tensor:
        if elements.known(name) and elements.fits(x):
            out = x.new_empty(x.shape)
            if elements.apply(name, x, out):
                return out
        return super().activation(x, name)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        activated = _gated("silu", gate_up)
        return super().silu_mul(gate_up) if activated is None else activated

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        activated = _gated("gelu_pytorch_tanh", gate_up)
        return super().gelu_tanh_mul(gate_up) if activated is None else activated

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        activated = _gated("gelu", gate_up)
        return super().gelu_mul(gate_up) if activated is None else activated

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        if x.dim() == 2 and elements.apply("copy", x, x, factors):
            return x
        return super().scale_columns(x, factors)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if elements.fits(x) and x.is_contiguous() and elements.apply("sigmoid", gate, x, x):
            return x
        return super().sigmoid_mul(x, gate)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        groups: int,
        eps: float,
        gate_last: bool = False,
    ) -> Tensor:
        normed = norm.gated_norm(x, gate, weight, groups, eps, gate_last)
        if normed is None:
            return super().gated_norm(x, gate, weight, groups, eps, gate_last)
        return normed

    def gated_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        return self._delta(inputs, meta, super().gated_delta)

    def kimi_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        return self._delta(inputs, meta, super().kimi_delta)

    def _delta(
        self,
        inputs: DeltaInputs,
        meta: AttentionMeta,
        plain: Callable[[DeltaInputs, AttentionMeta], Tensor],
    ) -> Tensor:
        assert inputs.pending_updates is None
        outputs = delta_rule.delta_rule(inputs, meta)
        if outputs is not None:
            return outputs
        return self._without(
            meta, list(inputs[:4]), lambda own, part: plain(DeltaInputs(*own, *inputs[4:]), part)
        )

    def causal_conv(
        self,
        x: Tensor,
        conv: Tensor,
        bias: Tensor | None,
        tail: Tensor,
        meta: AttentionMeta,
        silu: bool = False,
    ) -> Tensor:
        convolved = convolution.causal_conv(x, conv, bias, tail, meta, silu=silu)
        if convolved is None:
            plain = super().causal_conv
            return self._without(
                meta, [x], lambda own, part: plain(*own, conv, bias, tail, part, silu)
            )
        return convolved

    def short_conv(
        self,
        x: Tensor,
        before: Tensor,
        behind: Tensor,
        conv: Tensor,
        bias: Tensor | None,
        tail: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        gates = before, behind
        convolved = convolution.causal_conv(x, conv, bias, tail, meta, silu=False, gates=gates)
        if convolved is None:
            return super().short_conv(x, before, behind, conv, bias, tail, meta)
        return convolved

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        heads: Mamba2Heads,
        tail: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        mixed = mamba2.mamba2(x, dt, heads, tail, state, meta)
        if mixed is None:
            plain = super().mamba2
            return self._without(
                meta, [x, dt], lambda own, part: plain(*own, heads, tail, state, part)
            )
        return mixed

    def mamba1(self, inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor:
        mixed = mamba1.mamba1(inputs, meta)
        if mixed is None:
            plain = super().mamba1
            x, dt, b, c, rates, skip, gate, state = inputs
            return self._without(
                meta,
                [x, dt, b, c, gate],
                lambda own, part: plain(Mamba1Inputs(*own[:4], rates, skip, own[4], state), part),
            )
        return mixed
