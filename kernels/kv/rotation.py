"""Rotary embeddings in plain torch: rows of a table, and the rotation of heads by them."""

import torch
from torch import Tensor


def rotation_of(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the table's rows as factors (cos, cos), (-sin, sin): [num_tokens, 1, rotary_dim]."""
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [num_tokens, heads, head_dim] float32 with rotated first elements of each head."""
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    swapped = part.roll(rotary_dim // 2, -1)
    rotated = torch.mul(part, cos).addcmul_(swapped, sin)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
