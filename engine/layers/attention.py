"""Attention between its two projections."""

from torch import Tensor

from engine.layers.build import Builder
from engine.layers.norm import Norm
from kernels.metadata import AttentionMeta


class Attention:
    """Causal, over the paged cache; rotary positions, an RMS norm on each head of q and k if the
    model has them."""

    def __init__(self, build: Builder, cos_sin: Tensor) -> None:
        """cos_sin: see `rotary.cos_sin_table`."""
        config = build.config
        assert build.layer is not None
        how = config.attention[build.layer]
        hidden, dim = config.hidden_size, how.head_dim
        q, kv = how.num_heads * dim, how.num_kv_heads * dim
        begin, end = build.group.part(how.num_heads, "num_attention_heads")
        self.kernels = build.kernels
        self.num_heads = end - begin
        self.scale = how.scale
        self.eps = config.rms_eps
        self.cos_sin = cos_sin
        self.qkv = build.column("qkv", (q, kv, kv), hidden, bias=config.qkv_bias, unit=dim)
        self.out = build.row("out", hidden, q, bias=config.out_bias)
        self.linears = (self.qkv, self.out)
        names = ("q_norm", "k_norm") if config.qk_norm else ()
        self.norms = tuple(build.norm(name, dim) for name in names)
        self.q_norm, self.k_norm = (*(norm.weight for norm in self.norms), None, None)[:2]

    @property
    def activations(self) -> int:
        return self.qkv.spec.out_features + 2 * self.out.spec.in_features

    def forward(
        self,
        x: Tensor,
        kv: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [n, hidden] -> self(norm(x)) [n, hidden], added to residual and written over it if
        there is one."""
        k_cache, v_cache = kv
        q = self.kernels.rope_kv_write(
            self.qkv.forward(x, meta.lora, norm=norm),
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            self.eps,
            k_cache,
            v_cache,
            self.num_heads,
            meta,
        )
        attended = self.kernels.attention(q, k_cache, v_cache, self.scale, meta)
        return self.out.forward(attended, meta.lora, residual=residual)
