"""Attention of encoders: each token sees the whole text, which is in one step; nothing is kept."""

from torch import Tensor

from engine.layers.attention.plain import Attention
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.rotary import Tables, rotate
from kernels.attention.bidirectional import bidirectional_attention
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class BidirectionalAttention(Attention):
    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        layer = build.config.attention[build.layer or 0]
        self.head_dim, self.window = layer.head_dim, layer.window
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
        """See Attention."""
        qkv = self.qkv.forward(x, meta.lora, norm=norm).unflatten(1, (-1, self.head_dim))
        q, k, v = qkv.tensor_split(3, dim=1)
        if self.rotates:
            rows = self.cos_sin.index_select(0, meta.positions)[:, None]
            rotate(q, rows)
            rotate(k, rows)
        if meta.query_start_host is None:
            meta.query_start_host = meta.query_start.tolist()
        attended = bidirectional_attention(q, k, v, meta.query_start_host, self.scale, self.window)
        return self.out.forward(attended.flatten(1), meta.lora, residual=residual)
