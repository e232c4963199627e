"""The tower of Qwen3-VL, Qwen3.5 and Qwen3.6: learned and rotary positions, and deepstack."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config.towers.qwen_vl import QwenVision
from engine.layers.build import Builder
from engine.models.vision.tower import Tower, patches_of, places, segments_of, turns
from kernels.metadata import AttentionMeta


class _Block:
    def __init__(self, tower: "Qwen3Tower", name: str) -> None:
        config = tower.config
        width, inner = config.hidden_size, config.intermediate_size
        self.tower, self.act = tower, config.activation
        self.attention_norm = tower.layer_norm(f"{name}.norm1", width)
        self.qkv = tower.linear(f"{name}.attn.qkv", 3 * width, width)
        self.out = tower.closing(f"{name}.attn.proj", width, width)
        self.mlp_norm = tower.layer_norm(f"{name}.norm2", width)
        self.up = tower.linear(f"{name}.mlp.linear_fc1", inner, width)
        self.down = tower.closing(f"{name}.mlp.linear_fc2", width, inner)

    def forward(self, residual: Tensor, segments: AttentionMeta) -> Tensor:
        qkv = self.qkv.forward(residual, norm=self.attention_norm)
        attended = self.tower.attend(qkv, segments)
        residual = self.out.forward(attended, residual=residual)
        inner = self.up.forward(residual, norm=self.mlp_norm)
        inner = self.tower.kernels.activation(inner, self.act)
        return self.down.forward(inner, residual=residual)


class _Merger:
    """The layers that make one embedding of a block of patches.

    joined: whether the norm is of the whole block, and not of each patch.
    """

    def __init__(self, tower: "Qwen3Tower", name: str, joined: bool) -> None:
        config = tower.vision
        self.width = config.hidden_size * config.merge**2
        self.kernels, self.joined = tower.kernels, joined
        self.norm = tower.layer_norm(f"{name}.norm", self.width if joined else config.hidden_size)
        self.up = tower.linear(f"{name}.linear_fc1", self.width, self.width)
        self.down = tower.linear(f"{name}.linear_fc2", config.out_size, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings [n / merge², out_size] of patches x [n, hidden_size]."""
        x = self.norm(x.view(-1, self.width) if self.joined else x).view(-1, self.width)
        return self.down.forward(self.kernels.activation(self.up.forward(x), "gelu"))


class Qwen3Tower(Tower):
    def __init__(self, build: Builder, config: QwenVision) -> None:
        super().__init__(build, config)
        self.vision = config
        width, patch = config.hidden_size, config.patch_size
        # [width, colours, frames, patch²]
        self.patch = self.matrix(
            "visual.patch_embed.proj.weight", width, 3, config.frames, patch * patch
        )
        self.patch_bias = self.vector("visual.patch_embed.proj.bias", width).tensor
        self.table = self.matrix("visual.pos_embed.weight", config.positions, width)
        self.blocks = [_Block(self, f"visual.blocks.{i}") for i in range(config.num_layers)]
        self.merger = _Merger(self, "visual.merger", False)
        self.levels = {
            layer: _Merger(self, f"visual.deepstack_merger_list.{level}", True)
            for level, layer in enumerate(config.deepstack_layers)
        }

    def shape_of(self, size: int) -> tuple[int, int, int]:
        side = self.vision.patch_size * self.vision.merge
        rows = max(1, math.isqrt(size))
        return 1, rows * side, size // rows * side

    def step_bytes(self, size: int) -> int:
        config = self.vision
        inside = 4 * config.hidden_size + 2 * max(2 * config.hidden_size, config.intermediate_size)
        return size * config.merge**2 * inside * self.activation_dtype.itemsize

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        patch, merge = self.vision.patch_size, self.vision.merge
        device = pixels[0].device
        patches, learned, rows, columns, lengths = [], [], [], [], []
        for picture in pixels:
            patches.append(patches_of(self.normalised(picture), patch, merge))
            height, width = picture.shape[1] // patch, picture.shape[2] // patch
            row, column = places(height, width, merge, device)
            learned.append(self._learned(height, width, row, column))
            rows.append(row)
            columns.append(column)
            lengths.append(height * width)
        x = linear(torch.cat(patches), self._weight(), self.patch_bias) + torch.cat(learned)
        residual = x.to(self.activation_dtype)
        rotation = turns(torch.cat(rows), torch.cat(columns), self.vision.head_dim)
        segments = segments_of(lengths, device, rotation)
        levels = []
        for number, block in enumerate(self.blocks):
            residual = block.forward(residual, segments)
            if number in self.levels:
                levels.append(self.levels[number].forward(residual))
        return torch.cat((self.merger.forward(residual), *levels), 1).to(self.dtype)

    def _weight(self) -> Tensor:
        """Return the patches' matrix [width, patch² * 3]; a still picture's frames are equal."""
        return self.patch.sum(2).transpose(1, 2).flatten(1)

    def _learned(self, height: int, width: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Return learned positions [n, width] of patches at these rows and columns of a grid.

        They are interpolated between the four nearest ones of the table, whose corners are the
        grid's corners.
        """
        side = round(self.vision.positions**0.5)
        above, below, down = _between(height, side, rows)
        left, right, across = _between(width, side, columns)
        top = torch.lerp(self.table[above * side + left], self.table[above * side + right], across)
        bottom = torch.lerp(
            self.table[below * side + left], self.table[below * side + right], across
        )
        return torch.lerp(top, bottom, down)


def _between(count: int, side: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table's lines before and after each of `count` lines, and how far it is between.

    index: [n] lines that are asked for. The distances are [n, 1].
    """
    lines = torch.linspace(0, side - 1, count, device=index.device)[index]
    before = lines.long()
    return before, (before + 1).clamp(max=side - 1), (lines - before)[:, None]
