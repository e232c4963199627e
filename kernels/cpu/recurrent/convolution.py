"""Depthwise causal convolutions, as kernels generated for the number of channels.

The kernels of most recurrent layers contain such a convolution (`Convolution`).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
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
    write_loop,
)
from kernels.metadata import AttentionMeta

# Indices of the kernel's arguments in args.
_X, _X_STRIDE, _CONV, _BIAS, _TAIL = range(FIRST, FIRST + 5)
OWN = FIRST + 5  # first index of the other arguments of a kernel that contains a convolution
_BEFORE, _BEFORE_STRIDE, _BEHIND, _BEHIND_STRIDE, _OUT, _WORDS = range(OWN, OWN + 6)
_BLOCK = 8  # vectors of channels per work item


def put_convolution(
    args: "ctypes.Array[ctypes.c_int64]", x: Tensor, conv: Tensor, bias: Tensor | None, tail: Tensor
) -> None:
    args[_X], args[_X_STRIDE] = x.data_ptr(), x.stride(0)
    args[_CONV], args[_TAIL] = conv.data_ptr(), tail.data_ptr()
    args[_BIAS] = 0 if bias is None else bias.data_ptr()


class Convolution:
    """The generator of the convolution of `Kernels.causal_conv` inside a kernel.

    gated: whether x is multiplied by a gate before the convolution.
    """

    def __init__(
        self, w: IRWriter, channels: int, taps: int, biased: bool, gated: bool = False
    ) -> None:
        self._w, self._channels, self._taps, self._biased = w, channels, taps, biased
        self._x, self._conv, self._bias, self._tail = (
            w.argument(word, "ptr") for word in (_X, _CONV, _BIAS, _TAIL)
        )
        self._stride = w.argument(_X_STRIDE)
        self._before = ""
        if gated:
            self._before, self._before_stride = (
                w.argument(_BEFORE, "ptr"),
                w.argument(_BEFORE_STRIDE),
            )

    def run(
        self, entry: Entry, first: Value, size: int, found: Callable[[Value, list[Value]], None]
    ) -> None:
        """Generate the convolution of an entry's tokens, and the update of the tail.

        The generated code covers channels [first, first + size).

        found(token, vectors): called to generate the use of a token's convolved channels; token is
            the token's index in the step.
        """
        w, taps = self._w, self._taps
        some = parts(size, w.lanes)
        tail_at = w.mul(entry.row, (taps - 1) * self._channels)
        tail_at = w.at(self._tail, w.add(tail_at, first))
        place = w.at(self._conv, w.mul(first, taps))
        weights = [w.load_columns(w.at(place, at * taps), taps, count) for at, count in some]
        start = [""] * len(some)
        if self._biased:
            place = w.at(self._bias, first)
            start = [w.load_some(w.at(place, at), count) for at, count in some]

        def begin() -> None:
            write_loop(
                w,
                0,
                taps - 1,
                lambda tap: clear(w, w.at(tail_at, w.mul(tap, self._channels)), size),
            )

        w.when(entry.begins, begin)

        def input_of(token: Value) -> Callable[[int, int], Value]:
            """Return load(offset, count), which loads `count` channels of a token's input.

            token: the token's index in the entry; a negative index is an input in the tail.
            """
            early = w.op(f"icmp slt i64 {token}, 0")
            inside = w.call("i64", "llvm.smax.i64", [("i64", token), ("i64", "0")])
            at = w.add(entry.begin, inside)
            own = w.at(self._x, w.add(w.mul(at, self._stride), first))
            old = w.at(tail_at, w.mul(w.add(token, taps - 1), self._channels))
            if not self._before:
                place = w.op(f"select i1 {early}, ptr {old}, ptr {own}")
                return lambda at, count: w.load_some(w.at(place, at), count)
            gate = w.at(self._before, w.add(w.mul(at, self._before_stride), first))

            def product(at: int, count: int) -> Value:
                left, other = (w.load_some(w.at(from_, at), count) for from_ in (own, gate))
                value = w.binary("fmul", left, other)
                # The tail may have NaN, so select an address instead of multiplying values by 0.
                row = w.op(f"select i1 {early}, ptr {old}, ptr {own}")
                before = w.load_some(w.at(row, at), count)
                return w.op(f"select i1 {early}, {w.vector} {before}, {w.vector} {value}")

            return product

        def token(index: Value) -> None:
            inputs = [input_of(w.sub(index, taps - 1 - tap)) for tap in range(taps)]
            sums = []
            for number, (at, count) in enumerate(some):
                total = start[number]
                for tap, load in enumerate(inputs):
                    weight, value = weights[number][tap], load(at, count)
                    if total:
                        total = w.fma(value, weight, total)
                    else:
                        total = w.binary("fmul", value, weight)
                sums.append(total)
            found(w.add(entry.begin, index), sums)

        write_loop(w, 0, entry.count, token)

        def keep(tap: Value) -> None:
            # Write rows in ascending order, since each row of the tail is read from later rows.
            load = input_of(w.add(w.sub(entry.count, taps - 1), tap))
            target = w.at(tail_at, w.mul(tap, self._channels))
            for at, count in some:
                w.store_some(load(at, count), w.at(target, at), count)

        write_loop(w, 0, taps - 1, keep)


@dataclass(frozen=True)
class ConvolutionShape:
    """The sizes and options for which a convolution's kernel is generated.

    activated: whether SiLU is applied to the results.
    gated: whether x and the results are multiplied by gates.
    """

    channels: int
    taps: int
    biased: bool
    activated: bool
    gated: bool


def _convolve(shape: ConvolutionShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries, out = Entries(w), w.argument(_OUT, "ptr")
    conv = Convolution(w, shape.channels, shape.taps, shape.biased, shape.gated)
    behind, stride = w.argument(_BEHIND, "ptr"), w.argument(_BEHIND_STRIDE)
    block = min(_BLOCK * size, shape.channels)
    whole, tail = divmod(shape.channels, block)

    def work(entry: Entry, item: Value) -> None:
        first = w.mul(item, block)

        def convolve_channels(count: int) -> None:
            def found(token: Value, values: list[Value]) -> None:
                target = w.at(out, w.add(w.mul(token, shape.channels), first))
                other = w.at(behind, w.add(w.mul(token, stride), first))
                for (at, width), value in zip(parts(count, size), values, strict=True):
                    if shape.activated:
                        value = w.silu(value)
                    if shape.gated:
                        value = w.binary("fmul", value, w.load_some(w.at(other, at), width))
                    w.store_some(value, w.at(target, at), width)

            conv.run(entry, first, count, found)

        between(w, item, 0, whole, lambda _: convolve_channels(block))
        if tail:
            between(w, item, whole, whole + 1, lambda _: convolve_channels(tail))

    entries.claim(whole + (tail > 0), work)
    return w, "void @convolve(ptr %args)"


@lru_cache(maxsize=64)
def _function(
    channels: int, taps: int, biased: bool, activated: bool, gated: bool
) -> NativeFunction | None:
    """Return the compiled kernel of a `ConvolutionShape`.

    Arguments are passed singly because making and hashing the shape takes longer than the lookup.
    """
    shape = ConvolutionShape(channels, taps, biased, activated, gated)
    functions = compile_or_none(lambda size: module([_convolve(shape, size)]))
    return functions and functions["convolve"]


def causal_conv(
    x: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    meta: AttentionMeta,
    *,
    silu: bool,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Return the causal convolution of each channel, and write the last inputs to tail.

    Arguments are those of `Kernels.causal_conv`. gates: `before` and `behind` of
    `Kernels.short_conv`.

    Returns None if no kernel can be generated.
    """
    function = _function(*conv.shape, bias is not None, silu, gates is not None)
    if function is None or not rows_of(x, *(gates or ())):
        return None
    args = (ctypes.c_int64 * _WORDS)()
    put_entries(args, meta, len(x))
    put_convolution(args, x, conv, bias, tail)
    if gates is not None:
        args[_BEFORE], args[_BEFORE_STRIDE] = gates[0].data_ptr(), gates[0].stride(0)
        args[_BEHIND], args[_BEHIND_STRIDE] = gates[1].data_ptr(), gates[1].stride(0)
    out = x.new_empty(len(x), conv.shape[0])
    args[_OUT] = out.data_ptr()
    function(args, threads_for(out.numel()))
    return clear_padding(out, meta)
