"""LatentShape: what kernels of attention over latents are generated for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import CompilerUnavailable, dot_bf16, lanes

NAMES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}


@dataclass(frozen=True)
class LatentShape:
    """The sizes of a latent attention, which `Kernels.latent_attention` explains."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    block_size: int
    dtype: str  # of latents, LLVM's name
    up: str  # of what makes keys and values of them

    @property
    def head(self) -> int:
        """Elements of a query."""
        return self.nope + self.rope

    @property
    def kept(self) -> int:
        """The elements of a latent and the shared key behind it."""
        return self.rank + self.rope

    @property
    def each(self) -> int:
        """The elements made of a latent for a head: of a key before the shared one, and a value."""
        return self.nope + self.value

    @property
    def dot(self) -> bool:
        """Whether keys are made by the processor's products of pairs of bfloat16."""
        pairs = self.dtype == self.up == "bfloat" and dot_bf16()
        return pairs and self.rank % (2 * lanes()) == 0 == self.head % 2


def fits(q: Tensor, rank: int, rope: int) -> bool:
    """Whether parts fill vectors, on a machine with a compiler. q [n, heads, nope + rope]."""
    try:
        size = lanes()
    except CompilerUnavailable:
        return False
    whole = not any(part % size for part in (rank, q.shape[2])) and rope % (2 * size) == 0
    beside = q.stride(2) == 1 and q.stride(1) == q.shape[2]
    return whole and beside and q.dtype == torch.float32


def shape_of(q: Tensor, cache: Tensor, up: Tensor) -> LatentShape | None:
    """Return the shape to generate kernels for, or None where nothing is generated."""
    heads, both, rank = up.shape
    rope = cache.shape[3] - rank
    if not fits(q, rank, rope) or both % lanes() or not up.is_contiguous():
        return None
    nope, names = q.shape[2] - rope, (NAMES[cache.dtype], NAMES[up.dtype])
    return LatentShape(heads, nope, rope, both - nope, rank, cache.shape[2], *names)
