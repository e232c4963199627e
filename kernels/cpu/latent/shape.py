"""LatentShape: the sizes and dtypes for which kernels of latent attention are generated."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import check
from kernels.cpu.codegen.processor import CompilerUnavailable, dot_bf16, lanes

NAMES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}


@dataclass(frozen=True)
class LatentShape:
    """The sizes and dtypes of a latent attention; for names see `Kernels.latent_attention`."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    block_size: int
    dtype: str  # type of the latents, as LLVM names it
    up: str  # type of the up-projection, as LLVM names it

    @property
    def head(self) -> int:
        """The number of elements of a head's query."""
        return self.nope + self.rope

    @property
    def kept(self) -> int:
        """The number of elements of a cached latent and its shared rotary key."""
        return self.rank + self.rope

    @property
    def expanded(self) -> int:
        """The number of elements to which a latent expands per head: non-rotary key and value."""
        return self.nope + self.value

    @property
    def dot(self) -> bool:
        """Whether latents are expanded by multiplying pairs of bfloat16."""
        pairs = self.dtype == self.up == "bfloat" and dot_bf16()
        return pairs and self.rank % (2 * lanes()) == 0 == self.head % 2


def fits(q: Tensor, rank: int, rope: int) -> bool:
    """Whether the sizes of heads and latents are multiples of a vector, and a compiler exists.

    q: [n, heads, nope + rope].
    """
    try:
        check()
        size = lanes()
    except CompilerUnavailable:
        return False
    whole = not any(part % size for part in (rank, q.shape[2])) and rope % (2 * size) == 0
    beside = q.stride(2) == 1 and q.stride(1) == q.shape[2]
    return whole and beside and q.dtype == torch.float32


def shape_of(q: Tensor, cache: Tensor, up: Tensor) -> LatentShape | None:
    """Return the shape of these tensors, or None if no kernels can be generated for it."""
    heads, both, rank = up.shape
    rope = cache.shape[3] - rank
    if not fits(q, rank, rope) or both % lanes() or not up.is_contiguous():
        return None
    nope, names = q.shape[2] - rope, (NAMES[cache.dtype], NAMES[up.dtype])
    return LatentShape(heads, nope, rope, both - nope, rank, cache.shape[2], *names)
