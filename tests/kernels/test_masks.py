"""What a query sees of its keys, and what its scores become: windows, pieces, soft caps, sinks and
slopes, on every back end against float64."""

from typing import Any

import pytest
import torch

from kernels.attention.inputs import AttentionInputs
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, attention, grid, paged, random, row_error

SEES = {"window 1": (1, 0), "window 20": (20, 0), "window 64": (64, 0), "chunk 24": (0, 24)}
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "slopes": {"slopes": True},
    "cap and sinks": {"softcap": 3.0, "sinks": True},
}
pytestmark = pytest.mark.triton
BACK_ENDS: dict[str, Any] = {
    "cuda": kernels_for("cuda"),
    "cuda deterministic": kernels_for("cuda", True),
    "reference": Kernels(),
}


def step(
    kv_len: list[int], query_len: list[int], decodes: int, sees: tuple[int, int], dim: int = 64,
    block_size: int = 16, kv_heads: int = 2, padding: int = 0, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMeta]:  # fmt: skip
    """Return caches and metadata as `paged` does, without the blocks that no query of the step
    sees."""
    k_cache, v_cache, meta = paged(
        kv_len, query_len, kv_heads, dim, block_size, decodes, dtype, padding=padding
    )
    meta.window, meta.chunk = sees
    for entry, (length, queries) in enumerate(zip(kv_len, query_len, strict=True)):
        first = int(meta.first_key(length - queries))
        for block in meta.block_table[entry, : first // block_size].tolist():
            k_cache[block], v_cache[block] = torch.nan, torch.nan
        meta.block_table[entry, : first // block_size] = 2**30
    return k_cache, v_cache, meta


def scores(name: str, heads: int) -> dict[str, Any]:
    how = dict(SCORES[name])
    for field in ("sinks", "slopes"):
        if how.get(field):
            how[field] = torch.randn(heads, device=DEVICE).abs() * (4 if field == "sinks" else 0.3)
    return how


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("sees", "how"), grid([*SEES, "all"], SCORES))
def test_mixed_step(sees: str, how: str, back_end: str) -> None:
    """A mask off by one at either end, a tile in which a row sees nothing, a block read that went
    back, a sink that counts once a split: decodes, chunks after a prefix, prompts, padding."""
    torch.manual_seed(0)
    kv_len, query_len = [130, 3, 1, 70, 65, 90, 17], [1, 1, 1, 64, 3, 25, 17]
    k_cache, v_cache, meta = step(kv_len, query_len, 3, SEES.get(sees, (0, 0)), padding=5)
    q = random(sum(query_len) + 5, 8, 64)
    extra = scores(how, 8)
    want = attention(q, k_cache, v_cache, 0.125, meta, **extra)
    kernels = BACK_ENDS[back_end]
    kernels.prepare(meta, 8, k_cache)
    for _ in range(2):  # the second layer
        out = kernels.attention(AttentionInputs(q, k_cache, v_cache, 0.125, **extra), meta).view(
            q.shape
        )
        assert out.isfinite().all()
        assert row_error(out[: len(want)], want) < BOUND[torch.float32]


@pytest.mark.parametrize(
    ("sees", "how"), grid(["window 64", "chunk 24", "all"], ["plain", "sinks", "cap and sinks"])
)
@pytest.mark.parametrize("entries", [1, 5])
def test_decodes_in_splits(entries: int, sees: str, how: str) -> None:
    """Splits cut over keys that nobody sees, or a sink in each of them."""
    torch.manual_seed(1)
    window, chunk = SEES.get(sees, (0, 0))
    see = (window * 10, 1000 if chunk else 0)
    lengths = [2600, 3, 64, 1, 1][:entries]
    k_cache, v_cache, meta = step(lengths, [1] * entries, entries, see, kv_heads=4)
    q = random(entries, 8, 64)
    extra = scores(how, 8)
    want = attention(q, k_cache, v_cache, 0.125, meta, **extra)
    cuda = BACK_ENDS["cuda"]
    cuda.prepare(meta, 8, k_cache)
    out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.125, **extra), meta).view(q.shape)
    assert row_error(out, want) < BOUND[torch.float32]
    assert int(meta.plan.count[0]) > entries, "nothing was split"


@pytest.mark.parametrize(("block_size", "dim"), [(1, 64), (4, 80), (128, 32), (32, 256)])
def test_blocks_and_heads(block_size: int, dim: int) -> None:
    """A page taken for another where a window begins inside it."""
    kv_len, query_len = [150, 33, 150, 40], [1, 1, 70, 40]
    k_cache, v_cache, meta = step(kv_len, query_len, 2, (37, 0), dim, block_size)
    q = random(sum(query_len), 6, dim)
    want = attention(q, k_cache, v_cache, 0.1, meta)
    for back_end in BACK_ENDS.values():
        meta.plan = meta.counts = None
        back_end.prepare(meta, 6, k_cache)
        out = back_end.attention(AttentionInputs(q, k_cache, v_cache, 0.1), meta).view(q.shape)
        assert row_error(out, want) < BOUND[torch.float32]


def test_a_window_reads_what_it_needs() -> None:
    """Decode with a window of 1,024 at a context of 32k that walks 32k keys: the plan lists the
    keys that are read."""
    k_cache = random(1, 2, 16, 64)
    kv_len = torch.tensor([32768, 20000, 5], dtype=torch.int32, device=DEVICE)
    meta = AttentionMeta(
        torch.empty(0), torch.empty(0), torch.empty(0), kv_len, torch.empty(0), 3, 32768,
        window=1024,
    )  # fmt: skip
    BACK_ENDS["cuda"].prepare(meta, 8, k_cache)
    items = meta.plan.items[: int(meta.plan.count[0])].tolist()
    listed = {entry: [0, 10**9, 0] for entry in range(3)}
    for entry, begin, end, *_ in items:
        keys, first, last = listed[entry]
        listed[entry] = [keys + end - begin, min(first, begin), max(last, end)]
    assert listed == {0: [1024, 31744, 32768], 1: [1024, 18976, 20000], 2: [5, 0, 5]}
