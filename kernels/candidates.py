"""Candidate: one of several kernels for an operation, in a tuple in order of preference.

Back ends run the first candidate that fits. `manta plan`, `manta doctor` and kernels/README.md list
from these tuples which kernel is used for which form on which device. So importing the tuples must
need neither Triton nor a device: functions are imported at their first call.

A form is what the choice of a kernel depends on and what is known before a step: the `Format` of
packed weights, or the sizes of heads and pages (`kernels.attention.inputs`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

Capability = tuple[int, int]  # compute capability of a CUDA device
Form = TypeVar("Form")
# Names of the operands that a kernel multiplies, as the docs show them.
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
    operands: the operands that the kernel multiplies.
    takes: (form, compute capability) -> whether the kernel supports this form on such a GPU, if the
        sizes of matrices are multiples of its tiles.
    tokens: form -> the minimum and maximum number of tokens of a step that the kernel supports; for
        attention, tokens of one request in the step.
    fits: (the operation's inputs) -> whether the kernel supports this call.
    run: the function that launches the kernel.
    fuses: the surrounding operations that `run` also computes. The back end computes the others
        before or after `run`.
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
    """Return the candidates that support a form on a device, in order of preference."""
    return [candidate for candidate in candidates if candidate.takes(form, capability)]
