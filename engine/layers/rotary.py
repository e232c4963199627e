"""The table of cosines and sines of rotary position embeddings."""

import math

import torch
from torch import Tensor

from engine.model_config import Rope


def cos_sin_table(
    rope: Rope | None, rotary_dim: int, max_positions: int, device: torch.device
) -> Tensor:
    """[max_positions, rotary_dim] float32: cosines, then sines (rotate-half form). rope: None:
    nothing turns."""
    if device.type == "meta":
        return torch.empty(max_positions, rotary_dim, dtype=torch.float32, device=device)
    if rope is None:
        table = torch.zeros(max_positions, rotary_dim, dtype=torch.float32, device=device)
        table[:, : rotary_dim // 2] = 1.0
        return table
    frequencies = _FREQUENCIES[rope.type](rope, rotary_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)


def _default(rope: Rope, dim: int) -> Tensor:
    """[dim / 2]: radians a position."""
    return 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _linear(rope: Rope, dim: int) -> Tensor:
    return _default(rope, dim) / rope.factor


def _llama3(rope: Rope, dim: int) -> Tensor:
    """Slow frequencies are divided by factor, fast ones kept, those between blended."""
    frequencies = _default(rope, dim)
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # in the trained context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(rope: Rope, dim: int) -> Tensor:
    """Fewer than beta_slow turns: interpolated; more than beta_fast: kept; between: a ramp."""
    frequencies = _default(rope, dim)

    def dimension(turns: float) -> float:
        trained = rope.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(trained) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    interpolate = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return interpolate * frequencies / rope.factor + (1 - interpolate) * frequencies


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
