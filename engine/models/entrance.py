"""Entrance: the computation between the embedding and the first layer.

The computation has one or more of these: a scale factor, a projection, learned positions, token
types, a norm.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.weights.parameter import Parameter


class Entrance:
    """The computation between the embedding and the first layer, in models that have one."""

    def __init__(self, build: Builder) -> None:
        config = build.config
        # rounded to the embedding's dtype, as in training
        factor = torch.tensor(config.embedding_scale, dtype=build.dtype).item()
        self.factor = factor / config.residual_scale
        self.project: Linear | None = None
        if config.embedding_size != config.hidden_size:
            self.project = build.undivided().column(
                "project_in", (config.hidden_size,), config.embedding_size
            )
        self.positions: Parameter | None = None
        if build.has("positions"):
            first = config.position_offset
            self.positions = build.table(
                "positions",
                config.position_rows,
                first,
                first + config.max_positions,
                config.hidden_size,
            )
        self.types: Parameter | None = None
        if build.has("token_types"):
            kinds = 1 if config.separator < 0 else 2
            self.types = build.table(
                "token_types", config.token_types, 0, kinds, config.hidden_size
            )
        self.separator = config.separator
        self.norm: Norm | None = None
        if build.has("embedding_norm"):
            self.norm = build.norm("embedding_norm", config.hidden_size)

    @classmethod
    def of(cls, build: Builder) -> "Entrance | None":
        entrance = cls(build)
        others = (entrance.project, entrance.positions, entrance.types, entrance.norm)
        plain = all(other is None for other in others)
        return None if entrance.factor == 1 and plain else entrance

    def __call__(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input for embeddings x [n, embedding_size], which may be
        overwritten.

        token_ids, positions: [n]. In models with token types every text must be whole and begin at
            position 0.
        """
        if self.factor != 1:
            x = x.mul_(self.factor)
        if self.project is not None:
            x = self.project.forward(x)
        if self.positions is not None:
            x = x.add_(self.positions.tensor.index_select(0, positions))
        if self.types is not None:
            types = self.types.tensor
            x = x.add_(types if len(types) == 1 else types[self._kinds(token_ids, positions)])
        return x if self.norm is None else self.norm(x)

    def _kinds(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the type of each token [n]: 0 up to a text's first separator, 1 after it."""
        is_separator = (token_ids == self.separator).long()
        # number of separators before each token, over all texts
        before = is_separator.cumsum(0) - is_separator
        first = torch.arange(len(token_ids), device=positions.device) - positions
        return (before > before[first]).long()

    @property
    def linears(self) -> list[Linear]:
        return [] if self.project is None else [self.project]

    def parameters(self) -> Iterator[Parameter]:
        if self.project is not None:
            yield from self.project.parameters
        if self.positions is not None:
            yield self.positions
        if self.types is not None:
            yield self.types
        if self.norm is not None:
            yield from self.norm.parameters
