"""The kernels for MoE experts, in order of preference (`kernels.candidates`).

`Candidate.fits` takes x [tokens, hidden] and the stack (ExpertWeights or PackedExperts);
`Candidate.run` has the arguments of `Kernels.experts`.
"""

from typing import Any

from torch import Tensor

from kernels.candidates import Candidate, Capability, Lazy
from kernels.packed import E2M1, Format

_ANY = float("inf")
_HOPPER = 9  # the major number of Hopper's compute capability


def _takes_any(form: Format, capability: Capability) -> bool:
    return True


def _takes_fragments(form: Format, capability: Capability) -> bool:
    plain = (form.group, form.rows, form.offset) == (32, 1, "none")
    return plain and form.table == E2M1 and capability[0] == _HOPPER


def _takes_rounded(form: Format, capability: Capability) -> bool:
    return form.rounds_experts(capability)


def _any_tokens(form: Format) -> tuple[int, float]:
    return 1, _ANY


def _tokens(last: int) -> Any:
    return lambda form: (1, last)


def _always(x: Tensor, stack: Any) -> bool:
    return True


def _run(path: str) -> Lazy:
    return Lazy(f"kernels.experts.{path}")


# Candidates for 16-bit and 32-bit weights.
EXPERTS: tuple[Candidate[Format], ...] = (
    Candidate(
        "few", "weights", _takes_any, _tokens(4),
        _run("few:few_fits"), _run("few:few"),
    ),
    Candidate(
        "grouped", "weights", _takes_any, _any_tokens,
        _always, _run("grouped:grouped"),
    ),
)  # fmt: skip

# Candidates for packed weights. Fragments (`kernels.fragments`) are an order of codes to which
# `order_experts` may convert weights after loading.
PACKED_EXPERTS: tuple[Candidate[Format], ...] = (
    Candidate(
        "few_fragments", "decoded codes", _takes_fragments, _tokens(1),
        _run("fragments.dispatch:few_fragments_fit"), _run("fragments.dispatch:few_fragments"),
    ),
    Candidate(
        "fragments", "decoded codes", _takes_fragments, _any_tokens,
        _run("fragments.dispatch:in_fragments"), _run("fragments.dispatch:grouped_fragments"),
    ),
    Candidate(
        "fp8", "8-bit floats", _takes_rounded, _any_tokens,
        _run("rounded:rounded_fits"), _run("rounded:rounded_experts"),
    ),
    Candidate(
        "few_packed", "decoded codes", _takes_any, _tokens(8),
        _run("few_packed:few_packed_fits"), _run("few_packed:few_packed"),
    ),
    Candidate(
        "packed", "decoded codes", _takes_any, _any_tokens,
        _always, _run("packed:packed_experts"),
    ),
)  # fmt: skip

# Candidates of the deterministic mode, all batch-invariant.
FIXED_EXPERTS: tuple[Candidate[Format], ...] = (
    Candidate(
        "grouped_fixed", "weights", _takes_any, _any_tokens,
        _always, _run("grouped:grouped_fixed"),
    ),
)  # fmt: skip
FIXED_PACKED_EXPERTS: tuple[Candidate[Format], ...] = (
    Candidate(
        "fragments_fixed", "decoded codes", _takes_fragments, _any_tokens,
        _run("fragments.dispatch:in_fragments"), _run("fragments.dispatch:fixed_fragments"),
    ),
    Candidate(
        "packed_fixed", "decoded codes", _takes_any, _any_tokens,
        _always, _run("packed:packed_experts_fixed"),
    ),
)  # fmt: skip
