"""device -> implementation: one table.

Layers hold the Kernels they were built with; nobody asks again at run time.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from torch import Tensor

from kernels.metadata import AttentionMeta, LoraLinear, LoraStep

# (device type, deterministic) -> module; imported when asked for, because Triton is CUDA's alone.
_BACK_ENDS = {
    ("cpu", False): "kernels.cpu.native",
    ("cpu", True): "kernels.cpu.deterministic",
    ("cuda", False): "kernels.cuda",
    ("cuda", True): "kernels.cuda_deterministic",
}


class Kernels(Protocol):
    """The operations that a model step is made of.

    `reference` has each in plain torch: the oracle. All tensors are contiguous unless
    said otherwise and live on one device; x is [num_tokens, hidden].
    """

    DETERMINISTIC: bool  # a token's numbers depend on its request alone, bit by bit
    GATES: Mapping[str, Callable[[Tensor], Tensor]]  # hidden_act of config.json -> gated activation

    def prepare(self, meta: AttentionMeta, num_heads: int, k_cache: Tensor) -> None:
        """Once a step, before the layers: fill meta.plan with what all layers share.

        It may do nothing. k_cache is any layer's; it gives block size, KV heads and head size. On
        CUDA it launches on the current stream and reads nothing back, so it can sit in a graph.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight, computed in float32, returned in x's dtype."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]: silu(first half) * second half."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_kv_write(
        self,
        qkv: Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        # [max_positions, rotary_dim] float32: cosines, then sines (rotate-half form)
        cos_sin: Tensor,
        # [head_dim]: RMS norm over each head before the rotation (Qwen3), or None
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim], written at meta.slots
        v_cache: Tensor,
        num_heads: int,
        meta: AttentionMeta,
    ) -> Tensor:
        """Split, norm and rotate; write keys and values to the cache.

        Returns q [num_tokens, num_heads, head_dim].
        """
        ...

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, meta: AttentionMeta
    ) -> Tensor:
        """Causal attention of each entry's queries over its cached keys (this step's included).

        q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]. The last query
        token of entry e stands at position kv_len[e] - 1. Padding tokens give finite values of no
        meaning.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias; weight is [out, in]."""
        ...

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """linear(rms_norm(x)): what stands before attention."""
        ...

    def norm_gated_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,  # [2 * out, in]: the gate's rows, then the up's
        bias: Tensor | None,
        gate: str,  # a key of GATES
    ) -> Tensor:
        """gate(linear(rms_norm(x))) -> [num_tokens, out]: the first half of an MLP."""
        ...

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual + linear(x), written over residual."""
        ...

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        """Look for a faster way to do linear (add: linear_add) with these weights, all of one
        shape, for these numbers of rows of x. It may do nothing."""
        ...

    def lora_add(self, y: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep) -> Tensor:
        """y [num_tokens, out], the layer's output for x [num_tokens, in], plus B (A x) of each
        token's adapter; written over y. Tokens without an adapter are not touched.
        """
        ...

    def lora_gated(
        self, gate_up: Tensor, x: Tensor, layer: LoraLinear, step: LoraStep, gate: str
    ) -> Tensor:
        """gate(lora_add(gate_up, x)) -> [num_tokens, out / 2] of all tokens; gate: a key of
        GATES.
        """
        ...


def kernels_for(device: str, deterministic: bool = False) -> Kernels:
    """The back end of a device type ("cpu" or "cuda"). Raises KeyError for others."""
    return import_module(_BACK_ENDS[device, deterministic])  # type: ignore[return-value]
