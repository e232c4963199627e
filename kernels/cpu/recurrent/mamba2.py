"""Mamba-2 (arXiv 2405.21060), as two kernels generated for a shape of heads.

    mix     convolutions, time steps and decays; a work item is a head, or a group of B or C
    walk    recurrent states; a work item is a head

Rows of a head's state are independent. `walk` processes as many rows at a time as a vector has
lanes. These rows stay in the first-level cache, and their results fill one vector.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.recurrent.convolution import OWN, Convolution, put_convolution
from kernels.cpu.recurrent.entries import (
    Entries,
    Entry,
    between,
    by_tokens,
    clear,
    clear_padding,
    own_scratch,
    parts,
    put_entries,
    rows_of,
    sums_of_lanes,
    threads_for,
    write_loop,
)
from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba2 import Mamba2Heads

# Indices of the kernels' arguments in args.
_MIXED, _DT, _DT_STRIDE, _DECAY, _DT_BIAS, _LEAST, _MOST = range(OWN, OWN + 7)
_STATE, _SKIP, _OUT, _SCRATCH, _WORDS = range(OWN + 7, OWN + 12)


@dataclass(frozen=True)
class Mamba2Shape:
    heads: int
    head_size: int
    groups: int
    state_size: int
    taps: int
    biased: bool

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def mixed(self) -> int:
        """The number of float32 numbers that `mix` writes per token."""
        return self.channels + 2 * self.heads


class _Mixed:
    """The layout of the output of `mix` for all tokens of the step.

    In memory are x by head, then B and C by group, then time steps and decays by token.
    """

    def __init__(self, w: IRWriter, shape: Mamba2Shape, tokens: Value) -> None:
        self._w, self._shape, self._tokens = w, shape, tokens
        self._x = w.argument(_MIXED, "ptr")
        self._shared = w.at(self._x, w.mul(tokens, shape.inner))
        both = 2 * shape.groups * shape.state_size
        self._steps = w.at(self._shared, w.mul(tokens, both))
        self._decays = w.at(self._steps, w.mul(tokens, shape.heads))

    def _row(self, array: Value, number: Value, token: Value, size: int) -> Value:
        row = self._w.add(self._w.mul(number, self._tokens), token)
        return self._w.at(array, self._w.mul(row, size))

    def x(self, head: Value, token: Value) -> Value:
        return self._row(self._x, head, token, self._shape.head_size)

    def shared(self, group: Value, token: Value) -> Value:
        """Return the address of a token's B or C for a group.

        group: 0 .. groups - 1 for B, then groups .. 2 * groups - 1 for C.
        """
        return self._row(self._shared, group, token, self._shape.state_size)

    def step(self, token: Value, head: Value | int) -> Value:
        return self._w.at(self._steps, self._w.add(self._w.mul(token, self._shape.heads), head))

    def decay(self, token: Value, head: Value | int) -> Value:
        return self._w.at(self._decays, self._w.add(self._w.mul(token, self._shape.heads), head))


def _mix(shape: Mamba2Shape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries = Entries(w)
    conv = Convolution(w, shape.channels, shape.taps, shape.biased)
    mixed = _Mixed(w, shape, entries.tokens)
    dt, dt_stride = w.argument(_DT, "ptr"), w.argument(_DT_STRIDE)
    decay, bias = w.argument(_DECAY, "ptr"), w.argument(_DT_BIAS, "ptr")
    least, most = (w.spread(w.load(w.at("%args", at, "i64"), "float")) for at in (_LEAST, _MOST))

    def steps(entry: Entry) -> None:
        for at, count in parts(shape.heads, size):
            rate = w.exp(w.load_some(w.at(decay, at), count))
            rate = w.op(f"fneg {w.vector} {rate}")
            shift = w.load_some(w.at(bias, at), count)

            def token(index: Value, at: int = at, count: int = count, rate: Value = rate,
                      shift: Value = shift) -> None:  # fmt: skip
                row = w.add(entry.begin, index)
                step = w.load_some(w.at(w.at(dt, w.mul(row, dt_stride)), at), count)
                step = w.softplus(w.binary("fadd", step, shift))
                step = w.maximum(least, step)
                over = w.op(f"fcmp ogt {w.vector} {step}, {most}")
                step = w.op(f"select <{size} x i1> {over}, {w.vector} {most}, {w.vector} {step}")
                w.store_some(step, mixed.step(row, at), count)
                w.store_some(w.exp(w.binary("fmul", rate, step)), mixed.decay(row, at), count)

            write_loop(w, 0, entry.count, token)

    def convolved(entry: Entry, first: Value, width: int, target) -> None:  # type: ignore[no-untyped-def]
        def found(token: Value, values: list[Value]) -> None:
            place = target(token)
            for (at, count), value in zip(parts(width, size), values, strict=True):
                w.store_some(w.silu(value), w.at(place, at), count)

        conv.run(entry, first, width, found)

    def head(entry: Entry, number: Value) -> None:
        first = w.mul(number, shape.head_size)
        convolved(entry, first, shape.head_size, lambda token: mixed.x(number, token))

    def group(entry: Entry, number: Value) -> None:
        first = w.add(w.mul(number, shape.state_size), shape.inner)
        convolved(entry, first, shape.state_size, lambda token: mixed.shared(number, token))

    def work(entry: Entry, item: Value) -> None:
        between(w, item, 0, 1, lambda _: steps(entry))
        between(w, item, 1, 1 + both, lambda number: group(entry, number))
        end = 1 + both + shape.heads
        between(w, item, 1 + both, end, lambda number: head(entry, number))

    both = 2 * shape.groups
    entries.claim(1 + both + shape.heads, work)
    return w, "void @mix(ptr %args)"


def _walk(shape: Mamba2Shape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries = Entries(w)
    mixed = _Mixed(w, shape, entries.tokens)
    state, skip, out = (w.argument(word, "ptr") for word in (_STATE, _SKIP, _OUT))
    line = own_scratch(w, _SCRATCH, size)  # step * x of the rows that are being processed
    width = shape.state_size
    whole = width - width % size

    def tile(head: Value, own: Value, first: Value, end: Value, row: Value, rows: int) -> None:
        """Generate the update of rows [row, row + rows) of the state at `own`, and their results.

        The rows are updated by the tokens [first, end).
        """
        group = w.op(f"udiv i64 {head}, {shape.heads // shape.groups}")
        skipped = w.spread(w.load(w.at(skip, head), "float"))

        def token(index: Value) -> None:
            x = w.load_some(w.at(mixed.x(head, index), row), rows)
            step = w.spread(w.load(mixed.step(index, head), "float"))
            decay = w.spread(w.load(mixed.decay(index, head), "float"))
            w.store(w.binary("fmul", x, step), line)
            b = mixed.shared(group, index)
            c = mixed.shared(w.add(group, shape.groups), index)

            def columns(at: Value, count: int, sums: list[Value]) -> list[Value]:
                column, other = (w.load_some(w.at(pointer, at), count) for pointer in (b, c))
                row_sums = []
                for number in range(rows):
                    place = w.at(own, w.add(w.mul(w.add(row, number), width), at))
                    new_state = w.binary("fmul", w.load_some(place, count), decay)
                    factor = w.spread(w.load(w.at(line, number), "float"))
                    new_state = w.fma(factor, column, new_state)
                    w.store_some(new_state, place, count)
                    row_sums.append(w.fma(new_state, other, sums[number]))
                return row_sums

            zeros = [(w.vector, "zeroinitializer")] * rows
            sums = w.loop(
                0, whole, zeros, lambda at, *sums: columns(at, size, list(sums)), step=size
            )
            if whole < width:
                sums = columns(str(whole), width - whole, sums)
            read = w.fma(skipped, x, sums_of_lanes(w, sums))
            place = w.add(w.mul(w.add(w.mul(index, shape.heads), head), shape.head_size), row)
            w.store_some(read, w.at(out, place), rows)

        write_loop(w, first, end, token)

    def work(entry: Entry, head: Value) -> None:
        matrix = shape.head_size * width
        own = w.at(state, w.mul(w.add(w.mul(entry.row, shape.heads), head), matrix))
        w.when(entry.begins, lambda: clear(w, own, matrix))
        full = shape.head_size - shape.head_size % size

        def tokens(first: Value, end: Value) -> None:
            first, end = w.add(entry.begin, first), w.add(entry.begin, end)

            def rows(row: Value) -> list[Value]:
                tile(head, own, first, end, row, size)
                return []

            w.loop(0, full, [], rows, step=size)
            if full < shape.head_size:
                tile(head, own, first, end, str(full), shape.head_size - full)

        by_tokens(w, entry.count, tokens)

    entries.claim(shape.heads, work)
    return w, "void @walk(ptr %args)"


@lru_cache(maxsize=16)
def _functions(shape: Mamba2Shape) -> tuple[NativeFunction, NativeFunction] | None:
    functions = compile_or_none(lambda size: module([_mix(shape, size), _walk(shape, size)]))
    return functions and (functions["mix"], functions["walk"])


def mamba2(
    x: Tensor, dt: Tensor, heads: Mamba2Heads, tail: Tensor, state: Tensor, meta: AttentionMeta
) -> Tensor | None:
    """Return the results of Mamba-2 (`Kernels.mamba2`); update tails and states in place.

    Returns None, and writes nothing, if no kernel can be generated.
    """
    shape = Mamba2Shape(
        heads.heads,
        heads.head_size,
        heads.groups,
        heads.state_size,
        heads.conv.shape[1],
        heads.conv_bias is not None,
    )
    functions = _functions(shape)
    if functions is None or not rows_of(x, dt):
        return None
    mix, walk = functions
    tokens, args = len(x), (ctypes.c_int64 * _WORDS)()
    put_entries(args, meta, tokens)
    put_convolution(args, x, heads.conv, heads.conv_bias, tail)
    mixed = x.new_empty(tokens, shape.mixed)
    out = x.new_empty(tokens, heads.heads, heads.head_size)
    args[_MIXED], args[_OUT], args[_STATE] = mixed.data_ptr(), out.data_ptr(), state.data_ptr()
    args[_DT], args[_DT_STRIDE] = dt.data_ptr(), dt.stride(0)
    args[_DECAY], args[_DT_BIAS] = heads.decay.data_ptr(), heads.bias.data_ptr()
    args[_SKIP] = heads.skip.data_ptr()
    args[_LEAST], args[_MOST] = (bits(limit) for limit in heads.limits)
    args[_SCRATCH] = scratch(torch.get_num_threads() * lanes())
    mix(args, threads_for(mixed.numel()))
    walk(args, threads_for(len(meta.kv_len) * state[0].numel()))
    return clear_padding(out, meta)
