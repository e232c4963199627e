"""What keeps a token's numbers free of the step's other rows, operation by operation."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.cpu import norm
from kernels.cpu.deterministic import (
    Deterministic,
    _apart,
    _as_decodes,
    _DeterministicPlan,
    _one_thread,
)
from kernels.kv.format import FORMATS
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels

# What the deterministic back ends take over from the ordinary ones, and why that is safe there.
_COMPOSED = "made of operations that are told here"
_ONE_ELEMENT = "an exactly rounded operation of each element, after one that is told here"
_GENERATED = "generated kernels walk each token alike; what is not generated goes by `_without`"
_ON_CUDA = "is called for weights that stay packed on CUDA alone"
_BY_ROW = "a program of the kernel has a row, or a part of one, and sums in one order"
_TOLD = "the kernel is told, and then cuts nothing by the step's sizes"
SAFE: Mapping[str, Mapping[str, str]] = {
    "Deterministic": {
        "prepare": "nothing is computed",
        "tune_linear": "does nothing on the CPU",
        "norm_add": _ONE_ELEMENT,
        "scale_columns": "an exactly rounded product of each element",
        "linear_add": _ONE_ELEMENT,
        "linear_act": _COMPOSED,
        "norm_linear": _COMPOSED,
        "norm_gated_linear": _COMPOSED,
        "add_opened": _COMPOSED,
        "router_logits": _COMPOSED,
        "norm_route": _COMPOSED,
        "lora_gated": _COMPOSED,
        "packed_linear": _ON_CUDA,
        "takes_gate": _ON_CUDA,
        "packed_experts": _ON_CUDA,
        "order_experts": _ON_CUDA,
        "gated_delta": _GENERATED,
        "kimi_delta": _GENERATED,
        "verify_delta": "returns None on the CPU, whose drafts are verified on copies",
        "causal_conv": _GENERATED,
        "short_conv": _GENERATED,
        "mamba1": _GENERATED,
        "mamba2": _GENERATED,
    },
    "CudaDeterministic": {
        "rms_norm": _BY_ROW,
        "norm_add": _BY_ROW,
        "silu_mul": _BY_ROW,
        "gelu_tanh_mul": _BY_ROW,
        "gelu_mul": _BY_ROW,
        "relu_mul": _BY_ROW,
        "layer_norm": _BY_ROW,
        "gated_norm": _BY_ROW,
        "activation": _BY_ROW,
        "xielu": _BY_ROW,
        "add_opened": _BY_ROW,
        "scale_columns": "an exactly rounded product of each element",
        "sigmoid_mul": "a result is made of its own two numbers",
        "route": "as by row; where `topk` has no kernel, torch sums a few numbers of each row",
        "rope_kv_write": _BY_ROW,
        "latent_write": _BY_ROW,
        "latent_attention": "models that have it are refused (engine/resolve.py)",
        "gated_delta": _TOLD,
        "kimi_delta": _TOLD,
        "verify_delta": _TOLD,
        "mamba2": _TOLD,
        "mamba1": "a program walks an entry's tokens one after the other",
        "whole_texts": "texts are computed one by one",
        "causal_conv": "each result is the sum of a token's own taps, in one order",
        "short_conv": _COMPOSED,
        "order_experts": "codes are moved, and none is changed",
        "lora_add": "`LoraStep` says it to the kernel",
        "lora_gated": "`LoraStep` says it to the kernel",
    },
}


def deterministic() -> list[type[Kernels]]:
    from kernels.cuda_deterministic import CudaDeterministic

    return [Deterministic, CudaDeterministic]


# The table of kernels that an operation takes its kernel from, which a back end may replace.
TABLES = {
    "packed_linear": "PACKED_LINEAR",
    "takes_gate": "PACKED_LINEAR",
    "experts": "EXPERTS",
    "packed_experts": "PACKED_EXPERTS",
}


def test_no_operation_is_forgotten() -> None:
    """A new operation that is left to torch or to an ordinary kernel: a token's numbers then depend
    on how many rows the step has, and no model in the tests need show it."""
    pytest.importorskip("triton")
    operations = {name for name, it in vars(Kernels).items() if name[0] != "_" and callable(it)}
    assert len(operations) > 30
    for back_end in deterministic():
        overridden = operations & vars(back_end).keys()
        overridden |= {name for name, table in TABLES.items() if table in vars(back_end)}
        safe = SAFE[back_end.__name__].keys()
        assert overridden | safe == operations, back_end
        assert not overridden & safe, back_end


def test_gated_norms_that_are_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's silu over all rows at once: a row's last elements are rounded as vectors or alone,
    as its place among the others has it."""
    monkeypatch.setattr(norm, "gated_norm", lambda *_: None)
    generator = torch.Generator().manual_seed(5)
    x, gate = (torch.randn(9, 21, generator=generator) * 3 for _ in range(2))
    weight = torch.rand(21, generator=generator)
    kernels = Deterministic()
    for last in (False, True):
        whole = kernels.gated_norm(x.clone(), gate, weight, 3, 1e-6, last)
        alone = [
            kernels.gated_norm(row.clone(), own.clone(), weight, 3, 1e-6, last)
            for row, own in zip(x.split(1), gate.split(1), strict=True)
        ]
        assert torch.equal(whole, torch.cat(alone))


# (keys before the step, tokens of it) of each entry
STEP = ((40, 1), (3, 1), (0, 37), (21, 30), (16, 16))
SIZE, HEADS = 8, 2  # of blocks; of keys


def _step(window: int, chunk: int) -> AttentionMeta:
    """Return a step's metadata with blocks in mixed order; block 0 is no request's."""
    lengths = [before + count for before, count in STEP]
    widths = [-(-length // SIZE) for length in lengths]
    ids = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(2)).int() + 1
    table = torch.zeros(len(STEP), max(widths), dtype=torch.int32)
    for row, own in zip(table, ids.split(widths), strict=True):
        row[: len(own)] = own
    starts = [0, *accumulate(count for _, count in STEP)]
    positions = torch.cat([torch.arange(before, before + count) for before, count in STEP]).int()
    return AttentionMeta(
        positions=positions,
        slots=torch.zeros(len(positions), dtype=torch.int64),
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        num_decodes=2,
        max_kv_len=max(lengths),
        window=window,
        chunk=chunk,
    )


def _filled(form: str, dim: int, meta: AttentionMeta, seed: int) -> Cache:
    """Return a cache of random keys in the places of the step's entries, and NaN in all others."""
    shape = (int(meta.block_table.max()) + 1, HEADS, SIZE, dim)
    filled = torch.zeros(shape[0], SIZE, dtype=torch.bool)
    for row, length in zip(meta.block_table.long(), meta.kv_len.tolist(), strict=True):
        at = torch.arange(length)
        filled[row[at // SIZE], at % SIZE] = True
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if form == "float32":
        values[~filled[:, None].expand(shape[:3])] = float("nan")
        return values
    cache = QuantizedKV.empty(FORMATS[form], shape)
    index = torch.meshgrid(*map(torch.arange, shape[:3]), indexing="ij")
    blocks, heads, places = (tensor.flatten() for tensor in index)
    cache.write(blocks, heads, places, values.view(-1, dim))
    cache.numbers[~filled[:, None].expand(shape[:3])] = float("nan")
    return cache


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (13, 0), (0, 12)])
@pytest.mark.parametrize(
    ("form", "dim"),
    [("int8", 64), ("fp8", 32), ("int4", 64), ("int8", 6), ("float32", 5), ("float32", 16)],
)
def test_keys_that_are_read_once_for_all_tokens(
    form: str, dim: int, window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a token of a chunk has other bits than alone, or a number of what it must not see; keys
    in fewer bits are expanded for each token, so that a long prompt takes minutes."""
    meta = _step(window, chunk)
    k_cache, v_cache = (_filled(form, dim, meta, seed) for seed in (3, 4))
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(len(meta.positions), 3 * HEADS, dim, generator=generator)
    scored: list[dict[str, Any]] = [{}, {"softcap": 5.0}]
    scored += [{"sinks": torch.randn(3 * HEADS)}, {"slopes": torch.rand(3 * HEADS)}]
    read, reads = QuantizedKV.read, 0

    def counted(*given: Any) -> Tensor:
        nonlocal reads
        reads += 1
        return read(*given)

    for numbers in scored:
        with _one_thread():
            want = [
                Kernels().attention(
                    AttentionInputs(row.clone(), k_cache, v_cache, dim**-0.5, **numbers), alone
                )
                for row, alone in zip(q.split(1), _apart(_as_decodes(meta)), strict=True)
            ]
        meta.plan, reads = _DeterministicPlan(meta), 0
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedKV, "read", counted)
            got = Deterministic().attention(
                AttentionInputs(q, k_cache, v_cache, dim**-0.5, **numbers), meta
            )
        assert got.isfinite().all()
        assert torch.equal(got, torch.cat(want))
        assert reads == (0 if form == "float32" else 2 * len(STEP))


@pytest.mark.parametrize("window", [0, 13])
def test_a_later_token_that_is_not_finite(window: int) -> None:
    """Bug: tokens that are computed together are NaN where one of them is, which hides its number
    from those before it by a weight of 0."""
    meta = _step(window, 0)
    k_cache, v_cache = (_filled("float32", 16, meta, seed) for seed in (3, 4))
    length = int(meta.kv_len[3])
    v_cache[meta.block_table[3, (length - 3) // SIZE], 1, (length - 3) % SIZE] = float("inf")
    q = torch.randn(len(meta.positions), 2 * HEADS, 16, generator=torch.Generator().manual_seed(5))
    with _one_thread():
        want = [
            Kernels().attention(AttentionInputs(row.clone(), k_cache, v_cache, 0.25), alone)
            for row, alone in zip(q.split(1), _apart(_as_decodes(meta)), strict=True)
        ]
    meta.plan = _DeterministicPlan(meta)
    got = Deterministic().attention(AttentionInputs(q, k_cache, v_cache, 0.25), meta)
    assert int((~got.isfinite()).any(1).sum()) == 3
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_token_of_a_chunk_in_several_threads(threads: int) -> None:
    """Bug: torch cuts the products of a few heads among its threads, so that a decode of
    SmolLM2-135M (nine heads, three of keys) had other bits than the same token in a chunk."""
    heads, of_keys, dim, size, length = 9, 3, 64, 16, 10
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def step(positions: list[int]) -> AttentionMeta:
        return AttentionMeta(
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.zeros(len(positions), dtype=torch.int64),
            query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
            kv_len=torch.tensor([positions[-1] + 1], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            num_decodes=len(positions) == 1,
            max_kv_len=positions[-1] + 1,
        )

    def attention(q: Tensor, positions: list[int]) -> Tensor:
        meta = step(positions)
        meta.plan = _DeterministicPlan(meta)
        return Deterministic().attention(
            AttentionInputs(q[positions].clone(), k_cache, v_cache, 0.125), meta
        )

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            k_cache, v_cache = random(1, of_keys, size, dim), random(1, of_keys, size, dim)
            q = random(length, heads, dim)
            alone = [attention(q, [at]) for at in range(length)]
            assert torch.equal(attention(q, [*range(length)]), torch.cat(alone))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
