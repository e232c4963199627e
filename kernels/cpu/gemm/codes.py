"""Helpers for kernels of 4- and 8-bit weights: unpacking codes to bytes, and quantising rows of x
to 8 bits.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.cpu.codegen.ir import IRWriter, Value, constant
from kernels.cpu.codegen.products import look_up
from kernels.cpu.gemm.panels import RowNorm, norm_scale
from kernels.packed import BLOCK, Format

NAMES = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}

RoundedBlock = tuple[Value, Value, Value]
"""The addresses for a quantised block of 32 inputs of a row: of its codes, of its scale, and of the
sums of its codes per unit (`Format.x_bytes`). The last is "" if sums are not needed."""


def bytes_type(writer: IRWriter) -> Value:
    return f"<{4 * writer.lanes} x i8>"


def reinterpret(writer: IRWriter, value: Value, source: str, target: str) -> Value:
    return writer.op(f"bitcast {source} {value} to {target}")


def table_of(writer: IRWriter, form: Format) -> Value:
    if not form.table:
        return ""
    return f"<{', '.join(f'i8 {value}' for value in form.table * (writer.lanes // 4))}>"


def nibbles(writer: IRWriter, raw: Value, table: Value) -> tuple[Value, Value]:
    """Unpack bytes to two vectors of bytes: their low and their high 4-bit codes.

    table: a table for `look_up`, whose bytes replace the codes; "" for none.
    """
    integers, kind = writer.integers, bytes_type(writer)
    mask = writer.whole(0x0F0F0F0F)
    low = writer.op(f"and {integers} {raw}, {mask}")
    high = writer.op(f"lshr {integers} {raw}, {writer.whole(4)}")
    high = writer.op(f"and {integers} {high}, {mask}")
    if not table:
        return low, high

    def looked_up(value: Value) -> Value:
        entries = look_up(
            writer, 4 * writer.lanes, table, reinterpret(writer, value, integers, kind)
        )
        return reinterpret(writer, entries, kind, integers)

    return looked_up(low), looked_up(high)


def _across(
    writer: IRWriter,
    vectors: Sequence[Value],
    kind: str,
    join: Callable[[Value, Value], Value],
) -> Value:
    """Reduce each of 1, 2 or 4 vectors with `join`, and return one vector of the results.

    Lane i has the result of vector i modulo the number of vectors.
    """
    rows, stride, lanes = list(vectors), 1, range(writer.lanes)
    while len(rows) > 1:
        # Lanes whose index has the stride's bit set come from the second vector, the others from
        # the first.
        halves = []
        for a, b in zip(rows[::2], rows[1::2], strict=True):
            parts = []
            for side in (0, stride):
                chosen = ((j & stride and len(lanes)) + (j & ~stride | side) for j in lanes)
                mask = ", ".join(f"i32 {j}" for j in chosen)
                parts.append(
                    writer.op(
                        f"shufflevector {kind} {a}, {kind} {b}, <{len(lanes)} x i32> <{mask}>"
                    )
                )
            halves.append(join(*parts))
        rows, stride = halves, 2 * stride
    (value,) = rows
    while stride < len(lanes):
        value, stride = join(value, writer.swapped(value, stride, kind)), 2 * stride
    return value


_TOGETHER = 4  # blocks of a row that are quantised at once, with common reductions and divisions


def round_row(
    writer: IRWriter,
    form: Format,
    source: Value,
    place: Callable[[Value], RoundedBlock],
    width: Value,
    norm: RowNorm | None,
) -> None:
    """Generate the quantisation of a row of x to 8 bits.

    place: index of a block in the row -> addresses of its results.
    norm: weight and eps of an RMS norm to apply first, or None.
    """
    size, kind, integers = writer.lanes, writer.vector, writer.integers
    weight, by = "", ""
    if norm is not None:
        weight, eps = norm
        by = norm_scale(writer, source, width, eps)

    def read(index: Value) -> list[Value]:
        column = writer.mul(index, BLOCK)
        values = []
        for part in range(0, BLOCK, size):
            value = writer.load(writer.at(writer.at(source, column), part))
            if norm is not None:
                value = writer.binary("fmul", value, by)
                scale = writer.load(writer.at(writer.at(weight, column), part))
                value = writer.binary("fmul", value, scale)
            values.append(value)
        return values

    def larger_bits(values: list[Value]) -> Value:
        best = reinterpret(writer, writer.all(1e-30), kind, integers)
        # Compare non-negative floats by their bits, which have the same order; NaN is the largest.
        for value in values:
            bits = reinterpret(writer, value, kind, integers)
            bits = writer.op(f"and {integers} {bits}, {writer.whole(0x7FFFFFFF)}")
            best = writer.larger(best, bits)
        return best

    def round_blocks(first: Value, count: int) -> list[Value]:
        few, floats = ", ".join(f"i32 {i}" for i in range(count)), f"<{count} x float>"
        indices = [first if at == 0 else writer.add(first, at) for at in range(count)]
        all_values = [read(index) for index in indices]

        def first_lanes(vector: Value, kind: str) -> Value:
            """Return the vector's first `count` lanes, one per block."""
            return writer.op(
                f"shufflevector {kind} {vector}, {kind} poison, <{count} x i32> <{few}>"
            )

        def extract(vector: Value, at: int) -> Value:
            return writer.op(f"extractelement {floats} {vector}, i64 {at}")

        best = [larger_bits(values) for values in all_values]
        tops = first_lanes(_across(writer, best, integers, writer.larger), integers)
        tops = writer.op(f"bitcast <{count} x i32> {tops} to {floats}")
        largest = f"splat (float {constant(127.0)})"
        inverses = writer.op(f"fdiv {floats} {largest}, {tops}")
        scales = writer.op(f"fdiv {floats} {tops}, {largest}")
        places = [place(index) for index in indices]
        units: list[list[Value]] = [[] for _ in range(form.units)]
        for at, (values, (codes, at_scale, totals)) in enumerate(
            zip(all_values, places, strict=True)
        ):
            inverse = writer.spread(extract(inverses, at))
            whole = []
            for part, value in enumerate(values):
                # Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
                shifted = writer.fma(value, inverse, writer.all(12582912.0))
                whole.append(writer.binary("fsub", shifted, writer.all(12582912.0)))
                bits = reinterpret(writer, shifted, kind, integers)
                narrow = writer.op(f"trunc {integers} {bits} to <{size} x i8>")
                writer.store(narrow, writer.at(codes, part * size, "i8"), f"<{size} x i8>")
            writer.store(extract(scales, at), at_scale, "float")
            if not totals:
                continue
            length = len(whole) // form.units
            for unit, words in enumerate(units):
                total = whole[unit * length]
                for value in whole[unit * length + 1 : (unit + 1) * length]:
                    total = writer.binary("fadd", total, value)
                words.append(total)
        for unit, words in enumerate(units):
            if not words:
                continue
            # Integers below 2^24: their float sums are exact in any order.
            sums = first_lanes(
                _across(writer, words, kind, lambda a, b: writer.binary("fadd", a, b)), kind
            )
            result, of = floats, "float"
            if form.zero:
                by_zero = f"splat (float {constant(-form.zero)})"
                sums = writer.op(f"fmul {floats} {sums}, {by_zero}")
                # Quantise NaN to 0; the result is NaN anyway, because the block's scale is NaN.
                result, of = f"<{count} x i32>", "i32"
                name = f"llvm.fptosi.sat.v{count}i32.v{count}f32"
                sums = writer.call(result, name, [(floats, sums)])
            else:
                sums = writer.op(f"fmul {floats} {sums}, {scales}")
            for at, (_, _, totals) in enumerate(places):
                value = writer.op(f"extractelement {result} {sums}, i64 {at}")
                writer.store(value, writer.at(totals, 4 * unit, "i8"), of)
        return []

    blocks = writer.op(f"lshr i64 {width}, {BLOCK.bit_length() - 1}")
    whole = writer.op(f"and i64 {blocks}, {-_TOGETHER}")
    writer.loop(0, whole, [], lambda index: round_blocks(index, _TOGETHER), step=_TOGETHER)
    writer.loop(whole, blocks, [], lambda index: round_blocks(index, 1))
