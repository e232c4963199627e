"""The matmul kernels for packed weights, in order of preference (`kernels.candidates`).

The functions that choose or run a kernel are in `kernels.gemm.packed.calls`, which needs Triton.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.candidates import Candidate, Capability, Fusion, Lazy, Operands
from kernels.packed import FLOAT8, Format

# Maximum tokens of a step for which the GEMM kernel itself decodes the codes. At 256 tokens, with 4
# bits and offsets, the four matrices of a layer of llama-8b took 305 microseconds on one H200, and
# 342 microseconds when dequantised for cuBLAS.
DECODED_TOKENS = 256
_FEW = 8  # tokens of one MMA tile
_ANY = float("inf")
_AMPERE = (8, 0)


class LinearCall(NamedTuple):
    """The operations around the GEMM in a call of `Kernels.packed_linear`.

    norm: weight [in] of an RMS norm of x, or None; eps: its epsilon.
    gate: key of `Kernels.GATES` for the result, or None.
    residual: [tokens, out], to which the result is added in place, or None.
    x_gate: key of `Kernels.GATES` for x, or None.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    gate: str | None = None
    residual: Tensor | None = None
    x_gate: str | None = None


def _integers(form: Format) -> bool:
    return form.bits == 4 and not form.table


def _rounds_floats(form: Format, capability: Capability) -> bool:
    return form.code == "e4m3" and form.scale == torch.float32 and form.rounds(capability)


def _takes_blocks(form: Format, capability: Capability) -> bool:
    return form.rows > 1 and _rounds_floats(form, capability)


def _takes_int8(form: Format, capability: Capability) -> bool:
    return form.code == "int" and form.scale == torch.float32 and form.rounds(capability)


def _takes_mma4(form: Format, capability: Capability) -> bool:
    whole = _integers(form) and form.zero < 128 and form.rows == 1 and form.span == 128
    return whole and capability >= _AMPERE


def _takes_gemv8(form: Format, capability: Capability) -> bool:
    return form.code == "e4m3" and form.scale == torch.float32 and capability >= FLOAT8


def _takes_gemv4(form: Format, capability: Capability) -> bool:
    return _integers(form) and form.span >= 32


def _takes_few(form: Format, capability: Capability) -> bool:
    if capability < _AMPERE:
        return False
    if form.bits == 8:
        plain = form.code == "e4m3" or form.zero == 128
        return plain and form.offset == "none" and form.rows == 1 and form.scale == torch.float32
    return _integers(form) and form.zero < 128 and (form.group, form.scale) == (128, torch.float16)


def _takes_any(form: Format, capability: Capability) -> bool:
    return True


def _from_rounded_rows(form: Format) -> tuple[int, float]:
    return form.rounded_rows, _ANY


def _one_token(form: Format) -> tuple[int, float]:
    return 1, 1


def _few_tokens(form: Format) -> tuple[int, float]:
    return 1, _FEW


def _decoded_tokens(form: Format) -> tuple[int, float]:
    return 1, DECODED_TOKENS


def _any_tokens(form: Format) -> tuple[int, float]:
    return 1, _ANY


def _kernel(
    name: str,
    operands: Operands,
    takes: Callable[[Format, Capability], bool],
    tokens: Callable[[Format], tuple[int, float]],
    fuses: frozenset[Fusion],
) -> Candidate[Format]:
    """Return the candidate that runs the function `name` of `calls` if `<name>_fits` is true.

    takes, tokens: as in `Candidate`, with a weight's format.
    fuses: the operations that the kernel computes besides the product.
    """
    run = Lazy(f"kernels.gemm.packed.calls:{name}")
    return Candidate(name, operands, takes, tokens, Lazy(f"{run.path}_fits"), run, fuses)


_IN = frozenset[Fusion](("norm", "x_gate"))
_GEMV = frozenset[Fusion](("norm", "gate", "residual"))
_RESIDUAL = frozenset[Fusion](("residual",))
_GATE = frozenset[Fusion](("gate",))

# Kernels that fuse an x_gate come first, because the back end computes x_gate before it tries the
# others. A GEMV for one kind of code comes before the GEMV for all kinds. The GEMM that decodes
# codes computes steps of up to DECODED_TOKENS; above, dequantising for cuBLAS takes less time.
PACKED_LINEAR: tuple[Candidate[Format], ...] = (
    _kernel("fp8", "8-bit floats", _rounds_floats, _from_rounded_rows, _IN),
    _kernel("fp8_blocks", "8-bit floats", _takes_blocks, _from_rounded_rows, _IN | _RESIDUAL),
    _kernel("int8", "8-bit integers", _takes_int8, _from_rounded_rows, _IN | _RESIDUAL),
    _kernel("mma4", "decoded codes", _takes_mma4, _few_tokens, _GATE | _RESIDUAL),
    _kernel("gemv8", "decoded codes", _takes_gemv8, _one_token, _GEMV),
    _kernel("gemv4", "decoded codes", _takes_gemv4, _one_token, _GEMV),
    _kernel("few", "decoded codes", _takes_few, _few_tokens, _RESIDUAL),
    _kernel("gemv", "decoded codes", _takes_any, _one_token, _GEMV),
    _kernel("dot", "decoded codes", _takes_any, _decoded_tokens, _RESIDUAL),
    _kernel("dequantise", "dequantised weights", _takes_any, _any_tokens, _RESIDUAL),
)

# Candidates of the deterministic mode, all batch-invariant. Sums of 8-bit integers are exact.
FIXED_LINEAR: tuple[Candidate[Format], ...] = (
    _kernel("int8_fixed", "8-bit integers", _takes_int8, _any_tokens, _IN | _RESIDUAL),
    _kernel("dequantise_fixed", "dequantised weights", _takes_any, _any_tokens, _RESIDUAL),
)
