"""Score modifiers of generated attention kernels: softcap, attention sinks and ALiBi slopes.

`kernels.reference.Kernels.attention` defines them. Scored: the modifiers that a layer has. Numbers:
the modifiers' values. Places: the code that loads and applies them.
"""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from kernels.cpu.codegen.compiler import bits
from kernels.cpu.codegen.ir import IRWriter, Value


@dataclass(frozen=True)
class Scored:
    softcap: bool = False
    sinks: bool = False
    slopes: bool = False

    @property
    def plain(self) -> bool:
        return not (self.softcap or self.slopes)


@dataclass(frozen=True)
class Numbers:
    """The values of a layer's score modifiers.

    sinks, slopes: [num_heads] float32, contiguous.
    """

    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def scored(self) -> Scored:
        return Scored(self.softcap > 0, self.sinks is not None, self.slopes is not None)

    def write_words(self, args: ctypes.Array[ctypes.c_int64], at: int) -> None:
        """Write the values to three words of args from index `at` on, where `Places` reads them."""
        args[at] = bits(self.softcap)
        for place, tensor in ((at + 1, self.sinks), (at + 2, self.slopes)):
            args[place] = 0 if tensor is None else tensor.data_ptr()


class Places:
    """The generator of code that loads score modifiers from words `at` to `at + 2` of args.

    scored: the modifiers that the layer has.
    """

    def __init__(self, writer: IRWriter, scored: Scored, at: int) -> None:
        self._writer, self._scored = writer, scored
        if scored.softcap:
            cap = writer.op(f"load float, ptr {writer.at('%args', at, 'i64')}")
            self._cap = writer.spread(cap)
        self._sinks = writer.argument(at + 1, "ptr") if scored.sinks else ""
        self._slopes = writer.argument(at + 2, "ptr") if scored.slopes else ""

    def slope(self, head: Value) -> Value:
        """Return a head's ALiBi slope, broadcast to all lanes; "" if the layer has no slopes."""
        writer = self._writer
        if not self._slopes:
            return ""
        return writer.spread(writer.load(writer.at(self._slopes, head), "float"))

    def sink(self, head: Value) -> Value:
        """Return a head's attention sink, broadcast to all lanes."""
        writer = self._writer
        return writer.spread(writer.load(writer.at(self._sinks, head), "float"))

    def change(self, scores: Value, slope: Value, ahead: Value) -> Value:
        """Return a vector of scores with softcap and ALiBi slope applied.

        slope: the result of `slope`.
        ahead: the position of the first score's key minus the query's.
        """
        writer = self._writer
        if self._scored.softcap:
            turned = writer.tanh(writer.binary("fdiv", scores, self._cap))
            scores = writer.binary("fmul", turned, self._cap)
        return writer.fma(writer.counted(ahead), slope, scores) if slope else scores
