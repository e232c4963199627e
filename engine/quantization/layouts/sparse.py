"""The layout of 2:4 sparse matrices: two of each four numbers, and a bit mask of their positions.

compressed-tensors calls this `sparse-24-bitmask`. There is no sparse matmul here: a matrix is
expanded to a dense one when it is loaded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.config.quantized import KEY
from engine.errors import ConfigError, TensorError
from engine.quantization.layouts.layout import Layout
from engine.quantization.method import Part
from engine.weights.parameter import Fill, Source
from kernels.packed import BLOCK, Decoded, Format


class SparseRows:
    """The tensors of a sparse matrix: `compressed` [out, in / 2] and `bitmask` [out, in / 8].

    Bit i of byte b of the mask is for input 8 * b + i.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, fill: Fill | None = None
    ) -> None:
        """Add the parameters to a layout. Raises ConfigError if a rank would split a byte."""
        part = layout.part
        if part.in_features % 8:
            raise ConfigError(
                f"tensor {part.name}.bitmask: rows of {part.in_features} inputs are not supported, "
                "only multiples of 8",
                param=KEY,
            )
        first, end = layout.inputs(8)
        self._name = part.name
        self._rows, self._width = layout.rows, layout.width
        shape = (part.out_features, part.in_features // 2)
        source = Source(f"{part.name}.compressed", shape, part.rows, (4 * first, 4 * end))
        self._values = layout.add_parameter(
            "compressed", dtype, source, (layout.rows, layout.width // 2), device, fill
        )
        shape = (part.out_features, part.in_features // 8)
        source = Source(f"{part.name}.bitmask", shape, part.rows, (first, end))
        self._mask = layout.add_parameter(
            "bitmask", torch.uint8, source, (layout.rows, layout.width // 8), device, _fill_mask
        )

    def dense(self, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) with their zeros, [n, in].

        Raises TensorError if the mask does not have two bits set of each four.
        """
        bits = torch.arange(8, dtype=torch.uint8, device=self._mask.device)
        mask = ((self._mask[begin:end].unsqueeze(-1) >> bits) & 1).flatten(1).bool()
        if not bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()):
            raise TensorError(f"{self._name}.bitmask", "has not two bits of each four")
        values = self._values[begin:end]
        # viewed as bytes, as 8-bit floats cannot be indexed
        if values.dtype.itemsize == 1:
            values = values.view(torch.uint8)
        dense = torch.zeros(end - begin, self._width, dtype=values.dtype, device=values.device)
        dense[mask] = values.flatten()
        return dense


class SparseLayout(Layout):
    """The layout of a sparse matrix of 16- or 32-bit numbers."""

    scale_name = "compressed"
    # a placeholder by which parts of a layer have equal formats; no kernel supports it
    form = Format(8, BLOCK, torch.float32)
    dequantises = True

    def __init__(self, part: Part, device: torch.device) -> None:
        super().__init__(part)
        self.parameters = {}
        # float32, which represents all dtypes of files exactly
        self._matrix = SparseRows(self, torch.float32, device)

    def decode(self, begin: int, end: int) -> Decoded:
        raise AssertionError("sparse numbers of 16 bits have no codes")

    def values(self, step: int) -> Iterator[Tensor]:
        for begin in range(0, self.rows, step):
            yield self._matrix.dense(begin, min(begin + step, self.rows))


def _fill_mask(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(0b01010101)
