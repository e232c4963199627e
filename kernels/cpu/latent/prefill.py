"""Prefill attention over paged latents (multi-head latent attention), generated per shape of heads.

Latents are expanded to keys and values one tile at a time, in memory that stays in the processor's
cache, for all queries of a head. Softmax is online (FlashAttention-2, arXiv:2307.08691). A work
item is a head and a block of queries. Results are batch-invariant, and do not depend on how a
prompt was chunked, since tiles begin at the prompt's beginning.

With AVX512-BF16 and bfloat16 latents and weights, all operands are bfloat16, as on a GPU, and sums
are float32. Otherwise everything is float32. A "unit" below is four bytes: a pair of bfloat16, or a
float32.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.products import fma_pairs
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.latent.shape import LatentShape
from kernels.cpu.recurrent.entries import write_loop

_TILE = 64  # keys per tile
_MADE = 4  # elements of a key or value that are computed at once
_ROWS = 6  # queries of a block, whose sums stay in registers
_MOST = 1024  # maximum number of queries of a work item
_LEAST = -3e38  # score whose weight is 0

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_Q, _CACHE, _UP, _OUT, _TABLE, _TOKENS, _LENGTH, _QUERIES, _SCALE, _SCRATCH, _WORDS = range(2, 13)


def worth_making(tokens: int, keys: int, shape: LatentShape) -> bool:
    """Whether expanding a chunk's latents to keys and values takes fewer operations than using
    absorbed queries.

    tokens: queries of the chunk. keys: keys of its request so far.
    """
    spared = tokens * keys * (2 * shape.rank - shape.expanded)
    expansion = (keys - tokens) * shape.rank * shape.expanded
    return spared > (expansion // 2 if shape.dot else expansion)


def _floats(shape: LatentShape, size: int, queries: int) -> int:
    """Return the size of a thread's scratch memory, in float32 elements."""
    tile = _TILE * (shape.rank + shape.head + 2 * shape.value + _ROWS)
    rows = -(-queries // _ROWS) * _ROWS
    return tile + _MADE * shape.rank + rows * (shape.head + shape.value + 2 * size)


def _prefill(shape: LatentShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    kind, tile, dtype, dot = w.vector, _TILE, shape.dtype, shape.dot
    width = 4 if size == 16 else 2  # vectors of columns that are computed at once
    f"<{2 * size} x bfloat>"
    unit = 2 if dot else 1  # elements per unit: a bfloat16 pair, or a float32
    q, cache, up, out, table = (w.argument(name, "ptr") for name in (_Q, _CACHE, _UP, _OUT, _TABLE))
    tokens, length, queries = (w.argument(name) for name in (_TOKENS, _LENGTH, _QUERIES))
    before = w.sub(length, tokens)
    scale = w.spread(w.load(w.at("%args", _SCALE, "i64"), "float"))
    thread = w.op(f"atomicrmw add ptr {w.at('%args', 1, 'i64')}, i64 1 monotonic")
    filled_most = w.mul(w.op(f"udiv i64 {w.add(queries, _ROWS - 1)}, {_ROWS}"), _ROWS)
    of_tile = tile * (shape.rank + shape.head + 2 * shape.value + _ROWS) + _MADE * shape.rank
    of_row = shape.head + shape.value + 2 * size
    floats = w.add(w.mul(filled_most, of_row), of_tile)
    # Scratch: latents [rank units, tile], keys [head units, tile], values transposed [value, tile]
    # and plain [tile units, value], weights [_ROWS, tile], rows of up. Then queries [rows, head],
    # sums [rows, value], largest scores [rows, lanes] and sums of weights [rows, lanes].
    latents = w.at(w.argument(_SCRATCH, "ptr"), w.mul(thread, floats))
    keys = w.at(latents, tile * shape.rank)
    transposed = w.at(keys, tile * shape.head)
    values = w.at(transposed, tile * shape.value)
    weights = w.at(values, tile * shape.value)
    lines = w.at(weights, tile * _ROWS)
    query = w.at(lines, _MADE * shape.rank)
    sums = w.at(query, w.mul(filled_most, shape.head))
    tops = w.at(sums, w.mul(filled_most, shape.value))
    totals = w.at(tops, w.mul(filled_most, size))

    def least(a: Value, b: Value | int) -> Value:
        return w.call("i64", "llvm.smin.i64", [("i64", a), ("i64", str(b))])

    def multiplied(factor: Value, part: Value, total: Value) -> Value:
        """Return total + factor * part, for vectors of float32 or of bfloat16 pairs."""
        return fma_pairs(w, factor, part, total) if dot else w.fma(factor, part, total)

    def products(
        rows: list[Value], matrix: Value, columns: int, inner: int, at: Value,
        begin: list[Value] | None = None, vectors: int = width,
    ) -> list[Value]:  # fmt: skip
        """Return rows @ matrix for `vectors` vectors of columns, from column `at` on.

        The result is in the order of rows. matrix: [inner, columns] units.
        rows: address of each row of `inner` units.
        begin: the sums to add to, zeros if None.
        """
        start = begin or ["zeroinitializer"] * (len(rows) * vectors)

        def accumulate(k: Value, *held: Value) -> list[Value]:
            line = w.at(matrix, w.add(w.mul(k, columns), at))
            parts = [w.load(w.at(line, v * size)) for v in range(vectors)]
            sums = []
            for r, row in enumerate(rows):
                factor = w.spread(w.load(w.at(row, k), "float"))
                sums += [
                    multiplied(factor, part, held[r * vectors + v]) for v, part in enumerate(parts)
                ]
            return sums

        return w.loop(0, inner, [(kind, value) for value in start], accumulate)

    def load_units(place: Value) -> Value:
        """Load a vector of a latent's elements, as float32 or as bfloat16 pairs."""
        return w.load(place) if dot else w.load_as_float(place, dtype)

    def paired(low: Value, high: Value) -> Value:
        """Return two vectors rounded to bfloat16, with their elements interleaved as pairs."""
        words = []
        for value in (low, high):
            narrow = w.op(f"fptrunc {kind} {value} to <{size} x bfloat>")
            narrow = w.op(f"bitcast <{size} x bfloat> {narrow} to <{size} x i16>")
            words.append(w.op(f"zext <{size} x i16> {narrow} to {w.integers}"))
        upper = w.op(f"shl {w.integers} {words[1]}, {w.whole(16)}")
        both = w.op(f"or {w.integers} {words[0]}, {upper}")
        return w.op(f"bitcast {w.integers} {both} to {kind}")

    def gather(begin: Value) -> None:
        """Copy latents [begin, begin + tile) to scratch, each as a column.

        Columns after the last latent repeat the last latent.
        """

        def gather_keys(at: Value) -> list[Value]:
            places = []
            for i in range(size):
                key = least(w.add(begin, w.add(at, i)), w.sub(length, 1))
                block = w.load(
                    w.at(table, w.op(f"udiv i64 {key}, {shape.block_size}"), "i32"), "i32"
                )
                block = w.mul(w.op(f"sext i32 {block} to i64"), shape.block_size)
                row = w.add(block, w.op(f"urem i64 {key}, {shape.block_size}"))
                places.append(w.at(cache, w.mul(row, shape.kept), dtype))

            def part(first: int, target: Value) -> Callable[[Value], list[Value]]:
                def units(d: Value) -> list[Value]:
                    element = w.add(w.mul(d, unit), first)
                    square = [load_units(w.at(place, element, dtype)) for place in places]
                    for i, column in enumerate(w.transpose(square)):
                        w.store(column, w.at(target, w.add(w.mul(w.add(d, i), tile), at)))
                    return []

                return units

            w.loop(0, shape.rank // unit, [], part(0, latents), step=size)
            shared = w.at(keys, shape.nope // unit * tile)
            w.loop(0, shape.rope // unit, [], part(shape.rank, shared), step=size)
            return []

        w.loop(0, tile, [], gather_keys, step=size)

    def make(head: Value, first: int, count: int, put) -> None:  # type: ignore[no-untyped-def]
        """Generate the expansion of a tile's latents to part of a head's keys or values.

        Expands to elements [first, first + count) of the head's rows in `up`.

        put(element - first, column, vectors for each of _MADE elements): stores results. A column
            is a key's index in the tile.
        """

        def expand_elements(element: Value) -> list[Value]:
            row = w.add(w.add(w.mul(head, shape.expanded), first), element)
            source = w.at(up, w.mul(row, shape.rank), shape.up)
            rows = [w.at(source, r * shape.rank, shape.up) for r in range(_MADE)]
            if not dot:

                def widen(at: Value) -> list[Value]:
                    value = w.load_as_float(w.at(source, at, shape.up), shape.up)
                    w.store(value, w.at(lines, at))
                    return []

                w.loop(0, _MADE * shape.rank, [], widen, step=size)
                rows = [w.at(lines, r * shape.rank) for r in range(_MADE)]

            def columns(at: Value) -> list[Value]:
                sums = products(rows, latents, tile, shape.rank // unit, at)
                put(element, at, [sums[r * width : (r + 1) * width] for r in range(_MADE)])
                return []

            w.loop(0, tile, [], columns, step=width * size)
            return []

        w.loop(0, count, [], expand_elements, step=_MADE)

    def put_key(element: Value, at: Value, vectors: list[list[Value]]) -> None:
        for r in range(0, _MADE, unit):
            line = w.mul(w.op(f"udiv i64 {w.add(element, r)}, {unit}"), tile)
            for v in range(width):
                value = paired(vectors[r][v], vectors[r + 1][v]) if dot else vectors[r][v]
                w.store(value, w.at(keys, w.add(w.add(line, at), v * size)))

    def put_value(element: Value, at: Value, vectors: list[list[Value]]) -> None:
        """Store elements of values transposed, so that numbers of adjacent keys are adjacent."""
        for r, row in enumerate(vectors):
            place = w.add(w.mul(w.add(element, r), tile), at)
            for v, value in enumerate(row):
                store(value, transposed, w.add(place, v * size))

    def store(value: Value, array: Value, at: Value) -> None:
        """Store a float32 vector in an array from element `at` on, as the array's dtype."""
        if not dot:
            w.store(value, w.at(array, at))
            return
        narrow = w.op(f"fptrunc {kind} {value} to <{size} x bfloat>")
        w.store(narrow, w.at(array, at, "i16"), f"<{size} x bfloat>")

    def transpose_values() -> None:
        def block(element: Value) -> list[Value]:
            for at in range(0, tile // unit, size):
                rows = [
                    w.load(w.at(transposed, w.add(w.mul(w.add(element, i), tile // unit), at)))
                    for i in range(size)
                ]
                for i, row in enumerate(w.transpose(rows)):
                    w.store(row, w.at(values, w.add(element, (at + i) * shape.value)))
            return []

        w.loop(0, shape.value, [], block, step=size)

    def attend(begin: Value, row: Value, first: Value, masked: bool) -> None:
        """Update the online softmax of _ROWS queries, from `row` on, with the tile at key `begin`.

        first: first token of the work item.
        masked: whether keys after a query's own must be hidden.
        """
        own = [w.at(query, w.mul(w.add(row, r), shape.head // unit)) for r in range(_ROWS)]

        def scores(at: Value) -> list[Value]:
            sums = products(own, keys, tile, shape.head // unit, at)
            for r in range(_ROWS):
                for v in range(width):
                    w.store(sums[r * width + v], w.at(weights, w.add(at, r * tile + v * size)))
            return []

        w.loop(0, tile, [], scores, step=width * size)
        scales = []
        for r in range(_ROWS):
            line = w.at(weights, r * tile)
            parts = [w.load(w.at(line, at)) for at in range(0, tile, size)]
            if masked:
                last = w.sub(w.add(w.add(before, first), w.add(row, r)), begin)
                bound = w.spread(w.op(f"trunc i64 {last} to i32"), "i32")
                for v, part in enumerate(parts):
                    lane = ", ".join(f"i32 {v * size + i}" for i in range(size))
                    seen = w.op(f"icmp sle {w.integers} <{lane}>, {bound}")
                    parts[v] = w.op(
                        f"select <{size} x i1> {seen}, {kind} {part}, {kind} {w.all(_LEAST)}"
                    )
            best = parts[0]
            for part in parts[1:]:
                best = w.maximum(part, best)
            held = w.at(tops, w.mul(w.add(row, r), size))
            known = w.load(held)
            top = w.maximum(w.largest(best), known)
            w.store(top, held)
            shrink = w.exp(w.binary("fsub", known, top))
            scales.append(shrink)
            place = w.at(totals, w.mul(w.add(row, r), size))
            total = w.binary("fmul", w.load(place), shrink)
            for v, part in enumerate(parts):
                weight = w.exp(w.binary("fsub", part, top))
                store(weight, line, str(v * size))
                total = w.binary("fadd", total, weight)
            w.store(total, place)
        rows = [w.at(weights, r * tile) for r in range(_ROWS)]
        results = [w.at(sums, w.mul(w.add(row, r), shape.value)) for r in range(_ROWS)]

        def mix(vectors: int) -> Callable[[Value], list[Value]]:
            def mix_columns(at: Value) -> list[Value]:
                start = [
                    w.binary("fmul", w.load(w.at(result, w.add(at, v * size))), scales[r])
                    for r, result in enumerate(results)
                    for v in range(vectors)
                ]
                sums = products(rows, values, shape.value, tile // unit, at, start, vectors)
                for r, result in enumerate(results):
                    for v in range(vectors):
                        w.store(sums[r * vectors + v], w.at(result, w.add(at, v * size)))
                return []

            return mix_columns

        whole = shape.value // (width * size) * width * size
        w.loop(0, whole, [], mix(width), step=width * size)
        w.loop(whole, shape.value, [], mix(1), step=size)

    def work(item: Value) -> None:
        head = w.op(f"urem i64 {item}, {shape.heads}")
        block = w.op(f"udiv i64 {item}, {shape.heads}")
        # The last block of queries comes first: it sees the most keys.
        first = w.mul(w.sub(w.sub(blocks, 1), block), queries)
        count = least(w.sub(tokens, first), queries)
        filled = w.mul(w.op(f"udiv i64 {w.add(count, _ROWS - 1)}, {_ROWS}"), _ROWS)

        def prepare(row: Value) -> None:
            token = w.add(first, least(row, w.sub(count, 1)))
            source = w.at(q, w.mul(w.add(w.mul(token, shape.heads), head), shape.head))
            target = w.at(query, w.mul(row, shape.head // unit))
            for d in range(0, shape.head, size):
                store(w.binary("fmul", w.load(w.at(source, d)), scale), target, str(d))
            result = w.at(sums, w.mul(row, shape.value))
            for d in range(0, shape.value, size):
                w.store("zeroinitializer", w.at(result, d))
            w.store(w.all(_LEAST), w.at(tops, w.mul(row, size)))
            w.store("zeroinitializer", w.at(totals, w.mul(row, size)))

        write_loop(w, 0, filled, prepare)
        position = w.add(before, first)  # position of the first query

        def over(begin: Value) -> list[Value]:
            gather(begin)
            make(head, 0, shape.nope, put_key)
            make(head, shape.nope, shape.value, put_value)
            transpose_values()
            # Skip queries before the tile: they see none of its keys.
            seeing = w.sub(begin, position)
            seeing = w.call("i64", "llvm.smax.i64", [("i64", seeing), ("i64", "0")])
            seeing = w.mul(w.op(f"udiv i64 {seeing}, {_ROWS}"), _ROWS)

            def rows(row: Value) -> list[Value]:
                end = w.add(begin, tile - 1)
                some = w.op(f"icmp slt i64 {w.add(position, row)}, {end}")
                w.when(some, lambda: attend(begin, row, first, True))
                every = w.op(f"xor i1 {some}, true")
                w.when(every, lambda: attend(begin, row, first, False))
                return []

            w.loop(seeing, filled, [], rows, step=_ROWS)
            return []

        w.loop(0, w.add(position, count), [], over, step=tile)

        def finish(row: Value) -> None:
            total = w.spread(w.sum(w.load(w.at(totals, w.mul(row, size)))))
            inverse = w.binary("fdiv", w.all(1.0), total)
            source = w.at(sums, w.mul(row, shape.value))
            token = w.add(first, row)
            target = w.at(out, w.mul(w.add(w.mul(token, shape.heads), head), shape.value))
            for d in range(0, shape.value, size):
                w.store(w.binary("fmul", w.load(w.at(source, d)), inverse), w.at(target, d))

        write_loop(w, 0, count, finish)

    blocks = w.op(f"udiv i64 {w.add(tokens, w.sub(queries, 1))}, {queries}")
    w.claim("%args", "1", w.mul(blocks, shape.heads), work)
    return w, "void @prefill(ptr %args)"


@lru_cache(maxsize=16)
def _function(shape: LatentShape) -> NativeFunction | None:
    functions = compile_or_none(lambda size: module([_prefill(shape, size)]))
    return functions and functions["prefill"]


def prefill(
    shape: LatentShape,
    q: Tensor,  # [n, heads, nope + rope], contiguous
    cache: Tensor,
    up: Tensor,
    scale: float,
    table: Tensor,  # the entry's block table, int32
    length: int,  # number of the entry's keys; queries are its last n tokens
    out: Tensor,  # [n, heads * value], contiguous
) -> None:
    """Compute causal attention of one entry's queries over its latents into out.

    shape: from `shape_of`, which returns None on machines without a compiler.
    """
    function = _function(shape)
    assert function is not None
    threads, args = torch.get_num_threads(), (ctypes.c_int64 * _WORDS)()
    # Each block of queries expands the keys again, so use several blocks only if there are fewer
    # heads than threads.
    queries = min(_MOST, max(_TILE, -(-len(q) * shape.heads // threads)), len(q))
    args[_Q], args[_OUT], args[_CACHE] = q.data_ptr(), out.data_ptr(), cache.data_ptr()
    args[_UP], args[_TABLE], args[_SCALE] = up.data_ptr(), table.data_ptr(), bits(scale)
    args[_TOKENS], args[_LENGTH], args[_QUERIES] = len(q), length, queries
    args[_SCRATCH] = scratch(threads * _floats(shape, lanes(), queries))
    function(args, threads)
