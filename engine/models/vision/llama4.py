"""The tower of Llama 4: tiles with a class token at the end, and rotary positions."""

import torch
from torch import Tensor

from engine.config.towers.llama4 import Llama4Vision
from engine.layers.build import Builder
from engine.models.vision.siglip import siglip_block
from engine.models.vision.tiles import TileTower
from engine.models.vision.tower import turns
from kernels.metadata import AttentionMeta


class Llama4Tower(TileTower):
    def __init__(self, build: Builder, config: Llama4Vision) -> None:
        super().__init__(build, config, "vision_model.patch_embedding.linear", bias=False)
        self.vision = config
        width = config.hidden_size
        self.class_token = self.matrix("vision_model.class_embedding", 1, width)
        rows = config.patches**2 + 1  # the class token's position last
        self.table = self.matrix("vision_model.positional_embedding_vlm", rows, width)
        self.before = self.layer_norm("vision_model.layernorm_pre", width)
        norms = "input_layernorm", "post_attention_layernorm"
        self.blocks = [
            siglip_block(self, f"vision_model.model.layers.{i}", norms, "o_proj")
            for i in range(config.num_layers)
        ]
        self.after = self.layer_norm("vision_model.layernorm_post", width)
        joined, adapted = width * config.merge**2, config.adapted_size
        name = "vision_model.vision_adapter.mlp"
        self.up = self.linear(f"{name}.fc1", adapted, joined, bias=False)
        self.down = self.linear(f"{name}.fc2", adapted, adapted, bias=False)
        name = "multi_modal_projector.linear_1"
        self.product = self.linear(name, config.out_size, adapted, bias=False)

    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        x = x + self.table[rows * self.vision.patches + columns]
        last = (self.class_token + self.table[-1:]).expand(len(x), 1, -1)
        x = torch.cat((x, last), 1).to(self.activation_dtype)
        return self.before(x.flatten(0, 1)).view(x.shape)

    def rotation(self, tiles: int, rows: Tensor, columns: Tensor) -> Tensor:
        nothing = rows.new_zeros(1)  # the class token is not rotated
        rows, columns = (torch.cat((places + 1, nothing)) for places in (rows, columns))
        return turns(columns, rows, self.vision.head_dim, self.vision.theta).repeat(tiles, 1)

    def attend(self, qkv: Tensor, segments: AttentionMeta, scale: float | None = None) -> Tensor:
        # Rotary pairs are adjacent in the checkpoint, but half a head apart for `attend`. Queries
        # and keys are permuted in the same way, which does not change the scores.
        both = qkv[:, : 2 * self.vision.hidden_size]
        pairs = both.unflatten(1, (2 * self.vision.num_heads, -1, 2))
        both.copy_(pairs.transpose(-2, -1).flatten(1))
        return super().attend(qkv, segments, scale)

    def projected(self, x: Tensor) -> Tensor:
        x = self.after(x.flatten(0, 1)).view(x.shape)
        act = self.config.activation
        x = self.up.forward(self.joined(x[:, :-1]), act=act)
        return self.product.forward(self.down.forward(x, act=act))
