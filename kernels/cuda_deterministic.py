"""The CUDA back end where a token's numbers depend on its request alone
(`EngineConfig.deterministic`): not on the step's other requests, nor on how its own prompt was cut
into chunks, found in the prefix cache, or computed again after a preemption.

So there is one way to do each thing: products in one order of summation whatever their rows, and
one attention kernel for decodes and chunks alike, that walks the keys from the first to the last
and never splits them. Everything else goes row by row anyway.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.paged import attend_chunks
from kernels.cuda import Cuda, _count
from kernels.experts import packed as packed_module
from kernels.experts.fragments import tiles as fragment_tiles
from kernels.experts.fragments.dispatch import grouped_fragments
from kernels.experts.grouped import FIXED, grouped
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.gemm.deterministic import linear_fixed
from kernels.gemm.packed import int8
from kernels.gemm.packed.dot import expand
from kernels.gemm.packed.round_rows import round_rows
from kernels.kv.quantized import Cache
from kernels.metadata import AttentionMeta
from kernels.packed import PackedWeight
from kernels.reference import Kernels


class CudaDeterministic(Cuda):
    DETERMINISTIC = True

    # As they are made of the products below, not as Cuda fuses them.
    norm_linear = Kernels.norm_linear
    norm_gated_linear = Kernels.norm_gated_linear
    norm_route = Kernels.norm_route
    router_logits = Kernels.router_logits

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_fixed(x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        return linear_fixed(x, weight, bias, residual)

    def packed_linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gate: str | None = None,
        residual: Tensor | None = None,
        x_gate: str | None = None,
    ) -> Tensor:
        """The product above with the expanded weight, or that of 8-bit integers, whose sums are
        exact, whatever x's rows."""
        if int8.fits(weight, x):
            rows = round_rows(x, norm, eps, torch.int8, x_gate)
            y = int8.int8_linear(*rows, weight, x.dtype, residual, int8.FIXED, split=1)
            return y if gate is None else self.GATES[gate](y)
        if x_gate is not None:
            x = self.GATES[x_gate](x)
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        y = linear_fixed(x, expand(weight, x), weight.bias, residual)
        return y if gate is None else self.GATES[gate](y)

    def takes_gate(self, x: Tensor, weight: PackedWeight) -> bool:
        return int8.fits(weight, x)

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        """Nothing that time may decide."""

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: ExpertWeights,
        residual: Tensor | None,
    ) -> Tensor:
        return grouped(x, weights, ids, stack, residual, FIXED)

    def packed_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: PackedExperts,
        residual: Tensor | None,
    ) -> Tensor:
        if stack.gate_up.in_fragments:
            return grouped_fragments(x, weights, ids, stack, residual, fragment_tiles.FIXED)
        return packed_module.packed_experts(x, weights, ids, stack, residual, packed_module.FIXED)

    def prepare(
        self, meta: AttentionMeta, num_heads: int, k_cache: Cache, latent_rank: int = 0
    ) -> None:
        _count(meta)

    def attention(
        self,
        q: Tensor,
        k_cache: Cache,
        v_cache: Cache,
        scale: float,
        meta: AttentionMeta,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        out = q.new_empty((num_tokens, num_heads * head_dim))
        _count(meta)
        attend_chunks(q, k_cache, v_cache, out, scale, meta, True, softcap, sinks, slopes)
        return out
