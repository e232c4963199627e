"""Mamba-1 (arXiv 2312.00752), as a kernel generated for a number of channels.

A work item has one channel per lane of a vector. For several tokens of a sequence (an entry of the
step), the channels' states are transposed first, so that a register holds one state element of all
channels. For a single token, transposing states and rates takes too long. A register then holds one
channel's state, and only the new states are transposed, to be multiplied by C.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import lru_cache

from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module
from kernels.cpu.recurrent.entries import (
    FIRST,
    Entries,
    Entry,
    between,
    clear,
    clear_padding,
    parts,
    put_entries,
    rows_of,
    threads_for,
)
from kernels.metadata import AttentionMeta
from kernels.recurrent.mamba1 import Mamba1Inputs

# Indices of the kernel's arguments in args: tensors, then their strides.
_GIVEN = range(FIRST, FIRST + 5)  # x, dt, B, C, gate
_STRIDES = range(FIRST + 5, FIRST + 10)
_RATES, _SKIP, _STATE, _OUT, _WORDS = range(FIRST + 10, FIRST + 15)


def _scan(channels: int, width: int, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries = Entries(w)
    pointers = [w.argument(word, "ptr") for word in _GIVEN]
    strides = [w.argument(word) for word in _STRIDES]
    rates, skip, state, out = (w.argument(word, "ptr") for word in (_RATES, _SKIP, _STATE, _OUT))

    # Channels' values in memory, from which scalars are loaded; a register would need a shuffle.
    steps, all_stepped = (w.op(f"alloca [{size} x float], align 64") for _ in range(2))

    def columns_of(lines: list[Value]) -> list[Value]:
        """Transpose a matrix in registers: return a vector per column. lines: its rows."""
        return w.transpose([*lines, *["zeroinitializer"] * (size - len(lines))])

    def transposed(place: Value, rows: int) -> list[Value]:
        """Load a matrix [rows, width] from address `place`; return a vector per column."""
        columns: list[Value] = []
        for at, count in parts(width, size):
            lines = [w.load_some(w.at(place, row * width + at), count) for row in range(rows)]
            columns += columns_of(lines)[:count]
        return columns

    def channels_of(entry: Entry, first: Value, rows: int) -> None:
        own = w.at(state, w.mul(w.add(w.mul(entry.row, channels), first), width))
        w.when(entry.begins, lambda: clear(w, own, rows * width))
        place_of_rates = w.at(rates, w.mul(first, width))
        skipped = w.load_some(w.at(skip, first), rows)

        def token(
            index: Value | int, update: Callable[[Value, Value, Value], Iterable[Value]]
        ) -> list[Value]:
            """Generate the code for one token's results; return the elements of the new states.

            update(time step, time step * x, address of B): yields the elements of the new states in
                order. Results are summed in this order, so that a token gets the same bits alone
                and among several.
            """
            row = w.add(entry.begin, index)
            x, dt, b, c, gate = (
                w.at(pointer, w.mul(row, stride))
                for pointer, stride in zip(pointers, strides, strict=True)
            )
            own_x = w.load_some(w.at(x, first), rows)
            step = w.softplus(w.load_some(w.at(dt, first), rows))
            read, new_state = w.binary("fmul", own_x, skipped), []
            for number, value in enumerate(update(step, w.binary("fmul", own_x, step), b)):
                read = w.fma(value, w.spread(w.load(w.at(c, number), "float")), read)
                new_state.append(value)
            read = w.binary("fmul", read, w.silu(w.load_some(w.at(gate, first), rows)))
            w.store_some(read, w.at(out, w.add(w.mul(row, channels), first)), rows)
            return new_state

        def updated(value: Value, rate: Value, step: Value, stepped: Value, b: Value) -> Value:
            decay = w.exp(w.binary("fmul", rate, step), small=True)  # rates are negative
            return w.fma(stepped, b, w.binary("fmul", value, decay))

        def walk() -> None:
            own_rates = transposed(place_of_rates, rows)

            def next_token(index: Value, *held: Value) -> list[Value]:
                def update(step: Value, stepped: Value, b: Value) -> Iterable[Value]:
                    for number, (value, rate) in enumerate(zip(held, own_rates, strict=True)):
                        input_value = w.spread(w.load(w.at(b, number), "float"))
                        yield updated(value, rate, step, stepped, input_value)

                return token(index, update)

            start = [(w.vector, value) for value in transposed(own, rows)]
            columns = w.loop(0, entry.count, start, next_token)
            for at, count in parts(width, size):
                for row, line in enumerate(columns_of(columns[at : at + count])[:rows]):
                    w.store_some(line, w.at(own, row * width + at), count)

        def update_once(step: Value, stepped: Value, b: Value) -> Iterable[Value]:
            w.store(step, steps)
            w.store(stepped, all_stepped)
            for at, count in parts(width, size):
                inputs, lines = w.load_some(w.at(b, at), count), []
                for row in range(rows):
                    step_number, other = (
                        w.spread(w.load(w.at(counters, row), "float"))
                        for counters in (steps, all_stepped)
                    )
                    place = w.at(own, row * width + at)
                    rate = w.load_some(w.at(place_of_rates, row * width + at), count)
                    value = updated(w.load_some(place, count), rate, step_number, other, inputs)
                    w.store_some(value, place, count)
                    lines.append(value)
                yield from columns_of(lines)[:count]

        def alone() -> None:
            token(0, update_once)

        single = w.op(f"icmp eq i64 {entry.count}, 1")
        w.when(single, alone)
        w.when(w.op(f"xor i1 {single}, true"), walk)

    whole, tail = divmod(channels, size)

    def work(entry: Entry, item: Value) -> None:
        first = w.mul(item, size)
        between(w, item, 0, whole, lambda _: channels_of(entry, first, size))
        if tail:
            between(w, item, whole, whole + 1, lambda _: channels_of(entry, first, tail))

    entries.claim(whole + (tail > 0), work)
    return w, "void @scan(ptr %args)"


@lru_cache(maxsize=16)
def _function(channels: int, width: int) -> NativeFunction | None:
    functions = compile_or_none(lambda size: module([_scan(channels, width, size)]))
    return functions and functions["scan"]


def mamba1(inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor | None:
    """Return the gated results of Mamba-1 (`Kernels.mamba1`); update states in place.

    Returns None, and writes nothing, if no kernel can be generated.
    """
    x, dt, b, c, rates, skip, gate, state = inputs
    function = _function(*rates.shape)
    if function is None or not rows_of(x, dt, b, c, gate):
        return None
    args = (ctypes.c_int64 * _WORDS)()
    put_entries(args, meta, len(x))
    for word, stride, tensor in zip(_GIVEN, _STRIDES, (x, dt, b, c, gate), strict=True):
        args[word], args[stride] = tensor.data_ptr(), tensor.stride(0)
    out = x.new_empty(len(x), rates.shape[0])
    args[_RATES], args[_SKIP] = rates.data_ptr(), skip.data_ptr()
    args[_STATE], args[_OUT] = state.data_ptr(), out.data_ptr()
    function(args, threads_for(out.numel()))
    return clear_padding(out, meta)
