"""Rotary embeddings in plain torch: look-up of rotary factors, and the rotation of heads."""

import torch
from torch import Tensor


def rotation_of(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotary factors (cos, cos) and (-sin, sin) of tokens at `positions`.

    cos_sin: the rotary table, see `RopeInputs`. Results: [num_tokens, 1, rotary_dim] each.
    """
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [num_tokens, heads, head_dim] float32 with each head's first elements rotated.

    cos, sin: the factors of `rotation_of`; their rotary_dim is the number of rotated elements.
    """
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    swapped = part.roll(rotary_dim // 2, -1)
    rotated = torch.mul(part, cos).addcmul_(swapped, sin)
    if rotary_dim == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
