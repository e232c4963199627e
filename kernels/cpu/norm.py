"""RMS norms, with or without a gate, and layer norms, as kernels generated for a norm's size."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, constant, module
from kernels.cpu.recurrent.entries import inverse_root, rows_of, threads_for

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_X, _GATE, _GATE_STRIDE, _WEIGHT, _EPS, _ROWS, _OUT, _BIAS, _WORDS = range(2, 11)


@dataclass(frozen=True)
class NormShape:
    size: int
    groups: int
    normed: bool
    gated: bool
    gate_last: bool


def _norm(shape: NormShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    x, gate, weight, out = (w.argument(word, "ptr") for word in (_X, _GATE, _WEIGHT, _OUT))
    stride, eps = w.argument(_GATE_STRIDE), w.load(w.at("%args", _EPS, "i64"), "float")
    width = shape.size
    whole = width - width % size

    def over(start: Value, body) -> Value:  # type: ignore[no-untyped-def]
        """Generate a loop of total = body(offset, count, total) over the vectors of a row's group.

        start: the initial total. count: used lanes of the vector. Returns the final total.
        """
        (total,) = w.loop(
            0, whole, [(w.vector, start)], lambda at, total: [body(at, size, total)], step=size
        )
        return body(str(whole), width - whole, total) if whole < width else total

    def work(item: Value) -> None:
        row = w.op(f"udiv i64 {item}, {shape.groups}")
        first = w.mul(w.op(f"urem i64 {item}, {shape.groups}"), width)
        source, target = (w.at(rows, w.mul(item, width)) for rows in (x, out))
        by = w.at(gate, w.add(w.mul(row, stride), first))
        factors = w.at(weight, first)

        def gated(at: Value, count: int) -> Value:
            value = w.load_some(w.at(source, at), count)
            if not shape.gated:
                return value
            return w.binary("fmul", value, w.silu(w.load_some(w.at(by, at), count)))

        def squares(at: Value, count: int, total: Value) -> Value:
            if shape.gate_last or not shape.gated:
                value = w.load_some(w.at(source, at), count)
            else:
                value = gated(at, count)
                w.store_some(value, w.at(target, at), count)
            return w.fma(value, value, total)

        total = over("zeroinitializer", squares)
        if not shape.normed:
            return
        mean = w.op(f"fdiv float {w.sum(total)}, {constant(width)}")
        scale = w.spread(inverse_root(w, w.op(f"fadd float {mean}, {eps}")))

        def normed(at: Value, count: int, total: Value) -> Value:
            place = w.at(target, at)
            late = shape.gate_last or not shape.gated
            value = gated(at, count) if late else w.load_some(place, count)
            value = w.binary("fmul", value, scale)
            value = w.binary("fmul", value, w.load_some(w.at(factors, at), count))
            w.store_some(value, place, count)
            return total

        over("zeroinitializer", normed)

    w.claim("%args", "1", w.mul(w.argument(_ROWS), shape.groups), work)
    return w, "void @norm(ptr %args)"


@lru_cache(maxsize=32)
def _function(
    size: int, groups: int = 1, normed: bool = True, gated: bool = False, gate_last: bool = False
) -> NativeFunction | None:
    """Return the compiled kernel of a `NormShape`.

    Arguments are passed singly because hashing them is several times as fast as making and hashing
    a NormShape.
    """
    shape = NormShape(size, groups, normed, gated, gate_last)
    functions = compile_or_none(lambda lanes: module([_norm(shape, lanes)]))
    return functions and functions["norm"]


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, gate_last: bool
) -> Tensor | None:
    """Return the gated RMS norm of each of `groups` equal parts of a row (`Kernels.gated_norm`).

    Returns None where no kernel can be generated.
    """
    size = x.shape[1] // groups
    normed = weight is not None
    function = _function(size, groups, normed, True, gate_last and normed)
    if function is None or not rows_of(x, gate):
        return None
    args, out = (ctypes.c_int64 * _WORDS)(), x.new_empty(x.shape)
    args[_X], args[_OUT], args[_ROWS] = x.data_ptr(), out.data_ptr(), len(x)
    args[_GATE], args[_GATE_STRIDE] = gate.data_ptr(), gate.stride(0)
    args[_WEIGHT], args[_EPS] = 0 if weight is None else weight.data_ptr(), bits(eps)
    function(args, threads_for(out.numel()))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Return the RMS norm x / rms(x) * weight over the last axis.

    Returns None if no kernel can be generated, or for tensors that are not contiguous float32.
    """
    both = x.dtype == weight.dtype == torch.float32
    if not (both and x.is_contiguous() and weight.is_contiguous()):
        return None
    function = _function(x.shape[-1])
    if function is None:
        return None
    args, out = (ctypes.c_int64 * _WORDS)(), torch.empty_like(x)
    args[_X], args[_OUT], args[_ROWS] = x.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1]
    args[_WEIGHT], args[_EPS] = weight.data_ptr(), bits(eps)
    function(args, threads_for(out.numel()))
    return out


def layer_norm_row(
    w: IRWriter,
    width: int,
    source: Value,
    target: Value,
    weight: Value,
    bias: Value,
    eps: Value,
    added: Value = "",
) -> None:
    """Generate the layer norm of one row.

    source, target: addresses of the row and of the result, which may be the same.
    weight, bias: "" if the norm has none.
    added: address of a row to add to source first. The sum is written to source.
    """
    start = [(w.vector, "zeroinitializer")]

    def mean(total: Value) -> Value:
        return w.op(f"fdiv float {w.sum(total)}, {constant(width)}")

    def add_row(at: Value, total: Value) -> list[Value]:
        value = w.load(w.at(source, at))
        if added:
            value = w.binary("fadd", value, w.load(w.at(added, at)))
            w.store(value, w.at(source, at))
        return [w.binary("fadd", total, value)]

    middle = w.spread(mean(w.loop(0, width, start, add_row, step=w.lanes)[0]))

    def squares(at: Value, total: Value) -> list[Value]:
        apart = w.binary("fsub", w.load(w.at(source, at)), middle)
        return [w.fma(apart, apart, total)]

    variance = mean(w.loop(0, width, start, squares, step=w.lanes)[0])
    scale = w.spread(inverse_root(w, w.op(f"fadd float {variance}, {eps}")))

    def write(at: Value) -> list[Value]:
        value = w.binary("fsub", w.load(w.at(source, at)), middle)
        value = w.binary("fmul", value, scale)
        factor = w.load(w.at(weight, at)) if weight else w.all(1.0)
        if bias:
            value = w.fma(value, factor, w.load(w.at(bias, at)))
        elif weight:
            value = w.binary("fmul", value, factor)
        w.store(value, w.at(target, at))
        return []

    w.loop(0, width, [], write, step=w.lanes)


def _layer_norm(width: int, weighted: bool, biased: bool, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    x, weight, bias, out = (w.argument(word, "ptr") for word in (_X, _WEIGHT, _BIAS, _OUT))
    eps = w.load(w.at("%args", _EPS, "i64"), "float")

    def work(row: Value) -> None:
        source, target = (w.at(rows, w.mul(row, width)) for rows in (x, out))
        layer_norm_row(
            w, width, source, target, weight if weighted else "", bias if biased else "", eps
        )

    w.claim("%args", "1", w.argument(_ROWS), work)
    return w, "void @layer_norm(ptr %args)"


@lru_cache(maxsize=32)
def _layer_function(width: int, weighted: bool, biased: bool) -> NativeFunction | None:
    functions = compile_or_none(
        lambda size: "" if width % size else module([_layer_norm(width, weighted, biased, size)])
    )
    return functions and functions.get("layer_norm")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """Return the layer norm over the last axis; arguments: `Kernels.layer_norm`.

    Returns None if no kernel can be generated, or for tensors that are not contiguous float32.
    """
    parts = [part for part in (x, weight, bias) if part is not None]
    if not all(part.dtype == torch.float32 and part.is_contiguous() for part in parts):
        return None
    function = _layer_function(x.shape[-1], weight is not None, bias is not None)
    if function is None:
        return None
    args, out = (ctypes.c_int64 * _WORDS)(), x.new_empty(x.shape)
    args[_X], args[_OUT], args[_ROWS] = x.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1]
    args[_WEIGHT] = 0 if weight is None else weight.data_ptr()
    args[_BIAS], args[_EPS] = 0 if bias is None else bias.data_ptr(), bits(eps)
    function(args, threads_for(out.numel()))
    return out
