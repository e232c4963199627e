"""Decode attention over paged latents (multi-head latent attention), and writes of latents.

There are four kernels, generated for a shape of heads:

    write    norm latents, apply rotary embeddings, write latents to the cache
    absorb   multiply queries by the key up-projection, which gives absorbed queries
    attend   per token and group of heads: scores, softmax, weighted sum of latents
    values   multiply the results of `attend` by the value up-projection

A group of heads reads a latent in place, both as key and as value. A vector holds the scores of
several keys and heads.
"""

import ctypes
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.gemm.panels import norm_scale
from kernels.cpu.latent.shape import NAMES, LatentShape, fits
from kernels.cpu.recurrent.entries import between, write_loop
from kernels.metadata import AttentionMeta

# Indices of the kernels' arguments in args. The first two words are the threads' work counters.
_Q, _Q_STRIDE, _LATENTS, _LATENTS_STRIDE, _NORM, _EPS, _TABLE, _POSITIONS, _SLOTS = range(2, 11)
_CACHE, _OUT, _TOKENS, _UP, _ABSORBED, _FOUND, _SCALE = range(11, 18)
_LENGTHS, _BLOCKS, _WIDTH, _SCORES, _ROOM, _WORDS = range(18, 24)
_MANY = 16  # number of tokens from which `write` uses all threads
_ROWS = 4  # tokens that share each read of the up-projection in `absorb`
_LEAST = -3e38  # score whose weight is 0


def _number(w: IRWriter, array: Value, index: Value) -> Value:
    """Load an element of an int32 array as i64."""
    return w.op(f"sext i32 {w.load(w.at(array, index, 'i32'), 'i32')} to i64")


def _write(
    heads: int, nope: int, rope: int, rank: int, dtype: str, size: int
) -> tuple[IRWriter, str]:
    w, head = IRWriter(size), nope + rope
    names = (_Q, _LATENTS, _NORM, _TABLE, _POSITIONS, _SLOTS, _CACHE, _OUT)
    q, latents, norm, table, positions, slots, cache, out = (w.argument(n, "ptr") for n in names)
    q_stride, stride = w.argument(_Q_STRIDE), w.argument(_LATENTS_STRIDE)
    eps = w.load(w.at("%args", _EPS, "i64"), "float")
    half = rope // 2

    def rotated(source: Value, rows: Value) -> list[Value]:
        first, second = (
            [w.load(w.at(source, begin + at)) for at in range(0, half, size)] for begin in (0, half)
        )
        upper, lower = [], []
        for at, (left, other) in enumerate(zip(first, second, strict=True)):
            cos, sin = (w.load(w.at(rows, begin + at * size)) for begin in (0, half))
            minus = w.op(f"fneg {w.vector} {sin}")
            upper.append(w.fma(other, minus, w.binary("fmul", left, cos)))
            lower.append(w.fma(left, sin, w.binary("fmul", other, cos)))
        return upper + lower

    def token(index: Value) -> None:
        rows = w.at(table, w.mul(_number(w, positions, index), rope))

        def query(number: Value) -> None:
            at = w.add(w.mul(index, q_stride), w.mul(number, head))
            source = w.at(q, at)
            target = w.at(out, w.mul(w.add(w.mul(index, heads), number), head))
            for at in range(0, nope, size):
                w.store(w.load(w.at(source, at)), w.at(target, at))
            for at, part in enumerate(rotated(w.at(source, nope), rows)):
                w.store(part, w.at(target, nope + at * size))

        write_loop(w, 0, heads, query)
        slot = w.load(w.at(slots, index, "i64"), "i64")

        def keep() -> None:
            source = w.at(latents, w.mul(index, stride))
            target = w.at(cache, w.mul(slot, (rank + rope)), dtype)
            scale = norm_scale(w, source, rank, eps)

            def normed(at: Value) -> list[Value]:
                value = w.binary("fmul", w.load(w.at(source, at)), scale)
                value = w.binary("fmul", value, w.load(w.at(norm, at)))
                w.store_float(value, w.at(target, at, dtype), dtype)
                return []

            w.loop(0, rank, [], normed, step=size)
            for at, part in enumerate(rotated(w.at(source, rank), rows)):
                place = w.at(target, rank + at * size, dtype)
                w.store_float(part, place, dtype)

        w.when(w.op(f"icmp sge i64 {slot}, 0"), keep)

    w.claim("%args", "1", w.argument(_TOKENS), token)
    return w, "void @write(ptr %args)"


def _absorb(shape: LatentShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    q, up, out = (w.argument(name, "ptr") for name in (_Q, _UP, _ABSORBED))
    tokens = w.argument(_TOKENS)
    scale = w.spread(w.load(w.at("%args", _SCALE, "i64"), "float"))
    width = gcd(shape.rank // size, 4)
    blocks = shape.rank // size // width

    def place(array: Value, token: Value, head: Value, row: int) -> Value:
        return w.at(array, w.mul(w.add(w.mul(token, shape.heads), head), row))

    def multiply_tokens(head: Value, column: Value, token: Value, rows: int) -> None:
        """Generate `width` vectors of columns of a head's absorbed queries, from `column` on.

        Computes `rows` tokens, from `token` on.
        """
        queries = [place(q, w.add(token, row), head, shape.head) for row in range(rows)]
        matrix = w.at(up, w.add(w.mul(head, shape.expanded * shape.rank), column), shape.up)

        def accumulate(d: Value, *held: Value) -> list[Value]:
            line = w.at(matrix, w.mul(d, shape.rank), shape.up)
            parts = [
                w.load_as_float(w.at(line, v * size, shape.up), shape.up) for v in range(width)
            ]
            sums = []
            for row, query in enumerate(queries):
                factor = w.spread(w.load(w.at(query, d), "float"))
                sums += [w.fma(factor, part, held[row * width + v]) for v, part in enumerate(parts)]
            return sums

        zeros = [(w.vector, "zeroinitializer")] * (rows * width)
        sums = w.loop(0, shape.nope, zeros, accumulate)
        for row in range(rows):
            target = w.at(place(out, w.add(token, row), head, shape.kept), column)
            for v in range(width):
                value = w.binary("fmul", sums[row * width + v], scale)
                w.store(value, w.at(target, v * size))

    def rotated(head: Value) -> None:
        def copy_rotated(token: Value) -> None:
            source = w.at(place(q, token, head, shape.head), shape.nope)
            target = w.at(place(out, token, head, shape.kept), shape.rank)
            for at in range(0, shape.rope, size):
                value = w.binary("fmul", w.load(w.at(source, at)), scale)
                w.store(value, w.at(target, at))

        write_loop(w, 0, tokens, copy_rotated)

    def work(item: Value) -> None:
        head = w.op(f"udiv i64 {item}, {blocks + 1}")
        block = w.op(f"urem i64 {item}, {blocks + 1}")

        def columns(block: Value) -> None:
            column = w.mul(block, width * size)
            whole = w.mul(w.op(f"udiv i64 {tokens}, {_ROWS}"), _ROWS)

            def rows(token: Value) -> list[Value]:
                multiply_tokens(head, column, token, _ROWS)
                return []

            w.loop(0, whole, [], rows, step=_ROWS)
            write_loop(w, whole, tokens, lambda token: multiply_tokens(head, column, token, 1))

        between(w, block, 0, blocks, columns)
        between(w, block, blocks, blocks + 1, lambda _: rotated(head))

    w.claim("%args", "1", str(shape.heads * (blocks + 1)), work)
    return w, "void @absorb(ptr %args)"


def group_of(shape: LatentShape) -> int:
    """Return the number of heads in a group, which read each latent once for all of them."""
    return gcd(shape.heads, 4)


def _attend(shape: LatentShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    group, kind, dtype = group_of(shape), w.vector, shape.dtype
    many = size // group  # keys per vector of scores
    groups = shape.heads // group
    width = gcd(shape.rank // size, 4)
    queries, outputs, cache, lengths, blocks = (
        w.argument(name, "ptr") for name in (_ABSORBED, _FOUND, _CACHE, _LENGTHS, _BLOCKS)
    )
    stride, room = w.argument(_WIDTH), w.argument(_ROOM)
    slot = w.op(f"atomicrmw add ptr {w.at('%args', 1, 'i64')}, i64 1 monotonic")
    # scores [room, group] of this thread
    scores = w.at(w.argument(_SCORES, "ptr"), w.mul(slot, w.mul(room, group)))
    number_of_lane = ", ".join(f"i32 {lane // group}" for lane in range(size))

    def folded(vector: Value, combine) -> Value:  # type: ignore[no-untyped-def]
        """Reduce the lanes of each head with `combine`; all lanes of a head get the result."""
        distance = group
        while distance < size:
            lane = ", ".join(f"i32 {j ^ distance}" for j in range(size))
            other = w.op(f"shufflevector {kind} {vector}, {kind} poison, <{size} x i32> <{lane}>")
            vector, distance = combine(vector, other), 2 * distance
        return vector

    def row_of(table: Value, key: Value) -> Value:
        block = _number(w, table, w.op(f"udiv i64 {key}, {shape.block_size}"))
        row = w.add(w.mul(block, shape.block_size), w.op(f"urem i64 {key}, {shape.block_size}"))
        return w.at(cache, w.mul(row, shape.kept), dtype)

    def work(item: Value) -> None:
        entry = w.op(f"udiv i64 {item}, {groups}")
        first = w.mul(w.op(f"urem i64 {item}, {groups}"), group)
        length = _number(w, lengths, entry)
        table = w.at(blocks, w.mul(entry, stride), "i32")
        head = w.add(w.mul(entry, shape.heads), first)
        query = w.at(queries, w.mul(head, shape.kept))
        end = w.spread(w.op(f"trunc i64 {length} to i32"), "i32")

        def score(key: Value) -> list[Value]:
            rows = []
            for ahead in range(many):
                last = [("i64", w.add(key, ahead)), ("i64", w.sub(length, 1))]
                rows.append(row_of(table, w.call("i64", "llvm.smin.i64", last)))

            def part(at: Value, *held: Value) -> list[Value]:
                keys = [w.load_as_float(w.at(row, at, dtype), dtype) for row in rows]
                asked = [w.load(w.at(query, w.add(at, g * shape.kept))) for g in range(group)]
                return [
                    w.fma(own, other, held[number * group + g])
                    for number, own in enumerate(keys)
                    for g, other in enumerate(asked)
                ]

            zeros = [(kind, "zeroinitializer")] * size
            value = w.sums(w.loop(0, shape.kept, zeros, part, step=size))
            own = w.spread(w.op(f"trunc i64 {key} to i32"), "i32")
            own = w.op(f"add {w.integers} {own}, <{number_of_lane}>")
            seen = w.op(f"icmp slt {w.integers} {own}, {end}")
            least = w.all(_LEAST)
            value = w.op(f"select <{size} x i1> {seen}, {kind} {value}, {kind} {least}")
            w.store(value, w.at(scores, w.mul(key, group)))
            return []

        w.loop(0, length, [], score, step=many)

        def most(key: Value, best: Value) -> list[Value]:
            return [w.maximum(w.load(w.at(scores, w.mul(key, group))), best)]

        (best,) = w.loop(0, length, [(kind, w.all(_LEAST))], most, step=many)
        top = folded(best, w.maximum)

        def weigh(key: Value, total: Value) -> list[Value]:
            place = w.at(scores, w.mul(key, group))
            weight = w.exp(w.binary("fsub", w.load(place), top))
            w.store(weight, place)
            return [w.binary("fadd", total, weight)]

        (total,) = w.loop(0, length, [(kind, "zeroinitializer")], weigh, step=many)
        total = folded(total, lambda one, other: w.binary("fadd", one, other))
        # A token without keys is padding, and its result must still be finite.
        inverse = w.binary("fdiv", w.all(1.0), w.maximum(total, w.all(1e-37)))
        inverses = [
            w.spread(w.op(f"extractelement {kind} {inverse}, i64 {g}")) for g in range(group)
        ]

        def columns(column: Value) -> list[Value]:
            def in_block(start: Value, *held: Value) -> list[Value]:
                base = w.at(row_of(table, start), column, dtype)
                bounds = [("i64", w.sub(length, start)), ("i64", str(shape.block_size))]

                def mix_latent(index: Value, *held: Value) -> list[Value]:
                    row = w.at(base, w.mul(index, shape.kept), dtype)
                    parts = [
                        w.load_as_float(w.at(row, v * size, dtype), dtype) for v in range(width)
                    ]
                    line = w.at(scores, w.mul(w.add(start, index), group))
                    mixed = []
                    for g in range(group):
                        weight = w.spread(w.load(w.at(line, g), "float"))
                        mixed += [
                            w.fma(part, weight, held[g * width + v]) for v, part in enumerate(parts)
                        ]
                    return mixed

                carried = [(kind, value) for value in held]
                return w.loop(0, w.call("i64", "llvm.smin.i64", bounds), carried, mix_latent)

            zeros = [(kind, "zeroinitializer")] * (group * width)
            sums = w.loop(0, length, zeros, in_block, step=shape.block_size)
            for g in range(group):
                target = w.at(outputs, w.add(w.mul(w.add(head, g), shape.rank), column))
                for v in range(width):
                    value = w.binary("fmul", sums[g * width + v], inverses[g])
                    w.store(value, w.at(target, v * size))
            return []

        w.loop(0, shape.rank, [], columns, step=width * size)

    w.claim("%args", "1", w.mul(w.argument(_TOKENS), groups), work)
    return w, "void @attend(ptr %args)"


def _values(shape: LatentShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    attended, up, out = (w.argument(name, "ptr") for name in (_FOUND, _UP, _OUT))
    tokens = w.argument(_TOKENS)
    blocks = shape.value // size

    def work(item: Value) -> None:
        head = w.op(f"udiv i64 {item}, {blocks}")
        first = w.mul(w.op(f"urem i64 {item}, {blocks}"), size)
        row = w.add(w.add(w.mul(head, shape.expanded), shape.nope), first)
        matrix = w.at(up, w.mul(row, shape.rank), shape.up)

        def token(index: Value) -> None:
            at = w.add(w.mul(index, shape.heads), head)
            source = w.at(attended, w.mul(at, shape.rank))

            def part(column: Value, *held: Value) -> list[Value]:
                own, sums = w.load(w.at(source, column)), []
                for number, total in enumerate(held):
                    place = w.at(matrix, w.add(column, number * shape.rank), shape.up)
                    sums.append(w.fma(w.load_as_float(place, shape.up), own, total))
                return sums

            zeros = [(w.vector, "zeroinitializer")] * size
            value = w.sums(w.loop(0, shape.rank, zeros, part, step=size))
            w.store(value, w.at(out, w.add(w.mul(at, shape.value), first)))

        write_loop(w, 0, tokens, token)

    w.claim("%args", "1", str(shape.heads * blocks), work)
    return w, "void @values(ptr %args)"


@lru_cache(maxsize=16)
def _writer(heads: int, head: int, rope: int, rank: int, dtype: str) -> NativeFunction | None:
    nope = head - rope
    functions = compile_or_none(lambda size: module([_write(heads, nope, rope, rank, dtype, size)]))
    return functions and functions["write"]


@lru_cache(maxsize=16)
def _functions(shape: LatentShape) -> dict[str, NativeFunction] | None:
    kernels = (_absorb, _attend, _values)
    return compile_or_none(lambda size: module([kernel(shape, size) for kernel in kernels]))


def write(
    q: Tensor,
    latents: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    meta: AttentionMeta,
) -> Tensor | None:
    """Norm and rotate latents, write them to the cache, and return rotated queries.

    Arguments are those of `Kernels.latent_write`. Returns None, and writes nothing, if no kernel
    can be generated.
    """
    _, heads, head = q.shape
    rank, rope = norm.shape[0], cos_sin.shape[1]
    if not fits(q, rank, rope) or latents.stride(1) != 1:
        return None
    function = _writer(heads, head, rope, rank, NAMES[cache.dtype])
    if function is None:
        return None
    args = (ctypes.c_int64 * _WORDS)()
    out = q.new_empty(q.shape)
    args[_Q], args[_Q_STRIDE], args[_OUT] = q.data_ptr(), q.stride(0), out.data_ptr()
    args[_LATENTS], args[_LATENTS_STRIDE] = latents.data_ptr(), latents.stride(0)
    args[_NORM], args[_EPS], args[_TABLE] = norm.data_ptr(), bits(eps), cos_sin.data_ptr()
    args[_POSITIONS], args[_SLOTS] = meta.positions.data_ptr(), meta.slots.data_ptr()
    args[_CACHE], args[_TOKENS] = cache.data_ptr(), len(q)
    function(args, torch.get_num_threads() if len(q) >= _MANY else 1)
    return out


def attend(
    shape: LatentShape,
    q: Tensor,  # [n, heads, nope + rope], contiguous
    cache: Tensor,
    up: Tensor,
    scale: float,
    lengths: Tensor,  # [n] int32: number of keys that each token sees
    table: Tensor,  # [n, blocks] int32, with rows of any stride
    longest: int,  # upper bound of lengths
    out: Tensor,  # [n, heads * value], contiguous
) -> None:
    """Compute decode attention over latents into out; each token has its own number of keys.

    shape: from `shape_of`, which returns None on machines without a compiler.
    """
    functions = _functions(shape)
    assert functions is not None
    threads, size = torch.get_num_threads(), lanes()
    args, group = (ctypes.c_int64 * _WORDS)(), group_of(shape)
    absorbed = q.new_empty(len(q), shape.heads, shape.kept)
    outputs = q.new_empty(len(q), shape.heads, shape.rank)
    room = longest + size
    args[_Q], args[_OUT], args[_TOKENS] = q.data_ptr(), out.data_ptr(), len(q)
    args[_CACHE], args[_UP], args[_SCALE] = cache.data_ptr(), up.data_ptr(), bits(scale)
    args[_ABSORBED], args[_FOUND] = absorbed.data_ptr(), outputs.data_ptr()
    args[_LENGTHS], args[_BLOCKS], args[_WIDTH] = (
        lengths.data_ptr(), table.data_ptr(), table.stride(0)
    )  # fmt: skip
    args[_ROOM], args[_SCORES] = room, scratch(threads * group * room)
    for name in ("absorb", "attend", "values"):
        functions[name](args, threads)
