"""Matmuls x @ W.T for 4- or 8-bit weights with a scale per group of inputs.

The kernels are generated for a format. W is packed into panels as in `kernels.cpu.gemm.dense`, with
scales next to their codes, so a panel is read as one stream. Each row of x is quantised to 8 bits
at run time, with a scale per 32 numbers. Products of a group are summed exactly in integers. Groups
are summed in float32 in a fixed order, so results are batch-invariant.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen import compiler, processor
from kernels.cpu.codegen.compiler import NativeFunction
from kernels.cpu.codegen.ir import IRWriter, Value
from kernels.cpu.codegen.processor import CompilerUnavailable, lanes
from kernels.cpu.codegen.products import dot_bytes, look_up
from kernels.cpu.gemm import tiled_blocks
from kernels.cpu.gemm.codes import (
    NAMES,
    RoundedBlock,
    nibbles,
    reinterpret,
    round_row,
    table_of,
)
from kernels.cpu.gemm.panels import (
    BLOCK_ROWS,
    EXPANDED,
    NUM_ROWS,
    OUT,
    OWN,
    OWN_BYTES,
    SCRATCH,
    WIDTH,
    Expansion,
    Panels,
    RoundedRows,
    RowNorm,
    W,
    X,
    gate_buffer,
    product_functions,
    products,
    store_tile,
)
from kernels.packed import BLOCK, Format

_ROWS = {16: 6, 8: 2}  # rows of a tile, by float32 lanes
# Number of rows from which a panel's 4-bit codes are unpacked to bytes once, not in each tile. With
# six or more tiles this saves time.
_MANY = 48
_AHEAD = 4096  # distance of prefetches in bytes


def fits(form: Format, outputs: int, width: int) -> bool:
    """Whether this machine has a kernel for a weight [outputs, width] of this format."""
    try:
        compiler.check()
        fitting = outputs % (4 * lanes()) == 0 and width % form.chunk == 0
        whole = all(isinstance(number, int) for number in form.table)
        return fitting and form.code == "int" and form.rows == 1 and whole
    except CompilerUnavailable:
        return False


def num_bytes(form: Format, outputs: int, width: int, bias: bool) -> int:
    """Return the bytes of a PackedBlocks weight [outputs, width], with or without a bias."""
    return width // form.chunk * form.chunk_bytes(outputs) + 4 * (outputs if bias else 2 * lanes())


# ---- Generation ----------------------------------------------------------------------------------


def _expanded(form: Format) -> Format | None:
    """Return the 8-bit format to which panels are expanded for many rows, or None.

    Panels are not expanded without VNNI or I8MM, as a dot product of 8-bit codes then takes twice
    the instructions.
    """
    if form.bits == 8 or processor.byte_dot() in ("", "dotprod"):
        return None
    return replace(form, bits=8, scale=torch.float32, table=())


def _expand(writer: IRWriter, form: Format, panel: Value, target: Value, chunks: Value) -> None:
    """Generate the expansion of the panel at `panel` to the format `_expanded(form)` at `target`.

    chunks: number of the panel's chunks (`Format.chunk` inputs each).
    """
    wide, size = _expanded(form), writer.lanes
    assert wide is not None
    table = table_of(writer, form)
    heads = 2 * form.units * (1 if form.offset == "none" else 2)
    form_bytes, wide_bytes = form.chunk_bytes(2 * size), wide.chunk_bytes(2 * size)

    def chunk(index: Value) -> list[Value]:
        base = writer.at(panel, writer.mul(index, form_bytes), "i8")
        place = writer.at(target, writer.mul(index, wide_bytes), "i8")
        for head in range(heads):
            at = writer.at(base, head * size * form.scale.itemsize, "i8")
            writer.store(writer.load_as_float(at, NAMES[form.scale]), writer.at(place, head * size))
        codes = writer.at(base, heads * size * form.scale.itemsize, "i8")
        bytes_at = writer.at(place, heads * size)

        def block(number: Value) -> list[Value]:
            source = writer.at(codes, writer.mul(number, 32 * size), "i8")
            into = writer.at(bytes_at, writer.mul(number, 64 * size), "i8")
            for word in range(4):
                for half in (0, 1):
                    at = writer.at(source, (2 * word + half) * 4 * size, "i8")
                    both = nibbles(writer, writer.load(at, writer.integers), table)
                    for to, value in zip((word, word + 4), both, strict=True):
                        at = writer.at(into, (2 * to + half) * 4 * size, "i8")
                        writer.store(value, at, writer.integers)
            return []

        writer.loop(0, form.chunk // BLOCK, [], block)
        return []

    writer.loop(0, chunks, [], chunk)


def _tile(writer: IRWriter, rows: int, form: Format, ahead: bool = True) -> None:
    """Generate out[rows, panel] = (out if add) + bias + x[rows, width] @ panel, for quantised x.

    form: the format of the panel's weights.
    ahead: whether to prefetch the panel.
    """
    size, integers = writer.lanes, writer.integers
    bias = [writer.load(writer.at("%bias", half * size)) for half in (0, 1)]
    blocks, chunk_bytes = form.chunk // BLOCK, form.chunk_bytes(2 * size)
    # Sum the blocks of x that share a scale of the weight before multiplying by this scale.
    scaled_last = blocks > 2 and form.offset == "none"
    x_blocks = writer.op(f"lshr i64 %width, {BLOCK.bit_length() - 1}")
    row_bytes = writer.mul(x_blocks, form.x_bytes)
    x_rows = [writer.at("%x", writer.mul(row_bytes, row), "i8") for row in range(rows)]
    table = table_of(writer, form)

    def ask(begin: Value, length: int) -> None:
        for line in range(0, length if ahead else 0, 64):
            writer.prefetch(writer.at(begin, _AHEAD + line, "i8"))

    def vector(base: Value, index: int) -> Value:
        """Load a vector of the scales or offsets at the beginning of a chunk."""
        at = writer.at(base, index * size * form.scale.itemsize, "i8")
        return writer.load_as_float(at, NAMES[form.scale])

    def words(codes: Value) -> list[tuple[int, int, Value]]:
        """Load a block's codes: (index of four inputs in the block, half of the panel, bytes)."""
        columns = []
        for word in range(form.bits):
            for half in (0, 1):
                at = writer.at(codes, (2 * word + half) * 4 * size, "i8")
                raw = writer.load(at, integers)
                if form.bits == 8:
                    columns.append((word, half, raw))
                    continue
                low, high = nibbles(writer, raw, table)
                columns += [(word, half, low), (word + 4, half, high)]
        return columns

    def chunk(index: Value, *totals: Value) -> list[Value]:
        base = writer.at("%w", writer.mul(index, chunk_bytes), "i8")
        heads = 2 * form.units
        scales = [vector(base, head) for head in range(heads)]
        offsets: list[Value] = []
        if form.offset != "none":
            offsets = [vector(base, heads + head) for head in range(heads)]
            heads *= 2
        if form.offset == "shift":
            pairs = zip(scales, offsets, strict=True)
            offsets = [writer.binary("fmul", scale, offset) for scale, offset in pairs]
        first = writer.mul(index, blocks)
        codes = writer.at(base, heads * size * form.scale.itemsize, "i8")
        ask(base, heads * size * form.scale.itemsize)

        def block(number: Value | int, *totals: Value) -> list[Value]:
            """Return the totals plus the dot products of a block (32 inputs)."""
            place = writer.mul(writer.add(first, number), form.x_bytes)
            x = [writer.at(row, place, "i8") for row in x_rows]
            unit_of = [word * form.units // 8 for word in range(8)]
            sums: dict[tuple[int, int, int], Value] = {}
            for row in range(rows):
                for unit in range(form.units):
                    start = "zeroinitializer"
                    if form.zero:
                        at = writer.at(x[row], BLOCK + 4 + 4 * unit, "i8")
                        start = writer.spread(writer.load(at, "i32"), "i32")
                    sums[row, unit, 0] = sums[row, unit, 1] = start
            at_code = writer.at(codes, writer.mul(number, 8 * form.bits * size), "i8")
            ask(at_code, 8 * form.bits * size)
            for word, half, value in words(at_code):
                for row in range(rows):
                    raw = writer.load(writer.at(x[row], 4 * word, "i8"), "i32")
                    key = (row, unit_of[word], half)
                    wide = form.bits == 8 or bool(table)
                    four = writer.spread(raw, "i32")
                    sums[key] = dot_bytes(writer, sums[key], value, four, wide)
            out = list(totals)
            for row in range(rows):
                x_scale = writer.spread(writer.load(writer.at(x[row], BLOCK, "i8"), "float"))
                for unit in range(form.units):
                    for half in (0, 1):
                        at = 2 * row + half
                        value = writer.op(
                            f"sitofp {integers} {sums[row, unit, half]} to {writer.vector}"
                        )
                        scale = x_scale
                        if not scaled_last:
                            scale = writer.binary("fmul", scales[2 * unit + half], x_scale)
                        out[at] = writer.fma(value, scale, out[at])
                        if offsets:
                            place = writer.at(x[row], BLOCK + 4 + 4 * unit, "i8")
                            total = writer.spread(writer.load(place, "float"))
                            out[at] = writer.fma(offsets[2 * unit + half], total, out[at])
            return out

        if blocks == 1:
            return block(0, *totals)
        begin = ["zeroinitializer"] * len(totals) if scaled_last else totals
        accumulated = writer.loop(0, blocks, [(writer.vector, total) for total in begin], block)
        if not scaled_last:
            return accumulated
        return [
            writer.fma(part, scales[at % 2], total)
            for at, (part, total) in enumerate(zip(accumulated, totals, strict=True))
        ]

    start = [(writer.vector, bias[half]) for _ in range(rows) for half in (0, 1)]
    chunks = writer.op(f"udiv i64 %width, {form.chunk}")
    store_tile(writer, rows, writer.loop(0, chunks, start, chunk))


def _rounded(writer: IRWriter, form: Format, norm: bool) -> RoundedRows:
    width = writer.argument(WIDTH)

    def row(writer: IRWriter, source: Value, target: Value, norm: RowNorm | None) -> None:
        def place(index: Value) -> RoundedBlock:
            block = writer.at(target, writer.mul(index, form.x_bytes), "i8")
            return block, writer.at(block, BLOCK, "i8"), writer.at(block, BLOCK + 4, "i8")

        round_row(writer, form, source, place, width, norm)

    blocks = writer.op(f"lshr i64 {width}, {BLOCK.bit_length() - 1}")
    return RoundedRows(writer, writer.mul(blocks, form.x_bytes), row, norm)


def _driver(
    writer: IRWriter, form: Format, most: int, *, norm: bool, add: bool, gate: str | None
) -> None:
    buffer = "" if gate is None else gate_buffer(writer, most)
    rows = _rounded(writer, form, norm)
    x = rows.all()
    chunks = writer.op(f"udiv i64 {writer.argument(WIDTH)}, {form.chunk}")
    w_bytes = writer.mul(chunks, form.chunk_bytes(2 * writer.lanes))
    expansion, wide = None, _expanded(form)
    if wide is not None:
        num_bytes = writer.mul(chunks, wide.chunk_bytes(2 * writer.lanes))
        first = writer.argument(EXPANDED, "ptr")
        own = writer.at(first, writer.mul(rows.slot, writer.mul(num_bytes, 2)), "i8")
        none = writer.op(f"icmp eq ptr {first}, null")
        expansion = Expansion(
            lambda writer, panel, target: _expand(writer, form, panel, target, chunks),
            num_bytes,
            writer.op(f"select i1 {none}, ptr null, ptr {own}"),
        )
    products(
        writer, most, x, rows.bytes, w_bytes,
        add=add, gate=gate, buffer=buffer, expansion=expansion,
    )  # fmt: skip


def _unpack(writer: IRWriter, form: Format) -> None:
    """Generate the look-up out[i] = dequantised weights of output ids[i]; ids are int64."""
    size = writer.lanes
    ids, out, w = (writer.argument(word, "ptr") for word in (X, OUT, W))
    width, chunk_bytes = writer.argument(WIDTH), form.chunk_bytes(2 * size)
    chunks = writer.op(f"udiv i64 {width}, {form.chunk}")
    some, name = "<16 x i8>", NAMES[form.scale]

    def number(base: Value, index: Value) -> Value:
        raw = writer.load(writer.at(base, index, name), name)
        raw = raw if name == "float" else writer.op(f"fpext {name} {raw} to float")
        first_lane = writer.op(f"insertelement <16 x float> poison, float {raw}, i64 0")
        spread = "<16 x float> poison, <16 x i32> zeroinitializer"
        return writer.op(f"shufflevector <16 x float> {first_lane}, {spread}")

    def bytes_of(codes: Value, lane: Value, words: range) -> Value:
        quad = "poison"
        for place, word in enumerate(words):
            at = writer.add(lane, 2 * size * word)
            raw = writer.load(writer.at(codes, at, "i32"), "i32")
            quad = writer.op(f"insertelement <4 x i32> {quad}, i32 {raw}, i64 {place}")
        return reinterpret(writer, quad, "<4 x i32>", some)

    def row(index: Value) -> None:
        chosen = writer.load(writer.at(ids, index, "i64"), "i64")
        panel = writer.op(f"udiv i64 {chosen}, {2 * size}")
        lane = writer.op(f"urem i64 {chosen}, {2 * size}")
        target = writer.at(out, writer.mul(index, width))

        def chunk(at: Value) -> list[Value]:
            place = writer.mul(writer.add(writer.mul(panel, chunks), at), chunk_bytes)
            base = writer.at(w, place, "i8")
            heads = form.units
            scales = [number(base, writer.add(lane, 2 * size * unit)) for unit in range(heads)]
            offsets = []
            if form.offset != "none":
                offsets = [
                    number(base, writer.add(lane, 2 * size * (heads + unit)))
                    for unit in range(heads)
                ]
                heads *= 2
            codes = writer.at(base, heads * 2 * size * form.scale.itemsize, "i8")

            def block(number: Value) -> list[Value]:
                here = writer.at(codes, writer.mul(number, 8 * form.bits * size), "i8")
                if form.bits == 8:
                    halves = [bytes_of(here, lane, range(at, at + 4)) for at in (0, 4)]
                else:
                    both = bytes_of(here, lane, range(4))
                    halves = [
                        writer.op(f"and {some} {both}, splat (i8 15)"),
                        writer.op(f"lshr {some} {both}, splat (i8 4)"),
                    ]
                first = writer.add(writer.mul(at, form.chunk), writer.mul(number, BLOCK))
                for half, value in enumerate(halves):
                    unit = half if form.units == 2 else 0
                    if form.table:
                        table = f"<{', '.join(f'i8 {entry}' for entry in form.table)}>"
                        value = look_up(writer, 16, table, value)
                    value = writer.op(f"zext {some} {value} to <16 x i32>")
                    value = writer.op(f"sub <16 x i32> {value}, {writer.whole(form.zero)}")
                    value = writer.op(f"sitofp <16 x i32> {value} to <16 x float>")
                    if form.offset == "shift":
                        value = writer.op(f"fadd <16 x float> {value}, {offsets[unit]}")
                    value = writer.op(f"fmul <16 x float> {value}, {scales[unit]}")
                    if form.offset == "add":
                        value = writer.op(f"fadd <16 x float> {value}, {offsets[unit]}")
                    place = writer.at(target, writer.add(first, 16 * half))
                    writer.store(value, place, "<16 x float>")
                return []

            writer.loop(0, form.chunk // BLOCK, [], block)
            return []

        writer.loop(0, chunks, [], chunk)

    writer.claim("%args", "1", writer.argument(NUM_ROWS), row)


@lru_cache(maxsize=64)
def _functions(form: Format) -> dict[str, NativeFunction]:
    most = _ROWS[lanes()]

    def tile(writer: IRWriter, rows: int) -> None:
        _tile(writer, rows, form)

    def driver(writer: IRWriter, norm: bool, add: bool, gate: str | None) -> None:
        _driver(writer, form, most, norm=norm, add=add, gate=gate)

    others: list[tuple[str, Callable[[IRWriter], None]]] = [
        ("round", lambda writer: _rounded(writer, form, norm=False).together()),
        ("round_norm", lambda writer: _rounded(writer, form, norm=True).together()),
        ("unpack", lambda writer: _unpack(writer, form)),
    ]
    wide, expanded = _expanded(form), None
    if wide is not None:
        # all numbers of rows per tile that `panels._all_rows` may choose
        sizes = {rows // -(-rows // most) for rows in range(_MANY, 4 * _MANY)} | {most}

        def expanded_tile(writer: IRWriter, rows: int) -> None:
            _tile(writer, rows, wide, ahead=False)

        expanded = (expanded_tile, sorted(sizes))
    return product_functions(most, tile, driver, others, expanded)


# ---- Public classes ------------------------------------------------------------------------------


class PackedBlocks(Panels):
    """A packed weight [out, in] of a quantised Format, whose rows `fill` packs."""

    def __init__(
        self,
        form: Format,
        outputs: int,
        width: int,
        bias: Tensor | None,
        weight: Tensor | None = None,
    ) -> None:
        """Allocate the weight and compile its kernels. Raises CompilerUnavailable.

        `fits` must be true. weight: memory of an already packed weight; None: allocate it.
        """
        assert fits(form, outputs, width), (form, outputs, width)
        self.form = form
        self._panel = 2 * lanes()
        if weight is None:
            chunks = width // form.chunk
            shape = (outputs // self._panel, chunks, form.chunk_bytes(self._panel))
            weight = torch.empty(shape, dtype=torch.uint8)
        self._tiled = tiled_blocks.fits(form, width)
        functions = _functions(form)
        if self._tiled:
            functions = functions | tiled_blocks.functions(form)
        super().__init__(functions, weight, bias, outputs, width)

    def fill(self, first: int, codes: Tensor, scale: Tensor, offset: Tensor | None) -> None:
        """Pack weights of the outputs from `first` on, a multiple of 64.

        codes: uint8, [n, in] for 8 bits, [n, in / 2] for 4 bits. 16 bytes hold 32 4-bit inputs:
        byte j has input j in its low half, and input 16 + j in its high half.
        scale, offset: [n, in / group], of form.scale.
        """
        form, size, panel = self.form, lanes(), self._panel
        count = codes.shape[0] // panel
        chunks = self._width // form.chunk
        target = self._weight[first // panel : first // panel + count]
        at = 0
        for part in (scale, offset):
            if part is None:
                continue
            panel_codes = part.view(count, panel, chunks, form.units).permute(0, 2, 3, 1)
            length = form.units * panel * form.scale.itemsize
            target[:, :, at : at + length] = (
                panel_codes.contiguous().view(count, chunks, -1).view(torch.uint8)
            )
            at += length
        blocks, words = form.chunk // BLOCK, form.bits
        source = codes.view(torch.int32).view(count, 2, size, chunks, blocks, words)
        whole = target.view(torch.int32)[:, :, at // 4 :]
        whole.view(count, chunks, blocks, words, 2, size).copy_(source.permute(0, 3, 4, 5, 1, 2))

    def view_outputs(self, first: int, end: int) -> "PackedBlocks":
        """Return a view of the outputs [first, end), multiples of 64, without the bias.

        The view shares the codes.
        """
        weight = self._weight[first // self._panel : end // self._panel]
        return PackedBlocks(self.form, end - first, self._width, None, weight)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the dequantised weights of some outputs, float32 [n, in].

        ids: [n] int64, must be in range.
        """
        out = torch.empty(ids.shape[0], self._width)
        if ids.shape[0] == 0:
            return out
        args, ids = self._args, ids.contiguous()
        assert ids.dtype == torch.int64
        args[X], args[OUT], args[NUM_ROWS] = ids.data_ptr(), out.data_ptr(), ids.shape[0]
        self._functions["unpack"](args, 1)
        return out

    def into(self, x: Tensor, out: Tensor, column: int) -> Tensor:
        """Write self(x) into out's columns from `column` on, and return out."""
        return self._run("plain", x, out, self._panels, column=column)

    def _name(self, name: str, rows: int) -> str:
        return f"tiled_{name}" if self._by_tiles(rows) else name

    def _by_tiles(self, rows: int) -> bool:
        return self._tiled and rows >= tiled_blocks.FROM

    def _prepare(self, rows: int, threads: int, norm: bool) -> None:
        if self._by_tiles(rows):
            self._prepare_tiles(rows, threads, norm)
            return
        expanded, wide = 0, _expanded(self.form)
        if wide is not None and rows >= _MANY:  # a gate and an up panel are expanded at a time
            panel = self._width // wide.chunk * wide.chunk_bytes(self._panel)
            expanded = 2 * threads * panel
        self._round(rows, threads, norm, self._width // BLOCK * self.form.x_bytes, expanded)

    def _prepare_tiles(self, rows: int, threads: int, norm: bool) -> None:
        shared, own = tiled_blocks.scratch_bytes(self.form, self._width, rows, threads)
        self._need(shared + threads * own)
        args = self._args
        args[OWN], args[OWN_BYTES] = args[SCRATCH] + shared, own
        args[BLOCK_ROWS] = tiled_blocks.block_rows(self.form, self._width, rows, threads)
        if not args[BLOCK_ROWS]:
            self._functions["tiled_round_norm" if norm else "tiled_round"](args, threads)
