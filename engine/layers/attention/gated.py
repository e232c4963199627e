"""Attention whose result is multiplied by the sigmoid of a product of the layer's input."""

import torch
from torch import Tensor

from engine.layers.attention.plain import Attention
from engine.layers.norm import Norm
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class GatedAttention(Attention):
    """The product that makes queries makes the gate too, head by head: a query, its gate."""

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
        k_cache, v_cache = kv
        made = self.qkv.forward(x, meta.lora, norm=norm)
        both = 2 * self.num_heads * self.head_dim
        queries = made[:, :both].unflatten(1, (self.num_heads, 2, self.head_dim))
        qkv = torch.cat((queries[:, :, 0].flatten(1), made[:, both:]), dim=1)
        q = self.kernels.rope_kv_write(
            qkv,
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            self.eps,
            k_cache,
            v_cache,
            self.num_heads,
            meta,
        )
        attended = self.kernels.attention(q, k_cache, v_cache, self.scale, meta, **self.also)
        attended = attended * torch.sigmoid(queries[:, :, 1].flatten(1))
        return self.out.forward(attended, meta.lora, residual=residual)
