"""The tile function of matmuls x @ W.T in bfloat16 with AMX.

Two tiles of x (32 rows, 32 columns) are multiplied by two tiles of weights (the same 32 columns, 32
outputs) into four tiles of sums, so each loaded tile is used twice. A panel of weights stays in the
first-level cache, while rows of x stream from the second-level cache and are loaded with a
non-temporal hint.
"""

from kernels.cpu.codegen import amx
from kernels.cpu.codegen.amx import TILE_ROWS
from kernels.cpu.codegen.ir import IRWriter, Value

MOST = 2 * TILE_ROWS  # maximum rows of x that are multiplied by a panel at once
AHEAD = "ptr %ahead"
"""The argument of `tile` that is the address of weights which a later call reads. A call prefetches
`LINES_AHEAD` cache lines of them per step of 32 columns. null: no other call reads the panel, and
this call prefetches its own weights."""
LINES_AHEAD = 4
_COLUMNS = 32  # columns of x in a tile
ROWS_A_PANEL = MOST * 2 * _COLUMNS // LINES_AHEAD
"""Rows of x whose tiles together prefetch a whole panel."""
# maximum number of rows that are rounded together, and maximum bytes of these rows
_BLOCK, _BLOCK_BYTES = 256, 800 << 10
_A_THREAD = 64  # rows per thread from which threads take blocks of rows instead of panels
_FAR = 4096  # distance of prefetches in bytes


def block_rows(rows: int, threads: int, row_bytes: int) -> int:
    """Return the rows of a block that a thread multiplies by all panels; 0 if threads share panels.

    With blocks, x and the result stay in the cache of a thread's core. row_bytes: bytes of a
    rounded row.
    """
    if rows < _A_THREAD * threads:
        return 0
    most = max(MOST, min(_BLOCK, _BLOCK_BYTES // row_bytes // MOST * MOST))
    blocks = -(-rows // (most * threads)) * threads
    return -(-rows // (blocks * MOST)) * MOST


def tile(writer: IRWriter, width: int, x_bytes: int) -> None:
    """Generate out[rows, panel] = (out if add) + bias + x[rows, width] @ panel, for up to MOST
    rows.

    x_bytes: bytes of a row of x. The last tile reads rows beyond the last one, and drops their
    results. Sums add the columns in the same order for any number of rows.
    """
    buffer = writer.op(f"alloca [{MOST * 2 * TILE_ROWS} x float], align 64")
    panel_line = 4 * TILE_ROWS * 2  # bytes of two columns of x for 32 outputs
    steps = width // _COLUMNS
    # rows of out that are prefetched per step, so that stores need not wait
    out_rows = -(-MOST // steps)
    last = writer.sub("%rows", 1)

    def rows_of(tiles: range, later: bool) -> None:
        """Generate the multiplication of one or two tiles of rows.

        AMX tiles 0 to 3 are sums, two per tile of rows; 4 and 5 are rows of x, 6 and 7 weights.
        tiles: the indices of the tiles of rows, 0, 1 or both.
        later: whether to prefetch the next panel.
        """
        for at in tiles:
            for half in (0, 1):
                place = writer.at("%bias", half * TILE_ROWS)
                amx.load(writer, 2 * at + half, place, 0)

        def step(k: Value) -> list[Value]:
            panel = writer.at("%w", writer.mul(k, panel_line * TILE_ROWS), "i8")
            lines, source = panel_line * TILE_ROWS // 64, writer.at(panel, _FAR, "i8")
            if later:
                lines = LINES_AHEAD
                source = writer.at("%ahead", writer.mul(k, 64 * lines), "i8")
            for line in range(lines):
                writer.prefetch(writer.at(source, 64 * line, "i8"))
            for out_row in range(out_rows if later else 0):
                row = [("i64", writer.add(writer.mul(k, out_rows), out_row)), ("i64", last)]
                row = writer.call("i64", "llvm.smin.i64", row)
                target = writer.at("%out", writer.mul("%stride", row))
                for half in (0, TILE_ROWS):
                    writer.prefetch(writer.at(target, half), to_write=True)
            for at in tiles:
                column = writer.add(writer.mul(k, 2 * _COLUMNS), at * TILE_ROWS * x_bytes)
                amx.load_passing(writer, 4 + at, writer.at("%x", column, "i8"), x_bytes)
            for half in (0, 1):
                amx.load(writer, 6 + half, writer.at(panel, 64 * half, "i8"), panel_line)
            for at in tiles:
                for half in (0, 1):
                    amx.multiply(writer, 2 * at + half, 4 + at, 6 + half)
            return []

        writer.loop(0, steps, [], step)

        def store_tiles(target: Value, stride: Value | int) -> None:
            """Generate the store of the tiles of sums. stride: floats between rows of target."""
            for at in tiles:
                for half in (0, 1):
                    row = writer.at(target, writer.mul(stride, at * TILE_ROWS))
                    place, apart = writer.at(row, half * TILE_ROWS), writer.mul(stride, 4)
                    amx.store(writer, 2 * at + half, place, apart)

        whole = writer.op(f"icmp eq i64 %rows, {len(tiles) * TILE_ROWS}")
        direct = writer.op(f"and i1 {whole}, {alone}")
        writer.when(direct, lambda: store_tiles("%out", "%stride"))

        def by_buffer() -> None:
            store_tiles(buffer, 2 * TILE_ROWS)
            writer.when(alone, lambda: write(False))
            writer.when(adding, lambda: write(True))

        writer.when(writer.op(f"xor i1 {direct}, true"), by_buffer)

    def write(added: bool) -> None:
        def row(index: Value) -> list[Value]:
            source = writer.at(buffer, writer.mul(index, 2 * TILE_ROWS))
            target = writer.at("%out", writer.mul("%stride", index))
            for half in (0, TILE_ROWS):
                value, place = writer.load(writer.at(source, half)), writer.at(target, half)
                if added:
                    value = writer.binary("fadd", writer.load(place), value)
                writer.store(value, place)
            return []

        writer.loop(0, "%rows", [], row)

    adding = writer.op("icmp ne i64 %add, 0")
    alone = writer.op("icmp eq i64 %add, 0")
    more = writer.op(f"icmp sgt i64 %rows, {TILE_ROWS}")
    later = writer.op("icmp ne ptr %ahead, null")
    single, both = range(1), range(2)
    many = writer.op(f"and i1 {more}, {later}")
    few = writer.op(f"and i1 {more}, {writer.op(f'xor i1 {later}, true')}")
    writer.when(many, lambda: rows_of(both, True))
    writer.when(few, lambda: rows_of(both, False))
    writer.when(writer.op(f"xor i1 {more}, true"), lambda: rows_of(single, False))
