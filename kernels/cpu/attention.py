"""Rotation with the write of keys and values, and decode attention over paged keys: generated for
one shape of heads. Keys are read where they lie: nothing is gathered, padded or masked."""

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import CompilerUnavailable, NativeFunction, compile_ir, lanes
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.scratch import scratch
from kernels.metadata import AttentionMeta

_NAMES = {torch.bfloat16: "bfloat", torch.float16: "half"}
_MANY = 64  # tokens from which the rotation is worth all threads

# Words of args, after the two counters.
_QKV, _POSITIONS, _SLOTS, _TABLE, _Q, _KEYS, _VALUES, _TOKENS, _Q_NORM, _K_NORM, _EPS = range(2, 13)
_OUT, _LENGTHS, _BLOCKS, _WIDTH, _SCALE, _SCORES, _ROOM, _WORDS = range(13, 21)


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rotary_dim: int
    qk_norm: bool
    dtype: str  # of the cache, LLVM's name


def _rotate(shape: AttentionShape, size: int) -> tuple[IRWriter, str]:
    """For each token: heads turned, keys and values into the cache."""
    writer = IRWriter(size)
    dim, half = shape.head_dim, shape.rotary_dim // 2
    names = (_QKV, _POSITIONS, _SLOTS, _TABLE, _Q, _KEYS, _VALUES, _Q_NORM, _K_NORM)
    qkv, positions, slots, table, q_out, keys, values, q_norm, k_norm = (
        writer.argument(name, "ptr") for name in names
    )
    total = shape.num_heads + 2 * shape.num_kv_heads
    eps = writer.op(f"load float, ptr {writer.at('%args', _EPS, 'i64')}")

    def head(source: Value, norm: Value, rows: Value) -> list[Value]:
        """One head's vectors, normed and turned."""
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
        turned = list(parts)
        for i in range(half // size):
            j = i + half // size
            cos = writer.load(writer.at(rows, i * size))
            sin = writer.load(writer.at(rows, half + i * size))
            minus = writer.op(f"fneg {writer.vector} {sin}")
            turned[i] = writer.fma(parts[j], minus, writer.binary("fmul", parts[i], cos))
            turned[j] = writer.fma(parts[i], sin, writer.binary("fmul", parts[j], cos))
        return turned

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
                turned = head(writer.at(source, at), k_norm, rows)
                own = writer.at(source, writer.add(at, shape.num_kv_heads * dim))
                plain = [writer.load(writer.at(own, d)) for d in range(0, dim, size)]
                for cache, parts in ((keys, turned), (values, plain)):
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


def _decode(shape: AttentionShape, size: int) -> tuple[IRWriter, str]:
    """For each entry and key head: scores of all keys, softmax, weighted sum of the values."""
    writer = IRWriter(size)
    dim, group, kind = shape.head_dim, shape.num_heads // shape.num_kv_heads, writer.vector
    parts = dim // size
    names = (_Q, _KEYS, _VALUES, _OUT, _LENGTHS, _BLOCKS)
    q, keys, values, out, lengths, blocks = (writer.argument(name, "ptr") for name in names)
    width, room = writer.argument(_WIDTH), writer.argument(_ROOM)
    scale = writer.op(f"load float, ptr {writer.at('%args', _SCALE, 'i64')}")
    slot = writer.op(f"atomicrmw add ptr {writer.at('%args', 1, 'i64')}, i64 1 monotonic")
    # [group, room] scores of this thread
    scores = writer.at(writer.argument(_SCORES, "ptr"), writer.mul(slot, writer.mul(room, group)))

    def work(item: Value) -> None:
        entry = writer.op(f"udiv i64 {item}, {shape.num_kv_heads}")
        kv_head = writer.op(f"urem i64 {item}, {shape.num_kv_heads}")
        length = writer.op(f"load i32, ptr {writer.at(lengths, entry, 'i32')}")
        length = writer.op(f"sext i32 {length} to i64")
        table = writer.at(blocks, writer.mul(entry, width), "i32")
        first = writer.mul(item, group * dim)  # = (entry * num_heads + kv_head * group) * dim
        query = [
            [writer.load(writer.at(writer.at(q, first), g * dim + p * size)) for p in range(parts)]
            for g in range(group)
        ]
        inside = writer.mul(kv_head, shape.block_size * dim)

        def over_keys(cache: Value, carried: list[tuple[str, Value]], each) -> list[Value]:  # type: ignore[no-untyped-def]
            """each(position, address of the key, *carried) for all keys, block by block."""

            def in_block(start: Value, *held: Value) -> list[Value]:
                number = writer.op(f"udiv i64 {start}, {shape.block_size}")
                block = writer.op(f"load i32, ptr {writer.at(table, number, 'i32')}")
                block = writer.op(f"sext i32 {block} to i64")
                size_of_block = shape.num_kv_heads * shape.block_size * dim
                base = writer.add(writer.mul(block, size_of_block), inside)
                left = writer.sub(length, start)
                count = writer.call(
                    "i64", "llvm.smin.i64", [("i64", left), ("i64", str(shape.block_size))]
                )

                def one(index: Value, *held: Value) -> list[Value]:
                    at = writer.add(base, writer.mul(index, dim))
                    address = writer.at(cache, at, shape.dtype)
                    return each(writer.add(start, index), address, *held)

                kinds = [kind for kind, _ in carried]
                return writer.loop(0, count, list(zip(kinds, held, strict=True)), one)

            return writer.loop(0, length, carried, in_block, step=shape.block_size)

        def score(position: Value, address: Value) -> list[Value]:
            key = [
                writer.load_as_float(writer.at(address, p * size, shape.dtype), shape.dtype)
                for p in range(parts)
            ]
            for g in range(group):
                total = writer.binary("fmul", key[0], query[g][0])
                for p in range(1, parts):
                    total = writer.fma(key[p], query[g][p], total)
                value = writer.op(f"fmul float {writer.sum(total)}, {scale}")
                place = writer.at(scores, writer.add(writer.mul(room, g), position))
                writer.store(value, place, "float")
            return []

        over_keys(keys, [], score)
        inverses = []
        for g in range(group):
            row = writer.at(scores, writer.mul(room, g))
            # Up to a whole vector: scores that add nothing.
            writer.store(writer.all(-3e38), writer.at(row, length))

            def most(at: Value, best: Value, row: Value = row) -> list[Value]:
                return [writer.maximum(writer.load(writer.at(row, at)), best)]

            (best,) = writer.loop(0, length, [(kind, writer.all(-3e38))], most, step=size)
            top = writer.spread(writer.largest(best))

            def weigh(at: Value, total: Value, row: Value = row, top: Value = top) -> list[Value]:
                place = writer.at(row, at)
                weight = writer.exp(writer.binary("fsub", writer.load(place), top))
                writer.store(weight, place)
                return [writer.binary("fadd", total, weight)]

            (total,) = writer.loop(0, length, [(kind, "zeroinitializer")], weigh, step=size)
            # An entry without keys is padding, whose result must be finite.
            tiny = ("float", "0x3810000000000000")
            below = writer.call("float", "llvm.maxnum.f32", [("float", writer.sum(total)), tiny])
            inverses.append(writer.spread(writer.op(f"fdiv float 1.0, {below}")))

        def mix(position: Value, address: Value, *sums: Value) -> list[Value]:
            value = [
                writer.load_as_float(writer.at(address, p * size, shape.dtype), shape.dtype)
                for p in range(parts)
            ]
            mixed = []
            for g in range(group):
                place = writer.at(scores, writer.add(writer.mul(room, g), position))
                weight = writer.spread(writer.load(place, "float"))
                mixed += [writer.fma(value[p], weight, sums[g * parts + p]) for p in range(parts)]
            return mixed

        sums = over_keys(values, [(kind, "zeroinitializer")] * (group * parts), mix)
        for g in range(group):
            for p in range(parts):
                place = writer.at(writer.at(out, first), g * dim + p * size)
                writer.store(writer.binary("fmul", sums[g * parts + p], inverses[g]), place)

    items = writer.mul(writer.argument(_TOKENS), shape.num_kv_heads)
    writer.claim("%args", "1", items, work)
    return writer, "void @decode(ptr %args)"


@lru_cache(maxsize=16)
def _functions(shape: AttentionShape) -> dict[str, NativeFunction] | None:
    """None where there is no compiler."""
    try:
        return compile_ir(module([_rotate(shape, lanes()), _decode(shape, lanes())]))
    except CompilerUnavailable:
        return None


class CpuAttention:
    """The two functions for one shape of heads, and their arguments."""

    def __init__(self, shape: AttentionShape, functions: dict[str, NativeFunction]) -> None:
        self._shape = shape
        self._rotate, self._decode = functions["rotate"], functions["decode"]
        self._args = (ctypes.c_int64 * _WORDS)()

    def rope_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMeta,
    ) -> Tensor:
        shape, args = self._shape, self._args
        tokens = qkv.shape[0]
        q = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
        args[_QKV], args[_Q] = qkv.data_ptr(), q.data_ptr()
        args[_POSITIONS], args[_SLOTS] = meta.positions.data_ptr(), meta.slots.data_ptr()
        args[_TABLE] = cos_sin.data_ptr()
        args[_KEYS], args[_VALUES] = k_cache.data_ptr(), v_cache.data_ptr()
        args[_TOKENS] = tokens
        if q_norm is not None and k_norm is not None:
            args[_Q_NORM], args[_K_NORM] = q_norm.data_ptr(), k_norm.data_ptr()
            args[_EPS] = _bits(eps)
        self._rotate(args, torch.get_num_threads() if tokens >= _MANY else 1)
        return q

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        meta: AttentionMeta,
        out: Tensor,
    ) -> None:
        """The first meta.num_decodes rows of out [num_tokens, num_heads * head_dim]."""
        shape, args = self._shape, self._args
        threads = torch.get_num_threads()
        room = meta.max_kv_len + 16  # scores are padded to a vector
        group = shape.num_heads // shape.num_kv_heads
        args[_Q], args[_OUT] = q.data_ptr(), out.data_ptr()
        args[_KEYS], args[_VALUES] = k_cache.data_ptr(), v_cache.data_ptr()
        args[_LENGTHS] = meta.kv_len.data_ptr()
        args[_BLOCKS], args[_WIDTH] = meta.block_table.data_ptr(), meta.block_table.stride(0)
        args[_TOKENS], args[_SCALE] = meta.num_decodes, _bits(scale)
        args[_ROOM], args[_SCORES] = room, scratch(threads * group * room).data_ptr()
        self._decode(args, threads)


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


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
    """None where heads do not fill vectors, for a float32 cache, or without a compiler."""
    try:
        size = lanes()
    except CompilerUnavailable:
        return None
    if head_dim % size or rotary_dim % (2 * size) or dtype not in _NAMES:
        return None
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, block_size, rotary_dim, qk_norm, _NAMES[dtype]
    )
    functions = _functions(shape)
    return None if functions is None else CpuAttention(shape, functions)
