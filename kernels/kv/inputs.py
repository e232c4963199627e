"""RopeInputs: the inputs of a layer's rotary embeddings and of its KV cache writes in one step."""

from typing import NamedTuple

from torch import Tensor

from kernels.kv.quantized import Cache


class RopeInputs(NamedTuple):
    """The inputs of `Kernels.rope_kv_write`.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
    cos_sin: [max_positions, rotary_dim] float32: cosines, then sines (rotate-half form);
        rotary_dim 0 = no rotation.
    q_norm, k_norm: [head_dim], an RMS norm over each head before the rotation (Qwen3), or None.
    eps: epsilon of these norms.
    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], written at meta.slots.
    num_heads: query heads.
    gated: whether qkv has an output gate of head_dim after each head's query; it is not changed.
    """

    qkv: Tensor
    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    k_cache: Cache
    v_cache: Cache
    num_heads: int
    gated: bool = False
