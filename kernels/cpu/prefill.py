"""Prefill attention over a paged KV cache: one launch for all entries of a step.

The kernels are generated for one shape of heads. Softmax is online over tiles of keys
(FlashAttention-2, arXiv:2307.08691). A work item is one key head and a tile of one entry's queries.
It copies a tile's keys, transposed, and values once for all its rows, so memory does not grow with
length. Each query has its own range of visible keys, so attention may be bidirectional.

With AVX512-BF16 or AMX, a bfloat16 KV cache is multiplied without conversion. Queries and softmax
weights are rounded to bfloat16; products are exact, sums and softmax are float32. On other
processors, and for other dtypes, keys and values are converted to float32.

Results are batch-invariant. The results of queries that see all earlier keys do not depend on how
the prompt was chunked either, since tiles of keys begin at the prompt's beginning.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.codegen import amx
from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_ir
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import CompilerUnavailable, amx_bf16, dot_bf16, lanes
from kernels.cpu.codegen.products import fma_pairs
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.scores import Numbers, Places, Scored

_NAMES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
_KEYS_A_TILE = 64
_ROWS_A_TILE = 96  # the approximate number of rows that share a copied tile of keys
_ROWS = 6  # rows that are multiplied together, so that their sums stay in registers
_LEAST = -1e38  # score whose weight is 0; twice this score is still a finite float32

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_Q, _KEYS, _VALUES, _OUT, _TILES, _LAST, _FIRST = range(2, 9)
_COUNT, _SCALE, _SCRATCH = range(9, 12)
_NUMBERS, _WORDS = 12, 15  # three words of score modifiers, see scores.py
# Number of words that describe a tile of queries: first token, number of tokens, address of the
# entry's block table, number of the entry's keys.
_TILE = 4


@dataclass(frozen=True)
class PrefillShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # type of the KV cache, as LLVM names it
    pairs: bool = False  # whether pairs of bfloat16 are multiplied
    tiled: bool = False  # whether AMX tiles multiply these pairs

    @property
    def block(self) -> int:
        """The number of rows that are multiplied together; a row is a query of one head."""
        return amx.TILE_ROWS if self.tiled else _ROWS

    @property
    def words(self) -> int:
        """The number of 32-bit words of a query or key: float32, or pairs of bfloat16."""
        return self.head_dim // 2 if self.pairs else self.head_dim

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def queries(self) -> int:
        """The number of queries in a tile."""
        return max(1, _ROWS_A_TILE // self.group)

    @property
    def rows(self) -> int:
        """The number of rows in a tile, padded to whole blocks."""
        return -(-self.queries * self.group // self.block) * self.block

    def floats(self, size: int) -> int:
        """Return the size of one thread's scratch in 32-bit words. size: float32 lanes."""
        tiles = 2 * _KEYS_A_TILE * self.words
        row = self.words + self.head_dim + 2 * size
        return tiles + self.block * _KEYS_A_TILE + self.rows * row


def _prefill(shape: PrefillShape, scored: Scored, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    if shape.tiled:
        amx.configure(w)
    dim, words, group, kind, tile = (
        shape.head_dim, shape.words, shape.group, w.vector, _KEYS_A_TILE,
    )  # fmt: skip
    per_word = dim // words  # elements per word
    # vectors of columns that are computed at once; with _ROWS rows they fill the registers
    width = 4 if size == 16 else 2
    names = (_Q, _KEYS, _VALUES, _OUT, _TILES, _LAST, _FIRST)
    q, keys, values, out, tiles, lasts, firsts = (w.argument(name, "ptr") for name in names)
    places = Places(w, scored, _NUMBERS)
    scale = w.spread(w.op(f"load float, ptr {w.at('%args', _SCALE, 'i64')}"))
    thread = w.op(f"atomicrmw add ptr {w.at('%args', 1, 'i64')}, i64 1 monotonic")
    own = w.at(w.argument(_SCRATCH, "ptr"), w.mul(thread, shape.floats(size)))
    # Scratch in words: keys [words, tile], values [tile / per_word, dim], weights [block, tile],
    # queries [rows, words]. In float32: sums [rows, dim], largest scores [rows, lanes], sums of
    # weights [rows, lanes].
    columns = own
    mixed = w.at(columns, words * tile)
    weights = w.at(mixed, tile // per_word * dim)
    query = w.at(weights, shape.block * tile)
    sums = w.at(query, shape.rows * words)
    tops = w.at(sums, shape.rows * dim)
    totals = w.at(tops, shape.rows * size)

    def least(a: Value, b: Value | int) -> Value:
        return w.call("i64", "llvm.smin.i64", [("i64", a), ("i64", str(b))])

    def number(array: Value, index: Value) -> Value:
        """Load an element of an int32 array as i64."""
        narrow = w.op(f"load i32, ptr {w.at(array, index, 'i32')}")
        return w.op(f"sext i32 {narrow} to i64")

    def lay_out(begin: Value, head: Value, table: Value, length: Value) -> None:
        """Generate the copy of keys [begin, begin + tile) of a head, and their values, to scratch.

        Keys are transposed. Columns after the last key repeat the last key.
        """

        def mix_pair(at: Value, places: tuple[Value, Value], d: Value) -> None:
            """Store 2 * size elements of the values of two keys, interleaved as pairs."""
            both = f"<{2 * size} x i16>"
            rows = [w.load(w.at(values, w.add(place, d), shape.dtype), both) for place in places]
            line = w.add(w.mul(w.op(f"lshr i64 {at}, 1"), dim), d)
            for half in (0, 1):
                lane = ", ".join(
                    f"i32 {half * size + i // 2 + i % 2 * 2 * size}" for i in range(2 * size)
                )
                joined = w.op(
                    f"shufflevector {both} {rows[0]}, {both} {rows[1]}, <{2 * size} x i32> <{lane}>"
                )
                w.store(joined, w.at(mixed, w.add(line, half * size)), both)

        def gather_keys(at: Value) -> list[Value]:
            places = []
            for i in range(size):
                key = least(w.add(begin, w.add(at, i)), w.sub(length, 1))
                block = number(table, w.op(f"udiv i64 {key}, {shape.block_size}"))
                inside = w.op(f"urem i64 {key}, {shape.block_size}")
                row = w.add(w.mul(block, shape.num_kv_heads), head)
                places.append(w.mul(w.add(w.mul(row, shape.block_size), inside), dim))

            def pairs(d: Value) -> list[Value]:
                square = [w.load(w.at(keys, w.add(place, d), shape.dtype)) for place in places]
                first = w.op(f"lshr i64 {d}, 1")
                for i, column in enumerate(w.transpose(square)):
                    w.store(column, w.at(columns, w.add(w.mul(w.add(first, i), tile), at)))
                for i in range(0, size, 2):
                    mix_pair(w.add(at, i), (places[i], places[i + 1]), d)
                return []

            def part(d: Value) -> list[Value]:
                square = []
                for i, place in enumerate(places):
                    from_ = w.add(place, d)
                    square.append(w.load_as_float(w.at(keys, from_, shape.dtype), shape.dtype))
                    value = w.load_as_float(w.at(values, from_, shape.dtype), shape.dtype)
                    w.store(value, w.at(mixed, w.add(w.mul(w.add(at, i), dim), d)))
                for i, column in enumerate(w.transpose(square)):
                    w.store(column, w.at(columns, w.add(w.mul(w.add(d, i), tile), at)))
                return []

            w.loop(0, dim, [], pairs if shape.pairs else part, step=per_word * size)
            return []

        w.loop(0, tile, [], gather_keys, step=size)

    def round_store(numbers: Value, line: Value, index: Value | int) -> None:
        """Store a vector from element `index` of `line` on, rounded to bfloat16 if shape.pairs."""
        if shape.pairs:
            w.store_pairs(numbers, w.at(line, index, "bfloat"))
        else:
            w.store(numbers, w.at(line, index))

    def power(x: Value) -> Value:
        return w.exp_of_weight(x) if shape.pairs else w.exp_below(x)

    def products(
        rows: list[Value],
        matrix: Value,
        columns_: int,
        inner: int,
        begin: list[Value] | None,
        at: Value,
    ) -> list[Value]:
        """Return rows @ matrix for up to `width` vectors of columns, from column `at` on.

        The result is in the order of rows. matrix: [inner, columns_] words.
        rows: address of each row.
        inner: words of a row.
        begin: the sums to add to, zeros if None.
        """
        vectors = min(width, columns_ // size)
        start = begin or ["zeroinitializer"] * (len(rows) * vectors)

        def accumulate(k: Value, *held: Value) -> list[Value]:
            line = w.at(matrix, w.add(w.mul(k, columns_), at))
            parts = [w.load(w.at(line, v * size)) for v in range(vectors)]
            result = []
            for r, row in enumerate(rows):
                factor = w.spread(w.load(w.at(row, k), "float"))
                for v, part in enumerate(parts):
                    total = held[r * vectors + v]
                    if shape.pairs:
                        result.append(fma_pairs(w, factor, part, total))
                    else:
                        result.append(w.fma(factor, part, total))
            return result

        return w.loop(0, inner, [(kind, value) for value in start], accumulate)

    def soften(
        r: Value | int,
        begin: Value,
        row: Value,
        token: Value,
        count: Value,
        head: Value,
        masked: bool,
    ) -> Value:
        """Replace the scores of a block's r-th row by unnormalised softmax weights.

        masked: whether some of the tile's keys are hidden from the row.

        Returns the factor by which the row's earlier sums must be scaled.
        """
        line, row = w.at(weights, w.mul(r, tile)), w.add(row, r)
        parts = [w.load(w.at(line, at)) for at in range(0, tile, size)]
        if masked or scored.slopes:
            index = w.op(f"udiv i64 {row}, {group}")
            index = w.add(token, least(index, w.sub(count, 1)))
            last = w.sub(number(lasts, index), begin)
        if not scored.plain:
            slope = places.slope(head_of(head, row))
            for v, part in enumerate(parts):
                ahead = w.sub(v * size, last) if slope else ""
                parts[v] = places.change(part, slope, ahead)
        if masked:
            first = w.sub(number(firsts, index), begin)
            bounds = [w.spread(w.op(f"trunc i64 {bound} to i32"), "i32") for bound in (first, last)]
            for v, part in enumerate(parts):
                lane = ", ".join(f"i32 {v * size + i}" for i in range(size))
                seen = w.op(f"icmp sle {w.integers} <{lane}>, {bounds[1]}")
                after = w.op(f"icmp sge {w.integers} <{lane}>, {bounds[0]}")
                seen = w.op(f"and <{size} x i1> {seen}, {after}")
                parts[v] = w.op(
                    f"select <{size} x i1> {seen}, {kind} {part}, {kind} {w.all(_LEAST)}"
                )
        best = parts[0]
        for part in parts[1:]:
            best = w.maximum(part, best)
        held = w.at(tops, w.mul(row, size))
        before = w.load(held)
        top = w.maximum(w.largest(best), before)
        w.store(top, held)
        scale_ = power(w.binary("fsub", before, top))
        place = w.at(totals, w.mul(row, size))
        total = w.binary("fmul", w.load(place), scale_)
        for v, part in enumerate(parts):
            weight = power(w.binary("fsub", part, top))
            round_store(weight, line, v * size)
            total = w.binary("fadd", total, weight)
        w.store(total, place)
        return scale_

    def block_of_tiles(
        begin: Value, row: Value, token: Value, count: Value, head: Value, masked: bool
    ) -> None:
        """Generate the computation of `block`, with the same arguments, by AMX tiles.

        AMX tiles 0 to 3 hold sums of 16 columns each; tile 4 holds rows.
        """
        side = amx.TILE_ROWS

        def multiply(
            rows: Value, apart: int, matrix: Value, columns_: int, inner: int, vectors: range
        ) -> None:
            """Add to AMX's sums the matmul of rows by some columns of a matrix.

            apart: words from a row to the next. matrix: [inner, columns_] words.
            vectors: indices of the vectors of 16 columns.
            """
            for step in range(0, inner, side):
                amx.load(w, 4, w.at(rows, step), 4 * apart)
                for v in vectors:
                    place = w.at(matrix, step * columns_ + v * side)
                    amx.load(w, 5 + v % 3, place, 4 * columns_)
                    amx.multiply(w, v - vectors[0], 4, 5 + v % 3)

        vectors = range(tile // side)
        for v in vectors:
            amx.clear(w, v)
        multiply(w.at(query, w.mul(row, words)), words, columns, tile, words, vectors)
        for v in vectors:
            amx.store(w, v, w.at(weights, v * side), 4 * tile)
        result = w.at(sums, w.mul(row, dim))

        def soften_rows(r: Value) -> list[Value]:
            for each_row in range(4):
                here = w.add(r, each_row)
                scale_ = soften(here, begin, row, token, count, head, masked)
                line = w.at(result, w.mul(here, dim))
                for d in range(0, dim, size):
                    place = w.at(line, d)
                    w.store(w.binary("fmul", w.load(place), scale_), place)
            return []

        w.loop(0, side, [], soften_rows, step=4)
        for first in range(0, dim // side, 4):
            vectors = range(first, min(first + 4, dim // side))
            for v in vectors:
                amx.load(w, v - first, w.at(result, v * side), 4 * dim)
            multiply(weights, tile, mixed, dim, tile // per_word, vectors)
            for v in vectors:
                amx.store(w, v - first, w.at(result, v * side), 4 * dim)

    def block(
        begin: Value, row: Value, token: Value, count: Value, head: Value, masked: bool
    ) -> None:
        """Update the online softmax of a block of rows with the tile of keys from key `begin` on.

        row: the block's first row in the tile of queries.
        token, count: first token, and number of rows, of the tile of queries.
        masked: whether some of the tile's keys are hidden from some rows.
        """
        rows = [w.at(query, w.mul(w.add(row, r), words)) for r in range(_ROWS)]
        vectors = min(width, tile // size)

        def scores(at: Value) -> list[Value]:
            sums = products(rows, columns, tile, words, None, at)
            for r in range(_ROWS):
                for v in range(vectors):
                    place = w.at(weights, w.add(at, r * tile + v * size))
                    w.store(sums[r * vectors + v], place)
            return []

        w.loop(0, tile, [], scores, step=vectors * size)
        scales = [soften(r, begin, row, token, count, head, masked) for r in range(_ROWS)]
        lines = [w.at(weights, r * tile) for r in range(_ROWS)]
        results = [w.at(sums, w.mul(w.add(row, r), dim)) for r in range(_ROWS)]
        wide = min(width, dim // size)

        def mix(at: Value) -> list[Value]:
            start = [
                w.binary("fmul", w.load(w.at(result, w.add(at, v * size))), scales[r])
                for r, result in enumerate(results)
                for v in range(wide)
            ]
            sums = products(lines, mixed, dim, tile // per_word, start, at)
            for r, result in enumerate(results):
                for v in range(wide):
                    w.store(sums[r * wide + v], w.at(result, w.add(at, v * size)))
            return []

        w.loop(0, dim, [], mix, step=wide * size)

    def head_of(head: Value, row: Value) -> Value:
        """Return the query head of a row."""
        return w.add(w.mul(head, group), w.op(f"urem i64 {row}, {group}"))

    def work(item: Value) -> None:
        head = w.op(f"urem i64 {item}, {shape.num_kv_heads}")
        at = w.mul(w.op(f"udiv i64 {item}, {shape.num_kv_heads}"), _TILE)
        token, count, place_of_table, length = (
            w.load(w.at(tiles, w.add(at, word), "i64"), "i64") for word in range(_TILE)
        )
        table = w.op(f"inttoptr i64 {place_of_table} to ptr")
        num_rows = w.mul(count, group)
        offset = w.mul(w.add(w.mul(token, shape.num_kv_heads), head), group * dim)
        # elements between the end of a token's rows of one key head and the next token's rows
        apart = (shape.num_kv_heads - 1) * group * dim

        def place(row: Value) -> Value:
            """Return the index of a row's first element in q and out."""
            index = w.op(f"udiv i64 {row}, {group}")
            return w.add(offset, w.add(w.mul(row, dim), w.mul(index, apart)))

        def prepare(row: Value) -> list[Value]:
            row_at = least(row, w.sub(num_rows, 1))
            source, target = w.at(q, place(row_at)), w.at(query, w.mul(row, words))
            result = w.at(sums, w.mul(row, dim))
            for d in range(0, dim, size):
                round_store(w.binary("fmul", w.load(w.at(source, d)), scale), target, d)
                w.store("zeroinitializer", w.at(result, d))
            w.store(w.all(_LEAST), w.at(tops, w.mul(row, size)))
            w.store("zeroinitializer", w.at(totals, w.mul(row, size)))
            return []

        length_ = shape.block
        filled = w.mul(w.op(f"udiv i64 {w.add(num_rows, length_ - 1)}, {length_}"), length_)
        w.loop(0, filled, [], prepare)
        first = number(firsts, token)
        all_see_from = number(firsts, w.add(token, w.sub(count, 1)))
        all_see_to = number(lasts, token)
        end = w.add(number(lasts, w.add(token, w.sub(count, 1))), 1)

        def over(begin: Value) -> list[Value]:
            lay_out(begin, head, table, length)
            early = w.op(f"icmp slt i64 {begin}, {all_see_from}")
            late = w.op(f"icmp sgt i64 {w.add(begin, tile - 1)}, {all_see_to}")
            some = w.op(f"or i1 {early}, {late}")

            def blocks(masked: bool) -> None:
                def rows(row: Value) -> list[Value]:
                    one_block = block_of_tiles if shape.tiled else block
                    one_block(begin, row, token, count, head, masked)
                    return []

                w.loop(0, filled, [], rows, step=shape.block)

            w.when(some, lambda: blocks(True))
            w.when(w.op(f"xor i1 {some}, true"), lambda: blocks(False))
            return []

        w.loop(first, end, [], over, step=tile)

        def finish(row: Value) -> list[Value]:
            total = w.spread(w.sum(w.load(w.at(totals, w.mul(row, size)))))
            weight = w.all(1.0)
            if scored.sinks:
                sink, best = places.sink(head_of(head, row)), w.load(w.at(tops, w.mul(row, size)))
                top = w.maximum(best, sink)
                weight = w.exp(w.binary("fsub", best, top))
                total = w.fma(total, weight, w.exp(w.binary("fsub", sink, top)))
            inverse = w.binary("fdiv", weight, total)
            source, target = w.at(sums, w.mul(row, dim)), w.at(out, place(row))
            for d in range(0, dim, size):
                w.store(w.binary("fmul", w.load(w.at(source, d)), inverse), w.at(target, d))
            return []

        w.loop(0, num_rows, [], finish)

    w.claim("%args", "1", w.mul(w.argument(_COUNT), shape.num_kv_heads), work)
    if shape.tiled:
        amx.release(w)
    return w, "void @prefill(ptr %args)"


class Entries:
    """The queries of a step by sequence (entry), and the range of keys that each query sees.

    spans: per entry: first token, token after the last, address of the int32 block table, number of
        keys. Elements of the table before the block of the first visible key are not read.
    first, last: [tokens] int32, the first and last visible key of each token; non-decreasing within
        an entry.
    kept: the owner of the block tables' memory, which must stay alive until the last launch.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int, int, int]],
        first: Tensor,
        last: Tensor,
        kept: object = None,
    ) -> None:
        self.spans, self.first, self.last, self._kept = spans, first, last, kept
        self._tiles: dict[int, NDArray[np.int64]] = {}

    def tiles(self, queries: int) -> NDArray[np.int64]:
        """Return tiles of at most `queries` queries: int64 [tiles, 4], the words of `_TILE`.

        Tiles with the most keys come first, so that threads end together.
        """
        tiles = self._tiles.get(queries)
        if tiles is None:
            rows = [
                (token, min(queries, end - token), table, length)
                for begin, end, table, length in self.spans
                for token in range(begin, end, queries)
            ]
            tile_rows = np.array(rows, np.int64).reshape(-1, _TILE)
            seen = (
                self.last.numpy()[tile_rows[:, 0] + tile_rows[:, 1] - 1]
                - self.first.numpy()[tile_rows[:, 0]]
            )
            tiles = np.ascontiguousarray(tile_rows[np.argsort(-seen, kind="stable")])
            self._tiles[queries] = tiles
        return tiles


class CpuPrefill:
    """The prefill kernel for one shape of heads."""

    def __init__(self, shape: PrefillShape, function: NativeFunction) -> None:
        self._floats, self._queries = shape.floats(lanes()), shape.queries
        self._function = function

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        entries: Entries,
        out: Tensor,
        numbers: Numbers,
    ) -> None:
        """Compute attention of the entries' queries into their rows of out.

        q: [n, num_heads, head_dim] float32 of the whole step.
        out: [n, num_heads * head_dim] float32 of the whole step.
        """
        args, threads = (ctypes.c_int64 * _WORDS)(), torch.get_num_threads()
        tiles = entries.tiles(self._queries)
        args[_Q], args[_OUT] = q.data_ptr(), out.data_ptr()
        args[_KEYS], args[_VALUES] = k_cache.data_ptr(), v_cache.data_ptr()
        args[_TILES], args[_COUNT] = tiles.ctypes.data, len(tiles)
        args[_LAST], args[_FIRST] = entries.last.data_ptr(), entries.first.data_ptr()
        args[_SCALE] = bits(scale)
        numbers.write_words(args, _NUMBERS)
        args[_SCRATCH] = scratch(threads * self._floats)
        self._function(args, threads)


@lru_cache(maxsize=16)
def prefill_for(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    scored: Scored,
) -> CpuPrefill | None:
    """Return the prefill kernel for a shape, or None if it cannot be generated.

    No kernel can be generated if head sizes are not multiples of a vector, or without a compiler.
    """
    try:
        size = lanes()
        width = min(4 if size == 16 else 2, head_dim // size)
        if dtype not in _NAMES or head_dim % size or head_dim // size % max(1, width):
            return None
        pairs = dtype == torch.bfloat16 and head_dim % (2 * size) == 0 and dot_bf16()
        shape = PrefillShape(
            num_heads, num_kv_heads, head_dim, block_size, _NAMES[dtype], pairs,
            pairs and amx_bf16(),
        )  # fmt: skip
        return CpuPrefill(shape, compile_ir(module([_prefill(shape, scored, size)]))["prefill"])
    except CompilerUnavailable:
        return None
