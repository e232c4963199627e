"""AttentionInputs, LatentInputs, AbsorbedInputs: the tensors of a layer's attention in one step.

AttentionForm and LatentForm hold the sizes and options by which a kernel is chosen (`candidates`).
"""

from typing import NamedTuple

from torch import Tensor

from kernels.kv.quantized import Cache, QuantizedKV


class AttentionInputs(NamedTuple):
    """The inputs of a layer's attention over paged keys and values (`Kernels.attention`).

    q: [num_tokens, num_heads, head_dim].
    k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
    scale: the factor of scores.
    softcap: if > 0, scores become softcap * tanh(score / softcap).
    sinks: [num_heads] float32, attention sinks: logits that join each softmax without a value.
    slopes: [num_heads] float32, ALiBi's slope of each head, or None.
    """

    q: Tensor
    k_cache: Cache
    v_cache: Cache
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None


class AttentionForm(NamedTuple):
    """The sizes and options by which a kernel of attention is chosen.

    kv: name of the format of quantised keys and values; "" = the model's dtype.
    element_size: bytes of an element of queries.
    head_dim: elements of a head.
    group: query heads that share a head of keys.
    block_size: tokens of a page.
    softcap, slopes: whether scores have a soft cap, or ALiBi's slopes.
    """

    kv: str
    element_size: int
    head_dim: int
    group: int
    block_size: int
    softcap: bool = False
    slopes: bool = False


def attention_form(inputs: AttentionInputs) -> AttentionForm:
    """Return the sizes and options of a layer's inputs, by which a kernel is chosen."""
    cache = inputs.k_cache
    _, num_kv_heads, block_size, head_dim = cache.shape
    return AttentionForm(
        kv=cache.form.name if isinstance(cache, QuantizedKV) else "",
        element_size=inputs.q.element_size(),
        head_dim=head_dim,
        group=inputs.q.shape[1] // num_kv_heads,
        block_size=block_size,
        softcap=inputs.softcap > 0,
        slopes=inputs.slopes is not None,
    )


class LatentInputs(NamedTuple):
    """The inputs of a layer's attention over paged latents (`Kernels.latent_attention`).

    q: [num_tokens, num_heads, nope + rope], the last `rope` elements rotated.
    cache: [num_blocks, 1, block_size, rank + rope].
    up: [num_heads, nope + value, rank], the up projection from latents to keys and values.
    scale: the factor of scores.
    """

    q: Tensor
    cache: Tensor
    up: Tensor
    scale: float


class AbsorbedInputs(NamedTuple):
    """The inputs of attention over latents with absorbed queries.

    An absorbed query is multiplied by the up projection of keys, so it attends to latents directly.

    absorbed: [num_heads, num_tokens, rank], with any stride between heads.
    q, cache, scale: those of `LatentInputs`.
    """

    absorbed: Tensor
    q: Tensor
    cache: Tensor
    scale: float


class LatentForm(NamedTuple):
    """The sizes by which a kernel of attention over latents is chosen.

    heads: query heads.
    rank: elements of a latent.
    rope: elements of the rotary part, which heads share.
    element_size: bytes of an element.
    block_size: tokens of a page.
    """

    heads: int
    rank: int
    rope: int
    element_size: int
    block_size: int


def latent_form(inputs: AbsorbedInputs) -> LatentForm:
    """Return the sizes of a layer's inputs, by which a kernel is chosen."""
    heads, _, rank = inputs.absorbed.shape
    _, _, block_size, width = inputs.cache.shape
    return LatentForm(heads, rank, width - rank, inputs.q.element_size(), block_size)
