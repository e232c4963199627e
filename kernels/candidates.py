"""Candidate: one of several kernels for an operation, as a line of a tuple in order of preference.

Back ends run the first candidate that fits. `manta plan`, `manta doctor` and kernels/README.md read
which one serves which form on which device. So these tuples need neither Triton nor a device:
functions are imported when they are first called.

A form is what the choice depends on before a step: the `Format` of packed weights, or the sizes of
heads and pages (`kernels.attention.inputs`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

Capability = tuple[int, int]  # compute capability of a CUDA device
Form = TypeVar("Form")
# Operands of a kernel's matrix units, or of its threads in a GEMV.
Operands = Literal[
    "weights", "8-bit floats", "8-bit integers", "decoded codes", "dequantised weights",
    "keys and values", "codes of keys and values", "latents", "keys and values of latents",
]  # fmt: skip
Fusion = Literal["norm", "gate", "residual", "x_gate", "up"]


class Lazy:
    """A function of another module, which is imported at the first call."""

    def __init__(self, path: str) -> None:
        """Name the function by its path, "module:function", without importing it."""
        self.path = path
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._function is None:
            module, name = self.path.split(":")
            self._function = getattr(import_module(module), name)
        return self._function(*inputs)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Form]):
    """One kernel for an operation.

    name: the kernel's name in the docs.
    operands: the operands that it multiplies.
    takes: whether it serves this form on a GPU of this compute capability, for matrices whose sizes
        are multiples of the kernel's tiles.
    tokens: the smallest and largest number of tokens that it serves with this form. They are the
        tokens of a step, for attention those of a request.
    fits: whether it serves a call, by the operation's inputs.
    run: the operation, with what the kernel fuses.
    fuses: what else of a call `run` computes. The back end computes the rest before or after.
    """

    name: str
    operands: Operands
    takes: Callable[[Form, Capability], bool]
    tokens: Callable[[Form], tuple[int, float]]
    fits: Callable[..., bool]
    run: Callable[..., Any]
    fuses: frozenset[Fusion] = frozenset()


def first_fit(candidates: Iterable[Candidate[Form]], *inputs: Any) -> Candidate[Form]:
    """Return the first kernel that supports the inputs of an operation; the last always does."""
    return next(candidate for candidate in candidates if candidate.fits(*inputs))


def taking(
    candidates: Iterable[Candidate[Form]], form: Form, capability: Capability
) -> list[Candidate[Form]]:
    """Return the candidates that serve a form on a device, in order of preference."""
    return [candidate for candidate in candidates if candidate.takes(form, capability)]
