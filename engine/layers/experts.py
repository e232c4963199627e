"""Experts: a mixture of experts, with a router and optionally a shared expert."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.layers.build import Builder
from engine.layers.linear import Linear, add_reduced
from engine.layers.mlp import Mlp
from engine.layers.norm import Norm, RMSNorm
from engine.quantization.method import ExpertsSpec
from engine.weights.parameter import Parameter, Unit
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Stack:
    """The weights of one layer's experts on this rank, stored by a LinearMethod.

    A rank has a part of each expert, or some whole experts.
    """

    def __init__(self, build: Builder) -> None:
        self.spec: ExpertsSpec = build.experts()
        sources = (*self.spec.gate_up, *self.spec.down)
        names = [source.name.removesuffix(".weight") for source in sources]
        self.method = build.method_of(self.spec.name, names)
        self.state: Any
        self.parameters: Sequence[Parameter]
        self.state, self.parameters = self.method.create_experts(self.spec)
        self.loading_bytes = sum(parameter.tensor.nbytes for parameter in self.parameters)
        self.transient = self.method.replaces(self.method.packed_experts_bytes(self.spec))
        if self.transient:
            for parameter in self.parameters:
                parameter.release()
        # [experts] int32: each expert's index on this rank; None = all are on this rank
        self.places: Tensor | None = None
        if build.spread_experts:
            here = build.experts_here()
            places = [
                here.index(expert) if expert in here else len(here)
                for expert in range(self.spec.total)
            ]
            self.places = torch.tensor(places, dtype=torch.int32, device=build.device)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None) -> Tensor:
        """Return this rank's part of the weighted sum of each token's experts (`Kernels.experts`).

        All ranks have all tokens and the same routing, so that no tokens are sent. An all-reduce
        adds the results of other ranks' experts.

        ids: expert ids in the whole layer.
        """
        if self.places is not None:
            ids = self.places.index_select(0, ids.flatten()).view_as(ids)
        return self.method.apply_experts(self.state, x, weights, ids, residual)

    @property
    def unit(self) -> Unit:
        return Unit([*self.parameters], self.finish, self.transient)

    @property
    def num_bytes(self) -> int:
        """The bytes of the experts after `finish`."""
        packed = self.method.packed_experts_bytes(self.spec)
        return self.loading_bytes if packed is None else packed

    def finish(self) -> None:
        """Pack the experts; called once all parameters are filled."""
        self.state = self.method.finish_experts(self.state)
        self.parameters = ()


class Experts:
    """The sum of weight * down(act(gate(x)) * up(x)) over chosen experts, plus the shared
    expert."""

    def __init__(self, build: Builder) -> None:
        config = build.config
        assert config.experts is not None
        self.config = experts = config.experts
        self.kernels, self.group = build.kernels, build.group
        assert build.layer is not None
        self.layer, self.routes = build.layer, build.routes
        self.then: RMSNorm | None = None  # see `add_reduced`
        self.stack = Stack(build)
        self.router = build.kept("router", experts.choices, config.hidden_size)
        self.others: tuple[Parameter, ...] = (self.router,)
        self.router_bias: Tensor | None = None
        self.correction: Tensor | None = None
        if experts.router_bias:
            self.router_bias = self._also(build.router_bias())
        if build.has("router_correction"):
            self.correction = self._also(build.vector("router_correction", experts.choices))
        self.shared: Mlp | None = None
        self.shared_gate: Tensor | None = None
        if experts.shared_size:
            self.shared = Mlp(build, "shared_", experts.shared_size)
            if experts.shared_gate:
                self.shared_gate = self._also(build.kept("shared_gate", 1, config.hidden_size))
        self.linears: tuple[Linear, ...] = () if self.shared is None else self.shared.linears
        self.stacks = (self.stack,)
        self.norms: tuple[Norm, ...] = ()

    def _also(self, parameter: Parameter) -> Tensor:
        self.others += (parameter,)
        return parameter.tensor

    @property
    def activations(self) -> int:
        experts, hidden = self.config, self.stack.spec.hidden
        inside = experts.routing.chosen * (self.stack.spec.size + hidden) + hidden
        inside += experts.choices
        return inside + (0 if self.shared is None else self.shared.activations + hidden)

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
        x, weights, ids = self._routed(x, norm, residual)
        out = self._shared(x, kv, meta, residual)
        add_to = out if self.group.size == 1 else None
        routed = self.stack.apply(x, weights, ids, add_to)
        if add_to is None:
            if out is None:
                return self.group.all_reduce(routed)
            return add_reduced(self.group, routed, out, self.then)
        return routed

    def _routed(
        self, x: Tensor, norm: Norm | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route norm(x); return norm(x), the weights of each token's experts, and their ids.

        The returned norm(x) does not share the residual's memory.
        """
        router, routing = (self.router.tensor, self.router_bias), self.config.routing
        if isinstance(norm, RMSNorm):
            x, weights, ids = self.kernels.norm_route(
                x, norm.weight, norm.eps, *router, routing, self.correction
            )
        else:
            if norm is not None:
                x = norm(x)
            elif residual is x:
                x = x.clone()
            logits = self.kernels.router_logits(x, *router)
            weights, ids = self.kernels.route(logits, routing, self.correction)
        self._note(ids)
        return x, weights, ids

    def _note(self, ids: Tensor) -> None:
        if self.routes.on:
            self.routes.note(self.layer, ids, self.config.choices)

    def _real(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace zero experts, which return their input, by another chosen expert with weight 0.

        The replacement is the token's expert with the largest weight, so no further expert is read.

        Returns the experts' weights and ids [n, chosen], and the sum [n, 1] of the zero experts'
        weights.
        """
        same = ids >= self.config.count
        own_weights = weights.masked_fill(same, 0.0)
        heaviest = ids.gather(1, own_weights.argmax(1, keepdim=True)).masked_fill_(
            same.all(1, True), 0
        )
        return (
            own_weights,
            torch.where(same, heaviest, ids),
            (weights - own_weights).sum(1, keepdim=True),
        )

    def _shared(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        residual: Tensor | None,
    ) -> Tensor | None:
        if self.shared is None:
            return residual
        if self.shared_gate is None:
            return self.shared.forward(x, kv, meta, residual=residual)
        shared = self.shared.forward(x, kv, meta)
        return self.kernels.add_opened(shared, x, self.shared_gate, residual)


class ExpertsBeside(Experts):
    """The sum norm(mlp(norm(x))) + norm(experts(norm(x))), with four different norms.

    The router has a separate norm, and each expert's weight has a factor.
    """

    def __init__(self, build: Builder) -> None:
        super().__init__(build)
        hidden, count = build.config.hidden_size, self.config.count
        self.mlp = Mlp(build)
        self.linears = self.mlp.linears
        self.mlp_out = build.norm("mlp_part_norm", hidden)
        self.before = build.norm("experts_norm", hidden)
        self.after = build.norm("experts_out_norm", hidden)
        self.norms = (self.mlp_out, self.before, self.after)
        scale = build.vector("router_norm", hidden, std=0.0, scale=hidden**-0.5)
        self.router_norm = RMSNorm(build.kernels, scale, build.config.norm_eps)
        self.factors = self._also(build.vector("expert_scale", count, std=0.0))
        self.others += (scale,)

    @property
    def activations(self) -> int:
        return super().activations + self.mlp.activations + 2 * self.stack.spec.hidden

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`).

        norm: the norm before the MLP.
        """
        logits = self.kernels.router_logits(self.router_norm(x), self.router.tensor, None)
        weights, ids = self.kernels.route(logits, self.config.routing, None)
        self._note(ids)
        weights = weights * self.factors.index_select(0, ids.flatten()).view_as(weights)
        routed = self.stack.apply(self.before(x), weights, ids, None)
        routed = self.after(self.group.all_reduce(routed))
        out = self.mlp_out(self.mlp.forward(x, kv, meta, norm=norm)).add_(routed)
        return out if residual is None else residual.add_(out)


class ExpertsAhead(Experts):
    """An MLP, and experts whose output is added in the next layer by `MlpBehindExperts`.

    LongCat (arXiv 2509.01322) calls this a shortcut connection.
    """

    def __init__(self, build: Builder) -> None:
        super().__init__(build)
        self.mlp = Mlp(build)
        self.linears = self.mlp.linears
        self.ahead = build.ahead

    @property
    def activations(self) -> int:
        return super().activations + self.mlp.activations + self.stack.spec.hidden

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return mlp(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`).

        The experts' output is stored in `ahead` for the next layer.
        """
        x, weights, ids = self._routed(x, norm, residual)
        weights, ids, of_same = self._real(weights, ids)
        routed = self.stack.apply(x, weights, ids, None)
        # The slice is assigned, as a step that failed between two layers leaves its output here.
        self.ahead[:] = [self.group.all_reduce(routed).addcmul_(x, of_same.to(x.dtype))]
        return self.mlp.forward(x, kv, meta, residual=residual)


class MlpBehindExperts(Mlp):
    """The sum of mlp(norm(x)) and the output of the previous layer's experts."""

    def __init__(self, build: Builder) -> None:
        super().__init__(build)
        self.ahead = build.ahead

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`)."""
        return super().forward(x, kv, meta, norm=norm, residual=residual).add_(self.ahead.pop())


def mlp_block(build: Builder) -> Experts | Mlp:
    """Build the MLP or the mixture of experts of the builder's layer."""
    experts, layer = build.config.experts, build.layer
    assert layer is not None
    if experts is None:
        return Mlp(build)
    if layer in experts.layers:
        if experts.ahead:
            return ExpertsAhead(build)
        return (ExpertsBeside if experts.beside_mlp else Experts)(build)
    behind = experts.ahead and layer - 1 in experts.layers
    return (MlpBehindExperts if behind else Mlp)(build)
