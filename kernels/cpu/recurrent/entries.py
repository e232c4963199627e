"""Entries, the sequences of a step in generated kernels of recurrent layers, and helper functions.

Each kernel processes an entry's tokens one after the other, for decodes and prompts alike, and the
state in memory is the state after the last token. So a token's results do not depend on how its
prompt was chunked, bit for bit. On a CPU this is as fast as a chunked formulation, whose matmuls
would take the same number of operations.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import keep
from kernels.cpu.codegen.ir import IRWriter, Value, constant
from kernels.metadata import AttentionMeta

# Indices of the kernels' arguments in args. The first two words are the threads' work counters.
_ROWS, _STARTS, _LENGTHS, _COUNT, _TOKENS = range(2, 7)
FIRST = 7  # index of the first argument that differs between kernels
_MANY = 1 << 13
TOKENS = 64  # tokens that are processed at once, so that their inputs stay in the cache


def put_entries(args: "ctypes.Array[ctypes.c_int64]", meta: AttentionMeta, tokens: int) -> None:
    """Write a step's entries and its number of tokens to a kernel's arguments `args`."""
    rows, starts, lengths = meta.rows, meta.query_start, meta.kv_len
    assert rows is not None and rows.is_contiguous() and lengths.is_contiguous()
    args[_ROWS], args[_STARTS], args[_LENGTHS] = (
        rows.data_ptr(), starts.data_ptr(), lengths.data_ptr()
    )  # fmt: skip
    args[_COUNT], args[_TOKENS] = len(lengths), tokens
    keep((rows, starts, lengths))


def threads_for(numbers: int) -> int:
    """Return the number of threads for a kernel whose result has `numbers` elements.

    The number is one for few elements, as waking other threads would take longer.
    """
    return torch.get_num_threads() if numbers >= _MANY else 1


def clear_padding(out: Tensor, meta: AttentionMeta) -> Tensor:
    """Set the rows of out after the last entry's end to zero, and return out."""
    starts = meta.query_start_host
    end = int(meta.query_start[-1]) if starts is None else starts[-1]
    if end < len(out):
        out[end:].zero_()
    return out


def rows_of(*tensors: Tensor) -> bool:
    """Whether kernels can read all tensors: 4-byte elements, contiguous in the last dimension."""
    return all(tensor.dtype.itemsize == 4 and tensor.stride(-1) == 1 for tensor in tensors)


@dataclass(frozen=True)
class Entry:
    """An entry (request) of a step, as values of the kernel.

    row: index of the request's state.
    begin: the entry's first token in the step.
    count: the entry's number of tokens.
    begins: whether this is the request's first step.
    """

    row: Value
    begin: Value
    count: Value
    begins: Value


class Entries:
    def __init__(self, writer: IRWriter) -> None:
        self._writer = writer
        self._rows, self._starts, self._lengths = (
            writer.argument(word, "ptr") for word in (_ROWS, _STARTS, _LENGTHS)
        )
        self.count, self.tokens = writer.argument(_COUNT), writer.argument(_TOKENS)

    def _number(self, array: Value, index: Value) -> Value:
        narrow = self._writer.load(self._writer.at(array, index, "i32"), "i32")
        return self._writer.op(f"sext i32 {narrow} to i64")

    def at(self, index: Value) -> Entry:
        w = self._writer
        begin = self._number(self._starts, index)
        count = w.sub(self._number(self._starts, w.add(index, 1)), begin)
        length = self._number(self._lengths, index)
        row = w.load(w.at(self._rows, index, "i64"), "i64")
        return Entry(row, begin, count, w.op(f"icmp eq i64 {length}, {count}"))

    def claim(self, items: int, body: Callable[[Entry, Value], None]) -> None:
        """Generate a loop of body(entry, item) over all entries with tokens, and items [0, items).

        Threads divide the pairs of entry and item.
        """
        w = self._writer

        def work(index: Value) -> None:
            entry = self.at(w.op(f"udiv i64 {index}, {items}"))
            some = w.op(f"icmp sgt i64 {entry.count}, 0")
            w.when(some, lambda: body(entry, w.op(f"urem i64 {index}, {items}")))

        w.claim("%args", "1", w.mul(self.count, items), work)


def between(w: IRWriter, item: Value, begin: int, end: int, body: Callable[[Value], None]) -> None:
    """Generate `if begin <= item < end: body(item - begin)`."""
    if begin < end:
        own = w.sub(item, begin)
        w.when(w.op(f"icmp ult i64 {own}, {end - begin}"), lambda: body(own))


def parts(size: int, lanes: int) -> list[tuple[int, int]]:
    """Return (first, count) for each vector of `lanes` lanes that is needed for `size` numbers."""
    return [(at, min(lanes, size - at)) for at in range(0, size, lanes)]


def write_loop(
    w: IRWriter, begin: Value | int, end: Value | int, body: Callable[[Value], None]
) -> None:
    """Generate `for i in range(begin, end): body(i)`."""

    def iteration(index: Value) -> list[Value]:
        body(index)
        return []

    w.loop(begin, end, [], iteration)


def by_tokens(w: IRWriter, count: Value, body: Callable[[Value, Value], None]) -> None:
    """Generate a loop of body(first, end) over chunks of at most TOKENS tokens out of `count`."""

    def piece(first: Value) -> list[Value]:
        after = [("i64", w.add(first, TOKENS)), ("i64", count)]
        body(first, w.call("i64", "llvm.smin.i64", after))
        return []

    w.loop(0, count, [], piece, step=TOKENS)


def clear(w: IRWriter, place: Value, size: int) -> None:
    """Generate the store of zeros to `size` float32 elements at address `place`."""
    whole = size - size % w.lanes

    def clear_vector(at: Value) -> list[Value]:
        w.store("zeroinitializer", w.at(place, at))
        return []

    w.loop(0, whole, [], clear_vector, step=w.lanes)
    if size > whole:
        w.store_some("zeroinitializer", w.at(place, whole), size - whole)


def square_sum(w: IRWriter, values: list[Value]) -> Value:
    """Return the sum of the squares of all elements of the vectors, as a scalar float."""
    total = w.binary("fmul", values[0], values[0])
    for value in values[1:]:
        total = w.fma(value, value, total)
    return w.sum(total)


def sums_of_lanes(w: IRWriter, vectors: list[Value]) -> Value:
    """Return a vector whose lane i is the sum of the i-th vector's lanes."""
    columns = w.transpose([*vectors, *["zeroinitializer"] * (w.lanes - len(vectors))])
    while len(columns) > 1:
        columns = [
            w.binary("fadd", left, other)
            for left, other in zip(columns[::2], columns[1::2], strict=True)
        ]
    return columns[0]


def inverse_root(w: IRWriter, number: Value) -> Value:
    """Return 1 / sqrt(number) as a float."""
    root = w.call("float", "llvm.sqrt.f32", [("float", number)])
    return w.op(f"fdiv float {constant(1.0)}, {root}")


def own_scratch(w: IRWriter, word: int, floats: int) -> Value:
    """Return the address of this thread's `floats` numbers in the scratch memory at args[word].

    It must be called once per kernel.
    """
    thread = w.op(f"atomicrmw add ptr {w.at('%args', 1, 'i64')}, i64 1 monotonic")
    return w.at(w.argument(word, "ptr"), w.mul(thread, floats))
