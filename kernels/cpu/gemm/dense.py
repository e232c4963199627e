"""Matmuls x @ W.T for 16- or 32-bit weights and float32 x.

The kernels are generated for the width of x. W is packed into panels of two vector registers of
outputs. A thread takes a panel, streams it once for each dozen rows of x, and keeps the sums in
registers. Matmuls are in float32. With bfloat16 weights and AVX512-BF16 or AMX, x is rounded to
bfloat16; then products are exact, and sums are float32. From a few rows on, AMX is several times as
fast; for one row both are equally fast. Results are batch-invariant. The preceding RMS norm and the
following bias, gate and residual are computed in the same call, so a layer starts its threads only
four times.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen import amx
from kernels.cpu.codegen.compiler import NativeFunction, check
from kernels.cpu.codegen.ir import IRWriter, Value, constant
from kernels.cpu.codegen.processor import CompilerUnavailable, amx_bf16, dot_bf16, lanes
from kernels.cpu.codegen.products import dot_bytes, fma_pairs
from kernels.cpu.gemm import tiled_bf16
from kernels.cpu.gemm.panels import (
    BIAS,
    BIAS_STEP,
    EPS,
    NORM,
    NUM_ROWS,
    SCRATCH,
    Panels,
    RoundedRows,
    RowNorm,
    W,
    X,
    gate_buffer,
    norm_scale,
    product_functions,
    products,
    store_tile,
)

_ROWS = {16: 12, 8: 5}  # rows of a tile, by float32 lanes: as many as the registers hold
_NAMES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
_DOT = "bfloat dot"  # bfloat16 weights on processors that multiply pairs of bfloat16
AMX = "bfloat amx"  # bfloat16 weights on processors that multiply tiles of bfloat16
_ROW_END = 64  # bytes after a quantised row of x, which hold its scale
_AHEAD = 2048  # distance of prefetches, in weights


def _tile(writer: IRWriter, rows: int, width: int, dtype: str) -> None:
    """Generate out[rows, panel] = (out if add) + bias + x[rows, width] @ panel."""
    size = writer.lanes
    kind = writer.vector
    unit, line_weights = ("float", 16) if dtype == "float" else ("i16", 32)
    bias = [writer.load(writer.at("%bias", half * size)) for half in (0, 1)]
    sums = [(kind, bias[half]) for _ in range(rows) for half in (0, 1)]

    def step(k: Value, weights: list[Value], x_offset: int, sums: list[Value]) -> list[Value]:
        at = writer.add(k, x_offset)
        out = []
        for row in range(rows):
            x = writer.load(writer.at(writer.at("%x", row * width), at), "float")
            x = writer.spread(x)
            out += [writer.fma(x, weights[half], sums[2 * row + half]) for half in (0, 1)]
        return out

    def pair(k: Value, *sums: Value) -> list[Value]:
        """Return the sums plus the products of columns 2 k and 2 k + 1 of x and their weights.

        With bfloat16, a lane holds both weights of an output.
        """
        begin = writer.mul(k, 4 * size)  # weights of two columns: two registers of outputs each
        panel = writer.at("%w", begin, unit)
        for line in range(0, 4 * size, line_weights):
            writer.prefetch(writer.at(panel, _AHEAD + line, unit))
        if dtype == "bfloat":
            raw = [
                writer.load(writer.at(panel, half * 2 * size, "i16"), writer.integers)
                for half in (0, 1)
            ]
            low = [writer.op(f"shl {writer.integers} {r}, {writer.whole(16)}") for r in raw]
            high = [writer.op(f"and {writer.integers} {r}, {writer.whole(-65536)}") for r in raw]
            both = [
                [writer.op(f"bitcast {writer.integers} {w} to {kind}") for w in column]
                for column in (low, high)
            ]
        else:
            both = [
                [
                    writer.load_as_float(writer.at(panel, (2 * column + half) * size, unit), dtype)
                    for half in (0, 1)
                ]
                for column in (0, 1)
            ]
        k2 = writer.mul(k, 2)
        return step(k2, both[1], 1, step(k2, both[0], 0, list(sums)))

    done = writer.loop(0, width // 2, sums, pair)
    store_tile(writer, rows, done)


def _tile_int8(writer: IRWriter, rows: int, width: int) -> None:
    """Generate the matmul of `_tile` for rows from `_quantise` and panels of `PackedInt8`.

    Sums of 8-bit products are exact; scales multiply the sums.
    """
    size, kind, integers = writer.lanes, writer.vector, writer.integers

    def four(k: Value, *sums: Value) -> list[Value]:
        panel = writer.at("%w", writer.mul(k, 8 * size), "i8")
        for line in range(0, 8 * size, 64):
            writer.prefetch(writer.at(panel, 2 * _AHEAD + line, "i8"))
        halves = (panel, writer.at(panel, 4 * size, "i8"))
        weights = [writer.load(half, integers) for half in halves]
        out = []
        for row in range(rows):
            for byte in (0, 1):
                at = writer.add(writer.mul(k, 4), row * (2 * width + _ROW_END) + byte * width)
                x = writer.spread(writer.load(writer.at("%x", at, "i8"), "i32"), "i32")
                for half in (0, 1):
                    total = sums[4 * row + 2 * byte + half]
                    out.append(dot_bytes(writer, total, x, weights[half], wide=True))
        return out

    end = writer.at("%w", 2 * size * width, "i8")
    # Per output: its scale, and the part of its sum due to the 128 added to x's upper bytes.
    scales, excess = ([writer.at(end, at + h * size) for h in (0, 1)] for at in (0, 2 * size))
    zero = (integers, "zeroinitializer")
    start = [(integers, writer.load(half, integers)) for half in excess] + [zero, zero]
    done = writer.loop(0, width // 4, start * rows, four)
    results = []
    for row in range(rows):
        at = row * (2 * width + _ROW_END) + 2 * width
        x_scale = writer.spread(writer.load(writer.at("%x", at, "i8"), "float"))
        for half in (0, 1):
            upper, lower = (
                writer.op(f"sitofp {integers} {done[4 * row + 2 * byte + half]} to {kind}")
                for byte in (0, 1)
            )
            value = writer.fma(upper, writer.all(256.0), lower)
            scale = writer.binary("fmul", writer.load(scales[half]), x_scale)
            bias = writer.load(writer.at("%bias", half * size))
            results.append(writer.fma(value, scale, bias))
    store_tile(writer, rows, results)


def _norm(writer: IRWriter, width: int, x: Value, num_rows: Value, offset: Value) -> Value:
    """Generate the RMS norm of all rows into this thread's scratch; return the scratch's address.

    Every thread computes the norm of all rows, which costs less than a barrier.
    """
    size = writer.lanes
    weight = writer.argument(NORM, "ptr")
    eps = writer.op(f"load float, ptr {writer.at('%args', EPS, 'i64')}")
    scratch = writer.at(writer.argument(SCRATCH, "ptr"), offset, "i8")

    def row(index: Value) -> list[Value]:
        offset = writer.mul(index, width)
        source, target = writer.at(x, offset), writer.at(scratch, offset)

        scale = norm_scale(writer, source, width, eps)

        def write(column: Value) -> list[Value]:
            value = writer.binary("fmul", writer.load(writer.at(source, column)), scale)
            value = writer.binary("fmul", value, writer.load(writer.at(weight, column)))
            writer.store(value, writer.at(target, column))
            return []

        writer.loop(0, width, [], write, step=size)
        return []

    writer.loop(0, num_rows, [], row)
    return scratch


def _tile_bf16(writer: IRWriter, rows: int, width: int) -> None:
    """Generate the matmul of `_tile` for bfloat16 rows of x, with dot products of pairs.

    A pair's dot product is exact and is added in float32.
    """
    size, kind = writer.lanes, writer.vector
    bias = [writer.load(writer.at("%bias", half * size)) for half in (0, 1)]
    sums = [(kind, bias[half]) for _ in range(rows) for half in (0, 1)]

    def two(k: Value, *sums: Value) -> list[Value]:
        """Return the sums plus the products of pairs 2 k and 2 k + 1 of columns of x."""
        panel = writer.at("%w", writer.mul(k, 8 * size), "i16")
        out = list(sums)
        for line in range(0, 8 * size, 32):
            writer.prefetch(writer.at(panel, _AHEAD + line, "i16"))
        for half_number in (0, 1):
            column = writer.add(writer.mul(k, 2), half_number)
            weights = [
                writer.load(writer.at(panel, (2 * half_number + half) * 2 * size, "i16"))
                for half in (0, 1)
            ]
            for row in range(rows):
                place = writer.at(writer.at("%x", row * width // 2), column)
                x = writer.spread(writer.load(place, "float"))
                for half in (0, 1):
                    at = 2 * row + half
                    out[at] = fma_pairs(writer, x, weights[half], out[at])
        return out

    store_tile(writer, rows, writer.loop(0, width // 4, sums, two))


def round_bf16(
    writer: IRWriter, width: int, source: Value, target: Value, norm: RowNorm | None
) -> None:
    """Generate the rounding of a row of x to bfloat16, after an RMS norm if `norm` is not None."""
    weight, by = "", ""
    if norm is not None:
        weight, eps = norm
        by = norm_scale(writer, source, width, eps)

    def write(column: Value) -> list[Value]:
        value = writer.load(writer.at(source, column))
        if by:
            value = writer.binary("fmul", value, by)
            value = writer.binary("fmul", value, writer.load(writer.at(weight, column)))
        writer.store_pairs(value, writer.at(target, column, "i16"))
        return []

    writer.loop(0, width, [], write, step=writer.lanes)


def _rounded_bf16(writer: IRWriter, width: int, num_bytes: int, norm: bool) -> RoundedRows:
    def row(writer: IRWriter, source: Value, target: Value, norm: RowNorm | None) -> None:
        round_bf16(writer, width, source, target, norm)

    return RoundedRows(writer, num_bytes, row, norm)


def _quantise(writer: IRWriter, width: int, x: Value, num_rows: Value, offset: Value) -> Value:
    """Generate the quantisation of each row of x to 16 bits, into this thread's scratch.

    The result of a row is its upper bytes plus 128, its lower bytes, and its scale. With only 8
    bits, an outlier would reduce the precision of all other values.
    """
    size, kind = writer.lanes, writer.vector
    scratch = writer.at(writer.argument(SCRATCH, "ptr"), offset, "i8")

    def row(index: Value) -> list[Value]:
        source = writer.at(x, writer.mul(index, width))
        target = writer.at(scratch, writer.mul(index, 2 * width + _ROW_END), "i8")

        def most(column: Value, best: Value) -> list[Value]:
            value = writer.load(writer.at(source, column))
            name = f"llvm.fabs.v{size}f32"
            return [writer.maximum(best, writer.call(kind, name, [(kind, value)]))]

        (best,) = writer.loop(0, width, [(kind, writer.all(1e-30))], most, step=size)
        top = writer.largest(best)
        top = writer.op(f"extractelement {kind} {top}, i64 0")
        inverse = writer.spread(writer.op(f"fdiv float {constant(32767.0)}, {top}"))
        scale = writer.op(f"fdiv float {top}, {constant(32767.0)}")
        writer.store(scale, writer.at(target, 2 * width, "i8"), "float")

        def write(column: Value) -> list[Value]:
            value = writer.load(writer.at(source, column))
            # Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
            value = writer.fma(value, inverse, writer.all(12582912.0 + 32768.0))
            bits = writer.op(f"bitcast {kind} {value} to {writer.integers}")
            upper = writer.op(f"lshr {writer.integers} {bits}, {writer.whole(8)}")
            for byte, part in enumerate((upper, bits)):
                narrow = writer.op(f"trunc {writer.integers} {part} to <{size} x i8>")
                place = writer.at(writer.at(target, byte * width, "i8"), column, "i8")
                writer.store(narrow, place, f"<{size} x i8>")
            return []

        writer.loop(0, width, [], write, step=size)
        return []

    writer.loop(0, num_rows, [], row)
    return scratch


def _driver(
    writer: IRWriter,
    width: int,
    most: int,
    *,
    norm: bool,
    add: bool,
    gate: str | None,
    dtype: str,
) -> None:
    size, int8 = writer.lanes, dtype == "i8"
    x, num_rows = writer.argument(X, "ptr"), writer.argument(NUM_ROWS)
    buffer = "" if gate is None else gate_buffer(writer, most)
    if dtype in ROW_BYTES:
        tiled = dtype == AMX
        if tiled:
            amx.configure(writer)
        rows = _rounded_bf16(writer, width, ROW_BYTES[dtype](width), norm)
        x, panel = rows.all(), 4 * size * width
        operands = writer, most, x, rows.bytes, panel
        products(*operands, add=add, gate=gate, buffer=buffer, rows=rows if tiled else None)
        if tiled:
            amx.release(writer)
        return
    x_bytes, w_bytes = 4 * width, (8 if dtype == "float" else 4) * size * width
    if norm or int8:
        slot = writer.op(f"atomicrmw add ptr {writer.at('%args', 1, 'i64')}, i64 1 monotonic")
        offset = writer.mul(slot, writer.mul(num_rows, scratch_bytes(width, int8)))
    if norm:
        x = _norm(writer, width, x, num_rows, offset)
    if int8:
        x_bytes, w_bytes = 2 * width + _ROW_END, 2 * size * (width + 8)
        x = _quantise(
            writer, width, x, num_rows, writer.add(offset, writer.mul(num_rows, 4 * width))
        )

    products(writer, most, x, x_bytes, w_bytes, add=add, gate=gate, buffer=buffer)


# Kind of kernel -> (width of x -> bytes of a bfloat16 row of x). Rows for AMX are padded, so that
# rows do not all map to the same cache sets.
ROW_BYTES: dict[str, Callable[[int], int]] = {
    _DOT: lambda width: 2 * width,
    AMX: lambda width: 2 * width + _ROW_END,
}


def scratch_bytes(width: int, int8: bool) -> int:
    """Return the bytes of scratch per thread and row, for norms and quantised rows."""
    return 4 * width + (2 * width + _ROW_END if int8 else 0)


def most_rows(dtype: str) -> int:
    """Return the number of rows in the largest tile."""
    return tiled_bf16.MOST if dtype == AMX else _ROWS[lanes()] // (2 if dtype == "i8" else 1)


def write_tile(writer: IRWriter, rows: int, width: int, dtype: str) -> None:
    if dtype == "i8":
        _tile_int8(writer, rows, width)
    elif dtype == _DOT:
        _tile_bf16(writer, rows, width)
    elif dtype == AMX:
        tiled_bf16.tile(writer, width, ROW_BYTES[AMX](width))
    else:
        _tile(writer, rows, width, dtype)


@lru_cache(maxsize=32)
def _functions(width: int, dtype: str) -> dict[str, NativeFunction]:
    most = most_rows(dtype)

    def tile(writer: IRWriter, rows: int) -> None:
        write_tile(writer, rows, width, dtype)

    def driver(writer: IRWriter, norm: bool, add: bool, gate: str | None) -> None:
        _driver(writer, width, most, norm=norm, add=add, gate=gate, dtype=dtype)

    others: list[tuple[str, Callable[[IRWriter], None]]] = []
    if dtype in ROW_BYTES:
        row = ROW_BYTES[dtype](width)
        others = [
            ("round", lambda writer: _rounded_bf16(writer, width, row, norm=False).together()),
            ("round_norm", lambda writer: _rounded_bf16(writer, width, row, norm=True).together()),
        ]
    return product_functions(most, tile, driver, others, any_rows=dtype == AMX)


def _bias_bytes(outputs: int, bias: bool) -> int:
    return 4 * (outputs if bias else 2 * lanes())


class PackedLinear(Panels):
    """A packed weight [out, in] of bfloat16, float16 or float32.

    Matmuls take x [n, in] float32, contiguous.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a weight, for which `fits` is true, and compile its kernels.

        Raises CompilerUnavailable.
        """
        outputs, width = weight.shape
        kind = self._kind(weight)
        packed = self._pack(weight, lanes())
        super().__init__(_functions(width, kind), packed, bias, outputs, width)
        self.kind = kind

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's numbers of outputs and inputs."""
        return self._outputs, self._width

    @property
    def words(self) -> tuple[int, int, int]:
        """The addresses of panels and bias, and the number of floats between two panels' biases."""
        return self._args[W], self._args[BIAS], self._args[BIAS_STEP]

    @staticmethod
    def fits(outputs: int, width: int) -> bool:
        """Whether a weight [outputs, width] can be packed, and this machine can compile kernels."""
        try:
            check()
        except CompilerUnavailable:
            return False
        size = lanes()
        return outputs % (4 * size) == 0 and width % size == 0

    @staticmethod
    def num_bytes(outputs: int, width: int, bias: bool, itemsize: int) -> int:
        """Return the bytes of a packed weight. itemsize: bytes of an element."""
        return itemsize * outputs * width + _bias_bytes(outputs, bias)

    def _kind(self, weight: Tensor) -> str:
        if weight.dtype != torch.bfloat16 or not dot_bf16():
            return _NAMES[weight.dtype]
        return AMX if weight.shape[1] % 32 == 0 and amx_bf16() else _DOT

    def _pack(self, weight: Tensor, size: int) -> Tensor:
        view = weight.view(-1, 2, size, weight.shape[1] // 2, 2)
        if weight.dtype == torch.bfloat16:  # a lane holds a pair of columns
            return view.permute(0, 3, 1, 2, 4).contiguous()
        return view.permute(0, 3, 4, 1, 2).contiguous()

    def _prepare(self, rows: int, threads: int, norm: bool) -> None:
        int8 = self.kind == "i8"
        if self.kind in ROW_BYTES:
            row = ROW_BYTES[self.kind](self._width)
            blocks = tiled_bf16.block_rows(rows, threads, row) if self.kind == AMX else 0
            self._round(rows, threads, norm, row, block_rows=blocks)
        elif norm or int8:
            self._need(threads * rows * scratch_bytes(self._width, int8))


class PackedInt8(PackedLinear):
    """A weight quantised to 8 bits, with a scale per output.

    Each row of x is quantised to 16 bits at run time, with a scale per row. The upper and the lower
    bytes are multiplied separately. `has_int8()` must be true.
    """

    @staticmethod
    def num_bytes(outputs: int, width: int, bias: bool, itemsize: int = 1) -> int:
        """Return the bytes of a quantised weight: one per element, plus a scale and a sum per
        output.
        """
        return outputs * (width + 8) + _bias_bytes(outputs, bias)

    def _kind(self, weight: Tensor) -> str:
        return "i8"

    def _pack(self, weight: Tensor, size: int) -> Tensor:
        """Return the packed panels, as int8.

        A panel has [in / 4, 2, size, 4] weights, [2, size] float32 scales, and [2, size] int32
        values of -128 * sum of weights.
        """
        weight = weight.float()
        scale = weight.abs().amax(1).clamp_(min=1e-30) / 127
        whole = (weight / scale[:, None]).round_().to(torch.int8)
        excess = whole.sum(1, dtype=torch.int32) * -128
        panels = whole.view(-1, 2, size, weight.shape[1] // 4, 4).permute(0, 3, 1, 2, 4)
        parts = [panels.reshape(panels.shape[0], -1)]
        parts += [part.view(-1, 2 * size).view(torch.int8) for part in (scale, excess)]
        return torch.cat(parts, 1)
