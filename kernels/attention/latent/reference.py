"""Attention over latents in plain torch: the oracle of every back end.

`kernels.reference.Kernels.latent_attention` defines the operation.

Decodes use absorbed queries. A query is multiplied by the up projection of keys, and attends to the
latents as to a single key head. The result is multiplied by the up projection of values. So a
latent is read once for all heads.

Prefill expands latents to keys and values instead, which are shorter than latents. All queries of a
sequence share the expanded keys and values.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention.reference import DecodeBatch, PrefillChunk

_KEYS_BYTES = 64 << 20  # bytes of keys and values that are expanded at once


def attend_latent_decodes(
    q: Tensor, cache: Tensor, up: Tensor, scale: float, part: DecodeBatch
) -> Tensor:
    """Return latent attention of a batch of decodes.

    q [n, heads, nope + rope] -> [n, heads, value]
    """
    latents = part.gather.read_keys(cache)
    part.gather.flat.index_fill_(0, part.unused, 0.0)
    latents = latents[:, 0].to(q.dtype)  # [n, keys, rank + rope]
    rank = up.shape[2]
    nope = q.shape[2] - (latents.shape[2] - rank)
    absorbed = torch.einsum("nhd,hdr->nhr", q[..., :nope], up[:, :nope])
    score = torch.cat((absorbed, q[..., nope:]), -1) @ latents.transpose(1, 2)
    weight = (score.float() * scale + part.mask[:, 0].float()).softmax(-1).to(q.dtype)
    attended = weight @ latents[..., :rank]
    return torch.einsum("nhr,hvr->nhv", attended, up[:, nope:])


def attend_latent_chunk(
    q: Tensor, cache: Tensor, up: Tensor, scale: float, chunk: PrefillChunk
) -> Tensor:
    """Return latent attention of a prompt's chunk.

    q [num_tokens, heads, nope + rope] -> the chunk's rows [length, heads, value]
    """
    latents = chunk.gather.read_keys(cache)[0, 0, : chunk.num_keys].to(q.dtype)
    heads, both, rank = up.shape
    rope = latents.shape[1] - rank
    nope = q.shape[2] - rope
    value = both - nope
    # Pad keys and values to one width: otherwise SDPA keeps every score in memory.
    width = max(nope + rope, value)
    queries = _widened(q[chunk.begin : chunk.end].transpose(0, 1), width)
    shared = latents[:, rank:].expand(1, -1, -1)
    mask = None if chunk.mask is None else chunk.mask.to(q.dtype)
    causal = mask is None and chunk.end - chunk.begin > 1
    pieces = []
    count = max(1, _KEYS_BYTES // (len(latents) * (both + 2 * width) * q.element_size()))
    for some in range(0, heads, count):
        expanded = latents[:, :rank] @ up[some : some + count].transpose(1, 2)
        key = torch.cat((expanded[..., :nope], shared.expand(len(expanded), -1, -1)), -1)
        attended = scaled_dot_product_attention(
            queries[None, some : some + count],
            _widened(key, width)[None],
            _widened(expanded[..., nope:], width)[None],
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
        )
        pieces.append(attended[0, ..., :value])
    return torch.cat(pieces).transpose(0, 1)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
