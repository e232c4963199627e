"""Attention with features that few models have, which the fused kernel does not support.

Queries and keys are clipped, scaled by position, or have norms other than one weight for all heads
before the rotation. Or values are narrower than keys, or the output has a factor.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.layers.attention.plain import Attention
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.layers.rotary import Tables, rotate
from engine.weights.parameter import Parameter
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class HeadNorm(Norm):
    """The norm of this rank's queries or keys [n, heads, head_dim], with a weight for each element.

    flat: whether the norm is one RMS norm over the heads of all ranks; otherwise each head has a
        layer norm.
    """

    def __init__(self, build: Builder, ours: str, heads: int, size: int, kept: tuple[int, int]):
        """Build the norm and its parameter.

        ours: the name in the record's tensors.
        heads: the number of heads of all ranks.
        size: elements of a head.
        kept: the half-open range of heads that this rank has.
        """
        self.kernels, self.eps = build.kernels, build.config.norm_eps
        self.flat = build.config.qk_norm == "flat"
        # With fewer heads than ranks, several ranks have the same head, which the all-reduce counts
        # repeatedly.
        self.counted = heads * size * max(1, build.group.size // heads)
        parameter = build.head_norm(ours, heads, size, kept)
        self.weight = parameter.tensor
        self.parameters: tuple[Parameter, ...] = (parameter,)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [n, heads, head_dim] without communication.

        Valid with one rank, or if each head has a separate norm.
        """
        if self.flat:
            return self.kernels.rms_norm(x.flatten(1), self.weight, self.eps).view(x.shape)
        normed = self.kernels.layer_norm(x, None, None, self.eps)
        return normed.mul_(self.weight.view(x.shape[1:]))

    def squared(self, x: Tensor) -> Tensor:
        """Return this rank's sum of squares of x, [n] float32."""
        return x.float().square().sum((1, 2))

    def by(self, x: Tensor, squares: Tensor) -> Tensor:
        """Return the norm of x [n, heads, head_dim] from the sum of squares over all ranks.

        squares: [n] float32.
        """
        rms = (squares / self.counted + self.eps).sqrt()[:, None]
        normed = x.flatten(1).float() / rms * self.weight.float()
        return normed.view(x.shape).to(x.dtype)


class VariantAttention(Attention):
    """Attention that changes queries, keys, values or outputs outside the fused kernel.

    If norms and rotary embeddings are computed here, the fused kernel gets a rotary table without
    rotation, and only writes KV to the cache.
    """

    def __init__(self, build: Builder, tables: Tables) -> None:
        super().__init__(build, tables)
        config = build.config
        layer = config.attention[build.layer or 0]
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self.clip = config.qkv_clip
        self.value_is_key = layer.value_is_key
        self.attended_scale = layer.attended_scale
        self.value_norm = build.unit_norm(dim) if layer.value_norm else None
        queries, keys = build.group.heads(heads, kv_heads)
        # (number of query heads, number of KV heads) on this rank
        self.heads = (self.num_heads, keys[1] - keys[0])
        self.rotation: Tensor | None = None
        self.apart: tuple[Norm, ...] = ()
        self.over_ranks: tuple[HeadNorm, ...] = ()  # norms whose sums of squares need an all-reduce
        self.group = build.group
        if config.qk_norm in ("heads", "flat"):
            self.norms = self.apart = of_heads = (
                HeadNorm(build, "q_norm", heads, dim, queries),
                HeadNorm(build, "k_norm", kv_heads, dim, keys),
            )
            if config.qk_norm == "flat" and build.group.size > 1:
                self.over_ranks = of_heads
        elif config.qk_norm_after:
            self.apart, self.q_norm, self.k_norm = self.norms, None, None
            self.rotation, self.cos_sin = self.cos_sin, tables(None, dim)
        self.temperatures: Tensor | None = None
        if layer.temperature is not None:
            self.temperatures = tables.temperatures(*layer.temperature)

    @property
    def activations(self) -> int:
        wider = self.head_dim - self.value_size
        return super().activations + (3 * self.num_heads + 2 * self.heads[1]) * wider

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
        if self.value_size < self.head_dim:
            values = qkv[:, -self.heads[1] * self.value_size :].unflatten(1, (self.heads[1], -1))
            values = pad(values, (0, self.head_dim - self.value_size)).flatten(1)
            qkv = torch.cat((qkv[:, : sum(self.heads) * self.head_dim], values), dim=1)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if self.value_is_key:
            qkv = torch.cat((qkv, qkv[:, self.num_heads * self.head_dim :]), dim=1)
        self._norm_and_rotate(qkv, meta)
        if self.value_norm is not None:
            size = kv[1].shape[1] * self.head_dim
            values = qkv[:, -size:].view(len(qkv), -1, self.head_dim)
            values.copy_(self.value_norm(values.contiguous()))
        q = self.write(qkv, kv, meta)
        if self.temperatures is not None:
            q.mul_(self.temperatures.index_select(0, meta.positions)[:, None, None])
        attended = self.attend(q, kv, meta)
        if self.value_size < self.head_dim:
            attended = attended.unflatten(1, (self.num_heads, self.head_dim))
            attended = attended[..., : self.value_size].flatten(1)
        if self.attended_scale != 1.0:
            attended = attended.mul_(self.attended_scale)
        return self.out.forward(attended, meta.lora, residual=residual)

    def _norm_and_rotate(self, qkv: Tensor, meta: AttentionMeta) -> None:
        """Apply norms and rotary embeddings to queries and keys in place."""
        if not self.apart:
            return
        heads, kv_heads = self.heads
        split = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        parts = (split[:, :heads], split[:, heads : heads + kv_heads])
        if self.over_ranks:
            both = list(zip(parts, self.over_ranks, strict=True))
            squares = torch.stack([head_norm.squared(part) for part, head_norm in both])
            squares = self.group.all_reduce(squares)
            for (part, head_norm), of_all in zip(both, squares, strict=True):
                part.copy_(head_norm.by(part, of_all))
            return
        for part, norm in zip(parts, self.apart, strict=True):
            if self.rotation is not None:
                rotate(part, self.rotation.index_select(0, meta.positions)[:, None])
            part.copy_(norm(part.contiguous()))


class BorrowingAttention(Attention):
    """Attention that computes only queries and reads another layer's KV."""

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

        kv: the other layer's KV cache.
        """
        q = self.qkv.forward(x, meta.lora, norm=norm).view(len(x), self.num_heads, self.head_dim)
        if self.q_norm is not None:
            q = self.kernels.rms_norm(q, self.q_norm, self.eps)
        rotate(q, self.cos_sin.index_select(0, meta.positions)[:, None])
        attended = self.attend(q, kv, meta)
        return self.out.forward(attended, meta.lora, residual=residual)
