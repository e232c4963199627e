"""Matmuls x @ W.T with AMX for many rows and weights of 4 and 8 bits.

Results equal those of `kernels.cpu.gemm.blocks` bit for bit.

A tile multiplication takes 16 rows of x, 16 outputs and the 32 inputs of a block. Its integer sums
are stored to memory, then loaded and added to 16 float registers, in the order of
`kernels.cpu.gemm.blocks`. An AMX multiplication takes 16 cycles, and its result is ready after 52.
A store that waits for the result delays later stores. So a tile is stored two blocks after its
multiplication, and added three blocks after it. While AMX is in use, half of the 512-bit
multipliers are off, but the adders are not. So integers are converted to floats by an addition.
"""

from collections.abc import Callable
from functools import lru_cache

from kernels.cpu.codegen import amx
from kernels.cpu.codegen.amx import TILE_ROWS
from kernels.cpu.codegen.compiler import NativeFunction, compile_ir
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import amx_int8, lanes
from kernels.cpu.gemm.codes import NAMES, RoundedBlock, nibbles, round_row, table_of
from kernels.cpu.gemm.panels import (
    BIAS,
    BIAS_STEP,
    BLOCK_ROWS,
    CALLS,
    EPS,
    GATES,
    NORM,
    NUM_PANELS,
    NUM_ROWS,
    OUT,
    OWN,
    OWN_BYTES,
    SCRATCH,
    STRIDE,
    THREADS,
    WIDTH,
    RowNorm,
    W,
    X,
    gated,
)
from kernels.packed import BLOCK, Format

FROM = 24  # rows from which AMX is faster
# Maximum number of rows that a thread rounds and multiplies together, and maximum bytes of these
# rows, so that they stay in its core's second-level cache.
_MOST, _MOST_BYTES = 256, 1280 << 10
_A_THREAD = 64  # rows per thread from which threads take blocks of rows instead of panels

_PANEL = 2 * TILE_ROWS  # outputs per panel
_BLOCK_BYTES = _PANEL * BLOCK  # bytes of a panel's codes for one block
_AHEAD = 3  # blocks between a multiplication and the addition of its sums
# 1.5 * 2^23: a float with this value plus an integer below 2^22 has the integer in its low bits
_MAGIC = 12582912.0
_MAGIC_BITS = 0x4B400000


def _codes(form: Format) -> tuple[int, int]:
    """Return (smallest code, largest code) of a format, minus the zero point."""
    values = [int(value) for value in form.table] or [0, (1 << form.bits) - 1]
    return min(values) - form.zero, max(values) - form.zero


def _signed(form: Format) -> bool:
    return _codes(form)[0] < 0


def fits(form: Format, width: int) -> bool:
    """Whether AMX multiplies a weight with this many inputs on this machine."""
    least, most = _codes(form)
    whole = least >= -128 and most < (128 if least < 0 else 256)
    pairs = not _scaled_last(form) or form.chunk // BLOCK % 2 == 0
    many = width % (2 * BLOCK) == 0 and width >= (_AHEAD + 1) * BLOCK
    return whole and pairs and many and form.units == 1 and amx_int8()


def _scaled_last(form: Format) -> bool:
    """Whether scales are applied after a chunk is summed, as in `kernels.cpu.gemm.blocks`."""
    return form.chunk // BLOCK > 2 and form.offset == "none"


def _x_bytes(form: Format) -> int:
    """Return the bytes of a block of 16 quantised rows of x: codes, scales, sums for offsets."""
    return TILE_ROWS * (BLOCK + 4 + (0 if form.offset == "none" else 4))


def _head_bytes(form: Format) -> int:
    """Return the bytes of a panel's scales and offsets for one group, as float32."""
    return _PANEL * 4 * (1 if form.offset == "none" else 2)


def _panel_bytes(form: Format, width: int) -> int:
    return width * _PANEL + width // form.chunk * _head_bytes(form)


def block_rows(form: Format, width: int, rows: int, threads: int) -> int:
    """Return the rows of a block that a thread multiplies by all panels.

    Returns 0 if threads divide the panels instead.
    """
    if threads > 1 and rows < _A_THREAD * threads:
        return 0
    tiles = _MOST_BYTES // (width // BLOCK * _x_bytes(form))
    most = min(_MOST, max(2, tiles) * TILE_ROWS)
    blocks = -(-rows // (most * threads)) * threads
    return -(-rows // (blocks * TILE_ROWS)) * TILE_ROWS


def scratch_bytes(form: Format, width: int, rows: int, threads: int) -> tuple[int, int]:
    """Return (bytes of scratch memory that threads share, bytes of each thread's own scratch).

    Both are multiples of a cache line.
    """
    block = block_rows(form, width, rows, threads)
    x = -(-(block or rows) // TILE_ROWS) * (width // BLOCK) * _x_bytes(form)
    own = 2 * _panel_bytes(form, width)
    return (0, own + x) if block else (x, own)


# ---- Generation ----------------------------------------------------------------------------------


def _expand(writer: IRWriter, form: Format, panel: Value, target: Value) -> None:
    """Generate the expansion of a panel of `kernels.cpu.gemm.blocks` to address `target`.

    The expanded panel has codes minus the zero point as bytes, then scales and offsets in float32.
    """
    size, integers = writer.lanes, writer.integers
    kind, blocks = f"<{4 * size} x i8>", form.chunk // BLOCK
    chunks = writer.op(f"udiv i64 {writer.argument(WIDTH)}, {form.chunk}")
    heads_at = writer.at(target, writer.mul(chunks, blocks * _BLOCK_BYTES), "i8")
    table = table_of(writer, form)

    def store_codes(value: Value, place: Value) -> None:
        if form.zero:
            value = writer.op(f"bitcast {integers} {value} to {kind}")
            value = writer.op(f"sub {kind} {value}, splat (i8 {(form.zero + 128) % 256 - 128})")
            writer.store(value, place, kind)
        else:
            writer.store(value, place, integers)

    def chunk(index: Value) -> list[Value]:
        base = writer.at(panel, writer.mul(index, form.chunk_bytes(_PANEL)), "i8")
        into = writer.at(heads_at, writer.mul(index, _head_bytes(form)), "i8")
        scales: list[Value] = []
        heads = _head_bytes(form) // (4 * size)
        for head in range(heads):
            at = writer.at(base, head * size * form.scale.itemsize, "i8")
            value = writer.load_as_float(at, NAMES[form.scale])
            if form.offset == "shift" and head >= 2:
                value = writer.binary("fmul", scales[head - 2], value)
            scales.append(value)
            writer.store(value, writer.at(into, head * size))
        codes = writer.at(base, heads * size * form.scale.itemsize, "i8")
        first = writer.mul(index, blocks)

        def block(number: Value) -> list[Value]:
            source = writer.at(codes, writer.mul(number, _PANEL * BLOCK * form.bits // 8), "i8")
            place = writer.mul(writer.add(first, number), _BLOCK_BYTES)
            into = writer.at(target, place, "i8")
            for word in range(form.bits):
                for half in (0, 1):
                    raw = writer.load(
                        writer.at(source, (2 * word + half) * 4 * size, "i8"), integers
                    )
                    columns = [(word, raw)]
                    if form.bits == 4:
                        columns = [*zip((word, word + 4), nibbles(writer, raw, table), strict=True)]
                    for to, value in columns:
                        store_codes(value, writer.at(into, (2 * to + half) * 4 * size, "i8"))
            return []

        writer.loop(0, blocks, [], block)
        return []

    writer.loop(0, chunks, [], chunk)


# Arguments of `_products`' function. w: address of one or two expanded panels (gate and up),
# `panel_bytes` apart. A tile of rows has 2^shift work items, of 16 outputs each. bias, second_bias:
# addresses of the first and second panel's bias. stride: floats from a row of out to the next.
# kind: index in _KINDS.
_PRODUCTS = (
    "i64 %rows, ptr %x, ptr %w, i64 %panel_bytes, ptr %out, i64 %stride, ptr %bias, "
    "ptr %second_bias, i64 %blocks, i64 %shift, i64 %kind"
)
_KINDS = ("plain", "add", *GATES)


def _products(writer: IRWriter, form: Format) -> None:
    """Generate the function that multiplies quantised rows of x by a panel from `_expand`.

    The function stores x @ panel + bias to out[rows, 32], or adds this to out. With a gate, two
    panels have such products, and the function stores act(gate) * up.

    AMX tiles 0 and 1 hold sums, 4 and 5 rows of x, 6 and 7 weights. The first tile of each pair is
    for even blocks, the second for odd ones.
    """
    size, kind = writer.lanes, writer.vector
    x_bytes, group = _x_bytes(form), form.chunk // BLOCK
    name = "tdpbssd" if _signed(form) else "tdpbsud"
    slots = writer.op("alloca [512 x i32], align 64")
    results = writer.op(f"alloca [{2 * TILE_ROWS * _PANEL} x float], align 64")
    tile_bytes = writer.mul("%blocks", x_bytes)
    tiles = writer.op(f"udiv i64 {writer.add('%rows', TILE_ROWS - 1)}, {TILE_ROWS}")
    items = writer.op(f"shl i64 {tiles}, %shift")
    a_tile = writer.sub(writer.op("shl i64 1, %shift"), 1)

    def load(x: Value, w: Value, odd: int) -> None:
        amx.load(writer, 4 + odd, x, BLOCK)
        amx.load(writer, 6 + odd, w, 8 * TILE_ROWS)

    def multiply(odd: int) -> None:
        amx.clear(writer, odd)
        amx.multiply_codes(writer, name, odd, 4 + odd, 6 + odd)

    def slot(odd: int) -> Value:
        return writer.at(slots, odd * 4 * TILE_ROWS * TILE_ROWS, "i8")

    def keep(odd: int) -> None:
        amx.store(writer, odd, slot(odd), 4 * TILE_ROWS)

    def tile_of(item: Value) -> Value:
        return writer.op(f"lshr i64 {item}, %shift")

    def x_of(item: Value) -> Value:
        return writer.at("%x", writer.mul(tile_of(item), tile_bytes), "i8")

    def panel_of(item: Value) -> Value:
        return writer.op(f"lshr i64 {writer.op(f'and i64 {item}, {a_tile}')}, 1")

    def w_of(item: Value) -> Value:
        half = writer.op(f"and i64 {item}, 1")
        panel = writer.at("%w", writer.mul(panel_of(item), "%panel_bytes"), "i8")
        return writer.at(panel, writer.mul(half, 4 * TILE_ROWS), "i8")

    for block in range(_AHEAD):
        odd = block % 2
        if block == 2:
            keep(odd)
        load(
            writer.at("%x", block * x_bytes, "i8"), writer.at("%w", block * _BLOCK_BYTES, "i8"), odd
        )
        multiply(odd)

    last = writer.sub(items, 1)

    def item(index: Value) -> list[Value]:
        """Generate the computation of one work item: 16 rows and 16 outputs."""
        following = [("i64", writer.add(index, 1)), ("i64", last)]
        after = writer.call("i64", "llvm.smin.i64", following)
        half = writer.op(f"and i64 {index}, 1")
        x, w, next_x, next_w = x_of(index), w_of(index), x_of(after), w_of(after)
        panel, tile = panel_of(index), tile_of(index)
        heads = writer.at(w, writer.mul("%blocks", _BLOCK_BYTES), "i8")
        second = writer.op(f"icmp ne i64 {panel}, 0")
        bias = writer.op(f"select i1 {second}, ptr %second_bias, ptr %bias")
        bias = writer.load(writer.at(bias, writer.mul(half, size)))
        target = writer.add(writer.mul(panel, TILE_ROWS * _PANEL), writer.mul(half, size))
        target = writer.at(results, target)
        first = writer.mul(tile, TILE_ROWS)
        into = writer.at("%out", writer.mul(first, "%stride"))

        def step(block: Value, odd: int, sums: list[Value]) -> list[Value]:
            """Generate one step of the software pipeline over blocks; return the new `sums`.

            The step scales the products of `block`, which are in memory, and adds them to `sums`.
            It stores the products of block + 1 from their tile to memory, and multiplies block +
            _AHEAD, which may belong to the next item.

            sums: one vector per row of x, the float32 sums so far.
            odd: block % 2; even and odd blocks have different tiles.
            """
            row = writer.op(f"and i64 {block}, {TILE_ROWS - 1}")
            line = writer.at(writer.at(into, writer.mul(row, "%stride")), writer.mul(half, size))
            writer.prefetch(line, to_write=True)
            ahead = writer.add(block, _AHEAD)
            own = writer.op(f"icmp slt i64 {ahead}, %blocks")
            from_x = writer.op(f"select i1 {own}, ptr {x}, ptr {next_x}")
            from_w = writer.op(f"select i1 {own}, ptr {w}, ptr {next_w}")
            wrapped = writer.sub(ahead, "%blocks")
            ahead = writer.op(f"select i1 {own}, i64 {ahead}, i64 {wrapped}")
            load(
                writer.at(from_x, writer.mul(ahead, x_bytes), "i8"),
                writer.at(from_w, writer.mul(ahead, _BLOCK_BYTES), "i8"),
                1 - odd,
            )
            x_scales = writer.at(writer.at(x, writer.mul(block, x_bytes), "i8"), 16 * BLOCK, "i8")
            scale, offset = "", ""
            if not _scaled_last(form):
                at = block if group == 1 else writer.op(f"udiv i64 {block}, {group}")
                head = writer.at(heads, writer.mul(at, _head_bytes(form)), "i8")
                scale = writer.load(head)
                if form.offset != "none":
                    offset = writer.load(writer.at(head, 2 * size))
            out = list(sums)

            def add_rows(rows: range) -> None:
                for row in rows:
                    raw = writer.load(writer.at(slot(odd), 64 * row, "i8"), writer.integers)
                    raw = writer.op(f"add {writer.integers} {raw}, {writer.whole(_MAGIC_BITS)}")
                    value = writer.op(f"bitcast {writer.integers} {raw} to {kind}")
                    value = writer.binary("fadd", value, writer.all(-_MAGIC))
                    by = writer.spread(writer.load(writer.at(x_scales, row), "float"))
                    if scale:
                        by = writer.binary("fmul", scale, by)
                    out[row] = writer.fma(value, by, out[row])
                    if offset:
                        place = writer.at(x_scales, TILE_ROWS + row)
                        total = writer.spread(writer.load(place, "float"))
                        out[row] = writer.fma(offset, total, out[row])

            add_rows(range(TILE_ROWS // 2))
            keep(1 - odd)
            multiply(1 - odd)
            add_rows(range(TILE_ROWS // 2, TILE_ROWS))
            return out

        def pair(block: Value, *sums: Value) -> list[Value]:
            return step(writer.add(block, 1), 1, step(block, 0, list(sums)))

        def row_at(row: int) -> Value:
            return writer.at(target, row * _PANEL)

        if _scaled_last(form):
            for row in range(TILE_ROWS):
                writer.store(bias, row_at(row))

            def of_group(index: Value) -> list[Value]:
                first = writer.mul(index, group)
                start = [(kind, "zeroinitializer")] * TILE_ROWS
                done = writer.loop(first, writer.add(first, group), start, pair, step=2)
                scale = writer.load(writer.at(heads, writer.mul(index, _head_bytes(form)), "i8"))
                for row, value in enumerate(done):
                    total = writer.fma(value, scale, writer.load(row_at(row)))
                    writer.store(total, row_at(row))
                return []

            writer.loop(0, writer.op(f"udiv i64 %blocks, {group}"), [], of_group)
        else:
            done = writer.loop(0, "%blocks", [(kind, bias)] * TILE_ROWS, pair, step=2)
            for row, value in enumerate(done):
                writer.store(value, row_at(row))

        def store_tile(chosen: str) -> None:
            """Generate the store of a finished tile of rows to out. chosen: one of _KINDS."""
            bounds = [("i64", writer.sub("%rows", first)), ("i64", str(TILE_ROWS))]

            def row(index: Value) -> list[Value]:
                source = writer.at(results, writer.mul(index, _PANEL))
                place = writer.at(into, writer.mul(index, "%stride"))
                for half in (0, size):
                    value, target = writer.load(writer.at(source, half)), writer.at(place, half)
                    if chosen == "add":
                        value = writer.binary("fadd", writer.load(target), value)
                    elif chosen in GATES:
                        up = writer.load(writer.at(source, TILE_ROWS * _PANEL + half))
                        value = gated(writer, chosen, value, up)
                    writer.store(value, target)
                return []

            writer.loop(0, writer.call("i64", "llvm.smin.i64", bounds), [], row)

        def finish() -> None:
            for number, chosen in enumerate(_KINDS):
                this = writer.op(f"icmp eq i64 %kind, {number}")
                writer.when(this, lambda chosen=chosen: store_tile(chosen))

        done_with = writer.op(f"and i64 {index}, {a_tile}")
        writer.when(writer.op(f"icmp eq i64 {done_with}, {a_tile}"), finish)
        return []

    writer.loop(0, items, [], item)


class _Rows:
    """The generator of code that quantises rows of x to 8 bits, in tiles of 16 rows."""

    def __init__(self, writer: IRWriter, form: Format, norm: bool) -> None:
        self._writer, self._form = writer, form
        self._width, self._x = writer.argument(WIDTH), writer.argument(X, "ptr")
        self.count = writer.argument(NUM_ROWS)
        self._norm: RowNorm | None = None
        if norm:
            eps = writer.op(f"load float, ptr {writer.at('%args', EPS, 'i64')}")
            self._norm = (writer.argument(NORM, "ptr"), eps)
        blocks = writer.op(f"lshr i64 {self._width}, {BLOCK.bit_length() - 1}")
        self.tile_bytes = writer.mul(blocks, _x_bytes(form))
        self._last = writer.sub(self.count, 1)

    def round(self, first: Value, tile: Value, target: Value) -> None:
        """Generate the quantisation of a tile's 16 rows to the tile's position in `target`.

        first: the first row of tile 0.
        Rows after the end repeat the last row, so that their unused results are finite.
        """
        writer, form = self._writer, self._form
        begin = writer.at(target, writer.mul(tile, self.tile_bytes), "i8")
        above = writer.add(first, writer.mul(tile, TILE_ROWS))

        def row(index: Value) -> list[Value]:
            operands = [("i64", writer.add(above, index)), ("i64", self._last)]
            chosen = writer.call("i64", "llvm.smin.i64", operands)
            source = writer.at(self._x, writer.mul(chosen, self._width))

            def place(block: Value) -> RoundedBlock:
                codes = writer.at(begin, writer.mul(block, _x_bytes(form)), "i8")
                scale = writer.at(writer.at(codes, TILE_ROWS * BLOCK, "i8"), index)
                totals = "" if form.offset == "none" else writer.at(scale, TILE_ROWS)
                return writer.at(codes, writer.mul(index, BLOCK), "i8"), scale, totals

            round_row(writer, form, source, place, self._width, self._norm)
            return []

        writer.loop(0, TILE_ROWS, [], row)

    def together(self) -> None:
        """Generate the quantisation of all tiles into one copy; threads divide the tiles."""
        writer, scratch = self._writer, self._writer.argument(SCRATCH, "ptr")
        writer.claim(
            "%args", "1", self.tiles(self.count), lambda tile: self.round("0", tile, scratch)
        )

    def tiles(self, rows: Value) -> Value:
        return self._writer.op(f"udiv i64 {self._writer.add(rows, TILE_ROWS - 1)}, {TILE_ROWS}")


def _driver(writer: IRWriter, form: Format, *, norm: bool, add: bool, gate: str | None) -> None:
    rows = _Rows(writer, form, norm)
    amx.configure(writer, [(TILE_ROWS, 64)] * 4 + [(TILE_ROWS, BLOCK)] * 2 + [(BLOCK // 4, 64)] * 2)
    out, w, bias = (writer.argument(word, "ptr") for word in (OUT, W, BIAS))
    stride, width, bias_step = (writer.argument(word) for word in (STRIDE, WIDTH, BIAS_STEP))
    panels, length = writer.argument(NUM_PANELS), writer.argument(BLOCK_ROWS)
    blocks = writer.op(f"lshr i64 {width}, {BLOCK.bit_length() - 1}")
    chunks = writer.op(f"udiv i64 {width}, {form.chunk}")
    panel_bytes = writer.mul(chunks, form.chunk_bytes(_PANEL))
    slot = writer.op(f"atomicrmw add ptr {writer.at('%args', 1, 'i64')}, i64 1 monotonic")
    own = writer.at(writer.argument(OWN, "ptr"), writer.mul(slot, writer.argument(OWN_BYTES)), "i8")
    # This thread's scratch: two expanded panels, and a block of rows if threads take blocks.
    num_bytes = writer.add(writer.mul(width, _PANEL), writer.mul(chunks, _head_bytes(form)))
    kind = _KINDS.index(gate or ("add" if add else "plain"))

    def of_rows(x: Value, first: Value, count: Value) -> Callable[[Value], None]:
        """Return f(panel), which generates the matmul of quantised rows [first, first + count)."""
        into = writer.at(out, writer.mul(first, stride))

        def body(panel: Value) -> None:
            second = panel if gate is None else writer.add(panel, panels)
            for number, chosen in enumerate([panel] if gate is None else [panel, second]):
                source = writer.at(w, writer.mul(chosen, panel_bytes), "i8")
                _expand(writer, form, source, writer.at(own, writer.mul(num_bytes, number), "i8"))
            operands = [
                f"i64 {count}",
                f"ptr {x}",
                f"ptr {own}",
                f"i64 {num_bytes}",
                f"ptr {writer.at(into, writer.mul(panel, _PANEL))}",
                f"i64 {stride}",
                f"ptr {writer.at(bias, writer.mul(panel, bias_step))}",
                f"ptr {writer.at(bias, writer.mul(second, bias_step))}",
                f"i64 {blocks}",
                f"i64 {1 if gate is None else 2}",
                f"i64 {kind}",
            ]
            writer.do(f"call void @products({', '.join(operands)})")

        return body

    def by_panels() -> None:
        body = of_rows(writer.argument(SCRATCH, "ptr"), "0", rows.count)
        writer.claim_shares("%args", writer.argument(THREADS), panels, body)

    def by_rows() -> None:
        x = writer.at(own, writer.mul(num_bytes, 2), "i8")

        def block(index: Value) -> None:
            first = writer.mul(index, length)
            bounds = [("i64", writer.sub(rows.count, first)), ("i64", length)]
            count = writer.call("i64", "llvm.smin.i64", bounds)

            def round_tile(tile: Value) -> list[Value]:
                rows.round(first, tile, x)
                return []

            writer.loop(0, rows.tiles(count), [], round_tile)
            body = of_rows(x, first, count)

            def iteration(panel: Value) -> list[Value]:
                body(panel)
                return []

            writer.loop(0, panels, [], iteration)

        total = writer.op(f"udiv i64 {writer.add(rows.count, writer.sub(length, 1))}, {length}")
        writer.claim("%args", "1", total, block)

    in_blocks = writer.op(f"icmp ne i64 {length}, 0")
    writer.when(in_blocks, by_rows)
    writer.when(writer.op(f"xor i1 {in_blocks}, true"), by_panels)
    amx.release(writer)


@lru_cache(maxsize=64)
def functions(form: Format) -> dict[str, NativeFunction]:
    """Compile the functions of `panels.product_functions` for AMX: {name: function}.

    Names begin with tiled_. The functions round and round_norm quantise rows of x.
    """
    parts: list[tuple[IRWriter, str]] = []

    def write(signature: str, body: Callable[[IRWriter], None]) -> None:
        writer = IRWriter(lanes())
        body(writer)
        parts.append((writer, signature))

    write(f"internal void @products({_PRODUCTS}) noinline", lambda writer: _products(writer, form))
    for name, (norm, add, gate) in CALLS.items():
        write(
            f"void @tiled_{name}(ptr %args)",
            lambda writer, norm=norm, add=add, gate=gate: _driver(
                writer, form, norm=norm, add=add, gate=gate
            ),
        )
    for name, norm in (("round", False), ("round_norm", True)):
        write(
            f"void @tiled_{name}(ptr %args)",
            lambda writer, norm=norm: _Rows(writer, form, norm).together(),
        )
    return compile_ir(module(parts))
