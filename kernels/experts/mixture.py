"""Mixture: the sizes and options of a mixture of experts that its kernels are compiled for."""

from typing import NamedTuple


class Mixture(NamedTuple):
    """The sizes and options of one matmul of a mixture's experts, as one `tl.constexpr`.

    size: numbers between an expert's two matmuls.
    width: numbers of a token, the hidden size.
    bias: whether this matmul has a bias.
    weigh: whether a token's input is weighted, and not what its expert returns.
    chosen: experts of a token, where the kernel asks.
    act: the activation, as `gate.code` has it, where the kernel asks.
    experts: experts on this rank, where the kernel asks.
    """

    size: int
    width: int
    bias: bool
    weigh: bool
    chosen: int = 0
    act: int = 0
    experts: int = 0
