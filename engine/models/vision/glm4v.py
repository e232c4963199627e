"""The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V: Qwen's, with bicubic learned positions."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from engine.config.towers.glm4v import GlmVision
from engine.layers.build import Builder
from engine.models.vision.block import Block, GatedMLP
from engine.models.vision.qwen_vl import QwenTower, sampled_positions
from engine.models.vision.tower import segments_of, turns

_MERGER_EPS = 1e-5  # epsilon of the merger's LayerNorm, for which the file's value does not apply


class GlmTower(QwenTower):
    """A tower that merges blocks of patches by a convolution, followed by a gated MLP."""

    gated = True

    def __init__(self, build: Builder, config: GlmVision) -> None:
        super().__init__(build, config, bias=True)
        self.sizes = config
        width, out, merge = config.hidden_size, config.out_size, config.merge
        self.before = self.rms_norm("visual.post_conv_layernorm", width)
        self.table = self.matrix(
            "visual.embeddings.position_embedding.weight", config.positions, width
        )
        self.blocks = [self._block(f"visual.blocks.{i}") for i in range(config.num_layers)]
        self.after = self.rms_norm("visual.post_layernorm", width)
        self.join = self.matrix("visual.downsample.weight", out, width * merge**2)
        self.join_bias = self.vector("visual.downsample.bias", out).tensor
        name = "visual.merger"
        self.project = self.linear(f"{name}.proj", out, out, bias=False)
        self.norm = self.layer_norm(f"{name}.post_projection_norm", out, _MERGER_EPS)
        both = f"{name}.gate_proj", f"{name}.up_proj"
        self.both = self.linear(both, config.merger_size, out, bias=False)
        self.down = self.linear(f"{name}.down_proj", out, config.merger_size, bias=False)

    def _block(self, name: str) -> Block:
        width = self.config.hidden_size
        norms = self.rms_norm(f"{name}.norm1", width), self.rms_norm(f"{name}.norm2", width)
        qkv = self.linear(f"{name}.attn.qkv", 3 * width, width, bias=self.sizes.qkv_bias)
        out = self.closing(f"{name}.attn.proj", width, width, bias=False)
        return Block(self, norms, qkv, out, GatedMLP(self, f"{name}.mlp", bias=False))

    def step_bytes(self, size: int) -> int:
        merger = 2 * self.sizes.merger_size + 4 * self.config.hidden_size * self.vision.merge**2
        merging = size * merger * self.activation_dtype.itemsize
        return max(super().step_bytes(size), merging)

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        entered = self.enter(pixels)
        x = self.before(entered.x.to(self.activation_dtype))
        residual = x + sampled_positions(self.table, entered, "bicubic").to(x.dtype)
        rotation = turns(entered.rows, entered.columns, self.vision.head_dim)
        segments = segments_of(entered.lengths, residual.device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        blocks = self.after(residual).view(-1, self.vision.merge**2, self.config.hidden_size)
        # A row of the convolution's matrix has one feature of all patches of a block, then the next
        # feature.
        joined = linear(blocks.transpose(1, 2).flatten(1).float(), self.join, self.join_bias)
        merged = self.norm(self.project.forward(joined.to(self.activation_dtype)))
        inner = self.kernels.activation(merged, "gelu")
        gated = self.both.forward(inner, gate=self.config.activation)
        return self.down.forward(gated).to(self.dtype)
