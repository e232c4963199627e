"""Bidirectional attention of encoders: tokens attend to the whole text, and no KV is cached."""

from torch import Tensor

from engine.layers.attention.plain import Attention
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.rotary import Tables
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class BidirectionalAttention(Attention):
    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        layer = build.config.attention[build.layer or 0]
        self.window, self.dtype = layer.window, build.dtype
        self.rotates = layer.rope is not None

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`)."""
        attended = self.attended(x, meta, norm)
        return self.out.forward(attended, meta.lora, residual=residual)

    def attended(self, x: Tensor, meta: AttentionMeta, norm: Norm | None = None) -> Tensor:
        """Return the attention's result, which is the input of `out`."""
        return self.kernels.whole_texts(
            self.qkv.forward(x, meta.lora, norm=norm),
            self.cos_sin if self.rotates else None,
            self.num_heads,
            self.scale,
            self.window,
            meta,
            self.dtype,
        )
