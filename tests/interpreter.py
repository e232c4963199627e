"""Patches of Triton's interpreter for tests: they refuse inputs that it computes wrongly, and cache
objects that it would build again.

The interpreter builds each type, shape and overflow check anew for each operation of each program,
which takes most of the time of a kernel's test."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton import language as tl
from triton.runtime import interpreter

SHORTENED = "3.7."  # versions of Triton whose interpreter `shorten` can patch


def guard() -> None:
    """Let the interpreter raise where it would compute wrongly: for bfloat16, and for numpy 2.4
    with Triton before 3.7."""

    def version(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    if version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4):
        pytest.exit(f"TRITON_INTERPRET=1: triton {triton.__version__} needs numpy < 2.4", 4)
    call: Callable[..., Any] = interpreter.GridExecutor.__call__

    def guarded(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                pytest.fail(
                    "bfloat16 in Triton's interpreter gives wrong numbers; use float32 there"
                )
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = guarded


def shorten() -> None:
    """Replace parts of the interpreter by faster ones with the same results."""
    if not triton.__version__.startswith(SHORTENED):
        return
    _patch_once_a_launch()
    _share_shapes()
    interpreter._get_np_dtype = _numpy_dtype
    # The interpreter computes whether integers overflow, but only asserts it with `debug`.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _patch_once_a_launch() -> None:
    """Let the interpreter patch Triton's language once per launch and module, not for each call of
    a function."""
    patch_lang = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    names: dict[Any, list[str]] = {}
    patched: set[int] = set()  # ids of the modules' globals

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name in dir(package) if hasattr(package, name)]
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = run


def _share_shapes() -> None:
    """Let blocks of equal shape share one shape object, which is never written."""
    core = tl.core
    equal = core.tuple.__eq__

    @dataclasses.dataclass
    class Shape:
        sizes: Any  # core.tuple of int
        text: str
        numel: int
        constant: Any  # numel as core.constexpr
        tensors: Any  # core.tuple of core.constexpr

    by_id: dict[int, Shape] = {}

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> Shape:
        shared = core.tuple(sizes)
        constants = core.tuple([core.constexpr(size) for size in sizes])
        numel = triton._utils.validate_block_shape(sizes)
        shape = Shape(shared, str(shared), numel, core.constexpr(numel), constants)
        by_id[id(shared)] = shape
        return shape

    scalar = shape_of(())

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        known = by_id.get(id(shape)) or shape_of(tuple(core._unwrap_shape(shape)))
        if known is scalar:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.shape, self.numel = element_ty, known.sizes, known.numel
        self.name = f"<{known.text}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = by_id[id(type.shape)] if type.is_block() else scalar
        self.numel, self.shape = shape.constant, shape.tensors

    same, other_one = core.constexpr(True), core.constexpr(False)

    def is_equal(self: Any, other: Any) -> Any:
        if self is other:
            return same
        if type(other) is list:  # of the sizes of a block
            return same if self.values == other else other_one
        return equal(self, other)

    core.block_type.__init__ = new_block
    core.tensor.__init__ = new_tensor
    core.tuple.__eq__ = is_equal


_original_dtype = interpreter._get_np_dtype


@functools.cache
def _of_name(name: str) -> Any:
    return _original_dtype(tl.dtype(name))


def _numpy_dtype(tt_dtype: Any) -> Any:
    """Return the numpy dtype of a Triton dtype, block type or pointer."""
    if isinstance(tt_dtype, tl.block_type):
        tt_dtype = tt_dtype.element_ty
    return np.dtype(np.uint64) if isinstance(tt_dtype, tl.pointer_type) else _of_name(tt_dtype.name)
