"""MoonViT, the tower of Kimi-VL, Kimi K2.5 and K2.6: learned and rotary positions."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.config.towers.kimi import KimiVision
from engine.layers.build import Builder
from engine.models.vision.block import Block, PlainMLP
from engine.models.vision.qwen_vl import Merger, QwenTower, sampled_positions
from engine.models.vision.tower import segments_of, turns


class KimiTower(QwenTower):
    def __init__(self, build: Builder, config: KimiVision) -> None:
        super().__init__(build, config, bias=True)
        self.kimi = config
        width = config.hidden_size
        table = "weight" if config.fused else "position_embeddings"
        self.table = self.matrix(f"visual.patch_embed.pos_emb.{table}", config.positions, width)
        names = "visual.encoder.blocks" if config.fused else "visual.layers"
        self.blocks = [self._block(f"{names}.{i}") for i in range(config.num_layers)]
        last = "visual.encoder.final_layernorm" if config.fused else "visual.final_layernorm"
        self.after = self.layer_norm(last, width)
        norm = self.layer_norm("visual.merger.pre_norm", width, config.merger_eps)
        self.merger = Merger(self, norm, "visual.merger.linear_1", "visual.merger.linear_2")

    def _block(self, name: str) -> Block:
        config = self.kimi
        width, heads = config.hidden_size, config.num_heads
        # In the checkpoint rotary pairs alternate between columns and rows, with the same
        # frequencies. `attend` needs the columns' pairs first, and a pair's elements half a head
        # apart.
        rows = np.arange(width).reshape(heads, -1, 2, 2).transpose(0, 3, 2, 1)
        if not config.fused:
            rows = np.arange(width).reshape(heads, 2, -1, 2).swapaxes(2, 3)
        turned, whole = rows.ravel(), np.arange(width)
        if config.fused:
            fused_rows = np.concatenate((turned, width + turned, 2 * width + whole))
            qkv = self.linear(f"{name}.wqkv", 3 * width, width, rows=(fused_rows,))
        else:
            parts = [f"{name}.attn.{part}_proj" for part in "qkv"]
            qkv = self.linear(parts, width, width, rows=(turned, turned, whole))
        # numbering of the projector's layers in names begins at 0 or 1
        first = 0 if config.fused else 1
        norms = (
            self.layer_norm(f"{name}.norm{first}", width),
            self.layer_norm(f"{name}.norm{first + 1}", width),
        )
        out = self.closing(f"{name}.wo" if config.fused else f"{name}.attn.proj", width, width)
        mlp = PlainMLP(self, f"{name}.mlp.fc{first}", f"{name}.mlp.fc{first + 1}")
        return Block(self, norms, qkv, out, mlp)

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        entered = self.enter(pixels)
        x = entered.x + sampled_positions(self.table, entered, "bicubic")
        residual = x.to(self.activation_dtype)
        rotation = turns(entered.columns, entered.rows, self.vision.head_dim, self.kimi.theta)
        segments = segments_of(entered.lengths, residual.device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        return self.merger.forward(self.after(residual)).to(self.dtype)
