"""Bidirectional attention over whole texts without a cache, for encoders, in plain torch."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Sequence[int],
    scale: float,
    window: int = 0,
    apart: bool = False,
) -> Tensor:
    """Compute attention in both directions within each text: [num_tokens, num_heads, head_dim].

    q, k, v: [num_tokens, num_heads, head_dim].
    starts: the first token of each text, then num_tokens.
    window: the tokens that a token sees on each side; 0 = its whole text.
    apart: whether each text has its own call, so that results do not depend on other texts. On
        the CPU each text always has its own call.
    """
    if apart or q.device.type == "cpu":
        return torch.cat([_one(q[a:b], k[a:b], v[a:b], scale, window) for a, b in pairwise(starts)])
    return _padded(q, k, v, starts, scale, window)


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    parts = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    mask = None
    if 0 < window < len(q) - 1:
        mask = _near(torch.arange(len(q), device=q.device), window)
    attended = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)
    return attended[0].transpose(0, 1)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], scale: float, window: int
) -> Tensor:
    """Return attention over all texts, padded to the longest: launches cost more than padding."""
    lengths = [b - a for a, b in pairwise(starts)]
    longest = max(lengths)
    place = torch.arange(longest)
    length = torch.tensor(lengths)[:, None]
    begin = torch.tensor(starts[:-1])[:, None]
    real = place[None] < length  # [texts, longest]
    index = torch.where(real, begin + place, begin).flatten().to(q.device, non_blocking=True)
    back = real.flatten().nonzero().flatten().to(q.device, non_blocking=True)
    mask = real[:, None, None].to(q.device, non_blocking=True)
    if 0 < window < longest - 1:
        mask = mask & _near(place, window).to(q.device, non_blocking=True)
        # A padding row sees at least itself: a softmax over nothing is NaN.
        mask = mask | torch.eye(longest, dtype=torch.bool, device=q.device)
    parts = (
        tensor.index_select(0, index).unflatten(0, (len(lengths), longest)).transpose(1, 2)
        for tensor in (q, k, v)
    )
    attended = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, back)


def _near(place: Tensor, window: int) -> Tensor:
    return (place[:, None] - place[None]).abs() <= window
