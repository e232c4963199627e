"""Candidate: one of several kernels for an operation, in a tuple in order of preference.

Back ends run the first candidate that fits. `manta plan`, `manta doctor` and kernels/README.md read
from these tuples which kernel serves which form on which device. So the tuples need neither Triton
nor a device: functions are imported when they are first called.

A form is the part of a choice that is known before a step: the `Format` of packed weights, or the
sizes of heads and pages (`kernels.attention.inputs`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

Capability = tuple[int, int]  # compute capability of a CUDA device
Form = TypeVar("Form")
# Operands of a kernel's tensor cores, or of its threads in a GEMV.
Operands = Literal[
    "weights", "8-bit floats", "8-bit integers", "decoded codes", "dequantised weights",
    "keys and values", "codes of keys and values", "latents", "keys and values of latents",
]  # fmt: skip
Fusion = Literal["norm", "gate", "residual", "x_gate", "up"]


class Lazy:
    """A callable that imports its function's module at the first call."""

    def __init__(self, path: str) -> None:
        """Store the function's path, "module:function", without importing the module."""
        self.path = path
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._function is None:
            module, name = self.path.split(":")
            self._function = getattr(import_module(module), name)
        return self._function(*inputs)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Form]):
    """One kernel for an operation, with the conditions under which it is chosen.

    name: the kernel's name in the docs.
    operands: the operands that it multiplies.
    takes: (form, compute capability) -> whether the kernel serves this form on such a GPU, for
        matrices whose sizes are multiples of its tiles.
    tokens: form -> the minimum and maximum number of tokens that the kernel serves: tokens of the
        step, for attention those of one request in the step.
    fits: (the operation's inputs) -> whether the kernel serves this call.
    run: the function that launches the kernel.
    fuses: the surrounding operations that `run` computes, too. The back end computes the others
        before or after.
    """

    name: str
    operands: Operands
    takes: Callable[[Form, Capability], bool]
    tokens: Callable[[Form], tuple[int, float]]
    fits: Callable[..., bool]
    run: Callable[..., Any]
    fuses: frozenset[Fusion] = frozenset()


def first_fit(candidates: Iterable[Candidate[Form]], *inputs: Any) -> Candidate[Form]:
    """Return the first candidate that fits the operation's inputs; the last one always fits."""
    return next(candidate for candidate in candidates if candidate.fits(*inputs))


def taking(
    candidates: Iterable[Candidate[Form]], form: Form, capability: Capability
) -> list[Candidate[Form]]:
    """Return the candidates that serve a form on a device, in order of preference."""
    return [candidate for candidate in candidates if candidate.takes(form, capability)]
