"""The tower of Pixtral and Mistral 3: rotary positions on two axes, and a patch merger."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config.towers.pixtral import PixtralVision
from engine.layers.build import Builder
from engine.models.vision.block import Block, GatedMLP
from engine.models.vision.tower import Tower, patches_of, places, segments_of, turns


class _Merger:
    """The layer that merges a block of patches into one embedding of the tower's width."""

    def __init__(self, tower: "PixtralTower", name: str, eps: float) -> None:
        config = tower.vision
        self.width, self.block = config.hidden_size, config.merge**2
        self.norm = tower.rms_norm(f"{name}.norm", self.width, eps)
        joined = self.width * self.block
        layer = f"{name}.patch_merger.merging_layer"
        self.join = tower.linear(layer, self.width, joined, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Merge patches x [n, width], which are ordered by block; return [n / block, width]."""
        blocks = self.norm(x).view(-1, self.block, self.width)
        # A row of the matrix has one feature of all patches of a block, then the next feature.
        return self.join.forward(blocks.transpose(1, 2).flatten(1))


class PixtralTower(Tower):
    def __init__(self, build: Builder, config: PixtralVision) -> None:
        super().__init__(build, config)
        self.vision = config
        width, patch = config.hidden_size, config.patch_size
        name = "vision_tower"
        self.patch = self.matrix(f"{name}.patch_conv.weight", width, 3, patch * patch)
        self.before = self.rms_norm(f"{name}.ln_pre", width)
        layers = range(config.num_layers)
        self.blocks = [self._block(f"{name}.transformer.layers.{i}") for i in layers]
        name = "multi_modal_projector"
        eps = config.merger_eps
        self.merger = None if eps is None else _Merger(self, name, eps)
        bias = config.projector_bias
        self.up = self.linear(f"{name}.linear_1", config.out_size, width, bias=bias)
        self.down = self.linear(f"{name}.linear_2", config.out_size, config.out_size, bias=bias)

    def _block(self, name: str) -> Block:
        width = self.vision.hidden_size
        norms = (
            self.rms_norm(f"{name}.attention_norm", width),
            self.rms_norm(f"{name}.ffn_norm", width),
        )
        projections = [f"{name}.attention.{part}_proj" for part in "qkv"]
        qkv = self.linear(projections, width, width, bias=False)
        out = self.closing(f"{name}.attention.o_proj", width, width, bias=False)
        return Block(self, norms, qkv, out, GatedMLP(self, f"{name}.feed_forward", bias=False))

    def shape_of(self, size: int) -> tuple[int, int, int]:
        side = self.vision.patch_size * self.vision.merge
        rows = max(1, math.isqrt(size))
        return 1, rows * side, size // rows * side

    def step_bytes(self, size: int) -> int:
        config = self.vision
        width, inner = config.hidden_size, config.intermediate_size
        inside = 2 * width + max(4 * width, 3 * inner)
        return size * config.merge**2 * inside * self.activation_dtype.itemsize

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        config = self.vision
        patch, merge = config.patch_size, config.merge
        device = pixels[0].device
        patches, rows, columns, lengths = [], [], [], []
        for picture in pixels:
            patches.append(patches_of(self.normalised(picture), patch, merge))
            height, width = picture.shape[1] // patch, picture.shape[2] // patch
            row, column = places(height, width, merge, device)
            rows.append(row)
            columns.append(column)
            lengths.append(height * width)
        weight = self.patch.transpose(1, 2).flatten(1)
        residual = self.before(linear(torch.cat(patches), weight).to(self.activation_dtype))
        rotation = turns(
            torch.cat(rows), torch.cat(columns), config.head_dim, config.theta, apart=True
        )
        segments = segments_of(lengths, device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        if self.merger is not None:
            residual = self.merger.forward(residual)
        inner = self.up.forward(residual, act=config.projector_activation)
        return self.down.forward(inner).to(self.dtype)
