"""Panels: the base class of packed weights, and the code generation that matmuls of all weight
formats share.

Threads take panels of two vector registers of outputs. A tile function multiplies a few rows of x
by a panel. Bias, gate and residual are applied here.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_ir
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.gemm import tiled_bf16

GATES = {"silu": (1.0, 0.0), "gelu_pytorch_tanh": (1.5957691216057308, 0.044715)}
CALLS: dict[str, tuple[bool, bool, str | None]] = {
    "plain": (False, False, None),
    "add": (False, True, None),
    "norm": (True, False, None),
    **{gate: (True, False, gate) for gate in GATES},
}
"""Name of a generated function of a matmul -> (whether x is normed, whether the result is added to
out, gate)."""

# Number of rows from which threads share the rounding of rows. For fewer rows each thread rounds
# all rows itself, which costs less than a barrier.
TOGETHER = 8
SPARE_ROWS = 32  # maximum number of rows after the end of x that the last tile reads

# Indices of the kernels' arguments in args. The first two words are the threads' work counters.
X, OUT, NUM_ROWS, W, BIAS, BIAS_STEP, NUM_PANELS, THREADS, STRIDE = range(2, 11)
NORM, EPS, SCRATCH, WIDTH, READY, EXPANDED, BLOCK_ROWS = range(11, 18)
OWN, OWN_BYTES, WORDS = range(18, 21)  # each thread's own scratch (`kernels.cpu.gemm.tiled_blocks`)

_ARGUMENTS = ("ptr %x", "ptr %w", "ptr %out", "i64 %stride", "ptr %bias", "i64 %add", "i64 %width")
TILE = ", ".join(_ARGUMENTS)  # arguments of tile<rows>; stride: floats between two rows of out


def store_tile(writer: IRWriter, rows: int, values: list[Value]) -> None:
    """Generate the store of a tile to out, or its addition to out if %add is set.

    values: two vectors per row.
    """
    size, kind = writer.lanes, writer.vector
    adding = writer.op("icmp ne i64 %add, 0")
    for row in range(rows):
        place = writer.at("%out", writer.mul("%stride", row))
        for half in (0, 1):
            address = writer.at(place, half * size)
            # This is a branch, because a multiplication by 0 would let NaN of uninitialised memory
            # through.
            value = values[2 * row + half]
            before = writer._block
            number = next(writer._names)
            writer.do(f"br i1 {adding}, label %sum{number}, label %kept{number}")
            writer.label(f"sum{number}")
            total = writer.binary("fadd", writer.load(address), value)
            writer.do(f"br label %kept{number}")
            writer.label(f"kept{number}")
            value = writer.op(f"phi {kind} [{value}, %{before}], [{total}, %sum{number}]")
            writer.store(value, address)


def tiles(writer: IRWriter, name: str, sizes: Sequence[int]) -> None:
    """Generate a call of the tile function <name><rows>, chosen at run time by %rows."""
    choices = " ".join(f"i64 {rows}, label %rows{rows}" for rows in sizes)
    writer.do(f"switch i64 %rows, label %done [{choices}]")
    for rows in sizes:
        writer.label(f"rows{rows}")
        writer.do(f"call void @{name}{rows}({TILE})")
        writer.do("br label %done")
    writer.label("done")


def gated(writer: IRWriter, gate: str, g: Value, u: Value) -> Value:
    """Return gate(g) * u for two vectors. gate: a key of GATES."""
    scale, cubic = GATES[gate]
    t = g
    if cubic:
        t = writer.binary("fmul", g, writer.binary("fmul", g, g))
        t = writer.fma(t, writer.all(cubic), g)
        t = writer.binary("fmul", t, writer.all(scale))
    return writer.binary("fmul", writer.binary("fmul", g, writer.sigmoid(t)), u)


def gate_buffer(writer: IRWriter, most: int) -> Value:
    """Allocate the buffer that `products` needs for a gate; return its address.

    The call must be in the entry block of the generated function.
    most: rows of the largest tile.
    """
    return writer.op(f"alloca [{2 * most * 2 * writer.lanes} x float], align 64")


@dataclass(frozen=True, slots=True)
class Expansion:
    """The expansion of a panel's codes to bytes and scales to float32, for matmuls of many rows.

    Each tile of rows would otherwise unpack the codes again.

    write(writer, panel, target): generates the code that expands a panel to address `target`.
    num_bytes: bytes of an expanded panel.
    memory: this thread's memory for two expanded panels; null if this call does not expand panels.
    """

    write: Callable[[IRWriter, Value, Value], None]
    num_bytes: Value
    memory: Value


def products(
    writer: IRWriter,
    most: int,
    x: Value,
    x_bytes: Value | int,
    w_bytes: Value | int,
    *,
    add: bool,
    gate: str | None,
    buffer: Value = "",
    expansion: Expansion | None = None,
    rows: "RoundedRows | None" = None,
) -> None:
    """Generate this thread's share of the matmul of rows at x by all panels.

    most: rows of the largest tile. x_bytes, w_bytes: bytes of a row of x and of a panel.
    add: whether results are added to the output.
    gate: a key of GATES, or None. buffer: from `gate_buffer`, if there is a gate.
    rows: rounded rows for tiles of `tiled_bf16.tile`, possibly in blocks (`Panels._round`). With
        them all tiles except the last have `most` rows. Without them tiles have about equally many
        rows.
    """
    size, tiled = writer.lanes, rows is not None
    out, w, bias = (writer.argument(word, "ptr") for word in (OUT, W, BIAS))
    num_rows, stride, width = (writer.argument(word) for word in (NUM_ROWS, STRIDE, WIDTH))
    panels, threads, bias_step = (
        writer.argument(word) for word in (NUM_PANELS, THREADS, BIAS_STEP)
    )

    # arguments: first row, number of rows, address of the result, stride of its rows in floats
    Tile = Callable[[Value, Value, Value, Value | int], None]

    def of_rows(x: Value, out: Value, num_rows: Value) -> Callable[[Value], None]:
        """Return f(panel), which generates the matmul of the rows at x by a panel into out."""
        single = writer.op(f"icmp sle i64 {num_rows}, {most}") if tiled else ""

        def tile_of(panel: Value, place: Value, tiles: str) -> Tile:
            def tile(first: Value, rows: Value, target: Value, step: Value | int) -> None:
                operands = [
                    f"i64 {rows}",
                    f"ptr {writer.at(x, writer.mul(first, x_bytes), 'i8')}",
                    f"ptr {place}",
                    f"ptr {target}",
                    f"i64 {step}",
                    f"ptr {writer.at(bias, writer.mul(panel, bias_step))}",
                    f"i64 {int(add)}",
                    f"i64 {width}",
                ]
                if tiled:  # each tile of rows prefetches its part of the next panel
                    read = writer.mul(first, w_bytes)
                    lines = writer.op(f"udiv i64 {read}, {tiled_bf16.ROWS_A_PANEL}")
                    later = writer.at(writer.at(place, w_bytes, "i8"), lines, "i8")
                    later = writer.op(f"select i1 {single}, ptr null, ptr {later}")
                    operands.append(f"ptr {later}")
                writer.do(f"call void @{tiles}({', '.join(operands)})")

            return tile

        def with_tiles(chosen: Sequence[Value], body: Callable[..., None]) -> None:
            """Generate body(*tiles) with a tile function for each chosen panel.

            The code chooses at run time whether panels are packed or expanded.
            """
            places = [writer.at(w, writer.mul(panel, w_bytes), "i8") for panel in chosen]

            def packed() -> None:
                tiles = zip(chosen, places, strict=True)
                body(*(tile_of(panel, place, "tiles") for panel, place in tiles))

            if expansion is None:
                packed()
                return

            def expanded() -> None:
                memory, tiles = expansion.memory, []
                for panel, place in zip(chosen, places, strict=True):
                    expansion.write(writer, place, memory)
                    tiles.append(tile_of(panel, memory, "expanded_tiles"))
                    memory = writer.at(memory, expansion.num_bytes, "i8")
                body(*tiles)

            none = writer.op(f"icmp eq ptr {expansion.memory}, null")
            writer.when(none, packed)
            writer.when(writer.op(f"xor i1 {none}, true"), expanded)

        def plain(panel: Value) -> None:
            def all_rows(tile: Tile) -> None:
                def rows_of(first: Value, rows: Value) -> None:
                    place = writer.add(writer.mul(first, stride), writer.mul(panel, 2 * size))
                    tile(first, rows, writer.at(out, place), stride)

                _all_rows(writer, num_rows, most, not tiled, rows_of)

            with_tiles([panel], all_rows)

        def both(panel: Value) -> None:
            """Generate gate(x @ gate's panel) * (x @ up projection's panel)."""
            assert gate is not None
            upper = writer.at(buffer, most * 2 * size)

            def all_rows(gate_tile: Tile, up_tile: Tile) -> None:
                def rows_of(first: Value, rows: Value) -> None:
                    gate_tile(first, rows, buffer, 2 * size)
                    up_tile(first, rows, upper, 2 * size)
                    target = writer.add(writer.mul(first, stride), writer.mul(panel, 2 * size))

                    def row(index: Value) -> list[Value]:
                        for half in (0, size):
                            at = writer.add(writer.mul(index, 2 * size), half)
                            g, u = (writer.load(writer.at(part, at)) for part in (buffer, upper))
                            value = gated(writer, gate, g, u)
                            place = writer.add(writer.mul(index, stride), half)
                            writer.store(value, writer.at(writer.at(out, target), place))
                        return []

                    writer.loop(0, rows, [], row)

                _all_rows(writer, num_rows, most, not tiled, rows_of)

            with_tiles([panel, writer.add(panel, panels)], all_rows)

        return plain if gate is None else both

    def share() -> None:
        writer.claim_shares("%args", threads, panels, of_rows(x, out, num_rows))

    if rows is None:
        share()
        return

    def of_block(x: Value, first: Value, count: Value) -> None:
        body = of_rows(x, writer.at(out, writer.mul(first, stride)), count)

        def iteration(panel: Value) -> list[Value]:
            body(panel)
            return []

        writer.loop(0, panels, [], iteration)

    writer.when(rows.in_blocks, lambda: rows.blocks(of_block))
    writer.when(writer.op(f"xor i1 {rows.in_blocks}, true"), share)


def _all_rows(
    writer: IRWriter, num_rows: Value, most: int, even: bool, body: Callable[[Value, Value], None]
) -> None:
    """Generate a loop of body(first row, number of rows) over tiles of at most `most` rows.

    even: whether tiles have about equally many rows; otherwise all except the last have `most`.
    """
    if not even:

        def full(first: Value) -> list[Value]:
            bounds = [("i64", writer.sub(num_rows, first)), ("i64", str(most))]
            body(first, writer.call("i64", "llvm.smin.i64", bounds))
            return []

        writer.loop(0, num_rows, [], full, step=most)
        return
    count = writer.op(f"udiv i64 {writer.add(num_rows, most - 1)}, {most}")
    base = writer.op(f"udiv i64 {num_rows}, {count}")
    more = writer.op(f"urem i64 {num_rows}, {count}")

    def next_tile(tile: Value, first: Value) -> list[Value]:
        extra = writer.op(f"icmp slt i64 {tile}, {more}")
        rows = writer.add(base, writer.op(f"zext i1 {extra} to i64"))
        body(first, rows)
        return [writer.add(first, rows)]

    writer.loop(0, count, [("i64", "0")], next_tile)


def norm_scale(writer: IRWriter, source: Value, width: Value | int, eps: Value) -> Value:
    """Return 1 / RMS of a row of x, the factor of its RMS norm, broadcast to all lanes."""

    def square(column: Value, total: Value) -> list[Value]:
        value = writer.load(writer.at(source, column))
        return [writer.fma(value, value, total)]

    start = [(writer.vector, "zeroinitializer")]
    (total,) = writer.loop(0, width, start, square, step=writer.lanes)
    count = writer.op(f"sitofp i64 {width} to float")
    mean = writer.op(f"fdiv float {writer.sum(total)}, {count}")
    shifted = writer.op(f"fadd float {mean}, {eps}")
    root = writer.call("float", "llvm.sqrt.f32", [("float", shifted)])
    return writer.spread(writer.op(f"fdiv float 1.0, {root}"))


RowNorm = tuple[Value, Value]
"""The weight and the eps of an RMS norm in generated code."""

RoundRow = Callable[[IRWriter, Value, Value, RowNorm | None], None]
"""f(writer, address of a row of x, target address, norm): generates the rounding of a row, after an
RMS norm if it is not None."""


class RoundedRows:
    """The generator of code that rounds or quantises rows of x into scratch memory.

    Each thread has its own copy of the rounded rows, or all threads share the copy of `together`.
    """

    def __init__(
        self, writer: IRWriter, num_bytes: Value | int, round_row: RoundRow, norm: bool
    ) -> None:
        """Load the arguments for rounding. num_bytes: bytes of a rounded row."""
        self._writer, self._round_row, self.bytes = writer, round_row, num_bytes
        self.slot = ""  # the index of this thread's copy, set by `all`
        self._block_rows = writer.argument(BLOCK_ROWS)
        self.in_blocks = writer.op(f"icmp ne i64 {self._block_rows}, 0")
        self._count, self._width = writer.argument(NUM_ROWS), writer.argument(WIDTH)
        self._x, self._scratch = (writer.argument(word, "ptr") for word in (X, SCRATCH))
        self._norm = None
        if norm:
            eps = writer.op(f"load float, ptr {writer.at('%args', EPS, 'i64')}")
            self._norm = (writer.argument(NORM, "ptr"), eps)

    def _round(self, row: Value, target: Value, place: Value) -> None:
        """Generate the rounding of row `row` of x to row `place` of the matrix `target`."""
        writer = self._writer
        source = writer.at(self._x, writer.mul(row, self._width))
        place = writer.at(target, writer.mul(place, self.bytes), "i8")
        self._round_row(writer, source, place, self._norm)

    def all(self) -> Value:
        """Return the address of the rounded rows; generates their rounding for this thread.

        The generated code skips the rounding if the function of `together` has run before.
        """
        writer, scratch = self._writer, self._scratch
        slot = writer.op(f"atomicrmw add ptr {writer.at('%args', 1, 'i64')}, i64 1 monotonic")
        self.slot = slot
        ready = writer.op(f"icmp ne i64 {writer.argument(READY)}, 0")
        own = writer.at(scratch, writer.mul(slot, writer.mul(self._count, self.bytes)), "i8")
        x = writer.op(f"select i1 {ready}, ptr {scratch}, ptr {own}")

        def round_row(row: Value) -> list[Value]:
            self._round(row, own, row)
            return []

        def alone() -> None:
            writer.loop(0, self._count, [], round_row)

        writer.when(writer.op(f"xor i1 {ready}, true"), alone)
        return x

    def together(self) -> None:
        """Generate the rounding of all rows into one copy; each thread rounds some of the rows."""
        scratch = self._scratch
        self._writer.claim("%args", "1", self._count, lambda row: self._round(row, scratch, row))

    def blocks(self, body: Callable[[Value, Value, Value], None]) -> None:
        """Generate a loop of body(rounded rows, first row, count) over blocks of rows.

        It must be called after `all`. A thread takes a block and rounds it into its own scratch, so
        that the block stays in the second-level cache of the thread's core.
        """
        writer, length = self._writer, self._block_rows
        own = writer.at(self._scratch, writer.mul(self.slot, writer.mul(length, self.bytes)), "i8")

        def block(index: Value) -> None:
            first = writer.mul(index, length)
            bounds = [("i64", writer.sub(self._count, first)), ("i64", length)]
            count = writer.call("i64", "llvm.smin.i64", bounds)

            def round_row(row: Value) -> list[Value]:
                self._round(writer.add(first, row), own, row)
                return []

            writer.loop(0, count, [], round_row)
            body(own, first, count)

        total = writer.op(f"udiv i64 {writer.add(self._count, writer.sub(length, 1))}, {length}")
        writer.claim("%args", "1", total, block)


def product_functions(
    most: int,
    tile: Callable[[IRWriter, int], None],
    driver: Callable[[IRWriter, bool, bool, str | None], None],
    others: Iterable[tuple[str, Callable[[IRWriter], None]]] = (),
    expanded: tuple[Callable[[IRWriter, int], None], Sequence[int]] | None = None,
    any_rows: bool = False,
) -> dict[str, NativeFunction]:
    """Compile the functions that Panels calls, and `others`: {name: function of args}.

    most: rows of the largest tile.
    tile(writer, rows), driver(writer, norm, add, gate): generate the functions' bodies.
    others: (name, generator of its body) of further functions.
    expanded: a tile over expanded panels, and the numbers of rows that it supports.
    any_rows: whether a single tile function, generated for `most` rows, takes any number of rows.
    """
    parts: list[tuple[IRWriter, str]] = []

    def write(signature: str, body: Callable[[IRWriter], None]) -> None:
        writer = IRWriter(lanes())
        body(writer)
        parts.append((writer, signature))

    kinds_of_tile = [("tile", tile, [*range(1, most + 1)])]
    if any_rows:
        signature = f"internal void @tiles(i64 %rows, {TILE}, {tiled_bf16.AHEAD})"
        write(signature, lambda writer: tile(writer, most))
        kinds_of_tile = []
    if expanded is not None:
        kinds_of_tile.append(("expanded_tile", expanded[0], [*expanded[1]]))
    for name, body_of, sizes in kinds_of_tile:
        for rows in sizes:
            # noinline, so that the tile is compiled once instead of in each function below.
            signature = f"internal void @{name}{rows}({TILE}) noinline"
            write(signature, lambda writer, rows=rows, body_of=body_of: body_of(writer, rows))
        write(
            f"internal void @{name}s(i64 %rows, {TILE})",
            lambda writer, name=name, sizes=sizes: tiles(writer, name, sizes),
        )
    for name, kind in CALLS.items():
        write(f"void @{name}(ptr %args)", lambda writer, kind=kind: driver(writer, *kind))
    for name, body in others:
        write(f"void @{name}(ptr %args)", body)
    return compile_ir(module(parts))


class Panels(ABC):
    """The base class of packed weights [out, in]: matmuls with x [n, in] float32, contiguous."""

    def __init__(
        self,
        functions: Mapping[str, NativeFunction],
        weight: Tensor,
        bias: Tensor | None,
        outputs: int,
        width: int,
    ) -> None:
        """Set up the kernels' arguments. functions: from `product_functions`. weight: packed."""
        panel = 2 * lanes()
        self._functions = functions
        self._weight = weight
        self._bias = torch.zeros(panel) if bias is None else bias.float()
        self._outputs, self._width = outputs, width
        self._panels = outputs // panel
        self._args = (ctypes.c_int64 * WORDS)()
        self._args[W] = self._weight.data_ptr()
        self._args[BIAS] = self._bias.data_ptr()
        self._args[BIAS_STEP] = 0 if bias is None else panel
        self._args[WIDTH] = width

    def _round(
        self,
        rows: int,
        threads: int,
        norm: bool,
        num_bytes: int,
        behind: int = 0,
        block_rows: int = 0,
    ) -> None:
        """Allocate scratch for rounded rows, and let all threads round the rows now if that pays.

        Rounding now pays with several threads and many rows, unless threads take blocks of rows.
        The generated functions round and round_norm round the rows (`RoundedRows.together`).
        Otherwise each thread rounds rows in the matmul.

        num_bytes: bytes of a rounded row.
        behind: bytes for expanded panels, which follow the rounded rows in scratch memory.
        block_rows: rows of a block if threads take blocks of rows, else 0.
        """
        together = threads > 1 and rows >= TOGETHER and not block_rows
        # Allocate spare rows, because kernels read whole tiles of rows.
        row_count = rows if together else threads * (block_rows or rows)
        rounded = (row_count + SPARE_ROWS) * num_bytes
        self._need(rounded + behind + 64)
        # Start at a cache line: a load that spans two lines takes twice as long.
        end = -(-(self._args[SCRATCH] + rounded) // 64) * 64
        self._args[EXPANDED] = end if behind else 0
        self._args[READY], self._args[BLOCK_ROWS] = together or block_rows, block_rows
        if together:
            self._functions["round_norm" if norm else "round"](self._args, threads)

    def _name(self, name: str, rows: int) -> str:
        """Return the name of the generated function for a call with this many rows."""
        return name

    @abstractmethod
    def _prepare(self, rows: int, threads: int, norm: bool) -> None:
        """Prepare scratch memory and rounded rows for a matmul, after args are set."""

    def _need(self, num_bytes: int) -> None:
        self._args[SCRATCH] = scratch(-(-num_bytes // 4))

    def _run(
        self,
        name: str,
        x: Tensor,
        out: Tensor,
        panels: int,
        norm: Tensor | None = None,
        eps: float = 0.0,
        column: int = 0,
    ) -> Tensor:
        """Run the generated function `name`, which writes columns of out from `column` on.

        Returns out.
        """
        rows = x.shape[0]
        if rows == 0:
            return out
        assert x.dtype == out.dtype == torch.float32 and x.is_contiguous() and out.is_contiguous()
        threads = torch.get_num_threads()
        args = self._args
        args[X], args[OUT] = x.data_ptr(), out.data_ptr() + 4 * column
        args[NUM_ROWS], args[STRIDE], args[NUM_PANELS] = rows, out.shape[1], panels
        args[THREADS] = threads
        if norm is not None:
            args[NORM] = norm.data_ptr()
            args[EPS] = bits(eps)
        self._prepare(rows, threads, norm is not None)
        self._functions[self._name(name, rows)](args, threads)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return self._run("plain", x, x.new_empty(x.shape[0], self._outputs), self._panels)

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add self(x) to residual in place, and return residual."""
        return self._run("add", x, residual, self._panels)

    def after_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return self(rms_norm(x))."""
        out = x.new_empty(x.shape[0], self._outputs)
        return self._run("norm", x, out, self._panels, norm, eps)

    def gated_after_norm(self, x: Tensor, norm: Tensor, eps: float, gate: str) -> Tensor:
        """Return gate(self(rms_norm(x))), [n, out / 2].

        gate: a key of GATES. Raises ValueError for other gates.
        """
        if gate not in GATES:
            raise ValueError(f"no product is generated for the gate {gate!r}: only {[*GATES]}")
        out = x.new_empty(x.shape[0], self._outputs // 2)
        return self._run(gate, x, out, self._panels // 2, norm, eps)
