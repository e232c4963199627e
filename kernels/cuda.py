"""Cuda: the CUDA back end, in Triton where that is faster than torch and its libraries.

Each module of Triton kernels takes milliseconds to import. So methods for operations that dense
models lack import their kernels when called: latents, recurrent layers, experts, adapters,
bidirectional attention.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import silu as activated

from kernels import activation, norm
from kernels.attention.candidates import (
    CHUNK_ATTENTION,
    DECODE_ATTENTION,
    LATENT_CHUNKS,
    LATENT_DECODE,
)
from kernels.attention.decode_plan import plan
from kernels.attention.inputs import AbsorbedInputs, AttentionInputs, LatentInputs
from kernels.candidates import first_fit
from kernels.experts.candidates import EXPERTS, PACKED_EXPERTS
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import Routing
from kernels.gemm import cublaslt
from kernels.gemm.cublaslt_tune import tune
from kernels.gemm.gated import gated, gated_plan
from kernels.gemm.gemv import GATES, fits, gemv
from kernels.gemm.packed.candidates import PACKED_LINEAR, LinearCall
from kernels.gemm.small_m import few_rows, few_rows_fit
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache
from kernels.kv.write import rope_kv_write
from kernels.launch.assembler import choose_assembler
from kernels.launch.compiling import hash_callees_first
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep
from kernels.packed import PackedWeight
from kernels.recurrent.delta_rule import DeltaInputs
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.reference import Kernels

choose_assembler()
hash_callees_first()


class Cuda(Kernels):
    """The operations of a step on CUDA, all of which a CUDA graph may capture.

    All methods launch on the current stream and read nothing back. Where several kernels serve an
    operation, class attributes list them in order of preference.
    """

    PACKED_LINEAR = PACKED_LINEAR
    EXPERTS = EXPERTS
    PACKED_EXPERTS = PACKED_EXPERTS
    DECODE_ATTENTION = DECODE_ATTENTION
    CHUNK_ATTENTION = CHUNK_ATTENTION
    LATENT_DECODE = LATENT_DECODE
    LATENT_CHUNKS = LATENT_CHUNKS

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        return norm.rms_norm(x, weight, eps, add_to=residual)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return activation.gelu_tanh_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.gelu_mul(gate_up)

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.relu_mul(gate_up)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return norm.layer_norm(x, weight, bias, eps)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        groups: int,
        eps: float,
        gate_last: bool = False,
    ) -> Tensor:
        return norm.gated_norm(x, gate, weight, groups, eps, gate_last)

    def activation(self, x: Tensor, name: str) -> Tensor:
        if name == "sigmoid":
            return torch.sigmoid(x)  # torch computes it in float32
        if name not in activation.CODES:
            return super().activation(x, name)
        return activation.activation(x, name)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return activation.sigmoid_mul(x, gate)

    def add_opened(self, given: Tensor, x: Tensor, gate: Tensor, residual: Tensor | None) -> Tensor:
        return activation.add_opened(given, x, gate, residual)

    def xielu(self, x: Tensor, parameters: Tensor) -> Tensor:
        return activation.xielu(x, parameters)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if fits(x):
            return gemv(x, weight, bias)
        if few_rows_fit(x, weight):
            return few_rows(x, weight, bias)
        return cublaslt.linear(x, weight, bias)

    def linear_act(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
        """Return act(linear(x)); cuBLASLt computes the GELU by tanh with the matmul."""
        fused = act == "gelu_pytorch_tanh" and bias is not None and x.dtype != torch.float32
        if not fused or fits(x) or few_rows_fit(x, weight):
            return super().linear_act(x, weight, bias, act)
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        if fits(x):
            return gemv(x, weight, bias, norm=norm, eps=eps)
        return super().norm_linear(x, norm, eps, weight, bias)

    def norm_gated_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        gate: str,
    ) -> Tensor:
        if fits(x) and gate in GATES:
            return gemv(x, weight, bias, norm=norm, eps=eps, gate=gate)
        if bias is None and (plan := gated_plan(x, weight, gate)):
            return gated(self.rms_norm(x, norm, eps), weight, gate, plan)
        return super().norm_gated_linear(x, norm, eps, weight, bias, gate)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        if fits(x):
            return gemv(x, weight, bias, residual=residual)
        if few_rows_fit(x, weight):
            return few_rows(x, weight, bias, residual)
        return cublaslt.linear_add_(x, weight, residual, bias)

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        tune(weights, sizes, add)

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
        """Return `Kernels.packed_linear` by the first kernel of PACKED_LINEAR that fits.

        The operations that this kernel does not fuse are computed before and after it."""
        call = LinearCall(norm, eps, gate, residual, x_gate)
        for kernel in self.PACKED_LINEAR:
            if call.x_gate is not None and "x_gate" not in kernel.fuses:
                x, call = self.GATES[call.x_gate](x), call._replace(x_gate=None)
            if kernel.fits(x, weight, call):
                break
        if norm is not None and "norm" not in kernel.fuses:
            x, call = self.rms_norm(x, norm, eps), call._replace(norm=None)
        if gate is not None and not ("gate" in kernel.fuses and gate in GATES):
            return self.GATES[gate](kernel.run(x, weight, call._replace(gate=None)))
        y: Tensor = kernel.run(x, weight, call)
        return y if residual is None or "residual" in kernel.fuses else residual.add_(y)

    def takes_gate(self, x: Tensor, weight: PackedWeight) -> bool:
        return any(
            "x_gate" in kernel.fuses and kernel.fits(x, weight, LinearCall())
            for kernel in self.PACKED_LINEAR
        )

    def prepare(
        self, meta: AttentionMeta, num_heads: int, k_cache: Cache, latent_rank: int = 0
    ) -> None:
        """Plan the step's decodes (`decode_plan.plan`) into meta.plan, if there are any."""
        _count(meta)
        if meta.num_decodes:
            assert meta.counts is not None
            kv_len = meta.kv_len[: meta.num_decodes]
            if latent_rank:
                from kernels.attention.latent.decode import plan_latent

                meta.plan = plan_latent(
                    kv_len, num_heads, latent_rank, k_cache, meta.max_kv_len, meta.counts[:1]
                )
                return
            meta.plan = plan(
                kv_len, num_heads, k_cache, meta.max_kv_len, meta.counts[:1],
                meta.window, meta.chunk, meta.runs,
            )  # fmt: skip

    def rope_kv_write(self, inputs: RopeInputs, meta: AttentionMeta) -> Tensor:
        return rope_kv_write(inputs, meta)

    def attention(self, inputs: AttentionInputs, meta: AttentionMeta) -> Tensor:
        """Return causal attention (`Kernels.attention`) by the first kernels that fit.

        DECODE_ATTENTION has kernels for the leading decodes, CHUNK_ATTENTION for the other entries.
        """
        num_tokens, num_heads, head_dim = inputs.q.shape
        out = inputs.q.new_empty((num_tokens, num_heads * head_dim))
        if meta.counts is None:
            self.prepare(meta, num_heads, inputs.k_cache)
        if meta.num_decodes:
            first_fit(self.DECODE_ATTENTION, inputs, meta).run(inputs, meta, out)
        if num_tokens > meta.num_decodes:
            first_fit(self.CHUNK_ATTENTION, inputs, meta).run(inputs, meta, out)
        return out

    def whole_texts(
        self,
        qkv: Tensor,
        cos_sin: Tensor | None,
        num_heads: int,
        scale: float,
        window: int,
        meta: AttentionMeta,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return bidirectional attention by `attend_texts`, by torch for heads of under 16
        elements.
        """
        if qkv.shape[1] < 3 * 16 * num_heads:
            return super().whole_texts(qkv, cos_sin, num_heads, scale, window, meta, dtype)
        from kernels.attention.whole_texts import attend_texts, rotate_texts

        if cos_sin is not None:
            rotate_texts(qkv, *meta.rotation(cos_sin), num_heads)
        return attend_texts(qkv, meta.query_start, num_heads, scale, window)

    def latent_write(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        cache: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        from kernels.attention.latent.write import latent_write

        return latent_write(q, latents, norm, eps, cos_sin, cache, meta)

    def latent_attention(
        self, q: Tensor, cache: Tensor, up: Tensor, scale: float, meta: AttentionMeta
    ) -> Tensor:
        """Return attention over latents (`Kernels.latent_attention`) by the first kernels that fit.

        LATENT_DECODE has kernels for the leading decodes, LATENT_CHUNKS for the other entries.

        Kernels that do not fuse "up" take absorbed queries. Their results are latents, which this
        method expands to values.
        """
        num_tokens, heads, head_dim = q.shape
        outputs, rank = up.shape[1:]
        nope = head_dim - (cache.shape[3] - rank)
        if meta.counts is None:
            self.prepare(meta, heads, cache, rank)
        out = q.new_empty(num_tokens, heads, outputs - nope)
        inputs = LatentInputs(q, cache, up, scale)
        count = num_tokens  # number of absorbed queries
        if count > meta.num_decodes:
            chunks = first_fit(self.LATENT_CHUNKS, inputs, meta)
            if "up" in chunks.fuses:
                chunks.run(inputs, meta, out)
                count = meta.num_decodes
        if count:
            absorbed = torch.bmm(q[:count, :, :nope].transpose(0, 1), up[:, :nope])
            queries = AbsorbedInputs(absorbed, q, cache, scale)
            latents = q.new_empty(count, heads, rank)
            if meta.num_decodes:
                first_fit(self.LATENT_DECODE, queries, meta).run(queries, meta, latents)
            if count > meta.num_decodes:
                chunks.run(queries, meta, latents)
            values = torch.bmm(latents.transpose(0, 1), up[:, nope:].transpose(1, 2))
            out[:count] = values.transpose(0, 1)
        return out.flatten(1)

    def gated_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        from kernels.recurrent.delta_rule_cuda import gated_delta

        _count(meta)
        return gated_delta(inputs, meta, self.DETERMINISTIC)

    def kimi_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        from kernels.recurrent.delta_rule_cuda import kimi_delta

        _count(meta)
        return kimi_delta(inputs, meta, self.DETERMINISTIC)

    def verify_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor | None:
        runs = meta.state_runs
        if runs is None or not runs.in_place:
            return None
        from kernels.recurrent import delta_verify_cuda, delta_walk_cuda

        verify = delta_walk_cuda.verify_by_walks if self.DETERMINISTIC else delta_verify_cuda.verify
        return verify(inputs, runs)

    def causal_conv(
        self,
        x: Tensor,
        conv: Tensor,
        bias: Tensor | None,
        tail: Tensor,
        meta: AttentionMeta,
        silu: bool = False,
    ) -> Tensor:
        from kernels.recurrent.convolution_cuda import causal_conv

        _count(meta)
        convolved = causal_conv(x, conv, bias, tail, meta)
        return activated(convolved) if silu else convolved

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        heads: Mamba2Heads,
        tail: Tensor,
        state: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        from kernels.recurrent.mamba2_cuda import mamba2

        _count(meta)
        return mamba2(x, dt, heads, tail, state, meta, self.DETERMINISTIC)

    def mamba1(self, inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor:
        from kernels.recurrent.mamba1_cuda import mamba1

        _count(meta)
        return self.gated_norm(mamba1(inputs, meta), inputs.gate, None, 1, 0.0)

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from kernels.experts import topk

        if topk.fits(routing):
            return topk.topk(logits, routing, correction)
        return super().route(logits, routing, correction)

    def router_logits(self, x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float32 or not x.is_cuda:  # not CUDA: Triton's interpreter
            return super().router_logits(x, router, bias)
        logits = torch.mm(x, router.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)

    def norm_route(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        router: Tensor,
        bias: Tensor | None,
        routing: Routing,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from kernels.experts import topk
        from kernels.experts.few_route import few_route, few_route_fits

        if few_route_fits(x, routing):
            return few_route(x, norm, eps, router, bias, routing, correction)
        if not topk.fits(routing):
            return super().norm_route(x, norm, eps, router, bias, routing, correction)
        normed = self.rms_norm(x, norm, eps)
        logits = self.router_logits(normed, router, None)
        # The top-k kernel adds the bias.
        return normed, *topk.topk(logits, routing, correction, bias)

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: ExpertWeights,
        residual: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts by the first of EXPERTS that fits."""
        kernel = first_fit(self.EXPERTS, x, stack)
        return cast(Tensor, kernel.run(x, weights, ids, stack, residual))

    def packed_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: PackedExperts,
        residual: Tensor | None,
    ) -> Tensor:
        """Return each token's weighted sum of experts by the first of PACKED_EXPERTS that fits."""
        kernel = first_fit(self.PACKED_EXPERTS, x, stack)
        return cast(Tensor, kernel.run(x, weights, ids, stack, residual))

    def order_experts(self, stack: PackedExperts, dtype: torch.dtype) -> None:
        from kernels.experts.fragments.dispatch import fragments_fit

        if fragments_fit(stack, dtype):
            stack.gate_up.to_fragments()
            stack.down.to_fragments()

    def lora_add(self, y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
        from kernels.lora import lora_add

        return lora_add(y, x, layer, step)

    def lora_gated(
        self, gate_up: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep, gate: str
    ) -> Tensor:
        if gate not in GATES:
            return super().lora_gated(gate_up, x, layer, step, gate)
        from kernels.lora import lora_gated

        return lora_gated(gate_up, x, layer, step, gate)


def _count(meta: AttentionMeta) -> None:
    """Set meta.counts, on the device, if the step's inputs do not include it."""
    if meta.counts is None:
        counts = [meta.num_decodes, len(meta.kv_len)]
        meta.counts = torch.tensor(counts, dtype=torch.int32, device=meta.kv_len.device)
