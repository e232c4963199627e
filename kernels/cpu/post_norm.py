"""The part of a post-norm layer (BERT's) after attention, in one launch:

    x = norm(residual + attended @ out.T)
    x = norm(x + act(x @ up.T) @ down.T)

Each thread computes everything for a block of rows and waits for no other thread. Intermediate
results stay in the second-level cache, in bfloat16 if the next matmul takes bfloat16. Results equal
those of separate launches bit for bit.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor, get_num_threads

from kernels.cpu.codegen import amx, elements
from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.gemm import tiled_bf16
from kernels.cpu.gemm.dense import AMX, ROW_BYTES, PackedLinear, most_rows, round_bf16, write_tile
from kernels.cpu.gemm.panels import SPARE_ROWS, TILE, tiles
from kernels.cpu.norm import layer_norm_row

NormParts = tuple[Tensor | None, Tensor | None, float]
"""The weight, bias and eps of a layer norm."""

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_ATTENDED, _RESIDUAL, _ROWS, _BLOCK, _SCRATCH, _FLOATS = range(2, 8)
_PRODUCTS, _NORMS, _WORDS = 8, 17, 23  # three words per matmul, and per norm
_LEAST = 64  # minimum rows per thread; with fewer, threads share panels of weights instead
_MOST, _BYTES = 256, 1 << 20  # maximum rows of a block, and maximum bytes of its scratch


class _Shape:
    """The layout of a block of rows in a thread's scratch.

    In memory are first the input of the first two matmuls, then a matmul's float32 sums, then the
    input of the last matmul, each for all rows of the block.

    kind: the kind of matmul kernel.
    hidden, attended, inner: widths of the residual, of the attention's result, and between the last
        two matmuls.
    """

    def __init__(self, kind: str, hidden: int, attended: int, inner: int) -> None:
        self.kind, self.hidden, self.attended, self.inner = kind, hidden, attended, inner
        self.rounds = kind in ROW_BYTES
        row = ROW_BYTES.get(kind, lambda width: 4 * width)
        self.bytes = {width: row(width) for width in (hidden, attended, inner)}
        self.taken = max(row(hidden), row(attended)) if self.rounds else 0
        self.row = self.taken + 4 * hidden + row(inner)

    def block(self, rows: int, threads: int) -> int:
        """Return the number of rows in a block, so that threads get about equally many rows."""
        step = most_rows(self.kind)
        most = max(step, min(_MOST, _BYTES // self.row) // step * step)
        blocks = -(-rows // (most * threads)) * threads
        return -(-rows // (blocks * step)) * step

    def floats(self, block: int) -> int:
        """Return the size of one thread's scratch, in float32 numbers, for blocks of `block` rows.

        The size includes spare rows, as kernels read whole tiles.
        """
        return -(-((block + SPARE_ROWS) * self.row + 3 * 64) // 64) * 16


def _rest(shape: _Shape, act: str, parts: tuple[bool, ...], w: IRWriter) -> None:
    size, hidden = w.lanes, shape.hidden
    tiled, most = shape.kind == AMX, most_rows(shape.kind)
    attended, residual = w.argument(_ATTENDED, "ptr"), w.argument(_RESIDUAL, "ptr")
    rows, length = w.argument(_ROWS), w.argument(_BLOCK)
    buffer = w.op(f"alloca [{most * 2 * size} x float], align 64")
    if tiled:
        amx.configure(w)
    slot = w.op(f"atomicrmw add ptr {w.at('%args', 1, 'i64')}, i64 1 monotonic")
    own = w.at(w.argument(_SCRATCH, "ptr"), w.mul(slot, w.argument(_FLOATS)))
    row_count = w.add(length, SPARE_ROWS)

    def behind(place: Value, row: int) -> Value:
        """Return the address of the first cache line after a block of rows at `place`.

        row: bytes of a row.
        """
        count = w.add(w.mul(row_count, row), 63)
        return w.at(place, w.mul(w.op(f"lshr i64 {count}, 6"), 64), "i8")

    taken, sums = own, behind(own, shape.taken)
    inside = behind(sums, 4 * hidden)
    inner_bytes = shape.bytes[shape.inner]

    def over(count: Value | int, body: Callable[[Value], None], step: int = 1) -> None:
        def iteration(index: Value) -> list[Value]:
            body(index)
            return []

        w.loop(0, count, [], iteration, step=step)

    def multiply(
        number: int, x: Value, width: int, outputs: int, count: Value,
        place: Callable[[Value, Value], tuple[Value, int]],
        then: Callable[[Value, Value, Value], None] | None = None,
    ) -> None:  # fmt: skip
        """Generate the matmul of x [count, width] by all panels of a weight.

        number: which of the layer's three matmuls.
        place: (row, panel) -> a tile's output address, and the floats between its rows.
        then: called after each tile with its first row, row count and panel.
        """
        first = _PRODUCTS + 3 * number
        weight, bias = w.argument(first, "ptr"), w.argument(first + 1, "ptr")
        bias_step = w.argument(first + 2)
        x_bytes = shape.bytes[width]
        itemsize = 4 if shape.kind == "float" else 2
        w_bytes = 2 * size * width * itemsize

        def panel_of(panel: Value) -> None:
            own_weight = w.at(weight, w.mul(panel, w_bytes), "i8")
            own_bias = w.at(bias, w.mul(panel, bias_step))

            def rows_of(row: Value) -> None:
                bounds = [("i64", w.sub(count, row)), ("i64", str(most))]
                here = w.call("i64", "llvm.smin.i64", bounds)
                target, stride = place(row, panel)
                operands = [
                    f"i64 {here}",
                    f"ptr {w.at(x, w.mul(row, x_bytes), 'i8')}",
                    f"ptr {own_weight}",
                    f"ptr {target}",
                    f"i64 {stride}",
                    f"ptr {own_bias}",
                    "i64 0",
                    f"i64 {width}",
                ]
                if tiled:  # each tile of rows prefetches its part of the next panel
                    lines = w.op(f"udiv i64 {w.mul(row, w_bytes)}, {tiled_bf16.ROWS_A_PANEL}")
                    operands.append(f"ptr {w.at(w.at(own_weight, w_bytes, 'i8'), lines, 'i8')}")
                w.do(f"call void @in{width}_tiles({', '.join(operands)})")
                if then is not None:
                    then(row, here, panel)

            over(count, rows_of, step=most)

        over(outputs // (2 * size), panel_of)

    def to_sums(row: Value, panel: Value) -> tuple[Value, int]:
        return w.at(sums, w.add(w.mul(row, hidden), w.mul(panel, 2 * size))), hidden

    def normed(number: int, x: Value, count: Value, rounded: bool) -> None:
        """Generate x = norm(x + the matmul's sums), in place, for `count` rows of the residual x.

        number: which of the layer's two norms.
        rounded: whether to store x also as the next matmul's input.
        """
        first = _NORMS + 3 * number
        weight, bias = (
            w.argument(first + part, "ptr") if parts[2 * number + part] else "" for part in (0, 1)
        )
        eps = w.load(w.at("%args", first + 2, "i64"), "float")

        def normalise_row(row: Value) -> None:
            line, more = w.at(x, w.mul(row, hidden)), w.at(sums, w.mul(row, hidden))
            layer_norm_row(w, hidden, line, line, weight, bias, eps, added=more)
            if rounded:
                target = w.at(taken, w.mul(row, shape.bytes[hidden]), "i8")
                round_bf16(w, hidden, line, target, None)

        over(count, normalise_row)

    def activate(first: Value, count: Value, panel: Value) -> None:
        """Generate the activation of the buffer's rows, stored as input of the last matmul."""

        def activate_row(row: Value) -> None:
            place = w.at(inside, w.mul(w.add(first, row), inner_bytes), "i8")
            for half in (0, size):
                value = w.load(w.at(buffer, w.add(w.mul(row, 2 * size), half)))
                value = elements.FUNCTIONS[act](w, value)
                at = w.add(w.mul(panel, 2 * size), half)
                if shape.rounds:
                    w.store_pairs(value, w.at(place, at, "i16"))
                else:
                    w.store(value, w.at(place, at))

        over(count, activate_row)

    def block(index: Value) -> None:
        first = w.mul(index, length)
        bounds = [("i64", w.sub(rows, first)), ("i64", length)]
        count = w.call("i64", "llvm.smin.i64", bounds)
        x, inputs = (
            w.at(matrix, w.mul(first, width))
            for matrix, width in ((residual, hidden), (attended, shape.attended))
        )
        if shape.rounds:

            def rounded(row: Value) -> None:
                target = w.at(taken, w.mul(row, shape.bytes[shape.attended]), "i8")
                round_bf16(
                    w, shape.attended, w.at(inputs, w.mul(row, shape.attended)), target, None
                )

            over(count, rounded)
        taken_rows = taken if shape.rounds else inputs
        multiply(0, taken_rows, shape.attended, hidden, count, to_sums)
        normed(0, x, count, shape.rounds)
        taken_rows = taken if shape.rounds else x
        in_buffer = (buffer, 2 * size)
        multiply(1, taken_rows, hidden, shape.inner, count, lambda row, panel: in_buffer, activate)
        multiply(2, inside, shape.inner, hidden, count, to_sums)
        normed(1, x, count, False)

    total = w.op(f"udiv i64 {w.add(rows, w.sub(length, 1))}, {length}")
    w.claim("%args", "1", total, block)
    if tiled:
        amx.release(w)


@lru_cache(maxsize=8)
def _function(
    kind: str, hidden: int, attended: int, inner: int, act: str, parts: tuple[bool, ...]
) -> NativeFunction | None:
    shape = _Shape(kind, hidden, attended, inner)

    def write(size: int) -> str:
        functions: list[tuple[IRWriter, str]] = []

        def function(signature: str, body: Callable[[IRWriter], None]) -> None:
            writer = IRWriter(size)
            body(writer)
            functions.append((writer, signature))

        for width in sorted({hidden, attended, inner}):
            most, name = most_rows(kind), f"in{width}_tile"
            if kind == AMX:
                function(
                    f"internal void @{name}s(i64 %rows, {TILE}, {tiled_bf16.AHEAD})",
                    lambda writer, width=width: write_tile(writer, tiled_bf16.MOST, width, kind),
                )
                continue
            sizes = [*range(1, most + 1)]
            for rows in sizes:
                function(
                    f"internal void @{name}{rows}({TILE}) noinline",
                    lambda writer, rows=rows, width=width: write_tile(writer, rows, width, kind),
                )
            function(
                f"internal void @{name}s(i64 %rows, {TILE})",
                lambda writer, name=name, sizes=sizes: tiles(writer, name, sizes),
            )
        function("void @rest(ptr %args)", lambda writer: _rest(shape, act, parts, writer))
        return module(functions)

    compiled = compile_or_none(write)
    return compiled and compiled["rest"]


def rest_of_layer(
    attended: Tensor,
    residual: Tensor,
    products: tuple[PackedLinear, PackedLinear, PackedLinear],
    norms: tuple[NormParts, NormParts],
    act: str,
) -> Tensor | None:
    """Compute the part of a post-norm layer after attention into residual, and return residual.

    attended: [n, width], float32, contiguous: the attention's result before its output projection.
    residual: [n, hidden], float32, contiguous.
    products: the output, up and down projections.
    norms: the norms after attention and after the MLP.
    act: name of the MLP's activation.
    Returns None if no kernel can be generated. Also returns None for few rows, for which it is
    faster to divide each matmul among threads.
    """
    out, up, _ = products
    (hidden, width), (inner, _) = out.shape, up.shape
    rows, threads = len(residual), get_num_threads()
    alike = {layer.kind for layer in products}
    fits = len(alike) == 1 and out.kind != "i8" and hidden % (2 * lanes()) == 0
    if not fits or rows < _LEAST * threads or not elements.known(act):
        return None
    parts = tuple(part is not None for weight, bias, _ in norms for part in (weight, bias))
    function = _function(out.kind, hidden, width, inner, act, parts)
    if function is None:
        return None
    shape, args = _Shape(out.kind, hidden, width, inner), (ctypes.c_int64 * _WORDS)()
    args[_ATTENDED], args[_RESIDUAL] = attended.data_ptr(), residual.data_ptr()
    args[_ROWS], args[_BLOCK] = rows, shape.block(rows, threads)
    args[_FLOATS] = shape.floats(args[_BLOCK])
    args[_SCRATCH] = scratch(threads * args[_FLOATS])
    for number, product in enumerate(products):
        first = _PRODUCTS + 3 * number
        args[first : first + 3] = product.words
    for number, (weight, bias, eps) in enumerate(norms):
        first = _NORMS + 3 * number
        args[first] = 0 if weight is None else weight.data_ptr()
        args[first + 1] = 0 if bias is None else bias.data_ptr()
        args[first + 2] = bits(eps)
    function(args, threads)
    return residual
