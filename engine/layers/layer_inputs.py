"""LayerInputs: per-layer embeddings of tokens (Gemma 4's E models)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.weights.parameter import Parameter
from kernels.metadata import AttentionMeta


class LayerInputs:
    """The per-layer embeddings of a step's tokens.

    An input is (norm(projected embedding) + row of a table) / sqrt(2).
    """

    def __init__(self, build: Builder) -> None:
        config = build.config
        if build.group.size > 1:
            raise ConfigError(
                f"{config.architecture} has inputs for each layer, which a model on several "
                "devices cannot divide; use one device",
                param="tensor_parallel",
            )
        self.layers, self.size, self.rows = (
            config.num_layers,
            config.layer_input_size,
            config.layer_input_rows,
        )
        self.padding = 0 if config.vision is None else config.vision.padding_id
        width = self.layers * self.size
        self.table = build.table("layer_inputs", self.rows, 0, self.rows, width)
        self.project = build.column("layer_inputs_project", (width,), config.hidden_size)
        self.norm = build.norm("layer_inputs_norm", self.size)
        self.scale = config.hidden_size**-0.5

    def __call__(self, token_ids: Tensor, embedded: Tensor, images: Tensor | None = None) -> Tensor:
        """Return the inputs [n, layers, size] of token_ids [n] with embeddings [n, hidden].

        Ids beyond the table, which are adapters' virtual tokens, use the first row.

        images: indices of image tokens, which use the row of the padding token.
        """
        projected = self.project.forward(embedded).mul_(self.scale)
        normed = self.norm(projected.view(-1, self.size)).view(-1, self.layers, self.size)
        known = torch.where(token_ids < self.rows, token_ids, 0)
        if images is not None:
            known.index_fill_(0, images, self.padding)
        rows = self.table.tensor.index_select(0, known).to(normed.dtype).view_as(normed)
        return normed.add_(rows, alpha=self.size**0.5).mul_(0.5**0.5)

    def parameters(self) -> Iterator[Parameter]:
        yield self.table
        yield from self.project.parameters
        yield from self.norm.parameters


class LayerInput:
    """A block that adds per-layer embeddings: residual + norm(out(act(gate(residual)) * input))."""

    def __init__(self, build: Builder) -> None:
        config = build.config
        self.kernels, self.act = build.kernels, config.hidden_act
        self.gate = build.column("layer_input_gate", (config.layer_input_size,), config.hidden_size)
        self.out = build.row("layer_input_out", config.hidden_size, config.layer_input_size)
        self.norm = build.norm("layer_input_norm", config.hidden_size)
        self.linears: tuple[Linear, ...] = (self.gate, self.out)

    def add_input(self, residual: Tensor, mine: Tensor, meta: AttentionMeta) -> Tensor:
        """Add the layer's input to residual [n, hidden] in place, and return the residual.

        mine: this layer's embeddings [n, size].
        """
        gate = self.kernels.activation(self.gate.forward(residual, meta.lora), self.act)
        return self.norm.added(self.out.forward(gate.mul_(mine), meta.lora), residual)
