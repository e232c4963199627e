"""Bfloat16Pairs: vectors of pairs of bfloat16, which a processor multiplies and adds in one
instruction.
"""

from kernels.cpu.codegen.ir import IRWriter, Value
from kernels.cpu.codegen.products import dot_pairs


class Bfloat16Pairs:
    """The writer of instructions that multiply pairs of bfloat16, and of conversions to pairs.

    `processor.dot_bf16` must be true.
    """

    def __init__(self, writer: IRWriter) -> None:
        self._writer, self._size = writer, writer.lanes
        self.kind = f"<{2 * writer.lanes} x bfloat>"
        self._words = f"<{2 * writer.lanes} x i16>"

    def dot(self, total: Value, a: Value, b: Value) -> Value:
        """Return, in each vector lane, total plus the dot product of a's and b's bfloat16 pairs."""
        return dot_pairs(self._writer, total, a, b)

    def rounded(self, low: Value, high: Value) -> Value:
        """Return the concatenation of two float32 vectors, rounded to bfloat16."""
        narrow, size = f"<{self._size} x bfloat>", self._size
        a, b = (
            self._writer.op(f"fptrunc {self._writer.vector} {half} to {narrow}")
            for half in (low, high)
        )
        lanes_ = ", ".join(f"i32 {i}" for i in range(2 * size))
        return self._writer.op(
            f"shufflevector {narrow} {a}, {narrow} {b}, <{2 * size} x i32> <{lanes_}>"
        )

    def spread(self, pointer: Value, kind: str) -> Value:
        """Broadcast a pair of bfloat16 from memory to all vector lanes, with its halves swapped.

        kind: i32 for a pair, i16 for one number and 0.

        The processor adds the second product of a pair first. With swapped halves products are
        added in the order of the numbers in memory.
        """
        word = self._writer.load(pointer, kind)
        if kind == "i16":
            word = self._writer.op(f"zext i16 {word} to i32")
        halves = [("i32", word), ("i32", word), ("i32", "16")]
        word = self._writer.call("i32", "llvm.fshl.i32", halves)
        word = self._writer.spread(word, "i32")
        return self._writer.op(f"bitcast {self._writer.integers} {word} to {self.kind}")

    def side_by_side(self, first: Value, second: Value | None) -> list[Value]:
        """Load two rows and interleave their elements as pairs, the first row's element last.

        second: None stands for a row of zeros.

        Pairs are interleaved within 128-bit parts, which takes one instruction. `in_order` restores
        the order of the elements.
        """
        writer, size = self._writer, self._size
        rows = [
            "zeroinitializer" if row is None else writer.load(row, self._words)
            for row in (second, first)
        ]
        out = []
        for half in (0, 4):
            chosen = (8 * (i // 8) + half + i % 8 // 2 + i % 2 * 2 * size for i in range(2 * size))
            lane = ", ".join(f"i32 {index}" for index in chosen)
            joined = writer.op(
                f"shufflevector {self._words} {rows[0]}, {self._words} {rows[1]}, "
                f"<{2 * size} x i32> <{lane}>"
            )
            out.append(writer.op(f"bitcast {self._words} {joined} to {self.kind}"))
        return out

    def in_order(self, a: Value, b: Value) -> list[Value]:
        """Return both vectors of sums over `side_by_side` pairs, reordered as elements lie in
        memory.
        """
        kind, size, out = self._writer.vector, self._size, []
        for begin in (0, size):
            places = range(begin, begin + size)
            lane = ", ".join(f"i32 {d // 8 * 4 + d % 4 + d % 8 // 4 * size}" for d in places)
            out.append(
                self._writer.op(f"shufflevector {kind} {a}, {kind} {b}, <{size} x i32> <{lane}>")
            )
        return out
