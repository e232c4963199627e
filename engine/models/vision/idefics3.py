"""The tower of Idefics 3 and SmolVLM: SigLIP over tiles, and a linear projector."""

import torch
from torch import Tensor

from engine.config.towers.idefics3 import Idefics3Vision
from engine.layers.build import Builder
from engine.models.vision.siglip import siglip_block
from engine.models.vision.tiles import TileTower


class Idefics3Tower(TileTower):
    def __init__(self, build: Builder, config: Idefics3Vision) -> None:
        super().__init__(build, config, "vision.embeddings.patch_embedding", bias=True)
        width, self.side = config.hidden_size, config.positions
        self.table = self.matrix("vision.embeddings.position_embedding.weight", self.side**2, width)
        self.blocks = [
            siglip_block(self, f"vision.encoder.layers.{i}") for i in range(config.num_layers)
        ]
        self.norm = self.layer_norm("vision.post_layernorm", width)
        self.product = self.linear(
            "connector.modality_projection.proj",
            config.out_size,
            width * config.merge**2,
            bias=False,
        )
        self._lines = nearest_lines(config.patches, self.side)

    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        if self._lines.device != x.device:
            self._lines = self._lines.to(x.device)
        return x + self.table[self._lines[rows] * self.side + self._lines[columns]]

    def projected(self, x: Tensor) -> Tensor:
        return self.product.forward(self.joined(self.norm(x.flatten(0, 1))))


def nearest_lines(count: int, side: int) -> Tensor:
    """Return the row of the position table for each of `count` rows of patches, [count].

    Positions are computed in float32. The rounding may select the previous row of the table, even
    if count == side.

    side: the number of rows of the table.
    """
    ends = torch.arange(1 / side, 1.0, 1 / side)
    lines = (torch.arange(count) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(lines, ends, right=True)
