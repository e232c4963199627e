"""Functions that write AMX instructions, for tiles of 16 rows of 64 bytes."""

import struct
from collections.abc import Sequence

from kernels.cpu.codegen.ir import IRWriter, Value

TILE_ROWS = 16  # rows of a tile


def _tile_op(writer: IRWriter, name: str, *given: str) -> None:
    writer.do(f"call void @llvm.x86.{name}({', '.join(given)})")
    kinds = ", ".join(operand.split()[0] for operand in given)
    writer._called.add(f"declare void @llvm.x86.{name}({kinds})")


def configure(writer: IRWriter, shapes: Sequence[tuple[int, int]] = ((TILE_ROWS, 64),) * 8) -> None:
    """Write the configuration of the tiles, which is valid until `release`.

    shapes: rows, and bytes of a row, of each tile.
    """
    rows, row_bytes = zip(*shapes, strict=True)
    words = struct.pack("<BB14x8H16x8B8x", 1, 0, *row_bytes, *rows)
    config = writer.op("alloca [64 x i8], align 64")
    for at, word in enumerate(struct.unpack("<8q", words)):
        writer.store(str(word), writer.at(config, at, "i64"), "i64")
    _tile_op(writer, "ldtilecfg", f"ptr {config}")


def release(writer: IRWriter) -> None:
    _tile_op(writer, "tilerelease")


def clear(writer: IRWriter, tile: int) -> None:
    _tile_op(writer, "tilezero", f"i8 {tile}")


def load(writer: IRWriter, tile: int, place: Value, stride: Value | int) -> None:
    """Write the load of a tile. stride: bytes from one row's first byte to the next row's."""
    _tile_op(writer, "tileloadd64", f"i8 {tile}", f"ptr {place}", f"i64 {stride}")


def load_passing(writer: IRWriter, tile: int, place: Value, stride: Value | int) -> None:
    """Write the load of a tile with a non-temporal hint, for memory that is not read again soon.

    stride: as in `load`.
    """
    _tile_op(writer, "tileloaddt164", f"i8 {tile}", f"ptr {place}", f"i64 {stride}")


def store(writer: IRWriter, tile: int, place: Value, stride: Value | int) -> None:
    _tile_op(writer, "tilestored64", f"i8 {tile}", f"ptr {place}", f"i64 {stride}")


def multiply(writer: IRWriter, sums: int, rows: int, columns: int) -> None:
    """Write the addition to tile `sums` (16 x 16 float32) of the matmul of two bfloat16 tiles.

    sums, rows, columns: indices of tiles. rows: 16 rows of 32 numbers. columns: 32 x 16 numbers,
    stored as 16 rows of 16 pairs: a pair has a column's numbers of two successive rows.
    """
    _tile_op(writer, "tdpbf16ps", f"i8 {sums}", f"i8 {rows}", f"i8 {columns}")


def multiply_codes(writer: IRWriter, name: str, sums: int, rows: int, columns: int) -> None:
    """Write the addition to tile `sums` (16 x 16 int32) of the matmul of two tiles of bytes.

    name: tdpbssd, or tdpbsud if columns are unsigned. sums, rows, columns: indices of tiles.
    rows: 16 rows of 64 signed bytes. columns: 64 x 16 bytes, stored as rows of four bytes per
    column.
    """
    _tile_op(writer, name, f"i8 {sums}", f"i8 {rows}", f"i8 {columns}")
