"""Helpers of the kernel tests: device, error bounds, paged caches filled with NaN, and attention in
float64 as the oracle."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import Tensor

from kernels.metadata import AttentionMeta

# Bound on ||out - ref|| / ||ref|| of a row: a few times the dtype's rounding error.
BOUND = {torch.float32: 1e-5, torch.float16: 5e-4 * 1.5, torch.bfloat16: 4e-3}


def _interpreted() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


if torch.cuda.is_available():
    DEVICE = "cuda"
    DTYPES = [torch.bfloat16, torch.float16, torch.float32]
elif _interpreted():
    DEVICE = "cpu"
    DTYPES = [torch.float32, torch.float16]  # the interpreter is wrong for bfloat16
else:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)


def row_error(out: Tensor, ref: Tensor) -> float:
    """Return the largest relative error of a row; NaN counts as infinite."""
    out, ref = out.double().flatten(0, -2), ref.double().flatten(0, -2)
    error = (out - ref).norm(dim=-1) / ref.norm(dim=-1).clamp(min=1e-30)
    return float(error.nan_to_num(nan=float("inf")).max())


def grid(first: Iterable[object], second: Iterable[object]) -> list[ParameterSet]:
    """Return all pairs for parametrize, most of them marked slow.

    Each value is in at least one pair that is not.
    """
    first, second = list(first), list(second)
    narrow = min(len(first), len(second))
    return [
        pytest.param(a, b, marks=() if i % narrow == j % narrow else pytest.mark.slow)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def paged(
    kv_len: list[int],
    query_len: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_decodes: int,
    dtype: torch.dtype,
    spare_blocks: int = 3,
    padding: int = 0,
) -> tuple[Tensor, Tensor, AttentionMeta]:
    """Return key and value caches with blocks in random order, and a step's metadata.

    Slots that no entry owns are NaN, also in an entry's last block."""
    blocks = [-(-n // block_size) for n in kv_len]
    num_blocks = sum(blocks) + spare_blocks
    order = torch.randperm(num_blocks, device=DEVICE)[: sum(blocks)].split(blocks)
    caches = []
    for _ in range(2):
        cache = torch.full(
            (num_blocks, num_kv_heads, block_size, head_dim), torch.nan, device=DEVICE, dtype=dtype
        )
        for length, own in zip(kv_len, order, strict=True):
            at = torch.arange(length, device=DEVICE)
            cache[own[at // block_size], :, at % block_size] = random(
                length, num_kv_heads, head_dim, dtype=dtype
            )
        caches.append(cache)
    # Kernels must not read the table beyond an entry's last block.
    table = torch.full((len(kv_len), max(blocks)), 2**30, dtype=torch.int32, device=DEVICE)
    for entry, own in enumerate(order):
        table[entry, : len(own)] = own.int()
    starts = torch.tensor([0, *query_len], dtype=torch.int32).cumsum(0).int().to(DEVICE)
    num_tokens = sum(query_len) + padding
    meta = AttentionMeta(
        positions=torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE),
        slots=torch.full((num_tokens,), -1, dtype=torch.int64, device=DEVICE),
        query_start=starts,
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=DEVICE),
        block_table=table,
        num_decodes=num_decodes,
        max_kv_len=max(kv_len),
    )
    return caches[0], caches[1], meta


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    meta: AttentionMeta,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return causal attention in float64: [num_tokens without padding, num_heads, head_dim]."""
    num_heads = q.shape[1]
    block_size = k_cache.shape[2]
    group = num_heads // k_cache.shape[1]
    starts = meta.query_start.tolist()
    rows = []
    for entry, length in enumerate(meta.kv_len.tolist()):
        query = q[starts[entry] : starts[entry + 1]].double()
        at = torch.arange(length, device=q.device)
        blocks = meta.block_table[entry, at // block_size].long()
        blocks = torch.where(blocks < len(k_cache), blocks, 0)  # freed blocks before a window
        key = k_cache[blocks, :, at % block_size].double().repeat_interleave(group, 1)
        value = v_cache[blocks, :, at % block_size].double().repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", query, key).nan_to_num() * scale
        position = torch.arange(length - len(query), length, device=q.device)
        key_at, query_at = at[None, :], position[:, None]
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score += slopes.double()[:, None, None] * (key_at - query_at)
        last = query_at
        if meta.last_keys is not None:
            last = meta.last_keys[starts[entry] : starts[entry + 1], None]
        hidden = key_at > last
        if meta.window:
            hidden |= query_at - key_at >= meta.window
        if meta.chunk:
            hidden |= query_at // meta.chunk != key_at // meta.chunk
        score.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(num_heads, len(query), 1)
            score = torch.cat((score, sink), -1)
        weight = score.softmax(-1)[..., :length]
        # Values of keys that no query attends to may be NaN.
        value = torch.where(hidden.all(0)[:, None, None], 0.0, value)
        rows.append(torch.einsum("hqk,khd->qhd", weight, value))
    return torch.cat(rows)


def multiply_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter compute a row of a matmul independently of its position in the tile.

    The interpreter's matmuls are NumPy's, in which a row's result depends on its position on some
    CPUs. On a GPU this changes nothing."""
    if DEVICE == "cpu":

        def rows_apart(a: Any, b: Any, **options: Any) -> Any:
            return (a[..., :, None].astype(np.float32) * b[..., None, :, :]).sum(axis=-2)

        monkeypatch.setattr(np, "matmul", rows_apart)
