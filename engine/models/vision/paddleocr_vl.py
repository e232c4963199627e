"""The tower of PaddleOCR-VL: SigLIP's layers for pictures of any shape, and Qwen's merger."""

from collections.abc import Sequence

from torch import Tensor

from engine.config.towers.paddleocr_vl import PaddleVision
from engine.layers.build import Builder
from engine.models.vision.qwen_vl import Merger, QwenTower, sampled_positions
from engine.models.vision.siglip import siglip_block
from engine.models.vision.tower import segments_of, turns

_MERGER_EPS = 1e-5  # epsilon of the merger's LayerNorm, for which the file's value does not apply


class PaddleTower(QwenTower):
    def __init__(self, build: Builder, config: PaddleVision) -> None:
        super().__init__(build, config, bias=True)
        width = config.hidden_size
        self.table = self.matrix(
            "visual.embeddings.position_embedding.weight", config.positions, width
        )
        layers = range(config.num_layers)
        self.blocks = [siglip_block(self, f"visual.encoder.layers.{i}") for i in layers]
        self.after = self.layer_norm("visual.post_layernorm", width)
        norm = self.layer_norm("visual.merger.pre_norm", width, _MERGER_EPS)
        self.merger = Merger(self, norm, "visual.merger.linear_1", "visual.merger.linear_2")

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        entered = self.enter(pixels)
        x = entered.x + sampled_positions(self.table, entered, "bilinear")
        residual = x.to(self.activation_dtype)
        rotation = turns(entered.rows, entered.columns, self.vision.head_dim)
        segments = segments_of(entered.lengths, residual.device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        return self.merger.forward(self.after(residual)).to(self.dtype)
