"""The tower of Gemma 3: SigLIP over a square picture, with average pooling of patches."""

from torch import Tensor

from engine.config.vision import TileVision
from engine.layers.build import Builder
from engine.models.vision.siglip import siglip_block
from engine.models.vision.tiles import TileTower


class Gemma3Tower(TileTower):
    def __init__(self, build: Builder, config: TileVision) -> None:
        super().__init__(build, config, "vision.embeddings.patch_embedding", bias=True)
        width = config.hidden_size
        self.table = self.matrix(
            "vision.embeddings.position_embedding.weight", config.patches**2, width
        )
        self.blocks = [
            siglip_block(self, f"vision.encoder.layers.{i}") for i in range(config.num_layers)
        ]
        self.norm = self.layer_norm("vision.post_layernorm", width)
        # The norm's weight is 1 + the checkpoint's.
        self.pooled_norm = self.rms_norm("projector.mm_soft_emb_norm", width, offset=1.0)
        self.projection = self.linear(
            "projector.mm_input_projection", config.out_size, width, bias=False, transposed=True
        )

    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return x + self.table[rows * self.tiles.patches + columns]

    def projected(self, x: Tensor) -> Tensor:
        normed = self.norm(x.flatten(0, 1)).unflatten(0, (-1, self.tiles.merge**2))
        pooled = normed.float().mean(1).to(x.dtype)
        return self.projection.forward(pooled, norm=self.pooled_norm)
