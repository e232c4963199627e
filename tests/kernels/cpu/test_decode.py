"""Generated decode attention against float64: windows, chunks, caps, sinks and slopes, over pages
that others have left NaN in."""

import pytest
import torch

from kernels.cpu import attention as module
from kernels.cpu.attention import attention_for
from kernels.cpu.codegen.processor import CompilerUnavailable, dot_bf16, lanes
from kernels.metadata import AttentionMeta
from tests.kernels.cpu.test_prefill import OTHER, caches, oracle

try:
    lanes()
except CompilerUnavailable as why:
    pytest.skip(f"no compiler: {why}", allow_module_level=True)

FLOAT32 = 3e-6  # of error
# The query and the weights are rounded to bfloat16, which has 8 bits.
PAIRS = 5e-3
LENGTHS = (1, 2, 16, 17, 95, 130)


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("sees", [(0, 0), (1, 0), (16, 0), (33, 0), (0, 32)], ids=str)
@pytest.mark.parametrize(("heads", "dim", "size"), [((9, 3), 64, 16), ((5, 1), 128, 1)], ids=str)
def test_decode(
    heads: tuple[int, int], dim: int, size: int, sees: tuple[int, int], other: str
) -> None:
    """Bug: a key before the window read, which is another request's by then; the first that it
    sees missed; a score beside its key's; one head's sink or slope taken for another's; what a
    page has behind the last key, or before the first, added as the other half of a pair."""
    check(heads, dim, size, sees, other, PAIRS if dot_bf16() else FLOAT32)


@pytest.mark.parametrize("sees", [(0, 0), (33, 0)], ids=str)
def test_decode_widened(sees: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a processor without products of bfloat16 cannot run what is made here."""
    monkeypatch.setattr(module, "dot_bf16", lambda: False)
    attention_for.cache_clear()
    for other in OTHER:
        check((9, 3), 64, 16, sees, other, FLOAT32)
    attention_for.cache_clear()


def check(
    heads: tuple[int, int], dim: int, size: int, sees: tuple[int, int], other: str, most: float
) -> None:
    torch.manual_seed(0)
    num_heads, kv_heads = heads
    numbers = OTHER[other](num_heads)
    kernels = attention_for(num_heads, kv_heads, dim, size, 0, False, torch.bfloat16)
    assert kernels is not None
    both, tables, wanted, blocks = [], [], [], 0
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    q = torch.randn(len(LENGTHS) + 1, num_heads, dim)
    width = -(-max(LENGTHS) // size)
    meta = AttentionMeta(
        positions=lengths - 1, slots=torch.empty(0), query_start=torch.empty(0),
        kv_len=torch.cat((lengths, torch.zeros(1, dtype=torch.int32))),
        block_table=torch.zeros(len(LENGTHS) + 1, width, dtype=torch.int32),
        num_decodes=len(LENGTHS) + 1, max_kv_len=max(LENGTHS),
        window=sees[0], chunk=sees[1],
    )  # fmt: skip
    for entry, length in enumerate(LENGTHS):
        k_cache, v_cache, table = caches(length, kv_heads, dim, size, torch.bfloat16)
        at = lengths[entry : entry + 1] - 1
        first = meta.first_key(at)
        wanted.append(oracle(q[entry, None], k_cache, v_cache, 0.1, table, at, first, numbers))
        gone = int(first) // size
        for cache in (k_cache, v_cache):
            cache[table[:gone].long()] = torch.nan
        both.append(torch.stack((k_cache, v_cache)))
        tables.append(table + blocks)
        tables[-1][:gone] = 2**30  # not to be read at all
        meta.block_table[entry, : len(table)] = tables[-1]
        blocks += len(k_cache)
    k_cache, v_cache = torch.cat(both, 1)
    out = torch.full((len(q), num_heads * dim), 7.0)
    kernels.decode(q, k_cache, v_cache, 0.1, meta, out, numbers)
    want = torch.cat(wanted)
    assert out.isfinite().all(), "padding too"
    assert float(((out[:-1] - want).norm(dim=1) / want.norm(dim=1)).max()) < most
