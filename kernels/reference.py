"""Kernels: the operations of a model step, each in plain torch.

The class is the base class of all back ends, which override operations that they compute faster,
and the oracle of their tests. So a new operation is a method here, and a back end overrides it
where speed matters.

Values that are the same for all layers of a step (cache rows to gather, masks, rotations) are
computed at the first layer and stored in ``meta.plan``.

Attention is in kernels/attention/reference.py, experts are in kernels/experts/reference.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    relu,
    silu,
    softplus,
)
from torch.nn.functional import rms_norm as _rms_norm

from kernels.attention.bidirectional import bidirectional_attention
from kernels.attention.inputs import AttentionInputs
from kernels.attention.latent.reference import attend_latent_chunk, attend_latent_decodes
from kernels.attention.reference import (
    Scores,
    attend_chunk,
    attend_decodes,
    make_plan,
    plan_of,
    without_gates,
    write_cache,
)
from kernels.experts import reference as mixture
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import Routing
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache, QuantizedKV, by_hadamard
from kernels.kv.rotation import rotate, rotation_of
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep
from kernels.packed import PackedWeight
from kernels.recurrent.convolution import causal_conv
from kernels.recurrent.delta_rule import DeltaInputs, delta_rule
from kernels.recurrent.mamba1 import Mamba1Inputs, mamba1
from kernels.recurrent.mamba2 import Mamba2Heads, mamba2

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square_(),
    "sigmoid": torch.sigmoid,
    "softplus": softplus,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class Kernels:
    """The operations of a model step, in plain torch.

    All tensors are contiguous unless said otherwise and live on one device; x is
    [num_tokens, hidden].
    """

    DETERMINISTIC = False  # whether results are batch-invariant, bit by bit

    def __init__(self) -> None:
        # hidden_act of config.json -> gated activation
        self.GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
            "silu": self.silu_mul,
            "gelu_pytorch_tanh": self.gelu_tanh_mul,
            "gelu": self.gelu_mul,
            "relu": self.relu_mul,
        }

    def prepare(
        self, meta: AttentionMeta, num_heads: int, k_cache: Cache, latent_rank: int = 0
    ) -> None:
        """Compute meta.plan, which a KV group's layers share; called once per step, before them.

        A back end may do nothing. The CUDA back end launches on the current stream and reads
        nothing back, so a CUDA graph can capture the launch.

        k_cache: the cache of any of these layers; it gives block size, KV heads and head size.
        latent_rank: width of latents if k_cache is a cache of latents, else 0.
        """
        meta.plan = make_plan(meta, k_cache)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight, computed in float32, in x's dtype."""
        if x.dtype != torch.float32:
            if weight.dtype != x.dtype:
                return self.rms_norm(x.float(), weight.float(), eps).to(x.dtype)
            return _rms_norm(x, weight.shape, weight, eps)
        # This takes half the operations of torch's rms_norm. It is only for float32: with 16 bits
        # the sum of squares would be rounded.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1])
        return torch.mul(x, mean.rsqrt_()).mul_(weight)

    def norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        """Add rms_norm(x) to residual, of x's shape and dtype, in place; return residual."""
        return residual.add_(self.rms_norm(x, weight, eps))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(first half) * second half: [num_tokens, 2 * size] -> [num_tokens, size]."""
        size = gate_up.shape[-1] // 2
        return silu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(first half), in its tanh form, * second half; shapes: see `silu_mul`."""
        size = gate_up.shape[-1] // 2
        return gelu(gate_up[:, :size], approximate="tanh").mul_(gate_up[:, size:])

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(first half), exact with erf, * second half; shapes: see `silu_mul`."""
        size = gate_up.shape[-1] // 2
        return gelu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def relu_mul(self, gate_up: Tensor) -> Tensor:
        """Return relu(first half) * second half; shapes: see `silu_mul`."""
        size = gate_up.shape[-1] // 2
        return relu(gate_up[:, :size]).mul_(gate_up[:, size:])

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return the layer norm of x [..., size], computed in float32, in x's dtype.

        This is (x - mean) / sqrt(variance + eps) * weight + bias over the last axis.

        weight, bias: [size]; None: 1 and 0.
        """
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        groups: int,
        eps: float,
        gate_last: bool = False,
    ) -> Tensor:
        """Return rms_norm(x * silu(gate)) of each of `groups` equal parts of a row.

        x: [n, size] float32; may be overwritten.
        gate: [n, size] of any dtype, which is also the dtype of the result.
        weight: [size] float32; None: no norm.
        gate_last: compute rms_norm(x) * silu(gate) instead.
        """
        if not gate_last:
            x = x.mul_(silu(gate.float()))
        if weight is not None and groups == 1:
            x = self.rms_norm(x, weight, eps)
        elif weight is not None:
            parts = x.unflatten(1, (groups, -1))
            x = self.rms_norm(parts, weight.new_ones(parts.shape[2]), eps).flatten(1).mul_(weight)
        return (x.mul_(silu(gate.float())) if gate_last else x).to(gate.dtype)

    def activation(self, x: Tensor, name: str) -> Tensor:
        """Apply an elementwise function in float32, and return a new tensor of x's dtype.

        name: "silu", "gelu" (exact, with erf), "gelu_pytorch_tanh", "relu", "relu2" (relu squared),
            "sigmoid", "softplus", or "quick_gelu": x sigmoid(1.702 x).
        """
        return _ACTIVATIONS[name](x.float()).to(x.dtype)

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply x [n, size] by factors [size] in place and return x; factors are float32."""
        return x.mul_(factors)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply x [n, m * size] by the sigmoid of gate [n, m, size] in place, and return x.

        gate may have any row stride.
        """
        return x.mul_(torch.sigmoid(gate.flatten(1)))

    def add_opened(self, given: Tensor, x: Tensor, gate: Tensor, residual: Tensor | None) -> Tensor:
        """Multiply each row of `given` [n, size] by sigmoid(x @ gate.T), one number per token.

        x: [n, hidden]. gate: [1, hidden].
        residual: [n, size], to which the result is added in place; None: `given` is overwritten.
        Returns the written tensor.
        """
        opened = self.activation(self.linear(x, gate, None), "sigmoid")
        return given.mul_(opened) if residual is None else residual.addcmul_(given, opened)

    def xielu(self, x: Tensor, parameters: Tensor) -> Tensor:
        """Compute xIELU (Huang and Schlag 2024) in float32; return a new tensor of x's dtype.

        parameters [4] float32: alpha_p and alpha_n before their softplus, beta, eps.
        x > 0: a_p x^2 + beta x; else a_n (expm1(min(x, eps)) - x) + beta x, with a_p =
        softplus(alpha_p), a_n = beta + softplus(alpha_n).
        """
        alpha_p, alpha_n, beta, eps = parameters.unbind()
        positive, negative = softplus(alpha_p), beta + softplus(alpha_n)
        x32 = x.float()
        below = (torch.expm1(torch.minimum(x32, eps)) - x32) * negative
        return (torch.where(x32 > 0, positive * x32 * x32, below) + beta * x32).to(x.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias; weight is [out, in]."""
        return linear(x, weight, bias)

    def linear_act(self, x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
        """Return act(linear(x)), [num_tokens, out]. act: a name that `activation` takes."""
        return self.activation(self.linear(x, weight, bias), act)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return linear(rms_norm(x)), [num_tokens, out]."""
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def norm_gated_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,  # [2 * out, in]: the gate's rows, then the up projection's
        bias: Tensor | None,
        gate: str,  # a key of GATES
    ) -> Tensor:
        """Return gate(linear(rms_norm(x))), [num_tokens, out]."""
        return self.GATES[gate](self.norm_linear(x, norm, eps, weight, bias))

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """Add linear(x) to residual in place, and return residual."""
        return residual.add_(self.linear(x, weight, bias))

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
        """Return gate(rms_norm(x) @ weight.T + bias), or add x @ weight.T + bias to residual.

        norm: [in]; None: x is not normed.
        gate: a key of GATES; the weight has the gate's rows before the up projection's, and the
            result is [num_tokens, out / 2]. None: no gate.
        residual: [num_tokens, out], written in place; None: the result is a new tensor.
        x_gate: a key of GATES that is applied first to x [num_tokens, 2 * in]; not with a norm.
        """
        if x_gate is not None:
            x = self.GATES[x_gate](x)
        if norm is not None:
            x = self.rms_norm(x, norm, eps)
        y = linear(x, weight.dense(x.dtype), weight.bias)
        if residual is not None:
            return residual.add_(y)
        return y if gate is None else self.GATES[gate](y)

    def takes_gate(self, x: Tensor, weight: PackedWeight) -> bool:
        """Whether `packed_linear` should fuse an x_gate, for the number of tokens of x."""
        return False

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        """Tune `linear`, or with `add` `linear_add`, for a shape of weights; may do nothing.

        weights: several weights of this shape. sizes: numbers of rows of x to tune for.
        """

    def rope_kv_write(self, inputs: RopeInputs, meta: AttentionMeta) -> Tensor:
        """Split queries, keys and values, norm and rotate them; write keys and values to the cache.

        Returns q [num_tokens, num_heads, head_dim].
        """
        qkv, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, num_heads, _ = without_gates(inputs)
        num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        plan = plan_of(meta, k_cache)
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        both = heads[:, : num_heads + num_kv_heads]
        if q_norm is not None and k_norm is not None:
            q, k = both[:, :num_heads], both[:, num_heads:]
            both = torch.cat((self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)), dim=1)
        rotated = rotate(both.float(), *plan.rotation(*meta.rotation(cos_sin)))
        if isinstance(k_cache, QuantizedKV):
            rotated = by_hadamard(k_cache.form, rotated)
        keys, values = rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]
        for cache, new in ((k_cache, keys), (v_cache, values)):
            if plan.written is not None:
                new = new[plan.written]
            write_cache(cache, plan.write_rows, new.reshape(-1, head_dim))
        return rotated[:, :num_heads].to(qkv.dtype)

    def attention(self, inputs: AttentionInputs, meta: AttentionMeta) -> Tensor:
        """Return causal attention of each entry's queries over its cached keys.

        The result is [num_tokens, num_heads * head_dim]. The keys include those of this step;
        meta.window and meta.chunk limit the keys that a query sees. The last query token of entry e
        is at position kv_len[e] - 1. Results of padding tokens are finite and meaningless.

        The score of the query at position t and the key at position s is scale * q k. With
        softcap > 0, scores become softcap * tanh(score / softcap) (Gemma 2). slopes, [num_heads]
        float32: slope * (s - t) is added to scores (ALiBi). sinks, [num_heads] float32: logits that
        are added to each softmax without a value (gpt-oss).
        """
        q, k_cache, v_cache = inputs[:3]
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = k_cache.shape[1]
        group = num_heads // num_kv_heads
        plan = plan_of(meta, k_cache)
        grouped = q.view(num_tokens, num_kv_heads, group, head_dim)
        how = Scores.of(inputs)
        if plan.whole is not None:
            attended = attend_decodes(grouped, k_cache, v_cache, how, plan.whole)
            return attended.reshape(num_tokens, num_heads * head_dim)
        out = q.new_zeros(num_tokens, num_kv_heads, group, head_dim)
        for part in plan.decodes:
            out[part.tokens] = attend_decodes(grouped[part.tokens], k_cache, v_cache, how, part)
        for chunk in plan.chunks:
            out[chunk.begin : chunk.end] = attend_chunk(grouped, k_cache, v_cache, how, chunk)
        return out.view(num_tokens, num_heads * head_dim)

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
        """Return bidirectional attention within complete texts, without a KV cache.

        The result is [num_tokens, num_heads * head_dim].

        qkv: [num_tokens, 3 * num_heads * head_dim]; it is overwritten.
        cos_sin: see RopeInputs; None: no rotation.
        window: the tokens that a token sees on each side; 0: its whole text.
        dtype: the model's dtype, to which keys and values may be rounded.
        """
        q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        if cos_sin is not None:
            cos, sin = rotation_of(*meta.rotation(cos_sin))
            for tensor in (q, k):
                tensor.copy_(rotate(tensor.float(), cos, sin))
        if meta.query_start_host is None:
            meta.query_start_host = meta.query_start.tolist()
        starts, apart = meta.query_start_host, self.DETERMINISTIC
        return bidirectional_attention(q, k, v, starts, scale, window, apart).flatten(1)

    def latent_write(
        self,
        q: Tensor,  # [num_tokens, heads, nope + rope]
        latents: Tensor,  # [num_tokens, rank + rope]
        norm: Tensor,  # [rank]
        eps: float,
        cos_sin: Tensor,  # [max_positions, rope] float32: cosines, then sines
        cache: Tensor,  # [num_blocks, 1, block_size, rank + rope], written at meta.slots
        meta: AttentionMeta,
    ) -> Tensor:
        """Norm and rotate latents, write them to the cache, and return rotated queries.

        The first `rank` elements of a latent are normed. The `rope` elements after them are a key
        that all heads share; they and the last `rope` elements of queries are rotated.

        q and latents may have rows of any stride. The result has q's shape and is contiguous.
        """
        rank = norm.shape[0]
        plan = plan_of(meta, cache)
        rotation = plan.rotation(cos_sin, meta.positions)
        normed = self.rms_norm(latents[:, :rank].contiguous(), norm, eps)
        key = rotate(latents[:, None, rank:].float(), *rotation)[:, 0]
        new = torch.cat((normed, key.to(normed.dtype)), dim=1)
        write_cache(cache, plan.write_rows, new if plan.written is None else new[plan.written])
        nope = q.shape[2] - cos_sin.shape[1]
        rotated = rotate(q[..., nope:].float(), *rotation).to(q.dtype)
        return torch.cat((q[..., :nope], rotated), dim=-1)

    def latent_attention(
        self,
        q: Tensor,
        cache: Tensor,
        up: Tensor,
        scale: float,
        meta: AttentionMeta,
    ) -> Tensor:
        """Compute causal attention of each entry's queries over its latents, this step's included.

        q: the result of latent_write.
        up: [heads, nope + value, rank], the up projection. The first `nope` rows times a latent
            give a head's key without its shared rotary part, the other rows give the head's value.

        Returns [num_tokens, heads * value]. Results of padding tokens are finite and meaningless.
        """
        up = up.to(q.dtype)
        num_tokens, heads, head_dim = q.shape
        value = up.shape[1] - (head_dim - (cache.shape[3] - up.shape[2]))
        plan = plan_of(meta, cache)
        if plan.whole is not None:
            return attend_latent_decodes(q, cache, up, scale, plan.whole).flatten(1)
        out = q.new_zeros(num_tokens, heads, value)
        for part in plan.decodes:
            out[part.tokens] = attend_latent_decodes(q[part.tokens], cache, up, scale, part)
        for chunk in plan.chunks:
            out[chunk.begin : chunk.end] = attend_latent_chunk(q, cache, up, scale, chunk)
        return out.flatten(1)

    def gated_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        """Compute the gated delta rule over each entry's tokens; update states and tails in place.

        silu(convolution of x) gives queries, keys and values; queries and keys are divided by their
        length. For each token: state *= decay; state += k (beta (v - k^T state))^T. The result is
        rms_norm(q^T state / sqrt(key_size)) silu(z) for each head: [num_tokens, value_heads *
        value_size] in x's dtype.

        inputs.pending_updates: state updates that decodes may append instead of writing states
            (`kernels.recurrent.delta_rule_cuda`). Only on CUDA, and not in deterministic mode.
        """
        return self._gated(inputs, meta, silu)

    def kimi_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
        """Compute Kimi Delta Attention (arXiv 2510.26692); update states and tails in place.

        The rule is gated_delta with a decay for each row of a state, and with results multiplied by
        sigmoid(z) instead of silu(z).
        """
        return self._gated(inputs, meta, torch.sigmoid)

    def verify_delta(self, inputs: DeltaInputs, meta: AttentionMeta) -> Tensor | None:
        """Compute gated_delta or kimi_delta of a step that verifies drafts, without state copies.

        Tokens of runs (a request's decode and its drafts) are not written into states. A function
        that updates states by the accepted tokens is added to `meta.state_runs`: to `replays`, or
        to `settles` if the next step's launch itself may do it.

        Returns None, and does nothing, if this back end needs state copies for runs.
        """
        return None

    def _gated(
        self, inputs: DeltaInputs, meta: AttentionMeta, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        assert inputs.pending_updates is None
        heads = inputs.heads
        normed = self.rms_norm(delta_rule(inputs, meta), heads.norm, heads.eps).flatten(1)
        return normed.mul_(gate(inputs.z.float())).to(inputs.x.dtype)

    def causal_conv(
        self,
        x: Tensor,  # [num_tokens, channels]
        conv: Tensor,  # [channels, taps] float32, the token's own tap last
        bias: Tensor | None,  # [channels] float32
        tail: Tensor,  # [rows, taps - 1, channels] float32, written at meta.rows
        meta: AttentionMeta,
        silu: bool = False,  # whether SiLU is applied to the results
    ) -> Tensor:
        """Return the causal convolution of each channel over an entry's tokens.

        The result is [num_tokens, channels] float32; results of padding tokens are undefined.

        The inputs before the entry are in the tail of the entry's row. The entry's last inputs are
        then written to the tail.
        """
        convolved = causal_conv(x, conv, bias, tail, meta)
        return _ACTIVATIONS["silu"](convolved) if silu else convolved

    def short_conv(
        self,
        x: Tensor,  # [num_tokens, channels]
        before: Tensor,  # [num_tokens, channels]
        behind: Tensor,  # [num_tokens, channels]
        conv: Tensor,
        bias: Tensor | None,
        tail: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        """Return causal_conv(before * x) * behind, [num_tokens, channels], and update tail."""
        return self.causal_conv(before * x, conv, bias, tail, meta).mul_(behind)

    def mamba2(
        self,
        x: Tensor,  # [num_tokens, channels]: x, B and C before their convolution
        dt: Tensor,  # [num_tokens, heads]: time steps before dt_bias, softplus and heads.limits
        heads: Mamba2Heads,
        tail: Tensor,  # [rows, taps - 1, channels] float32, written at meta.rows
        state: Tensor,  # [rows, heads, head_size, state_size] float32, likewise
        meta: AttentionMeta,
    ) -> Tensor:
        """Compute Mamba-2 over each entry's tokens; update states and tails in place.

        silu(convolution) gives x, B and C. A token's time step s is softplus(dt + dt_bias), within
        heads.limits. For each token: state = exp(-exp(A_log) s) state + s x B^T. The result is
        state C + D x, [num_tokens, heads, head_size] float32.
        """
        return mamba2(x, dt, heads, tail, state, meta)

    def mamba1(self, inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor:
        """Compute Mamba-1 over each entry's tokens; update states in place.

        With the time step s = softplus(dt), for each token: state = exp(rates s) state + s x B.
        The result is (state C + D x) silu(gate), [num_tokens, channels].
        """
        return self.gated_norm(mamba1(inputs, meta), inputs.gate, None, 1, 0.0)

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by a router's logits [num_tokens, experts].

        Returns (weights float32, ids of experts int32), each [num_tokens, chosen].

        correction: [experts] float32, added to scores for choosing experts, but not for weights.
        """
        return mixture.route(logits, routing, correction)

    def router_logits(self, x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [num_tokens, hidden] @ router.T + bias: [num_tokens, experts].

        The result is float32 if that costs nothing, because small differences may change the choice
        of experts.
        """
        return self.linear(x, router, bias)

    def norm_route(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        router: Tensor,  # [experts, hidden]
        bias: Tensor | None,
        routing: Routing,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rms_norm(x), and the result of `route` for its router logits."""
        normed = self.rms_norm(x, norm, eps)
        return normed, *self.route(self.router_logits(normed, router, bias), routing, correction)

    def experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: ExpertWeights,
        residual: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [num_tokens, hidden].

        weights, ids: the results of `route`.
        residual: the sum is added to it in place; it must not be x. None: the result is a new
            tensor.
        """
        return mixture.experts(x, weights, ids, stack, residual)

    def packed_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        stack: PackedExperts,
        residual: Tensor | None,
    ) -> Tensor:
        """Return the result of `experts` for a packed stack, whose weights are quantised."""
        return self.experts(x, weights, ids, stack.dense(x.dtype), residual)

    def order_experts(self, stack: PackedExperts, dtype: torch.dtype) -> None:
        """Reorder the codes of a filled stack to the fastest order for `packed_experts`.

        dtype: the dtype of x.
        """

    def lora_add(self, y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
        """Add B (A x) of each token's adapter to y [num_tokens, out], the layer's output, in place.

        x: [num_tokens, in]. Rows of tokens without an adapter are unchanged.
        """
        for slot, tokens in step.segments:
            mine = x.index_select(0, tokens)
            at = 0
            for index, size in enumerate(layer.outs, start=layer.first_part):
                factors = step.parts[slot].get(index)
                if factors is not None:
                    a, b = factors
                    delta = linear(linear(mine.to(a.dtype), a), b).to(y.dtype)
                    y[:, at : at + size].index_add_(0, tokens, delta)
                at += size
        return y

    def lora_gated(
        self, gate_up: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep, gate: str
    ) -> Tensor:
        """Return gate(lora_add(gate_up, x)) of all tokens: [num_tokens, out / 2].

        gate: a key of GATES.
        """
        return self.GATES[gate](self.lora_add(gate_up, x, layer, step))


@lru_cache(maxsize=8)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)
