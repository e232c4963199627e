"""LatentAttention: multi-head latent attention (MLA; `engine.architectures.latent`)."""

from torch import Tensor

from engine.architectures.latent import NORM_EPS
from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.layers.norm import Norm, RMSNorm
from engine.layers.rotary import Tables
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class LatentAttention:
    """Causal attention over paged latents, whose norms have a separate epsilon."""

    def __init__(self, build: Builder, tables: Tables) -> None:
        config = build.config
        assert build.layer is not None
        layer = config.attention[build.layer]
        assert layer.latent is not None
        self.latent = latent = layer.latent
        self.kernels = build.kernels
        (begin, end), _ = build.group.heads(layer.num_heads, 1)
        self.num_heads = end - begin
        self.head_dim = head = latent.nope + latent.rope
        self.scale = layer.scale
        self.cos_sin = tables(layer.rope, latent.rope)
        hidden, latent_size = config.hidden_size, latent.rank + latent.rope
        queries, ours = layer.num_heads * head, (begin * head, end * head)
        self.q: Linear | None = None
        self.query_norm: RMSNorm | None = None
        if latent.query_rank:
            sizes = (latent.query_rank, latent_size)
            self.down = build.undivided().column("qkv_a", sizes, hidden)
            self.query_norm = _norm(build, "query_norm", latent.query_rank, latent.query_factor)
            self.q = build.column("q_b", (queries,), latent.query_rank, ranges=(ours,))
        else:
            self.down = build.column(
                "qkv", (queries, latent_size), hidden, ranges=(ours, (0, latent_size))
            )
        self.latent_norm = _norm(build, "latent_norm", latent.rank, latent.factor)
        per_head = latent.nope + latent.value
        self.up = build.latent_projection(
            "kv_b", layer.num_heads * per_head, latent.rank, (begin * per_head, end * per_head)
        )
        columns = (begin * latent.value, end * latent.value)
        self.out = build.row("out", hidden, layer.num_heads * latent.value, columns=columns)
        self.linears: tuple[Linear, ...] = (self.down, self.up, self.out)
        self.norms: tuple[Norm, ...] = (self.latent_norm,)
        if self.q is not None and self.query_norm is not None:
            self.linears += (self.q,)
            self.norms += (self.query_norm,)
        self.stacks = ()
        self.others: tuple[Parameter, ...] = ()
        self.temperatures: Tensor | None = None
        if layer.temperature is not None:
            self.temperatures = tables.temperatures(*layer.temperature)

    @property
    def activations(self) -> int:
        latent = self.latent
        rotated = self.num_heads * (2 * self.head_dim + latent.rope)
        return self.down.spec.out_features + rotated + self.num_heads * 2 * latent.rank

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`).

        kv: (cache of latents, the same cache), instead of keys and values.
        """
        down = self.down.forward(x, meta.lora, norm=norm)
        latent_size = self.latent.rank + self.latent.rope
        q, latents = down[:, :-latent_size], down[:, -latent_size:]
        if self.q is not None:
            q = self.q.forward(q.contiguous(), meta.lora, norm=self.query_norm)
        cache = kv[0]
        assert isinstance(cache, Tensor), "latents are not quantised"
        q = self.kernels.latent_write(
            q.unflatten(1, (self.num_heads, self.head_dim)),
            latents,
            self.latent_norm.weight,
            self.latent_norm.eps,
            self.cos_sin,
            cache,
            meta,
        )
        if self.temperatures is not None:
            q.mul_(self.temperatures.index_select(0, meta.positions)[:, None, None])
        up = self.up.weight.view(self.num_heads, -1, self.latent.rank)
        attended = self.kernels.latent_attention(q, cache, up, self.scale, meta)
        return self.out.forward(attended, meta.lora, residual=residual)


def _norm(build: Builder, ours: str, size: int, factor: float) -> RMSNorm:
    norm = build.norm(ours, size, scale=factor)
    assert isinstance(norm, RMSNorm)
    norm.eps = NORM_EPS
    return norm
