"""The tower of Gemma 4: learned and rotary positions on two axes, and average pooling of
patches."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config.towers.gemma4 import Gemma4Vision
from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.models.vision.tower import Tower, patches_of, places, segments_of, turns
from kernels.metadata import AttentionMeta


class _Projection:
    """A linear layer of stacked matrices, each with optional clamping of input and output."""

    def __init__(self, tower: "Gemma4Tower", names: Sequence[str], out: int, features: int) -> None:
        inner = [f"{name}.linear" for name in names]
        self.clipped = tower.vision.clipped
        groups = [[name] for name in inner] if self.clipped else [inner]
        self.linears: list[Linear] = [
            tower.linear(group, out, features, bias=False) for group in groups
        ]
        self.bounds = [tower.bounds(name) for name in names] if self.clipped else []

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [n, features]; return [n, sum of the matrices' outputs]."""
        if not self.clipped:
            return self.linears[0].forward(x)
        outputs = []
        for layer, (low, high, least, most) in zip(self.linears, self.bounds, strict=True):
            outputs.append(layer.forward(x.clamp(low, high)).clamp_(least, most))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


class _Block:
    def __init__(self, tower: "Gemma4Tower", name: str) -> None:
        config = tower.vision
        width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        self.tower = tower
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self.attention_norm, self.after_attention, self.mlp_norm, self.after_mlp = (
            tower.rms_norm(f"{name}.{part}_layernorm", width) for part in norms
        )
        projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        self.qkv = _Projection(tower, projections, width, width)
        self.head_norms = [
            tower.rms_norm(f"{name}.self_attn.q_norm", head),
            tower.rms_norm(f"{name}.self_attn.k_norm", head),
            tower.plain_norm(head),
        ]
        self.out = _Projection(tower, [f"{name}.self_attn.o_proj"], width, width)
        gated = [f"{name}.mlp.{part}_proj" for part in ("gate", "up")]
        self.up = _Projection(tower, gated, inner, width)
        self.down = _Projection(tower, [f"{name}.mlp.down_proj"], width, inner)

    def forward(self, residual: Tensor, segments: AttentionMeta) -> Tensor:
        """Add the block's output to the residual [n, hidden_size] in place, and return the
        residual."""
        tower, config = self.tower, self.tower.vision
        qkv = self.qkv.forward(self.attention_norm(residual))
        heads = qkv.unflatten(1, (3, config.num_heads, config.head_dim))
        for part, (values, norm) in enumerate(zip(heads.unbind(1), self.head_norms, strict=True)):
            normed = norm(values.reshape(-1, config.head_dim)).view(values.shape)
            if part < 2:
                # In the checkpoint each half of a head has its own axis, and its two quarters are
                # rotated together. `attend` rotates the two halves together, so the two middle
                # quarters change places.
                normed = normed.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
            values.copy_(normed)
        attended = tower.attend(qkv, segments, scale=1.0)
        residual = self.after_attention.added(self.out.forward(attended), residual)
        inner = self.up.forward(self.mlp_norm(residual))
        inner = tower.kernels.GATES[config.activation](inner)
        return self.after_mlp.added(self.down.forward(inner), residual)


def _fill(value: float, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(value)


class Gemma4Tower(Tower):
    def __init__(self, build: Builder, config: Gemma4Vision) -> None:
        super().__init__(build, config)
        self.vision = config
        width, patch = config.hidden_size, config.patch_size
        name = "vision_tower.patch_embedder"
        self.patch = self.matrix(f"{name}.input_proj.weight", width, 3 * patch * patch)
        table = f"{name}.position_embedding_table"
        size = 2 * config.positions * width
        learned = self.vector(table, size, self.activation_dtype).tensor
        self.of_columns, self.of_rows = learned.view(2, config.positions, width)
        layers = range(config.num_layers)
        self.blocks = [_Block(self, f"vision_tower.encoder.layers.{i}") for i in layers]
        self.shift: Tensor | None = None
        if config.standardised:
            self.shift, self.scale = (
                self.vector(f"vision_tower.std_{part}", width).tensor for part in ("bias", "scale")
            )
        self.norm = self.plain_norm(width)
        projection = "embed_vision.embedding_projection"
        self.project = self.linear(projection, config.out_size, width, bias=False)

    def plain_norm(self, size: int) -> RMSNorm:
        """Create a norm without a weight."""
        ones = torch.ones(size, dtype=self.activation_dtype, device=self.device)
        return RMSNorm(self.kernels, ones, self.config.norm_eps)

    def bounds(self, name: str) -> tuple[Tensor, ...]:
        """Create a layer's clamping bounds, [1] each: (minimum, maximum) of the input, then the
        output."""
        limits = (("min", -math.inf), ("max", math.inf))
        return tuple(
            self.vector(
                f"{name}.{side}_{kind}",
                1,
                self.activation_dtype,
                fill=partial(_fill, limit),
            ).tensor
            for side in ("input", "output")
            for kind, limit in limits
        )

    def shape_of(self, size: int) -> tuple[int, int, int]:
        side = self.vision.patch_size * self.vision.pool
        # maximum number of embeddings along an axis
        most = self.vision.positions // self.vision.pool
        rows = max(1, min(most, math.isqrt(size)))
        return 1, rows * side, min(most, size // rows) * side

    def step_bytes(self, size: int) -> int:
        config = self.vision
        width, inner = config.hidden_size, config.intermediate_size
        inside = 2 * width + max(6 * width, 3 * inner)
        return size * config.pool**2 * inside * self.activation_dtype.itemsize

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        config = self.vision
        patch, pool = config.patch_size, config.pool
        device = pixels[0].device
        patches, rows, columns, lengths = [], [], [], []
        for picture in pixels:
            patches.append(patches_of(self.normalised(picture), patch, pool))
            height, width = picture.shape[1] // patch, picture.shape[2] // patch
            row, column = places(height, width, pool, device)
            rows.append(row)
            columns.append(column)
            lengths.append(height * width)
        row, column = torch.cat(rows), torch.cat(columns)
        residual = linear(torch.cat(patches), self.patch).to(self.activation_dtype)
        residual += self.of_columns.index_select(0, column) + self.of_rows.index_select(0, row)
        rotation = turns(column, row, config.head_dim, config.theta)
        segments = segments_of(lengths, device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        blocks = residual.view(-1, pool * pool, config.hidden_size)
        means = blocks.float().mean(1) * config.hidden_size**0.5
        if self.shift is not None:
            means = (means - self.shift) * self.scale
        normed = self.norm(means.to(self.activation_dtype))
        return self.project.forward(normed).to(self.dtype)
