"""Argmax of each row of a matrix by a generated kernel, in parallel over rows. NumPy would need two
calls per row.
"""

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu.codegen.compiler import NativeFunction, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, constant, module

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_X, _STRIDE, _ROWS, _WIDTH, _AT, _BEST, _WORDS = range(2, 9)
_LOWEST = constant(-math.inf)
_CHAINS = 4  # independent chains of comparisons, so that their latencies overlap


def _argmax(size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    x, places, bests = (w.argument(word, "ptr") for word in (_X, _AT, _BEST))
    stride, width = w.argument(_STRIDE), w.argument(_WIDTH)
    step = _CHAINS * size
    whole = w.mul(w.op(f"udiv i64 {width}, {step}"), step)
    lane_bests = w.op(f"alloca [{step} x float], align 64")
    lane_places = w.op(f"alloca [{step} x i32], align 64")
    counted = ", ".join(f"i32 {lane}" for lane in range(size))

    def larger(value: Value, place: Value, best: Value, at: Value, lanes: int) -> list[Value]:
        """Return the element-wise larger of two candidates, and its index.
        A NaN is larger than every number. Of equal numbers the lower index wins.
        """
        kind, whole, bit = ("float", "i32", "i1")
        if lanes > 1:
            kind, whole, bit = (f"<{lanes} x {scalar_type}>" for scalar_type in (kind, whole, bit))
        above = w.op(f"fcmp ugt {kind} {value}, {best}")
        above = w.op(f"and {bit} {above}, {w.op(f'fcmp ord {kind} {best}, {best}')}")
        if lanes == 1:
            same = w.op(f"fcmp oeq {kind} {value}, {best}")
            sooner = w.op(f"and i1 {same}, {w.op(f'icmp slt i32 {place}, {at}')}")
            above = w.op(f"or i1 {above}, {sooner}")
        return [
            w.op(f"select {bit} {above}, {kind} {value}, {kind} {best}"),
            w.op(f"select {bit} {above}, {whole} {place}, {whole} {at}"),
        ]

    def row(index: Value) -> None:
        begin = w.at(x, w.mul(index, stride))

        def piece(at: Value, *kept: Value) -> list[Value]:
            out = []
            for chain in range(_CHAINS):
                first = w.add(at, chain * size)
                value = w.load(w.at(begin, first))
                lane = w.spread(w.op(f"trunc i64 {first} to i32"), "i32")
                lane = w.op(f"add {w.integers} {lane}, <{counted}>")
                out += larger(value, lane, *kept[2 * chain : 2 * chain + 2], size)
            return out

        start = [(w.vector, f"splat (float {_LOWEST})"), (w.integers, "zeroinitializer")]
        chains = w.loop(0, whole, start * _CHAINS, piece, step=step)
        for chain in range(_CHAINS):
            w.store(chains[2 * chain], w.at(lane_bests, chain * size))
            w.store(chains[2 * chain + 1], w.at(lane_places, chain * size, "i32"), w.integers)

        def lane(number: Value, best: Value, at: Value) -> list[Value]:
            value = w.load(w.at(lane_bests, number), "float")
            return larger(value, w.load(w.at(lane_places, number, "i32"), "i32"), best, at, 1)

        def rest(number: Value, best: Value, at: Value) -> list[Value]:
            value = w.load(w.at(begin, number), "float")
            return larger(value, w.op(f"trunc i64 {number} to i32"), best, at, 1)

        best, at = w.loop(0, step, [("float", _LOWEST), ("i32", "0")], lane)
        best, at = w.loop(whole, width, [("float", best), ("i32", at)], rest)
        w.store(best, w.at(bests, index), "float")
        w.store(w.op(f"sext i32 {at} to i64"), w.at(places, index, "i64"), "i64")

    w.claim("%args", "1", w.argument(_ROWS), row)
    return w, "void @argmax(ptr %args)"


@lru_cache(maxsize=1)
def _function() -> NativeFunction | None:
    functions = compile_or_none(lambda size: module([_argmax(size)]))
    return functions and functions["argmax"]


def argmax(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return each row's argmax [n], the first of equals, and its maximum [n].

    x: [n, width] float32, rows contiguous. A row with a NaN gives NaN and a meaningless index.
    """
    function, (rows, width) = _function(), x.shape
    if function is None:
        places = x.argmax(1)
        return places, x[np.arange(rows), places]
    assert x.dtype == np.float32 and x.strides[1] == 4 and 0 < width < 1 << 31
    at, best = np.empty(rows, np.int64), np.empty(rows, np.float32)
    args = (ctypes.c_int64 * _WORDS)()
    args[_X], args[_STRIDE], args[_ROWS] = x.ctypes.data, x.strides[0] // 4, rows
    args[_WIDTH], args[_AT], args[_BEST] = width, at.ctypes.data, best.ctypes.data
    function(args, torch.get_num_threads() if rows > 1 else 1)
    return at, best
