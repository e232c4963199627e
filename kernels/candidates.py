"""Candidate: one of several kernels for an operation, as a line of a tuple in order of preference.

Back ends run the first candidate that fits. `manta plan`, `manta doctor` and docs/kernels.md read
which one serves which format on which device. So these tuples need neither Triton nor a device:
functions are imported when they are first called.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from kernels.packed import Format

Capability = tuple[int, int]  # of a CUDA device
# What the matrix units, or the threads of a GEMV, multiply.
Operands = Literal[
    "weights", "8-bit floats", "8-bit integers", "decoded codes", "dequantised weights"
]
Fusion = Literal["norm", "gate", "residual", "x_gate"]


class Lazy:
    """A function of another module, which is imported at the first call."""

    def __init__(self, path: str) -> None:
        """Take the path as "module:function"."""
        self.path = path
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._function is None:
            module, name = self.path.split(":")
            self._function = getattr(import_module(module), name)
        return self._function(*inputs)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel for an operation.

    name: the name that docs say.
    operands: what it multiplies.
    takes: whether it serves matrices of this format, whose sizes divide as usual, on a GPU of this
        compute capability.
    tokens: the first and the last number of tokens of a step that it serves with this format.
    fits: whether it serves a call, by the operation's inputs.
    run: the operation, with what the kernel fuses.
    fuses: what else of a call `run` computes. The back end computes the rest before or after.
    """

    name: str
    operands: Operands
    takes: Callable[[Format, Capability], bool]
    tokens: Callable[[Format], tuple[int, float]]
    fits: Callable[..., bool]
    run: Callable[..., Any]
    fuses: frozenset[Fusion] = frozenset()


def first_fit(candidates: Iterable[Candidate], *inputs: Any) -> Candidate:
    """Return the first candidate that fits these inputs of an operation; the last always does."""
    return next(candidate for candidate in candidates if candidate.fits(*inputs))


def taking(
    candidates: Iterable[Candidate], form: Format, capability: Capability
) -> list[Candidate]:
    """Return the candidates that serve a format on a device, in order of preference."""
    return [candidate for candidate in candidates if candidate.takes(form, capability)]
