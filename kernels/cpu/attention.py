"""Rotary embeddings, KV cache writes and decode attention over a paged KV cache.

The kernels are generated for one shape of heads. They read keys in place, without gathering,
padding or masks. Keys before a window or a chunk are not read at all.

With AVX512-BF16, a bfloat16 KV cache is multiplied without conversion. Queries and softmax weights
are rounded to bfloat16; products are exact, sums and softmax are float32. On other processors, and
for float16, keys and values are converted to float32.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from kernels.cpu.codegen.bfloat16_pairs import Bfloat16Pairs
from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_ir
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import CompilerUnavailable, dot_bf16, lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.scores import Numbers, Places, Scored
from kernels.kv.inputs import RopeInputs
from kernels.metadata import AttentionMeta

_NAMES = {torch.bfloat16: "bfloat", torch.float16: "half", torch.float32: "float"}
_MANY = 64  # number of tokens from which rotary embeddings use all threads

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_QKV, _POSITIONS, _SLOTS, _TABLE, _Q, _KEYS, _VALUES, _TOKENS, _Q_NORM, _K_NORM, _EPS = range(2, 13)
_OUT, _LENGTHS, _BLOCKS, _WIDTH, _SCALE, _SCORES, _ROOM, _WINDOW, _CHUNK = range(13, 22)
_NUMBERS, _WORDS = 22, 25  # three words of score modifiers, see scores.py
_ALL = 1 << 40  # window or chunk size that stands for none: more keys than any request has


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rotary_dim: int
    qk_norm: bool
    dtype: str  # type of the KV cache, as LLVM names it
    pairs: bool = False  # whether decodes multiply pairs of bfloat16


def _rotate(shape: AttentionShape, size: int) -> tuple[IRWriter, str]:
    """Generate the kernel that norms and rotates queries and keys, and writes keys and values.

    Returns the kernel's writer and declaration. The shape says whether heads have norms.
    size: the number of floats in a vector register.
    """
    writer = IRWriter(size)
    dim, half = shape.head_dim, shape.rotary_dim // 2
    names = (_QKV, _POSITIONS, _SLOTS, _TABLE, _Q, _KEYS, _VALUES, _Q_NORM, _K_NORM)
    qkv, positions, slots, table, q_out, keys, values, q_norm, k_norm = (
        writer.argument(name, "ptr") for name in names
    )
    total = shape.num_heads + 2 * shape.num_kv_heads
    eps = writer.op(f"load float, ptr {writer.at('%args', _EPS, 'i64')}")

    def head(source: Value, norm: Value, rows: Value) -> list[Value]:
        """Return one head's vectors after RMS norm (if the shape has it) and rotary embeddings."""
        parts = [writer.load(writer.at(source, at)) for at in range(0, dim, size)]
        if shape.qk_norm:
            squares = "zeroinitializer"
            for part in parts:
                squares = writer.fma(part, part, squares)
            mean = writer.op(f"fdiv float {writer.sum(squares)}, {float(dim):e}")
            mean = writer.op(f"fadd float {mean}, {eps}")
            root = writer.call("float", "llvm.sqrt.f32", [("float", mean)])
            scale = writer.spread(writer.op(f"fdiv float 1.0, {root}"))
            parts = [
                writer.binary(
                    "fmul",
                    writer.binary("fmul", part, scale),
                    writer.load(writer.at(norm, i * size)),
                )
                for i, part in enumerate(parts)
            ]
        rotated = list(parts)
        for i in range(half // size):
            j = i + half // size
            cos = writer.load(writer.at(rows, i * size))
            sin = writer.load(writer.at(rows, half + i * size))
            minus = writer.op(f"fneg {writer.vector} {sin}")
            rotated[i] = writer.fma(parts[j], minus, writer.binary("fmul", parts[i], cos))
            rotated[j] = writer.fma(parts[i], sin, writer.binary("fmul", parts[j], cos))
        return rotated

    def token(index: Value) -> None:
        position = writer.op(f"load i32, ptr {writer.at(positions, index, 'i32')}")
        position = writer.op(f"sext i32 {position} to i64")
        rows = writer.at(table, writer.mul(position, shape.rotary_dim))
        source = writer.at(qkv, writer.mul(index, total * dim))
        target = writer.at(q_out, writer.mul(index, shape.num_heads * dim))

        def query(number: Value) -> list[Value]:
            at = writer.mul(number, dim)
            for i, part in enumerate(head(writer.at(source, at), q_norm, rows)):
                writer.store(part, writer.at(writer.at(target, at), i * size))
            return []

        writer.loop(0, shape.num_heads, [], query)
        slot = writer.op(f"load i64, ptr {writer.at(slots, index, 'i64')}")

        def write() -> None:
            block = writer.op(f"udiv i64 {slot}, {shape.block_size}")
            inside = writer.op(f"urem i64 {slot}, {shape.block_size}")
            block = writer.mul(block, shape.num_kv_heads * shape.block_size)
            first = writer.add(block, inside)

            def key(number: Value) -> list[Value]:
                row = writer.add(first, writer.mul(number, shape.block_size))
                place = writer.mul(row, dim)
                at = writer.mul(writer.add(number, shape.num_heads), dim)
                rotated = head(writer.at(source, at), k_norm, rows)
                own = writer.at(source, writer.add(at, shape.num_kv_heads * dim))
                plain = [writer.load(writer.at(own, d)) for d in range(0, dim, size)]
                for cache, parts in ((keys, rotated), (values, plain)):
                    start = writer.at(cache, place, shape.dtype)
                    for i, part in enumerate(parts):
                        writer.store_float(
                            part, writer.at(start, i * size, shape.dtype), shape.dtype
                        )
                return []

            writer.loop(0, shape.num_kv_heads, [], key)

        writer.when(writer.op(f"icmp sge i64 {slot}, 0"), write)

    writer.claim("%args", "16", writer.argument(_TOKENS), token)
    return writer, "void @rotate(ptr %args)"


def _decode(shape: AttentionShape, scored: Scored, size: int) -> tuple[IRWriter, str]:
    """Generate the decode kernel: scores of visible keys, softmax, weighted sum of values.

    A work item is one request and one key head.
    """
    writer = IRWriter(size)
    dim, group, kind = shape.head_dim, shape.num_heads // shape.num_kv_heads, writer.vector
    parts = dim // size
    names = (_Q, _KEYS, _VALUES, _OUT, _LENGTHS, _BLOCKS)
    q, keys, values, out, lengths, blocks = (writer.argument(name, "ptr") for name in names)
    width, room = writer.argument(_WIDTH), writer.argument(_ROOM)
    window, chunk = writer.argument(_WINDOW), writer.argument(_CHUNK)
    places = Places(writer, scored, _NUMBERS)

    def most_of(a: Value, b: Value | int) -> Value:
        return writer.call("i64", "llvm.smax.i64", [("i64", a), ("i64", str(b))])

    scale = writer.op(f"load float, ptr {writer.at('%args', _SCALE, 'i64')}")
    slot = writer.op(f"atomicrmw add ptr {writer.at('%args', 1, 'i64')}, i64 1 monotonic")
    # Scores [group, room] of this thread. Whole blocks are scored, so up to a block of scores lies
    # before the first visible key.
    scores = writer.at(writer.argument(_SCORES, "ptr"), writer.mul(slot, writer.mul(room, group)))
    scores = writer.at(scores, shape.block_size)
    many = shape.block_size % size == 0
    pairs = Bfloat16Pairs(writer)

    def work(item: Value) -> None:
        entry = writer.op(f"udiv i64 {item}, {shape.num_kv_heads}")
        kv_head = writer.op(f"urem i64 {item}, {shape.num_kv_heads}")
        length = writer.op(f"load i32, ptr {writer.at(lengths, entry, 'i32')}")
        length = writer.op(f"sext i32 {length} to i64")
        last = writer.sub(length, 1)
        piece = writer.mul(writer.op(f"sdiv i64 {last}, {chunk}"), chunk)
        begin = most_of(most_of(writer.sub(length, window), piece), 0)
        seen = writer.sub(length, begin)
        table = writer.at(blocks, writer.mul(entry, width), "i32")
        first = writer.mul(item, group * dim)  # = (entry * num_heads + kv_head * group) * dim
        query = [
            [writer.load(writer.at(writer.at(q, first), g * dim + p * size)) for p in range(parts)]
            for g in range(group)
        ]
        if shape.pairs:
            query = [[pairs.rounded(*row[p : p + 2]) for p in range(0, parts, 2)] for row in query]
        inside = writer.mul(kv_head, shape.block_size * dim)

        last_block = writer.op(f"sdiv i64 {last}, {shape.block_size}")

        def base_of(number: Value) -> Value:
            """Return the offset in the KV cache of this head's part of the request's `number`-th
            block.
            """
            block = writer.op(f"load i32, ptr {writer.at(table, number, 'i32')}")
            block = writer.op(f"sext i32 {block} to i64")
            size_of_block = shape.num_kv_heads * shape.block_size * dim
            return writer.add(writer.mul(block, size_of_block), inside)

        def ask(cache: Value, number: Value) -> None:
            """Prefetch this head's part of the request's `number`-th block, or of its last block if
            there are fewer.

            The hardware prefetcher cannot follow the block table.
            """
            operands = [("i64", number), ("i64", last_block)]
            base = base_of(writer.call("i64", "llvm.smin.i64", operands))
            for line in range(0, shape.block_size * dim, 32):
                writer.prefetch(writer.at(cache, writer.add(base, line), shape.dtype))

        def over_keys(  # type: ignore[no-untyped-def]
            cache: Value, carried: list[tuple[str, Value]], each, step: int = 1, two=None
        ) -> list[Value]:
            """Emit a loop over all visible keys, whose body each(number, address, *carried) emits.

            Returns the carried values after the loop.

            number: index of the key, 0 for the first visible one.
            address: address of the key in the cache.
            step: keys per call, aligned to the beginning of blocks; some of them may be invisible.
            two: called for two adjacent keys of a block; `each` is then called for a key without
            a neighbour.
            """

            def in_block(start: Value, *held: Value) -> list[Value]:
                number = writer.op(f"udiv i64 {start}, {shape.block_size}")
                base = base_of(number)
                ask(cache, writer.add(number, 1))
                remaining = writer.sub(length, start)
                before = most_of(writer.sub(begin, start), 0)
                passed = writer.sub(start, begin)
                count = writer.call(
                    "i64", "llvm.smin.i64", [("i64", remaining), ("i64", str(shape.block_size))]
                )

                def told(index: Value, what, *held: Value) -> list[Value]:  # type: ignore[no-untyped-def]
                    at = writer.add(base, writer.mul(index, dim))
                    address = writer.at(cache, at, shape.dtype)
                    return what(writer.add(passed, index), address, *held)

                def visit_key(index: Value, *held: Value) -> list[Value]:
                    return told(index, each, *held)

                def both(index: Value, *held: Value) -> list[Value]:
                    return told(index, two, *held)

                first = (
                    before
                    if step == 1
                    else writer.sub(before, writer.op(f"urem i64 {before}, {step}"))
                )
                kinds = [kind for kind, _ in carried]
                if two is not None:
                    some = writer.op(f"and i64 {writer.sub(count, before)}, -2")
                    first = writer.add(before, some)
                    start_values = list(zip(kinds, held, strict=True))
                    held = tuple(writer.loop(before, first, start_values, both, step=2))
                return writer.loop(
                    first, count, list(zip(kinds, held, strict=True)), visit_key, step=step
                )

            whole = writer.sub(begin, writer.op(f"urem i64 {begin}, {shape.block_size}"))
            return writer.loop(whole, length, carried, in_block, step=shape.block_size)

        def key_at(address: Value) -> list[Value]:
            if shape.pairs:
                at = range(0, dim, 2 * size)
                return [writer.load(writer.at(address, d, "i16"), pairs.kind) for d in at]
            return [
                writer.load_as_float(writer.at(address, p * size, shape.dtype), shape.dtype)
                for p in range(parts)
            ]

        def product(key: list[Value], g: int) -> Value:
            """Multiply a key by a head's query. The lanes of the result are not summed yet."""
            if shape.pairs:
                total = "zeroinitializer"
                for a, b in zip(key, query[g], strict=True):
                    total = pairs.dot(total, a, b)
                return total
            total = writer.binary("fmul", key[0], query[g][0])
            for p in range(1, parts):
                total = writer.fma(key[p], query[g][p], total)
            return total

        def score(number: Value, address: Value) -> list[Value]:
            key = key_at(address)
            for g in range(group):
                total = product(key, g)
                value = writer.op(f"fmul float {writer.sum_of_pairs(total)}, {scale}")
                place = writer.at(scores, writer.add(writer.mul(room, g), number))
                writer.store(value, place, "float")
            return []

        def score_many(number: Value, address: Value) -> list[Value]:
            """Store the scores of a vector of keys, from key `number` on, for every head."""
            totals: list[list[Value]] = [[] for _ in range(group)]
            for at in range(size):
                key = key_at(writer.at(address, at * dim, shape.dtype))
                for g in range(group):
                    totals[g].append(product(key, g))
            for g in range(group):
                value = writer.binary("fmul", writer.sums(totals[g]), writer.spread(scale))
                writer.store(value, writer.at(scores, writer.add(writer.mul(room, g), number)))
            return []

        over_keys(keys, [], score_many if many else score, size if many else 1)
        ask(values, writer.op(f"udiv i64 {begin}, {shape.block_size}"))
        inverses = []
        for g in range(group):
            row = writer.at(scores, writer.mul(room, g))
            head = writer.add(writer.mul(kv_head, group), g)
            if not scored.plain:
                slope = places.slope(head)

                def change(at: Value, row: Value = row, slope: Value = slope) -> list[Value]:
                    place, ahead = writer.at(row, at), writer.sub(writer.add(begin, at), last)
                    writer.store(places.change(writer.load(place), slope, ahead), place)
                    return []

                writer.loop(0, seen, [], change, step=size)
            # Pad the scores to a whole vector with scores whose softmax weights are 0.
            writer.store(writer.all(-3e38), writer.at(row, seen))

            def most(at: Value, best: Value, row: Value = row) -> list[Value]:
                return [writer.maximum(writer.load(writer.at(row, at)), best)]

            (best,) = writer.loop(0, seen, [(kind, writer.all(-3e38))], most, step=size)
            top = writer.largest(best)
            sink = places.sink(head) if scored.sinks else ""
            if sink:
                top = writer.maximum(top, sink)

            def weigh(at: Value, total: Value, row: Value = row, top: Value = top) -> list[Value]:
                place = writer.at(row, at)
                weight = writer.exp(writer.binary("fsub", writer.load(place), top))
                # Weights replace scores in place. A weight has half of a score's bytes, so it only
                # overwrites scores that were already read.
                if shape.pairs:
                    writer.store_pairs(weight, writer.at(row, at, "bfloat"))
                else:
                    writer.store(weight, place)
                return [writer.binary("fadd", total, weight)]

            (total,) = writer.loop(0, seen, [(kind, "zeroinitializer")], weigh, step=size)
            weights = writer.sum(total)
            if sink:
                weight = writer.exp(writer.binary("fsub", sink, top))
                weight = writer.op(f"extractelement {kind} {weight}, i64 0")
                weights = writer.op(f"fadd float {weights}, {weight}")
            # An entry without keys is padding, and its result must still be finite.
            tiny = ("float", "0x3810000000000000")
            below = writer.call("float", "llvm.maxnum.f32", [("float", weights), tiny])
            inverses.append(writer.spread(writer.op(f"fdiv float 1.0, {below}")))

        def mix(number: Value, address: Value, *sums: Value) -> list[Value]:
            value = [
                writer.load_as_float(writer.at(address, p * size, shape.dtype), shape.dtype)
                for p in range(parts)
            ]
            mixed = []
            for g in range(group):
                place = writer.at(scores, writer.add(writer.mul(room, g), number))
                weight = writer.spread(writer.load(place, "float"))
                mixed += [writer.fma(value[p], weight, sums[g * parts + p]) for p in range(parts)]
            return mixed

        def mix_pairs(number: Value, address: Value, sums: Sequence[Value], alone: bool):  # type: ignore[no-untyped-def]
            """Return sums plus the weighted values of the key at `address` and of the next key.

            number: index of the key's weight. alone: whether to leave the next key out.
            """
            mixed = list(sums)
            weights = [
                pairs.spread(
                    writer.at(writer.at(scores, writer.mul(room, g)), number, "bfloat"),
                    "i16" if alone else "i32",
                )
                for g in range(group)
            ]
            for p in range(0, parts, 2):
                row = writer.at(address, p * size, "bfloat")
                following = None if alone else writer.at(row, dim, "bfloat")
                for half, value in enumerate(pairs.side_by_side(row, following)):
                    for g in range(group):
                        at = g * parts + p + half
                        mixed[at] = pairs.dot(mixed[at], value, weights[g])
            return mixed

        start = [(kind, "zeroinitializer")] * (group * parts)
        if shape.pairs:
            sums = over_keys(
                values,
                start,
                lambda number, address, *sums: mix_pairs(number, address, sums, alone=True),
                two=lambda number, address, *sums: mix_pairs(number, address, sums, alone=False),
            )
            ordered = (pairs.in_order(*sums[at : at + 2]) for at in range(0, group * parts, 2))
            sums = [*chain.from_iterable(ordered)]
        else:
            sums = over_keys(values, start, mix)
        for g in range(group):
            for p in range(parts):
                place = writer.at(writer.at(out, first), g * dim + p * size)
                writer.store(writer.binary("fmul", sums[g * parts + p], inverses[g]), place)

    items = writer.mul(writer.argument(_TOKENS), shape.num_kv_heads)
    writer.claim("%args", "1", items, work)
    return writer, "void @decode(ptr %args)"


class CpuRotation:
    """The rotary kernel for one shape of heads. Raises CompilerUnavailable."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._rotate = compile_ir(module([_rotate(shape, lanes())]))["rotate"]

    def rope_kv_write(
        self, inputs: RopeInputs, cos_sin: Tensor, rows: Tensor, slots: Tensor
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to plain caches; return queries.

        inputs: see `Kernels.rope_kv_write`.

        cos_sin, rows: the rotary table and the tokens' rows in it, see `AttentionMeta.rotation`.
        slots: each token's place in the caches, see `AttentionMeta.slots`.
        """
        qkv, _, q_norm, k_norm, eps, k_cache, v_cache, _, _ = inputs
        assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
        shape, args = self._shape, (ctypes.c_int64 * _WORDS)()
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        args[_QKV], args[_Q] = qkv.data_ptr(), q.data_ptr()
        args[_POSITIONS], args[_SLOTS] = rows.data_ptr(), slots.data_ptr()
        args[_TABLE] = cos_sin.data_ptr()
        args[_KEYS], args[_VALUES] = k_cache.data_ptr(), v_cache.data_ptr()
        args[_TOKENS] = tokens
        if q_norm is not None and k_norm is not None:
            args[_Q_NORM], args[_K_NORM] = q_norm.data_ptr(), k_norm.data_ptr()
            args[_EPS] = bits(eps)
        self._rotate(args, torch.get_num_threads() if tokens >= _MANY else 1)
        return q


class CpuAttention(CpuRotation):
    """The rotary and the decode kernel for one shape of heads. Raises CompilerUnavailable."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        plain = compile_ir(module([_decode(shape, Scored(), lanes())]))
        self._decodes: dict[Scored, NativeFunction] = {Scored(): plain["decode"]}

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        meta: AttentionMeta,
        out: Tensor,
        numbers: Numbers,
    ) -> None:
        """Compute attention of the step's decodes into the first meta.num_decodes rows of out.

        out: [num_tokens, num_heads * head_dim].
        """
        shape, args = self._shape, (ctypes.c_int64 * _WORDS)()
        threads = torch.get_num_threads()
        window, chunk = 0 if meta.chunk else meta.window, meta.chunk
        # Size of a row of scores: up to a block of invisible keys first, then padding to a vector.
        room = min(meta.max_kv_len, window or chunk or meta.max_kv_len) + 32 + shape.block_size
        group = shape.num_heads // shape.num_kv_heads
        args[_Q], args[_OUT] = q.data_ptr(), out.data_ptr()
        args[_KEYS], args[_VALUES] = k_cache.data_ptr(), v_cache.data_ptr()
        args[_LENGTHS] = meta.kv_len.data_ptr()
        args[_BLOCKS], args[_WIDTH] = meta.block_table.data_ptr(), meta.block_table.stride(0)
        args[_TOKENS], args[_SCALE] = meta.num_decodes, bits(scale)
        args[_ROOM], args[_SCORES] = room, scratch(threads * group * room)
        args[_WINDOW], args[_CHUNK] = window or _ALL, chunk or _ALL
        numbers.write_words(args, _NUMBERS)
        scored = numbers.scored
        decode = self._decodes.get(scored)
        if decode is None:
            function = _decode(shape, scored, lanes())
            decode = self._decodes[scored] = compile_ir(module([function]))["decode"]
        decode(args, threads)


def _shape_for(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rotary_dim: int,
    qk_norm: bool,
    dtype: torch.dtype,
) -> AttentionShape | None:
    """Return the shape, or None if head sizes are not multiples of a vector.

    Raises CompilerUnavailable.
    """
    size = lanes()
    if head_dim % size or rotary_dim % (2 * size) or dtype not in _NAMES:
        return None
    pairs = dtype == torch.bfloat16 and head_dim % (2 * size) == 0 and dot_bf16()
    return AttentionShape(
        num_heads, num_kv_heads, head_dim, block_size, rotary_dim, qk_norm, _NAMES[dtype], pairs
    )


@lru_cache(maxsize=16)
def attention_for(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rotary_dim: int,
    qk_norm: bool,
    dtype: torch.dtype,
) -> CpuAttention | None:
    """Return the attention kernels for a shape, or None if they cannot be generated.

    Kernels cannot be generated if head sizes are not multiples of a vector, for a float32 cache, or
    without a compiler.
    """
    try:
        shape = _shape_for(
            num_heads, num_kv_heads, head_dim, block_size, rotary_dim, qk_norm, dtype
        )
        return None if shape is None or dtype == torch.float32 else CpuAttention(shape)
    except CompilerUnavailable:
        return None


@lru_cache(maxsize=16)
def rotation_for(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rotary_dim: int,
    dtype: torch.dtype,
) -> CpuRotation | None:
    """Return the rotary kernel for a shape, or None if it cannot be generated.

    No kernel can be generated if head sizes are not multiples of a vector, or without a compiler.
    rotary_dim: 0 for no rotary embeddings.
    """
    try:
        shape = _shape_for(num_heads, num_kv_heads, head_dim, block_size, rotary_dim, False, dtype)
        return None if shape is None else CpuRotation(shape)
    except CompilerUnavailable:
        return None
