"""The tower of InternVL: InternViT over tiles, and a projector of each 2 x 2 patches."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the tower's tensors in one format of checkpoints.

    layers: the prefix of the names of layers, before the layer's number. The names in norms, qkv,
        qk_norm, out and scales follow that number.
    qkv: the projections to queries, keys and values, or one projection to all three.
    projector: the norm and the two linear layers that project to the text model's width.
    """

    patch: str
    class_token: str
    positions: str
    layers: str
    norms: tuple[str, str]
    qkv: tuple[str, ...]
    qk_norm: str
    out: str
    scales: tuple[str, str]
    projector: tuple[str, str, str]


_NAMES = {
    "internvl": _Names(
        patch="vision_tower.embeddings.patch_embeddings.projection",
        class_token="vision_tower.embeddings.cls_token",
        positions="vision_tower.embeddings.position_embeddings",
        layers="vision_tower.encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        qkv=tuple(f"attention.{part}_proj" for part in "qkv"),
        qk_norm="attention",
        out="attention.projection_layer",
        scales=("lambda_1", "lambda_2"),
        projector=(
            "multi_modal_projector.layer_norm",
            "multi_modal_projector.linear_1",
            "multi_modal_projector.linear_2",
        ),
    ),
    "internvl_chat": _Names(
        patch="vision_model.embeddings.patch_embedding",
        class_token="vision_model.embeddings.class_embedding",
        positions="vision_model.embeddings.position_embedding",
        layers="vision_model.encoder.layers",
        norms=("norm1", "norm2"),
        qkv=("attn.qkv",),
        qk_norm="attn",
        out="attn.proj",
        scales=("ls1", "ls2"),
        projector=("mlp1.0", "mlp1.1", "mlp1.3"),
    ),
}


class _Block(Block):
    """A layer with layer scale: attention and MLP have an elementwise factor."""

    def __init__(self, tower: "InternTower", name: str) -> None:
        config, names = tower.vision, tower.names
        width = config.hidden_size
        before, after = (tower.norm(f"{name}.{norm}") for norm in names.norms)
        qkv = tower.linear(
            [f"{name}.{part}" for part in names.qkv],
            3 * width // len(names.qkv),
            width,
            bias=config.qkv_bias,
        )
        out = tower.closing(f"{name}.{names.out}", width, width)
        self.plain = PlainMLP(tower, f"{name}.mlp.fc1", f"{name}.mlp.fc2")
        super().__init__(tower, (before, after), qkv, out, self.plain)
        self.scales = [
            tower.vector(f"{name}.{scale}", width, tower.activation_dtype, 0.0).tensor
            for scale in names.scales
        ]
        self.qk_norms = [
            tower.rms_norm(f"{name}.{names.qk_norm}.{part}_norm", width, _EPS)
            for part in "qk"
            if config.qk_norm
        ]

    def forward(self, residual: Tensor, segments: AttentionMeta) -> Tensor:
        qkv = self.qkv.forward(residual, norm=self.attention_norm)
        for part, norm in zip(qkv.chunk(3, 1), self.qk_norms, strict=False):
            part.copy_(norm(part.contiguous()))
        attended = self.out.forward(self.tower.attend(qkv, segments))
        residual.addcmul_(self.scales[0], attended)
        out = self.plain.down.forward(self.plain.inner(residual, self.mlp_norm))
        return residual.addcmul_(self.scales[1], out)


class InternTower(TileTower):
    def __init__(self, build: Builder, config: InternVision) -> None:
        self.names = names = _NAMES[config.family]
        super().__init__(build, config, names.patch, bias=True)
        self.vision = config
        width, joined = config.hidden_size, config.hidden_size * config.merge**2
        self.class_token = self.matrix(names.class_token, 1, width)
        self.table: Tensor | None = None  # learned positions, the class token's first
        if config.positions:
            self.table = self.matrix(names.positions, 1 + config.positions**2, width)
        self.blocks = [_Block(self, f"{names.layers}.{i}") for i in range(config.num_layers)]
        self.last_norm: Norm | None = None
        if config.last_norm:
            self.last_norm = self.layer_norm("vision_tower.layernorm", width)
        norm, up, down = names.projector
        self.projector_norm = self.layer_norm(norm, joined, _PROJECTOR_EPS)
        self.up = self.linear(up, config.out_size, joined)
        self.down = self.linear(down, config.out_size, config.out_size)

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
        x = self.projector_norm(self.joined(x[:, 1:]))
        return self.down.forward(self.up.forward(x, act=self.vision.projector_activation))
