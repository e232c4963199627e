"""Attention: plain causal attention with its projections."""

from typing import Any

import torch
from torch import Tensor

from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.layers.norm import Norm, RMSNorm
from engine.layers.rotary import Tables
from engine.weights.parameter import Parameter
from kernels.attention.inputs import AttentionInputs
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Attention:
    """Causal attention over the paged cache.

    Rotary embeddings, and an RMS norm on each head of q and k, are applied if the model has them.
    """

    def __init__(self, build: Builder, tables: Tables, in_features: int = 0) -> None:
        """Build the attention of the builder's layer.

        tables: the model's cache of rotary tables.
        in_features: width of the input; 0 = hidden_size.
        """
        config = build.config
        assert build.layer is not None
        layer = config.attention[build.layer]
        hidden, dim = config.hidden_size, layer.head_dim
        self.value_size = value = layer.value_size or dim
        q, kv = layer.num_heads * dim, layer.num_kv_heads * dim
        # factor of the queries' width: a gated layer projects queries and gates
        wide = 1 + layer.gated
        (begin, end), keys = build.group.heads(layer.num_heads, layer.num_kv_heads)
        self.kernels = build.kernels
        self.num_heads = end - begin
        self.head_dim = dim
        self.scale = layer.scale
        self.eps = config.norm_eps
        self.cos_sin = tables(layer.rope, dim)
        count = 3 - layer.value_is_key if layer.keys_of is None else 1
        ours, sizes = "qkv"[:count], (wide * q, kv, layer.num_kv_heads * value)[:count]
        head_ranges = ((begin, end), keys, keys)[:count]
        rows = (wide * dim, dim, value)
        ranges = [
            (first * size, last * size)
            for (first, last), size in zip(head_ranges, rows, strict=False)
        ]
        wide_input = in_features or hidden
        self.qkv = build.column(ours, sizes, wide_input, bias=config.qkv_bias, ranges=ranges)
        columns, attended = (begin * value, end * value), layer.num_heads * value
        self.out = build.row("out", hidden, attended, bias=config.out_bias, columns=columns)
        self.linears: tuple[Linear, ...] = (self.qkv, self.out)
        self.stacks = ()
        names = ("q_norm", "k_norm")[: min(count, 2)]
        normed = config.qk_norm == "head" and layer.qk_norm
        self.norms: tuple[Norm, ...] = tuple(build.norm(name, dim) for name in names if normed)
        weights = [norm.weight for norm in self.norms if isinstance(norm, RMSNorm)]
        self.q_norm, self.k_norm = (*weights, None, None)[:2]
        # Optional fields of AttentionInputs, which most layers do not have.
        self.also: dict[str, Any] = {}
        self.others: tuple[Parameter, ...] = ()
        if layer.softcap:
            self.also["softcap"] = layer.softcap
        if layer.sinks:
            sinks = build.sinks(layer.num_heads, (begin, end))
            self.also["sinks"], self.others = sinks.tensor, (sinks,)
        if layer.slopes:
            self.also["slopes"] = torch.tensor(layer.slopes[begin:end], device=build.device)

    @property
    def activations(self) -> int:
        return self.qkv.spec.out_features + 2 * self.out.spec.in_features

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)) of x [n, hidden], in the same shape.

        residual: if given, self(norm(x)) is added to it in place, and the residual is returned.
        """
        q = self.write(self.qkv.forward(x, meta.lora, norm=norm), kv, meta)
        return self.out.forward(self.attend(q, kv, meta), meta.lora, residual=residual)

    def write(self, qkv: Tensor, kv: KV, meta: AttentionMeta, gated: bool = False) -> Tensor:
        """Rotate queries and keys, write keys and values into the cache, and return the queries.

        qkv: the output of the first matmul, [n, (heads + 2 * KV heads) * head_dim].
        gated: whether qkv has a gate after each head's query.
        Returns the result of `Kernels.rope_kv_write`.
        """
        k_cache, v_cache = kv
        norms = (self.q_norm, self.k_norm, self.eps)
        inputs = RopeInputs(qkv, self.cos_sin, *norms, k_cache, v_cache, self.num_heads, gated)
        return self.kernels.rope_kv_write(inputs, meta)

    def attend(self, q: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        """Compute attention for queries [n, heads, head_dim]; return [n, heads * head_dim]."""
        k_cache, v_cache = kv
        inputs = AttentionInputs(q, k_cache, v_cache, self.scale, **self.also)
        return self.kernels.attention(inputs, meta)
