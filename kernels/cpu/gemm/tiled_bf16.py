"""x @ W.T of bfloat16 by AMX.

Two tiles of rows of x (32 rows, 32 of their columns) meet two of weights (the same columns, 32
outputs) in four tiles of sums, so each tile that is loaded is used twice. A panel of weights stays
in the first-level cache while rows of x stream past it from the second: they are loaded with the
hint that they need no place in the first.
"""

from kernels.cpu.codegen import amx
from kernels.cpu.codegen.amx import TILE_ROWS
from kernels.cpu.codegen.ir import IRWriter, Value

MOST = 2 * TILE_ROWS  # rows of x that meet a panel at once
AHEAD = "ptr %ahead"
"""An argument of `tile`: weights that a later call reads, and of which this one asks for
`LINES_AHEAD` lines a step of 32 columns; null: this call is the only one of its panel, and asks for
the panel itself."""
LINES_AHEAD = 4
_COLUMNS = 32  # of x in a tile
ROWS_A_PANEL = MOST * 2 * _COLUMNS // LINES_AHEAD
"""Of x, whose tiles together ask for a whole panel."""
_BLOCK, _BLOCK_BYTES = 256, 800 << 10  # of rows that are rounded together, and their bytes, at most
_A_THREAD = 64  # rows from which threads take blocks of them, and not panels
_FAR = 4096  # bytes of a panel that are asked for before they are needed


def block_rows(rows: int, threads: int, row_bytes: int) -> int:
    """Rows of a block that a thread multiplies with all panels, so that x and its result stay near
    it; 0: threads share panels. row_bytes: of a rounded row."""
    if rows < _A_THREAD * threads:
        return 0
    most = max(MOST, min(_BLOCK, _BLOCK_BYTES // row_bytes // MOST * MOST))
    blocks = -(-rows // (most * threads)) * threads
    return -(-rows // (blocks * MOST)) * MOST


def tile(writer: IRWriter, width: int, x_bytes: int) -> None:
    """Write out[rows, panel] = (out if add) + bias + x[rows, width] @ panel, for up to MOST rows of
    x, of x_bytes each. Rows that x does not have, up to whole tiles, are read and forgotten. Each
    sum goes over the columns in one order, whatever the rows."""
    buffer = writer.op(f"alloca [{MOST * 2 * TILE_ROWS} x float], align 64")
    panel_line = 4 * TILE_ROWS * 2  # bytes of two columns of x: of 32 outputs
    steps = width // _COLUMNS
    out_rows = -(-MOST // steps)  # that each step asks for, so that sums need not wait for them
    last = writer.sub("%rows", 1)

    def rows_of(tiles: range, later: bool) -> None:
        """Sums are tiles 0 to 3, two a tile of rows; those of x are 4 and 5, the weights 6 and
        7."""
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

        def put(target: Value, stride: Value | int) -> None:
            """Store a tile of sums. stride: in floats."""
            for at in tiles:
                for half in (0, 1):
                    row = writer.at(target, writer.mul(stride, at * TILE_ROWS))
                    place, apart = writer.at(row, half * TILE_ROWS), writer.mul(stride, 4)
                    amx.store(writer, 2 * at + half, place, apart)

        whole = writer.op(f"icmp eq i64 %rows, {len(tiles) * TILE_ROWS}")
        direct = writer.op(f"and i1 {whole}, {alone}")
        writer.when(direct, lambda: put("%out", "%stride"))

        def by_buffer() -> None:
            put(buffer, 2 * TILE_ROWS)
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
