"""Elementwise functions, as kernels generated for the length of rows.

The function "copy" replaces torch's copies in a recorded step (`kernels.cpu.codegen.program`).
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, module

# Indices of the kernel's arguments in args. The first two words are the threads' work counters.
_X, _STRIDE, _INNER_STRIDE, _OTHER, _OTHER_STRIDE, _OUT, _OUT_STRIDE = range(2, 9)
_ROWS, _INNER, _WORDS = range(9, 12)
_MANY = 1 << 13  # elements from which all threads are used


def _gelu_erf(w: IRWriter, x: Value) -> Value:
    """Return the exact GELU, x (1 + erf(x / sqrt 2)) / 2, with an error of 1e-7, for |x| below
    1e19.

    Half of erfc is t (a1 + .. + a5 t^4) e^(-x^2 / 2) / 2 with t = 1 / (1 + p |x| / sqrt 2)
    (Abramowitz and Stegun, 7.1.26).
    """
    size = w.call(w.vector, f"llvm.fabs.v{w.lanes}f32", [(w.vector, x)])
    below = w.fma(size, w.all(0.3275911 * 0.7071067811865476), w.all(1.0))
    t = w.inverse(below)
    series = w.all(1.061405429 / 2)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = w.fma(series, t, w.all(factor / 2))
    square = w.binary("fmul", w.binary("fmul", x, x), w.all(-0.5))
    part = w.binary("fmul", w.binary("fmul", series, t), w.exp_below(square))
    # GELU is relu(x) - |x| * erfc(|x| / sqrt 2) / 2.
    part = w.binary("fmul", part, size)
    return w.binary("fsub", _relu(w, x), part)


def _gelu(w: IRWriter, x: Value) -> Value:
    """Return the tanh approximation of GELU: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    cube = w.binary("fmul", x, w.binary("fmul", x, x))
    inner = w.fma(cube, w.all(0.044715), x)
    inner = w.binary("fmul", inner, w.all(1.5957691216057308))
    return w.binary("fmul", x, w.sigmoid(inner))


def _relu(w: IRWriter, x: Value) -> Value:
    """Return max(x, 0); NaN stays NaN."""
    less = w.op(f"fcmp olt {w.vector} {x}, zeroinitializer")
    return w.op(f"select <{w.lanes} x i1> {less}, {w.vector} zeroinitializer, {w.vector} {x}")


def _relu2(w: IRWriter, x: Value) -> Value:
    positive = _relu(w, x)
    return w.binary("fmul", positive, positive)


FUNCTIONS: dict[str, Callable[[IRWriter, Value], Value]] = {
    "copy": lambda w, x: x,
    "silu": lambda w, x: w.silu(x),
    "gelu": _gelu_erf,
    "gelu_pytorch_tanh": _gelu,
    "relu": _relu,
    "relu2": _relu2,
    "sigmoid": lambda w, x: w.sigmoid(x),
}


def _elements(name: str, width: int, multiplied: bool, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    x, other, out = (w.argument(word, "ptr") for word in (_X, _OTHER, _OUT))
    stride, inner_stride, inner = (w.argument(word) for word in (_STRIDE, _INNER_STRIDE, _INNER))
    out_stride, other_stride = w.argument(_OUT_STRIDE), w.argument(_OTHER_STRIDE)
    whole = width - width % size

    def piece(item: Value) -> None:
        row = w.op(f"udiv i64 {item}, {inner}")
        part = w.op(f"urem i64 {item}, {inner}")
        source = w.at(x, w.add(w.mul(row, stride), w.mul(part, inner_stride)))
        first = w.mul(part, width)
        target = w.at(out, w.add(w.mul(row, out_stride), first))
        factor = w.at(other, w.add(w.mul(row, other_stride), first))

        def activate(at: Value, count: int) -> list[Value]:
            value = FUNCTIONS[name](w, w.load_some(w.at(source, at), count))
            if multiplied:
                value = w.binary("fmul", value, w.load_some(w.at(factor, at), count))
            w.store_some(value, w.at(target, at), count)
            return []

        w.loop(0, whole, [], lambda at: activate(at, size), step=size)
        if whole < width:
            activate(str(whole), width - whole)

    w.claim("%args", "1", w.mul(w.argument(_ROWS), inner), piece)
    return w, "void @elements(ptr %args)"


@lru_cache(maxsize=64)
def _function(name: str, width: int, multiplied: bool) -> NativeFunction | None:
    functions = compile_or_none(lambda size: module([_elements(name, width, multiplied, size)]))
    return functions and functions["elements"]


def known(name: str) -> bool:
    """Whether an elementwise function of this name can be generated."""
    return name in FUNCTIONS


def fits(x: Tensor) -> bool:
    """Whether x is float32, two- or three-dimensional, with contiguous rows."""
    return x.dtype == torch.float32 and x.dim() in (2, 3) and x.stride(-1) == 1


def apply(name: str, x: Tensor, out: Tensor, other: Tensor | None = None) -> bool:
    """Compute f(x), or f(x) * other, into out, where f is the function called `name`.

    Returns False if no kernel can be generated.
    x: [n, width] or [n, m, width].
    out, other: [n, width] or [n, m * width]; other may also be one row for all.
    Rows may be slices of longer rows, and the tensors may share memory.
    """
    function = _function(name, x.shape[-1], other is not None) if fits(x) else None
    if function is None:
        return False
    args, inner = (ctypes.c_int64 * _WORDS)(), x.shape[1] if x.dim() == 3 else 1
    args[_X], args[_STRIDE], args[_OUT] = x.data_ptr(), x.stride(0), out.data_ptr()
    args[_INNER_STRIDE], args[_OUT_STRIDE] = x.stride(-2), out.stride(0)
    args[_ROWS], args[_INNER] = len(x), inner
    if other is not None:
        args[_OTHER], args[_OTHER_STRIDE] = other.data_ptr(), other.stride(0) * (other.dim() - 1)
    function(args, torch.get_num_threads() if x.numel() >= _MANY else 1)
    return True
