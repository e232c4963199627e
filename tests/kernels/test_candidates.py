"""Tables of candidates: every line can be run, and says what its kernel does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention.inputs import (
    AttentionForm,
    AttentionInputs,
    LatentForm,
    attention_form,
)
from kernels.candidates import Candidate, Lazy, first_fit, taking
from kernels.cuda import Cuda
from kernels.cuda_deterministic import CudaDeterministic
from kernels.gemm.packed.candidates import PACKED_LINEAR, LinearCall
from kernels.kv.format import FORMATS as KV_FORMATS
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.metadata import AttentionMeta
from kernels.packed import E2M1, Format, PackedWeight

TABLES = [
    getattr(back_end, table)
    for back_end in (Cuda, CudaDeterministic)
    for table in ("PACKED_LINEAR", "EXPERTS", "PACKED_EXPERTS")
]
ATTENTION = [
    getattr(back_end, table)
    for back_end in (Cuda, CudaDeterministic)
    for table in ("DECODE_ATTENTION", "CHUNK_ATTENTION")
]
LATENTS = [Cuda.LATENT_DECODE, Cuda.LATENT_CHUNKS]
FORMATS = [
    Format(4, 128, zero=8),
    Format(4, 32, torch.float32, offset="shift"),
    Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
    Format(8, 512, torch.float32, zero=128, activations=8),
    Format(8, 512, torch.float32, code="e4m3", activations=8),
    Format(8, 128, torch.float32, code="e4m3", rows=128, activations=8),
]


FORMS = [
    AttentionForm(kv, 2, dim, group, block_size, softcap)
    for kv in ("", "fp8", "int4")
    for dim in (64, 128, 256)
    for group in (1, 3, 8)
    for block_size in (1, 16, 256)
    for softcap in (False, True)
]
LATENT_FORMS = [
    LatentForm(heads, 512, 64, 2, block_size) for heads in (16, 64, 128) for block_size in (1, 64)
]


@pytest.mark.parametrize("table", [*TABLES, *ATTENTION, *LATENTS])
def test_functions_are_there(table: tuple[Candidate[Any], ...]) -> None:
    """Bug: a line names a function that was moved, which is seen at the first call on a GPU; two
    lines of one name in the docs; a form that no line serves."""
    assert len({candidate.name for candidate in table}) == len(table)
    for candidate in table:
        for function in (candidate.fits, candidate.run):
            if isinstance(function, Lazy):
                module, name = function.path.split(":")
                assert callable(getattr(__import__(module, fromlist=[name]), name))
    forms: Sequence[Any] = FORMATS
    if table in ATTENTION:
        forms = FORMS
    elif table in LATENTS:
        forms = LATENT_FORMS
    one_token = table in (Cuda.DECODE_ATTENTION, Cuda.LATENT_DECODE)
    for form in forms:
        last = taking(table, form, (7, 0))[-1]
        assert last.tokens(form)[1] == (1 if one_token else float("inf"))


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


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_tables_say_which_attention_runs(form: AttentionForm) -> None:
    """Bug: a kernel of attention runs for a cache that the table, plan and docs have no line for,
    or a line takes what its kernel does not fit."""
    shape = (4, 2, form.block_size, form.head_dim)
    cache: Cache = torch.empty(shape, dtype=torch.bfloat16)
    if form.kv:
        cache = QuantizedKV.empty(KV_FORMATS[form.kv], shape)
    q = torch.empty(3, 2 * form.group, form.head_dim, dtype=torch.bfloat16)
    inputs = AttentionInputs(q, cache, cache, 0.1, 5.0 if form.softcap else 0.0)
    assert attention_form(inputs) == form
    empty = torch.empty(0)
    meta = AttentionMeta(empty, empty, empty, empty, empty, 0, 1)
    for table in ATTENTION:
        kernel = first_fit(table, inputs, meta)
        assert kernel is taking(table, form, (8, 0))[0]
