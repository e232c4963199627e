"""Tables: the tables of cosines and sines for rotary embeddings."""

import math

import torch
from torch import Tensor

from engine.rope import Rope


class Tables:
    """A cache of the rotary tables of a model's layers; layers with equal settings share a
    table."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self.max_positions, self.device = max_positions, device
        self._tables: dict[tuple[object, ...], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables.values())

    def __call__(self, rope: Rope | None, head_dim: int) -> Tensor:
        """Return the rotary table of a layer; see `cos_sin_table`.

        rope: the rotary embedding; None = a table without rotation.
        """
        key = (rope, head_dim)
        if key not in self._tables:
            self._tables[key] = (
                _no_rotation(head_dim, self.max_positions, self.device)
                if rope is None
                else cos_sin_table(rope, head_dim, self.max_positions, self.device)
            )
        return self._tables[key]

    def temperatures(self, beta: float, trained: int, shift: int) -> Tensor:
        """Return the factors on queries by position, [max_positions] float32.

        beta, trained, shift: see `LayerAttention.temperature`.
        """
        key = (beta, trained, shift)
        if key not in self._tables:
            times = torch.arange(self.max_positions, dtype=torch.float32, device=self.device)
            self._tables[key] = 1 + beta * torch.log1p(torch.floor((times + shift) / trained))
        return self._tables[key]


def _no_rotation(head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    table = torch.zeros(max_positions, head_dim, dtype=torch.float32, device=device)
    table[:, : head_dim // 2] = 1
    return table


def cos_sin_table(rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> Tensor:
    """Return the table of rotary embeddings, [max_positions, rotary_dim] float32.

    A row has cosines, then sines (rotate-half form). rotary_dim is rope.dim, or head_dim if that is
    0.
    """
    rotary_dim = rope.dim or head_dim
    if device.type == "meta":
        return torch.empty(max_positions, rotary_dim, dtype=torch.float32, device=device)
    frequencies = _FREQUENCIES[rope.type](rope, rotary_dim, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device)


def _default(rope: Rope, dim: int, positions: int = 0) -> Tensor:
    """Return unscaled rotary frequencies [dim / 2], in radians per position.

    positions: the maximum number of positions, on which only other kinds of scaling depend.
    """
    return 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _linear(rope: Rope, dim: int, positions: int) -> Tensor:
    return _default(rope, dim) / rope.factor


def _llama3(rope: Rope, dim: int, positions: int) -> Tensor:
    """Return Llama 3's frequencies: low ones divided, high ones kept, others blended."""
    frequencies = _default(rope, dim)
    # number of rotations within the trained context
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(rope: Rope, dim: int, positions: int) -> Tensor:
    """Return yarn's frequencies: interpolated below beta_slow rotations, kept above beta_fast.

    Frequencies in between are blended linearly.
    """
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


def _longrope(rope: Rope, dim: int, positions: int) -> Tensor:
    """Return longrope's frequencies, each divided by a separate factor.

    There is one set of factors for short contexts, and another for long ones.
    """
    longer = positions > rope.original_max_positions
    return _default(rope, dim) / torch.tensor(rope.long_factors if longer else rope.short_factors)


def _proportional(rope: Rope, dim: int, positions: int) -> Tensor:
    frequencies = _default(rope, dim) / rope.factor
    frequencies[int(rope.part * dim) // 2 :] = 0.0
    return frequencies


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def rotate(x: Tensor, rows: Tensor) -> None:
    """Apply rotary embeddings to x [n, heads, head_dim] in place.

    rows: [n, 1, rotary_dim], cosines, then sines.
    """
    cos, sin = rows.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = first * cos - second * sin, second * cos + first * sin
    x[..., :half], x[..., half : 2 * half] = rotated
