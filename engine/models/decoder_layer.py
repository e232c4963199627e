"""Decoder layers: blocks in residual branches, with norms before, after or around them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from torch import Tensor

from engine.layers.attention.bidirectional import BidirectionalAttention
from engine.layers.attention.choose import attention_block
from engine.layers.attention.plain import Attention
from engine.layers.block import Block
from engine.layers.build import Builder
from engine.layers.experts import Experts, Stack, mlp_block
from engine.layers.layer_inputs import LayerInput
from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.mlp import Mlp
from engine.layers.norm import LayerNorm, Norm, RMSNorm
from engine.layers.rotary import Tables
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Sublayer:
    """A block in a residual branch: residual + after(block(before(residual))).

    Either norm may be None. The block decides whether a norm or the residual is fused with a GEMM.
    """

    def __init__(self, block: Block, before: Norm | None, after: Norm | None) -> None:
        self.block = block
        self.before = before
        self.after = after

    def forward(self, residual: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        """Add the block's output to the residual [n, hidden] in place, and return the residual."""
        if self.after is None:
            return self.block.forward(residual, kv, meta, norm=self.before, residual=residual)
        return self.after.added(self.block.forward(residual, kv, meta, norm=self.before), residual)

    @property
    def norms(self) -> Iterator[Norm]:
        yield from (norm for norm in (self.before, self.after) if norm is not None)
        yield from self.block.norms


class PostNormSublayer(Sublayer):
    """A sublayer whose norm follows the sum: after(residual + block(residual))."""

    def forward(self, residual: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        assert self.after is not None
        return self.after(self.block.forward(residual, kv, meta, residual=residual))


class DecoderLayer:
    """A layer of attention (or a recurrent mixer) and an MLP or experts, or of only one of both."""

    def __init__(self, build: Builder, tables: Tables) -> None:
        config = build.config
        assert build.layer is not None
        self.number = build.layer

        def norm(ours: str, of_residual: bool) -> Norm | None:
            if not build.has(ours):
                return None
            return build.norm(ours, config.hidden_size, of_residual=of_residual)

        def sublayer(block: Block, ours: str) -> Sublayer:
            before = norm(f"{ours}_norm", True)
            if config.post_norm:
                return PostNormSublayer(block, None, before)
            return Sublayer(block, before, norm(f"{ours}_out_norm", False))

        attention, size = config.attention[build.layer], config.mlp_size(build.layer)
        experts = config.experts
        mixed = experts is not None and build.layer in experts.layers
        self.attention: Sublayer | None = None
        if attention.attends or attention.mixer is not None:
            self.attention = sublayer(attention_block(build, tables), "attention")
        self.mlp: Sublayer | None = None
        if mixed or size:
            self.mlp = sublayer(mlp_block(build), "mlp")
        # Layers of equal kind launch the same kernels.
        self.kind = (attention, mixed, size)
        self.sublayers = tuple(part for part in (self.attention, self.mlp) if part is not None)
        self.input = LayerInput(build) if config.layer_input_size else None
        self.scale: Parameter | None = None
        if build.has("layer_scale"):
            self.scale = build.vector("layer_scale", 1, std=0.0)

    @property
    def ends_with_block(self) -> bool:
        """Whether the last block's output is the layer's, without per-layer inputs or a scale."""
        return self.input is None and self.scale is None

    @property
    def num_parameters(self) -> int:
        """The number of parameters in the layer's matrices."""
        count = sum(owner.spec.num_parameters for owner in self.linears)
        return count + sum(owner.spec.num_parameters for owner in self.stacks)

    @property
    def linears(self) -> Iterator[Linear]:
        yield from chain.from_iterable(sublayer.block.linears for sublayer in self.sublayers)
        if self.input is not None:
            yield from self.input.linears

    @property
    def stacks(self) -> Iterator[Stack]:
        return chain.from_iterable(sublayer.block.stacks for sublayer in self.sublayers)

    @property
    def packed(self) -> Iterator[Linear | Stack]:
        yield from self.linears
        yield from self.stacks

    def parameters(self) -> Iterator[Parameter]:
        for sublayer in self.sublayers:
            for norm in sublayer.norms:
                yield from norm.parameters
            yield from sublayer.block.others
            for linear in sublayer.block.linears:
                yield from linear.parameters
            for stack in sublayer.block.stacks:
                yield from stack.parameters
        if self.input is not None:
            for linear in self.input.linears:
                yield from linear.parameters
            yield from self.input.norm.parameters
        if self.scale is not None:
            yield self.scale

    def forward(
        self, residual: Tensor, kv: KV, meta: AttentionMeta, inputs: Tensor | None = None
    ) -> Tensor:
        """Add attention and MLP to the residual [n, hidden], which may be overwritten; return the
        sum.

        inputs: the per-layer embeddings (see LayerInputs); None = the model has none.
        """
        for sublayer in self.sublayers:
            residual = sublayer.forward(residual, kv, meta)
        if self.input is not None and inputs is not None:
            residual = self.input.add_input(residual, inputs[:, self.number], meta)
        return residual if self.scale is None else residual.mul_(self.scale.tensor)


class PostNormLayer(DecoderLayer):
    """A layer with a norm after each block; one kernel may compute everything after attention."""

    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        attention, mlp = self.attention, self.mlp
        assert attention is not None and mlp is not None
        self.rest: tuple[BidirectionalAttention, Mlp, LayerNorm, LayerNorm] | None = None
        norms, blocks = (attention.after, mlp.after), (attention.block, mlp.block)
        if (
            build.group.size == 1
            and isinstance(blocks[0], BidirectionalAttention)
            and type(blocks[1]) is Mlp
            and not blocks[1].gated
            and isinstance(norms[0], LayerNorm)
            and isinstance(norms[1], LayerNorm)
        ):
            self.rest = blocks[0], blocks[1], norms[0], norms[1]

    def forward(
        self, residual: Tensor, kv: KV, meta: AttentionMeta, inputs: Tensor | None = None
    ) -> Tensor:
        if self.rest is None or meta.lora is not None:
            return super().forward(residual, kv, meta, inputs)
        attention, mlp, *norms = self.rest
        attended = attention.attended(residual, meta)
        states = attention.out.state, mlp.up.state, mlp.down.state
        first, second = ((norm.weight, norm.bias, norm.eps) for norm in norms)
        done = mlp.down.method.apply_post_norms(
            states, attended, residual, (first, second), mlp.act
        )
        if done is not None:
            return done
        summed = attention.out.forward(attended, residual=residual)
        return self.sublayers[1].forward(norms[0](summed), kv, meta)


class ParallelLayer(DecoderLayer):
    """A layer whose attention and MLP both read the same residual and add to it."""

    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        assert self.mlp is not None
        if build.config.parallel == "shared":
            self.mlp.before = None

    def forward(
        self, residual: Tensor, kv: KV, meta: AttentionMeta, inputs: Tensor | None = None
    ) -> Tensor:
        attention, mlp = self.attention, self.mlp
        assert attention is not None and attention.before is not None and mlp is not None
        normed = attention.before(residual)
        other = normed if mlp.before is None else mlp.before(residual)
        residual = attention.block.forward(normed, kv, meta, residual=residual)
        return mlp.block.forward(other, kv, meta, residual=residual)


def look_ahead(layers: Sequence[DecoderLayer], last: Norm | None) -> None:
    """Set, for each block that ends in an all-reduce, the norm that reads the residual next.

    last: the norm after all layers.
    """
    row = [(layer, sublayer) for layer in layers for sublayer in layer.sublayers]
    # Only norms before Attention and Mlp, which accept a computed norm. Experts fuse theirs with
    # the router.
    norms = [
        sublayer.before if type(sublayer.block) in (Attention, Mlp) else None
        for _, sublayer in row[1:]
    ]
    for (layer, sublayer), norm in zip(row, [*norms, last], strict=True):
        inside = sublayer is not layer.sublayers[-1]
        plain = (
            type(layer) is DecoderLayer and type(sublayer) is Sublayer and sublayer.after is None
        )
        if plain and isinstance(norm, RMSNorm) and (inside or layer.ends_with_block):
            block = sublayer.block
            if type(block) is Experts:
                block.then = norm
            elif type(block) in (Attention, Mlp) and isinstance(
                block.linears[-1], RowParallelLinear
            ):
                block.linears[-1].then = norm
