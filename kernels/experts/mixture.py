"""Mixture: the sizes and options of a mixture of experts that its kernels are compiled for."""

from typing import NamedTuple


class Mixture(NamedTuple):
    """The sizes and options of one matmul of a mixture's experts, as one `tl.constexpr`.

    size: the width between an expert's two matmuls.
    width: the hidden size.
    bias: whether this matmul has a bias.
    weigh: whether the router's weight multiplies an expert's input, not its output.
    chosen: experts per token. act: `gate.code` of the activation. experts: experts on this rank.
        These three are 0 for kernels that do not need them.
    """

    size: int
    width: int
    bias: bool
    weigh: bool
    chosen: int = 0
    act: int = 0
    experts: int = 0
