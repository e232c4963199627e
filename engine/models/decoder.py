"""Decoder: a model's embedding, layers, final norm and LM head, built from its record."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engine.config.kv_groups import kv_groups
from engine.errors import ConfigError
from engine.layers.build import Builder
from engine.layers.experts import Stack
from engine.layers.layer_inputs import LayerInputs
from engine.layers.linear import LatentProjection, Linear, RowParallelLinear
from engine.layers.norm import Norm
from engine.layers.rotary import Tables
from engine.models.decoder_layer import DecoderLayer, ParallelLayer, PostNormLayer, look_ahead
from engine.models.entrance import Entrance
from engine.models.image_rows import ImageRows
from engine.models.vision.registry import build_tower
from engine.models.vision.tower import Tower
from engine.parallel.stages import Stage
from engine.quantization.method import DenseState, ExpertsSpec, LinearMethod, LinearSpec, Part
from engine.weights.parameter import Parameter, Unit
from engine.weights.stream import LEAST_OPEN
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


def _finish_left(each: Linear | Stack) -> None:
    """Pack a linear layer or experts, unless the loader has already done that."""
    if each.parameters:
        each.finish()


class Decoder:
    """A model, or one rank's part, built from its record; implements registry.Model."""

    def __init__(
        self,
        build: Builder,
        tied: LinearMethod,
        virtual_tokens: int,
        layer_numbers: range | None = None,
    ) -> None:
        """Build the layers of this pipeline stage.

        tied: the linear method of an LM head that is tied to the embedding.
        virtual_tokens: rows after the vocabulary in the embedding table.
        layer_numbers: the layers to build, for a part that cannot run; None = the stage's.
        """
        self.build = build
        self._made_with = tied, virtual_tokens
        self.config = config = build.config
        self.dtype, self.device, self.kernels = build.dtype, build.device, build.kernels
        self.group, self.head_group = build.group, build.head_group
        self.routes = build.routes
        self.stage = build.stage
        ends = build if build.stage.first else build.outline()
        hidden, vocab = config.embedding_size, config.vocab_size
        name = build.stored("embedding").names[0]
        part = Part(name, vocab, hidden, (0, vocab), (0, hidden))
        spec = LinearSpec("embedding", (part,), False, build.dtype, ends.device)
        first, end = build.group.share(vocab)
        tied_rows = (first, end) if config.tie_embeddings else None
        self.table = build.method.table(spec, virtual_tokens, tied_rows)
        self.lookup, self.embedding = self.table.lookup, self.table.embedding
        self.entrance = Entrance.of(ends)
        # the final norm; None for a model whose layers end with a norm
        self.norm: Norm | None = None
        if not config.post_norm:
            self.norm = ends.norm(
                "norm", config.hidden_size, of_residual=True, scale=config.logit_scale
            )
        tables = Tables(config.max_positions, build.device)
        self._tables = tables
        layer = DecoderLayer
        if config.parallel:
            layer = ParallelLayer
        elif config.post_norm:
            layer = PostNormLayer
        self.layer_inputs = LayerInputs(build) if config.layer_input_size else None
        self.project_out: Linear | None = None
        if hidden != config.hidden_size:
            self.project_out = ends.undivided().column("project_out", (hidden,), config.hidden_size)
        self._tied = tied
        self._tied_head: Any = DenseState(self.embedding[first:end], None, "head")
        self.head: Linear | None = None
        if not config.tie_embeddings:
            self.head = ends.column(
                "head", (vocab,), hidden, bias=config.head_bias, ranges=((first, end),)
            )
        # Numbers of the layers whose inputs a drafter reads, ascending; the number of layers stands
        # for the last layer's output. `through` stores copies in `tapped`, [n, hidden_size] each.
        self.taps: tuple[int, ...] = ()
        self.tapped: list[Tensor] = []
        self.tower: Tower | None = build_tower(ends)
        self.modules_elsewhere: set[str] = set()
        own = range(config.num_layers) if layer_numbers is None else layer_numbers
        if build.stage.count > 1 and layer_numbers is None:
            own = self._divide(
                [layer(build.outline().at(number), tables) for number in range(config.num_layers)]
            )
        if not build.stage.first:
            self.tower = None
        levels = 0 if self.tower is None else self.tower.config.deepstack
        if levels > len(own) and layer_numbers is None:
            raise ConfigError(
                f"pipeline_parallel: the first of {build.stage.count} stages has {len(own)} layers "
                f"of {config.architecture}, and embeddings of images are added after the first "
                f"{levels}; lower it, or set images: off",
                param="pipeline_parallel",
            )
        self.layer_numbers = own
        self.layers = [layer(build.at(number), tables) for number in own]
        if build.group.size > 1 and self.layers:
            look_ahead(self.layers, self.norm if build.stage.count == 1 else None)
        heads = build.head_group
        groups = kv_groups(config, heads.size, heads.rank)
        whole = build.stage.count == 1 or layer_numbers is not None
        self.kv = groups = groups if whole else groups.of(own)
        self._view_of = dict.fromkeys(own, 0)  # layers without KV can use any view
        self._view_of |= {
            number: index for index, view in enumerate(groups.views) for number in view.layers
        }
        self._view_of |= {number: self._view_of[source] for number, source in groups.borrowed}
        linears = self._all_linears()
        in_table = {parameter.name for parameter in self.table.parameters}
        filled = sum(
            parameter.tensor.nbytes
            for parameter in self.parameters()
            if parameter.name not in in_table
        )
        self.num_bytes = self.loading_bytes = filled + tables.num_bytes
        if build.stage.first:
            part = Part(name, end - first, hidden, (0, end - first), (0, hidden))
            self.loading_bytes += self.table.loading_bytes
            self.num_bytes += self.table.num_bytes + self._tied_bytes(replace(spec, parts=(part,)))
        self.num_bytes += sum(
            linear.num_bytes - linear.loading_bytes for linear in (*linears, *self._of_tower())
        )
        self.num_bytes += sum(stack.num_bytes - stack.loading_bytes for stack in self._stacks())
        transient = [layer for layer in self._in_units() if layer.transient]
        self.open_bytes = self._most_open(transient)
        self.loading_bytes += sum(layer.num_bytes - layer.loading_bytes for layer in transient)
        self.loading_bytes += self.open_bytes
        # Matrices are counted by their specs, as quantised parameters have fewer elements.
        stacks = self._stacks()
        elsewhere = in_table | {
            parameter.name for linear in linears for parameter in linear.parameters
        }
        elsewhere |= {parameter.name for stack in stacks for parameter in stack.parameters}
        in_stacks = sum(stack.spec.num_parameters for stack in stacks)
        self.num_parameters = in_stacks
        self.num_parameters += self.table.num_parameters if build.stage.first else 0
        self.num_parameters += sum(linear.spec.num_parameters for linear in linears)
        self.num_parameters += sum(
            parameter.tensor.numel()
            for parameter in self.parameters()
            if parameter.name not in elsewhere
        )
        self.num_active_parameters = self.num_parameters
        if self.tower is not None:  # not counted, as text tokens do not use the vision encoder
            self.num_active_parameters -= sum(
                parameter.tensor.numel() for parameter in self.tower.parameters()
            )
        if config.experts is not None:
            chosen, count = config.experts.routing.chosen, config.experts.choices
            self.num_active_parameters -= in_stacks * (count - chosen) // count

    def _divide(self, outlines: "list[DecoderLayer]") -> range:
        """Divide the layers among pipeline stages; return this stage's layers.

        This also records the tensors that are only on other stages. The cost of a layer is the
        number of parameters that a token uses; the same holds for the LM head. The embedding costs
        nothing unless it is tied, as a step reads few of its rows.

        outlines: all layers of the model, on the meta device.
        """
        ends = sum(linear.spec.num_parameters for linear in self._ends())
        if self.head is None:
            ends += self.table.num_parameters
        own = self.stage.layers([layer.num_parameters for layer in outlines], ends)
        others = [layer for layer in outlines if layer.number not in own]
        parameters = list(chain.from_iterable(layer.parameters() for layer in others))
        parameters += [] if self.stage.first else self._parameters_of_ends()
        elsewhere = {source.name for parameter in parameters for source in parameter.sources}
        self.build.elsewhere.update(elsewhere)
        self.modules_elsewhere.update(
            part.name
            for layer in others
            for linear in layer.linears
            if linear.adaptable
            for part in linear.spec.parts
        )
        return own

    @property
    def rotary_table(self) -> Tensor:
        """The rotary table of a layer with plain attention."""
        return self._tables(self.config.rope, self.config.head_dim)

    def linears(self) -> Iterator[Linear]:
        return (linear for linear in self._in_layers() if linear.adaptable)

    def _in_layers(self) -> Iterator[Linear]:
        return chain.from_iterable(layer.linears for layer in self.layers)

    def _of_tower(self) -> list[Linear]:
        return [] if self.tower is None else self.tower.linears

    def _stacks(self) -> list[Stack]:
        return [stack for layer in self.layers for stack in layer.stacks]

    def _all_linears(self) -> list[Linear]:
        if not self.stage.first:
            return [*self._in_layers()]
        entrance = [] if self.entrance is None else [*self.entrance.linears]
        entrance += [] if self.layer_inputs is None else [self.layer_inputs.project]
        return [*entrance, *self._in_layers(), *self._ends()]

    def _ends(self) -> list[Linear]:
        return [linear for linear in (self.project_out, self.head) if linear is not None]

    def matrices(self) -> list[LinearSpec]:
        return [linear.spec for linear in self._all_linears()]

    def expert_specs(self) -> list[ExpertsSpec]:
        return [stack.spec for stack in self._stacks()]

    def _tied_bytes(self, spec: LinearSpec) -> int:
        """Return the bytes of a packed copy of a tied LM head; 0 if there is none."""
        if self.head is not None or not self.config.generates or self.table.head() is not None:
            return 0
        return self._tied.packed_bytes(spec) or 0

    def step_bytes(self, tokens: int, samples: int) -> int:
        config, width = self.config, self.build.activation_dtype.itemsize
        inside = max(
            sublayer.block.activations for layer in self.layers for sublayer in layer.sublayers
        )
        logits = samples * config.vocab_size * (width + 4)
        return tokens * width * (2 * config.hidden_size + inside) + logits

    def forward(
        self,
        token_ids: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
        images: ImageRows | None = None,
    ) -> Tensor:
        residual = self.enter(token_ids, metas[0].positions, images)
        inputs = None
        if self.layer_inputs is not None:
            of_images = None if images is None else images.tokens
            inputs = self.layer_inputs(token_ids, residual, of_images)
        return self.leave(self.through(residual, metas, kv, inputs, images))

    def enter(
        self, token_ids: Tensor, positions: Tensor, images: ImageRows | None = None
    ) -> Tensor:
        """Return the first layer's input [num_tokens, hidden_size] for the token ids.

        Embeddings of images are inserted unchanged; factors apply only to other tokens. A later
        stage returns zeros of that shape, which `receive` fills.
        """
        if not self.stage.first:
            shape, dtype = (len(token_ids), self.config.hidden_size), self.build.activation_dtype
            return torch.zeros(shape, dtype=dtype, device=self.device)
        residual = self.table.forward(token_ids).to(self.build.activation_dtype)
        if self.entrance is not None:
            residual = self.entrance(residual, token_ids, positions)
        return residual if images is None else images.enter(residual)

    def through(
        self,
        residual: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
        inputs: Tensor | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        if self.taps:
            return self._tapped(residual, metas, kv, inputs, images)
        for layer in self.layers:
            number = layer.number
            own = kv.get(number, ())
            residual = layer.forward(residual, own, metas[self._view_of[number]], inputs)
            if images is not None:
                residual = images.after(number, residual)
        return residual

    def _tapped(
        self,
        residual: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
        inputs: Tensor | None,
        images: ImageRows | None,
    ) -> Tensor:
        """Run this stage's layers as `through` does, and store the inputs of the layers `taps`.

        The drafter reads these inputs from `tapped`. Returns the residual.
        """
        self.tapped, scale = [], self.config.residual_scale
        for layer in self.layers:
            number = layer.number
            if number in self.taps:
                self.tapped.append(residual * scale)
            own = kv.get(number, ())
            residual = layer.forward(residual, own, metas[self._view_of[number]], inputs)
            if images is not None:
                residual = images.after(number, residual)
        # the last layer's output, which also replaces the inputs of layers that `one_layer` leaves
        # out
        while len(self.tapped) < len(self.taps):
            self.tapped.append(residual * scale)
        return residual

    def leave(self, residual: Tensor) -> Tensor:
        """Return the final norm of the output of the last layer.

        Only the first stage has this norm; other stages return the residual unchanged.
        """
        return residual if self.norm is None or not self.stage.first else self.norm(residual)

    def logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        if self.project_out is not None:
            hidden = self.project_out.forward(hidden)
        if self.head is None:
            logits = self._tied.apply(self._tied_head, hidden)
        else:
            logits = self.head.forward(hidden)
        if whole:
            logits = self.group.gather_columns(logits, self.config.vocab_size)
        cap = self.config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        alike: dict[tuple[int, int, bool], list[Linear]] = {}
        for layer in self.layers:
            for sublayer in layer.sublayers:
                onto_residual = sublayer.after is None and self.build.group.size == 1
                for linear in sublayer.block.linears:
                    if isinstance(linear, LatentProjection):
                        continue
                    spec = linear.spec
                    added = onto_residual and isinstance(linear, RowParallelLinear)
                    key = (spec.out_features, spec.in_features, added)
                    alike.setdefault(key, []).append(linear)
        for (_, _, added), linears in alike.items():
            linears[0].method.tune([linear.state for linear in linears], tokens, added)
        if not self.stage.first:
            return
        if self.head is None:
            self._tied.tune([self._tied_head], samples, add=False)
        else:
            self.head.method.tune([self.head.state], samples, add=False)

    def parameters(self) -> Iterator[Parameter]:
        if self.stage.first:
            yield from self.table.parameters
            if self.entrance is not None:
                yield from self.entrance.parameters()
            if self.layer_inputs is not None:
                yield from self.layer_inputs.parameters()
        for layer in self.layers:
            yield from layer.parameters()
        if self.stage.first:
            if self.norm is not None:
                yield from self.norm.parameters
            for linear in self._ends():
                yield from linear.parameters
            if self.tower is not None:
                yield from self.tower.parameters()

    def _parameters_of_ends(self) -> list[Parameter]:
        parameters = [*self.table.parameters]
        parameters += [] if self.entrance is None else self.entrance.parameters()
        parameters += [] if self.norm is None else self.norm.parameters
        parameters += [] if self.tower is None else self.tower.parameters()
        return parameters + [
            parameter for linear in self._ends() for parameter in linear.parameters
        ]

    def units(self) -> Iterator[Unit]:
        return (owner.unit for owner in self._in_units())

    def _in_units(self) -> Iterator[Linear | Stack]:
        for linear in self._all_linears():
            # not a `unit_head`, whose rows `finish` normalises before packing
            if linear is not self.head or not self.config.unit_head:
                yield linear
        yield from self._of_tower()
        yield from self._stacks()

    def _most_open(self, transient: Sequence[Linear | Stack]) -> int:
        """Return `open_bytes` (see Model).

        transient: layers and experts whose parameters are packed after loading.
        """
        sizes = [owner.loading_bytes for owner in transient]
        layers = [
            sum(owner.loading_bytes for owner in layer.packed if owner.transient)
            for layer in self.layers
        ]
        most = max(2 * max(layers, default=0), max(sizes, default=0))
        return min(sum(sizes), max(most, LEAST_OPEN[self.build.runs_on]))

    def parts(self, most_bytes: int) -> Iterator[tuple["Decoder", "Decoder"]]:
        """Yield, for each part of this model, (an unloaded copy of the part, a view of this model's
        part).

        The first part of the first stage is the embedding and the LM head; others are layers. A
        copy has separate memory, so it should be dropped before the next one is created.

        most_bytes: the maximum bytes of the layers in one part, which has at least one layer.
        """
        build, made_with = self.build, self._made_with
        numbers = [layer.number for layer in self.layers]
        if self.stage.first:
            original = copy.copy(self)
            original.layers = []
            yield Decoder(build, *made_with, range(0)), original
        # a stage without embedding and LM head
        later = Stage(max(1, self.stage.number), max(2, self.stage.count))
        inner = replace(build, stage=later)
        size = sum(owner.num_bytes for layer in self.layers for owner in layer.packed)
        step = max(1, most_bytes * len(numbers) // max(1, size))
        for begin in range(0, len(numbers), step):
            original = copy.copy(self)
            original.layers = self.layers[begin : begin + step]
            chosen = numbers[begin : begin + step]
            yield Decoder(inner, *made_with, range(chosen[0], chosen[-1] + 1)), original

    def one_layer(self) -> "Decoder":
        short = copy.copy(self)
        kinds = {layer.kind: layer for layer in reversed(self.layers)}
        short.layers = sorted(kinds.values(), key=lambda layer: layer.number)
        return short

    def tensor_name(self, stored: str) -> str:
        name = self.config.tensor_name(stored)
        return name if self.config.quantized is None else self.config.quantized.canonical(name)

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, as this model has no such
        parameter.

        A stored LM head is ignored if the head is tied to the embedding.
        """
        name = self.config.tensor_name(stored)
        tied = False
        if self.head is None and self.build.has("head"):
            tied = name == f"{self.build.stored('head').names[0]}.weight"
        quantized = self.config.quantized
        if quantized is not None and quantized.ignores(name):
            return True
        if self._is_elsewhere(name) or self._is_elsewhere(self.tensor_name(stored)):
            return True
        return tied or self.config.ignores(stored)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a tensor, or its module, is only on other ranks or stages."""
        while name:
            if name in self.build.elsewhere:
                return True
            name = name.rpartition(".")[0]
        return False

    def finish(self) -> None:
        first = self.stage.first
        if first and self.config.unit_head and self.head is not None:
            if not isinstance(self.head.state, DenseState):
                raise ConfigError(
                    f"{self.config.architecture} divides the head's rows by their length, which "
                    "a quantised head does not allow",
                    param="quantization",
                )
            weight = self.head.state.weight
            weight.copy_(normalize(weight.float(), dim=1))
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            list(pool.map(_finish_left, [*self._all_linears(), *self._of_tower(), *self._stacks()]))
        if not first:
            return
        self.table.finish()
        if self.head is not None or not self.config.generates:
            return
        tied = self.table.head()
        if tied is not None:
            self._tied, self._tied_head = tied
        else:
            self._tied_head = self._tied.finish(self._tied_head)
