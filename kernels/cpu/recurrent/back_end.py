"""Recurrent: what both CPU back ends do in recurrent layers: generated kernels, where the machine
allows them."""

from collections.abc import Callable

from torch import Tensor

from kernels.cpu import norm
from kernels.cpu.recurrent import convolution, delta_rule, mamba1, mamba2
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.reference import Kernels

Step = Callable[[list[Tensor], AttentionMeta], Tensor]


class Recurrent(Kernels):
    def _without(self, meta: AttentionMeta, rows: list[Tensor], step: Step) -> Tensor:
        """step(rows, meta), in plain torch, where nothing is generated. rows: [num_tokens, ..]
        each."""
        return step(rows, meta)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        groups: int,
        eps: float,
        gate_last: bool = False,
    ) -> Tensor:
        found = norm.gated_norm(x, gate, weight, groups, eps, gate_last)
        if found is None:
            return super().gated_norm(x, gate, weight, groups, eps, gate_last)
        return found

    def gated_delta(
        self,
        x: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        heads: DeltaHeads,
        tail: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        found = delta_rule.gated_delta(x, z, a, b, heads, tail, state, meta)
        if found is None:
            plain = super().gated_delta
            return self._without(
                meta, [x, z, a, b], lambda own, part: plain(*own, heads, tail, state, part)
            )
        return found

    def kimi_delta(
        self,
        x: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        heads: DeltaHeads,
        tail: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        """Nothing is generated for it yet."""
        plain = super().kimi_delta
        return self._without(
            meta, [x, z, a, b], lambda own, part: plain(*own, heads, tail, state, part)
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
        found = convolution.causal_conv(x, conv, bias, tail, meta, silu=silu)
        if found is None:
            plain = super().causal_conv
            return self._without(
                meta, [x], lambda own, part: plain(*own, conv, bias, tail, part, silu)
            )
        return found

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
        found = convolution.causal_conv(x, conv, bias, tail, meta, silu=False, gates=gates)
        if found is None:
            return super().short_conv(x, before, behind, conv, bias, tail, meta)
        return found

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        heads: Mamba2Heads,
        tail: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        found = mamba2.mamba2(x, dt, heads, tail, state, meta)
        if found is None:
            plain = super().mamba2
            return self._without(
                meta, [x, dt], lambda own, part: plain(*own, heads, tail, state, part)
            )
        return found

    def mamba1(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        decay: Tensor,
        skip: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        found = mamba1.mamba1(x, dt, b, c, decay, skip, state, meta)
        if found is None:
            plain = super().mamba1
            return self._without(
                meta, [x, dt, b, c], lambda own, part: plain(*own, decay, skip, state, part)
            )
        return found
