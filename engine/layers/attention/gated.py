"""Attention whose output is multiplied by the sigmoid or softplus of a projection of the input."""

from torch import Tensor

from engine.layers.attention.plain import Attention
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.rotary import Tables
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class GatedAttention(Attention):
    """Attention whose query projection also computes gates: each head's query, then its gate."""

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
        qkv = self.qkv.forward(x, meta.lora, norm=norm)
        attended = self.attend(self.write(qkv, kv, meta, gated=True), kv, meta)
        both = qkv[:, : 2 * self.num_heads * self.head_dim]
        gates = both.unflatten(1, (self.num_heads, 2, self.head_dim))[:, :, 1]
        attended = self.kernels.sigmoid_mul(attended, gates)
        return self.out.forward(attended, meta.lora, residual=residual)


class SoftplusGatedAttention(Attention):
    """Attention with a separate projection for gates, one for each head or each element."""

    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        config = build.config
        assert build.layer is not None
        layer = config.attention[build.layer]
        gates = layer.softplus_gates
        (begin, end), _ = build.group.heads(layer.num_heads, layer.num_kv_heads)
        self.gate = build.column(
            "gate",
            (layer.num_heads * gates,),
            config.hidden_size,
            ranges=((begin * gates, end * gates),),
        )
        self.linears = (*self.linears, self.gate)

    @property
    def activations(self) -> int:
        return super().activations + 2 * self.gate.spec.out_features

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
        if norm is not None:
            x = norm(x)
        q = self.write(self.qkv.forward(x, meta.lora), kv, meta)
        gate = self.kernels.activation(self.gate.forward(x, meta.lora).float(), "softplus")
        attended = self.attend(q, kv, meta)
        by_head = attended.unflatten(1, (self.num_heads, self.head_dim))
        gates = gate.to(attended.dtype).unflatten(1, (self.num_heads, -1))
        return self.out.forward((by_head * gates).flatten(1), meta.lora, residual=residual)
