"""The tower of InternVL: InternViT over tiles, and a projector of each 2 x 2 patches."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from engine.config.towers.internvl import InternVision
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.models.vision.block import Block, PlainMLP
from engine.models.vision.tiles import TileTower
from kernels.metadata import AttentionMeta

_EPS = 1e-6  # epsilon of the norms of queries and keys
_PROJECTOR_EPS = 1e-5


class _Block(Block):
    """A layer whose attention and MLP are scaled, element by element, before they are added."""

    def __init__(self, tower: "InternTower", name: str) -> None:
        config = tower.vision
        width = config.hidden_size
        projections = [f"{name}.attention.{part}_proj" for part in "qkv"]
        self.plain = PlainMLP(tower, f"{name}.mlp.fc1", f"{name}.mlp.fc2")
        super().__init__(
            tower,
            (tower.norm(f"{name}.layernorm_before"), tower.norm(f"{name}.layernorm_after")),
            tower.linear(projections, width, width, bias=config.qkv_bias),
            tower.closing(f"{name}.attention.projection_layer", width, width),
            self.plain,
        )
        self.scales = [
            tower.vector(f"{name}.lambda_{part}", width, tower.activation_dtype, 0.0).tensor
            for part in (1, 2)
        ]
        self.qk_norms = [
            tower.rms_norm(f"{name}.attention.{part}_norm", width, _EPS)
            for part in "qk"
            if config.qk_norm
        ]

    def forward(self, residual: Tensor, segments: AttentionMeta) -> Tensor:
        qkv = self.qkv.forward(residual, norm=self.attention_norm)
        for part, norm in zip(qkv.chunk(3, 1), self.qk_norms, strict=False):
            part.copy_(norm(part.contiguous()))
        attended = self.out.forward(self.tower.attend(qkv, segments))
        residual.addcmul_(self.scales[0], attended)
        inner = self.plain.up.forward(residual, norm=self.mlp_norm)
        inner = self.plain.down.forward(self.tower.activated(inner))
        return residual.addcmul_(self.scales[1], inner)


class InternTower(TileTower):
    def __init__(self, build: Builder, config: InternVision) -> None:
        name = "vision_tower.embeddings"
        super().__init__(build, config, f"{name}.patch_embeddings.projection", bias=True)
        self.vision = config
        width, joined = config.hidden_size, config.hidden_size * config.merge**2
        self.class_token = self.matrix(f"{name}.cls_token", 1, width)
        self.table: Tensor | None = None  # the class token's position first
        if config.positions:
            rows = 1 + config.positions**2
            self.table = self.matrix(f"{name}.position_embeddings", rows, width)
        self.blocks = [
            _Block(self, f"vision_tower.encoder.layer.{i}") for i in range(config.num_layers)
        ]
        self.last_norm: Norm | None = None
        if config.last_norm:
            self.last_norm = self.layer_norm("vision_tower.layernorm", width)
        name = "multi_modal_projector"
        self.projector_norm = self.layer_norm(f"{name}.layer_norm", joined, _PROJECTOR_EPS)
        self.up = self.linear(f"{name}.linear_1", config.out_size, joined)
        self.down = self.linear(f"{name}.linear_2", config.out_size, config.out_size)

    def norm(self, name: str) -> Norm:
        make = self.layer_norm if self.vision.norm == "layer_norm" else self.rms_norm
        return make(name, self.vision.hidden_size)

    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        first = self.class_token
        if self.table is not None:
            first = first + self.table[:1]
            x = x + self._positions(self.table[1:])[rows * self.vision.patches + columns]
        return torch.cat((first.expand(len(x), 1, -1), x), 1)

    def _positions(self, table: Tensor) -> Tensor:
        """Return the positions [patches, hidden_size] of a tile, row by row."""
        side, learned = self.vision.patches, self.vision.positions
        if side == learned:
            return table
        square = table.view(1, learned, learned, -1).permute(0, 3, 1, 2)
        return interpolate(square, (side, side), mode="bicubic")[0].flatten(1).T

    def projected(self, x: Tensor) -> Tensor:
        if self.last_norm is not None:
            x = self.last_norm(x.flatten(0, 1)).view(x.shape)
        x = self.up.forward(self.projector_norm(self.joined(x[:, 1:])))
        return self.down.forward(self.kernels.activation(x, self.vision.projector_activation))
