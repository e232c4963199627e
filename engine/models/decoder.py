"""Decoder: embedding, layers of attention and MLP, norm and head, as a record names them
(`engine.architectures`)."""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kv_groups import kv_groups
from engine.layers.attention import Attention
from engine.layers.build import Builder
from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.mlp import Mlp
from engine.layers.norm import Norm, RMSNorm
from engine.layers.rotary import cos_sin_table
from engine.quantization.method import DenseState, LinearMethod, LinearSpec, Part
from engine.weights.parameter import Parameter
from kernels.metadata import AttentionMeta

KV = tuple[Tensor, Tensor]


class Block(Protocol):
    """What stands between two norms: attention, an MLP."""

    @property
    def linears(self) -> Sequence[Linear]: ...
    @property
    def norms(self) -> Sequence[Norm]: ...
    @property
    def activations(self) -> int:
        """Elements a token that are alive at once inside, beside the residual and its norm."""
        ...

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [n, hidden] -> self(norm(x)), added to residual and written over it if there is one."""
        ...


class Sublayer:
    """residual + after(block(before(residual))); either norm may be missing. Whether a norm or the
    residual rides along with one of the block's products is for the block to see."""

    def __init__(self, block: Block, before: Norm | None, after: Norm | None) -> None:
        self.block = block
        self.before = before
        self.after = after

    def forward(self, residual: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        """residual [n, hidden] is written over."""
        if self.after is None:
            return self.block.forward(residual, kv, meta, norm=self.before, residual=residual)
        return residual.add_(self.after(self.block.forward(residual, kv, meta, norm=self.before)))

    @property
    def norms(self) -> Iterator[Norm]:
        yield from (norm for norm in (self.before, self.after) if norm is not None)
        yield from self.block.norms


class DecoderLayer:
    """Attention, then the MLP."""

    def __init__(self, build: Builder, cos_sin: Tensor) -> None:
        assert build.layer is not None
        self.number = build.layer

        def norm(ours: str) -> RMSNorm | None:
            return build.norm(ours, build.config.hidden_size) if build.has(ours) else None

        self.attention = Sublayer(
            Attention(build, cos_sin), norm("attention_norm"), norm("attention_out_norm")
        )
        self.mlp = Sublayer(Mlp(build), norm("mlp_norm"), norm("mlp_out_norm"))
        self.sublayers = (self.attention, self.mlp)

    @property
    def linears(self) -> Iterator[Linear]:
        return chain.from_iterable(each.block.linears for each in self.sublayers)

    def parameters(self) -> Iterator[Parameter]:
        for each in self.sublayers:
            for norm in each.norms:
                yield from norm.parameters
            for linear in each.block.linears:
                yield from linear.parameters

    def forward(self, residual: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        """residual [n, hidden] -> the same with attention and MLP added; its memory is reused."""
        return self.mlp.forward(self.attention.forward(residual, kv, meta), kv, meta)


class Decoder:
    """See registry.Model."""

    def __init__(self, build: Builder, tied: LinearMethod, virtual_tokens: int) -> None:
        """tied: for the head, if it is the embedding."""
        self.build = build
        self.config = config = build.config
        self.dtype, self.device, self.kernels = build.dtype, build.device, build.kernels
        hidden, vocab = config.hidden_size, config.vocab_size
        name = build.stored("embedding").names[0]
        part = Part(name, vocab, hidden, (0, vocab), (0, hidden))
        spec = LinearSpec("embedding", (part,), False, build.dtype, build.device)
        self.table = build.method.table(spec, virtual_tokens)
        self.lookup, self.embedding = self.table.lookup, self.table.embedding
        self.norm = build.norm("norm", hidden)
        tables = {
            (layer.rope, layer.head_dim): cos_sin_table(
                layer.rope, layer.head_dim, config.max_positions, build.device
            )
            for layer in dict.fromkeys(config.attention)
        }
        self.layers = [
            DecoderLayer(build.at(number), tables[layer.rope, layer.head_dim])
            for number, layer in enumerate(config.attention)
        ]
        self._group_of = {
            number: index
            for index, group in enumerate(kv_groups(config).groups)
            for number in group.layers
        }
        self._tied = tied
        self._tied_head: Any = DenseState(self.embedding, None)
        self.head: Linear | None = None
        if not config.tie_embeddings:
            self.head = build.column("head", (vocab,), hidden)
        linears = self._all_linears()
        in_table = {each.name for each in self.table.parameters}
        filled = sum(each.tensor.nbytes for each in self.parameters() if each.name not in in_table)
        self.loading_bytes = self.table.loading_bytes + filled
        self.loading_bytes += sum(table.nbytes for table in tables.values())
        self.num_bytes = self.loading_bytes + self._tied_bytes(spec)
        self.num_bytes += self.table.num_bytes - self.table.loading_bytes
        self.num_bytes += sum(linear.num_bytes - linear.loading_bytes for linear in linears)
        # Those in blocks or words have another number of elements.
        elsewhere = in_table | {each.name for linear in linears for each in linear.parameters}
        self.num_parameters = self.table.num_parameters
        self.num_parameters += sum(linear.spec.num_parameters for linear in linears)
        self.num_parameters += sum(
            each.tensor.numel() for each in self.parameters() if each.name not in elsewhere
        )

    def linears(self) -> Iterator[Linear]:
        return chain.from_iterable(layer.linears for layer in self.layers)

    def _all_linears(self) -> list[Linear]:
        return [*self.linears(), *([] if self.head is None else [self.head])]

    def _tied_bytes(self, spec: LinearSpec) -> int:
        """Of what the head's method makes of the embedding, beside it."""
        if self.head is not None or self.table.head() is not None:
            return 0
        return self._tied.packed_bytes(spec) or 0

    def step_bytes(self, tokens: int, samples: int) -> int:
        config, width = self.config, self.build.activation_dtype.itemsize
        inside = max(each.block.activations for layer in self.layers for each in layer.sublayers)
        logits = samples * config.vocab_size * (width + 4)
        return tokens * width * (2 * config.hidden_size + inside) + logits

    def forward(
        self, token_ids: Tensor, metas: Sequence[AttentionMeta], kv: Sequence[KV]
    ) -> Tensor:
        residual = self.table.forward(token_ids).to(self.build.activation_dtype)
        for layer in self.layers:
            number = layer.number
            residual = layer.forward(residual, kv[number], metas[self._group_of[number]])
        return self.norm(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            return self._tied.apply(self._tied_head, hidden)
        return self.build.group.all_gather_columns(self.head.forward(hidden))

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        alike: dict[tuple[int, int, bool], list[Linear]] = {}
        for layer in self.layers:
            for each in layer.sublayers:
                onto_residual = each.after is None and self.build.group.size == 1
                for linear in each.block.linears:
                    spec = linear.spec
                    added = onto_residual and isinstance(linear, RowParallelLinear)
                    key = (spec.out_features, spec.in_features, added)
                    alike.setdefault(key, []).append(linear)
        for (_, _, added), linears in alike.items():
            linears[0].method.tune([linear.state for linear in linears], tokens, added)
        if self.head is None:
            self._tied.tune([self._tied_head], samples, add=False)
        else:
            self.head.method.tune([self.head.state], samples, add=False)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.table.parameters
        for layer in self.layers:
            yield from layer.parameters()
        yield from self.norm.parameters
        if self.head is not None:
            yield from self.head.parameters

    def one_layer(self) -> "Decoder":
        short = copy.copy(self)
        kinds = {self.config.attention[layer.number]: layer for layer in reversed(self.layers)}
        short.layers = sorted(kinds.values(), key=lambda layer: layer.number)
        return short

    def ignores(self, name: str) -> bool:
        """A tied head may be in the checkpoint all the same; it is the embedding."""
        tied = self.head is None and name == f"{self.build.stored('head').names[0]}.weight"
        quantized = self.config.quantized
        if quantized is not None and quantized.ignores(name):
            return True
        return tied or name in self.build.elsewhere or self.config.record.ignores(name)

    def finish(self) -> None:
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            list(pool.map(Linear.finish, self._all_linears()))
        self.table.finish()
        if self.head is not None:
            return
        kept = self.table.head()
        if kept is not None:
            self._tied, self._tied_head = kept
        else:
            self._tied_head = self._tied.finish(self._tied_head)
