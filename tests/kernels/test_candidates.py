"""Tables of candidates: every line can be run, and says what its kernel does."""

import pytest
import torch

pytest.importorskip("triton")

from kernels.candidates import Candidate, Lazy, taking
from kernels.cuda import Cuda
from kernels.cuda_deterministic import CudaDeterministic
from kernels.gemm.packed.candidates import PACKED_LINEAR, LinearCall
from kernels.packed import E2M1, Format, PackedWeight

TABLES = [
    getattr(back_end, table)
    for back_end in (Cuda, CudaDeterministic)
    for table in ("PACKED_LINEAR", "EXPERTS", "PACKED_EXPERTS")
]
FORMATS = [
    Format(4, 128, zero=8),
    Format(4, 32, torch.float32, offset="shift"),
    Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
    Format(8, 512, torch.float32, zero=128, activations=8),
    Format(8, 512, torch.float32, code="e4m3", activations=8),
    Format(8, 128, torch.float32, code="e4m3", rows=128, activations=8),
]


@pytest.mark.parametrize("table", TABLES)
def test_functions_are_there(table: tuple[Candidate, ...]) -> None:
    """Bug: a line names a function that was moved, which is seen at the first call on a GPU; two
    lines of one name in the docs; a table whose last line does not fit everything."""
    assert len({candidate.name for candidate in table}) == len(table)
    for candidate in table:
        for function in (candidate.fits, candidate.run):
            if isinstance(function, Lazy):
                module, name = function.path.split(":")
                assert callable(getattr(__import__(module, fromlist=[name]), name))
    for form in FORMATS:
        assert table[-1].takes(form, (7, 0)) and table[-1].tokens(form)[1] == float("inf")


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_tables_say_what_kernels_take(form: Format) -> None:
    """Bug: a kernel runs for a format, or for numbers of tokens, that plan and docs leave out."""
    weight = PackedWeight(form, 512, 512, None, torch.device("cpu"))
    listed = taking(PACKED_LINEAR, form, (9, 0))
    for tokens in (1, 2, 8, 9, 32, 256, 257):
        x = torch.empty(tokens, 512, dtype=torch.bfloat16)
        for candidate in PACKED_LINEAR:
            if candidate.fits(x, weight, LinearCall()):
                first, last = candidate.tokens(form)
                assert candidate in listed and first <= tokens <= last, candidate.name
