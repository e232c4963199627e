"""Paged attention against float64, in every way that entries, pages and heads can lie."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.attention.decode import attention_decode
from kernels.attention.decode_plan import plan
from kernels.attention.inputs import AttentionInputs
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.oracle import (
    BOUND,
    DEVICE,
    DTYPES,
    attention,
    grid,
    multiply_rows_apart,
    paged,
    random,
    row_error,
)
from tests.kernels.test_quantized_attention import plain, quantized

pytestmark = pytest.mark.triton
cuda, cuda_deterministic = kernels_for("cuda"), kernels_for("cuda", True)
gpu = pytest.mark.gpu
# Of blocks and heads: models have heads of 128, for which kernels take other tiles than for 64.
PAGES = [(1, 64), (16, 64), (64, 64), (1, 128), (128, 128)]


def check(
    kv_len, query_len, num_heads, num_kv_heads, head_dim, block_size, num_decodes, dtype, padding=0
):
    k_cache, v_cache, meta = paged(
        kv_len, query_len, num_kv_heads, head_dim, block_size, num_decodes, dtype, padding=padding
    )
    q = random(sum(query_len) + padding, num_heads, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    out = cuda.attention(AttentionInputs(q, k_cache, v_cache, scale), meta)
    assert out.isfinite().all()
    ref = attention(q, k_cache, v_cache, scale, meta)
    got = out.view(q.shape)[: len(ref)]
    if head_dim < 16:  # of so few elements one head's result may be short by chance
        got, ref = got.flatten(1), ref.flatten(1)
    assert row_error(got, ref) < BOUND[dtype]


@pytest.mark.parametrize(("page", "dtype"), grid([*PAGES, (32, 64), (128, 64)], DTYPES), ids=str)
def test_decode_lengths_around_pages(page: tuple[int, int], dtype: torch.dtype) -> None:
    """A mask off by one at a page's edge, or a page of NaN read through a weight of zero."""
    block_size, head_dim = page
    lengths = [
        1,
        15,
        16,
        17,
        block_size - 1 or 1,
        block_size,
        block_size + 1,
        129,
        5 * block_size + 3,
    ]
    check(lengths, [1] * len(lengths), 8, 2, head_dim, block_size, len(lengths), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    grid([(4, 4), (5, 1), (8, 2), (9, 3), (24, 1)], [4, 64, 80, 96, 128, 256]),
    ids=str,
)
def test_heads(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Padded heads or dimensions leaking into the sums; groups that are no power of two; heads
    smaller than a product takes."""
    num_heads, num_kv_heads = heads
    check([200, 33, 40, 130], [1, 1, 7, 70], num_heads, num_kv_heads, head_dim, 16, 2, dtype)


@pytest.mark.parametrize(
    "lengths",
    [
        [2047],  # merged by a grid of its own
        [2600, *[1] * 80],  # merged by the last split to arrive
    ],
    ids=["grid", "last"],
)
def test_decode_merges_splits(lengths: list[int]) -> None:
    """Splits of one entry merged with the wrong weights, or the wrong entry's."""
    count = len(lengths) if DEVICE == "cuda" else min(len(lengths), 6)  # the interpreter is slow
    lengths = lengths[:count]
    k_cache, v_cache, meta = paged(lengths, [1] * count, 4, 64, 16, count, torch.float32)
    q = random(count, 8, 64)
    cuda.prepare(meta, 8, k_cache)
    ref = attention(q, k_cache, v_cache, 0.125, meta)
    for _ in range(2):  # the second layer finds the arrival counters as the first did
        out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.125), meta)
        assert row_error(out.view(q.shape), ref) < BOUND[torch.float32]
    assert int(meta.plan.count[0]) > count
    assert meta.plan.last_merges == (len(lengths) > 1)
    assert not meta.plan.arrived.any()


# Rows and lengths of entries: runs of two to eight, and neighbours that are none.
RUNS = [
    (3, [41, 42, 43]),
    (5, [200]),
    (8, [60]),
    (9, [61]),  # another request, one token longer than the one before it
    (2, [1, 2, 3, 4]),
    (7, [*range(145, 153)]),
    (1, [128, 129]),
]


RUN_CASES: dict[str, list[tuple[int, list[int]]]] = {
    "mixed": RUNS,
    "grid": [(0, [2045, 2046, 2047])],
    "last": [(4, [2558, 2559, 2560, 2561]), (1, [7])],
}


@pytest.mark.parametrize(
    ("name", "heads"), grid(RUN_CASES, [(2, 2), (8, 2), (6, 2), (8, 1), (16, 1)]), ids=str
)
def test_runs_of_one_request(name: str, heads: tuple[int, int]) -> None:
    """Entries of one request at consecutive positions, as drafts are verified: a query that sees a
    later one's key, a neighbour taken for the same request, splits that a query sees nothing of."""
    runs = RUN_CASES[name]
    num_heads, num_kv_heads = heads
    how = (3.0, random(num_heads).float(), random(num_heads).abs().float())
    kv_len = [max(lengths) for _, lengths in runs]
    k_cache, v_cache, whole = paged(
        kv_len, [1] * len(runs), num_kv_heads, 64, 16, len(runs), torch.float32
    )
    entry_of = [index for index, (_, lengths) in enumerate(runs) for _ in lengths]
    q = random(len(entry_of), num_heads, 64)
    entries = torch.tensor(entry_of, device=DEVICE)
    lengths = [length for _, lengths in runs for length in lengths]
    meta = rows_of(lengths, [1] * len(q), len(q), whole.block_table[entries], q)
    rows = [row for row, lengths in runs for _ in lengths]
    meta.runs = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    cuda.prepare(meta, num_heads, k_cache)
    for softcap, sinks, slopes in ((0.0, None, None), how):
        ref = attention(
            q, k_cache, v_cache, 0.125, meta, softcap=softcap, sinks=sinks, slopes=slopes
        )
        inputs = AttentionInputs(q, k_cache, v_cache, 0.125, softcap, sinks, slopes)
        out = cuda.attention(inputs, meta)
        assert row_error(out.view(q.shape), ref) < BOUND[torch.float32]
    queries = 16 * num_kv_heads // num_heads
    planned = sum(-(-len(lengths) // queries) for _, lengths in runs)
    assert {int(entry) for entry in meta.plan.items[: int(meta.plan.count[0]), 0]} == {
        at for at in range(len(q)) if int(meta.plan.entries[at, 2]) == 0
    }
    assert sum(int(meta.plan.entries[at, 2]) == 0 for at in range(len(q))) == planned


def test_decode_with_nothing_cached_is_finite() -> None:
    """0 / 0 in a padding row of a graph; NaN would spread through whatever is shared by rows."""
    k_cache, v_cache, meta = paged([5, 9], [1, 1], 2, 64, 16, 2, torch.float32)
    meta.kv_len[1] = 0
    out = cuda.attention(AttentionInputs(random(2, 4, 64), k_cache, v_cache, 0.125), meta)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), PAGES)
def test_prefill_ragged(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """Chunks after a prefix, one-token chunks, decodes before them and padding after them."""
    kv_len = [50, 3, 1, 64, 65, 200, 17, 130]
    query_len = [1, 1, 1, 64, 3, 45, 1, 130]
    check(kv_len, query_len, 8, 2, head_dim, block_size, 2, dtype, padding=5)


@pytest.mark.parametrize("block_size", [2, 4, 8, 32, 128])
def test_other_block_sizes(block_size: int) -> None:
    """A page taken for another where a tile of keys holds many of them, or a part of one: decodes,
    a prompt, and a chunk after a prefix, all ending inside, at and beyond a block's end."""
    kv_len = [block_size, block_size + 1, 19, 2 * block_size + 3]
    check(kv_len, [1, 1, 19, block_size + 2], 2, 1, 32, block_size, 2, DTYPES[-1])


def spans_of(
    query_len: list[int], kv_len: list[int], spans: dict[int, list[tuple[int, int]]]
) -> torch.Tensor:
    """Return the last visible key of each token. spans: entry -> ranges that see each other."""
    last = []
    for entry, (queries, length) in enumerate(zip(query_len, kv_len, strict=True)):
        own = torch.arange(length - queries, length)
        for begin, end in spans.get(entry, ()):
            own[(own >= begin) & (own < end)] = end - 1
        last.append(own)
    return torch.cat(last).int().to(DEVICE)


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("name", ["", "int8"])
def test_tokens_of_an_image_see_each_other(name: str, window: int) -> None:
    """Bugs: a tile ends at its last query's own key; a tile that all queries see is one of keys
    behind them; keys of the next image are seen. Images begin and end within tiles and at their
    borders, before the chunk too, and fill a chunk up to its end."""
    kv_len, query_len = [40, 1, 200, 70, 64, 33], [1, 1, 170, 70, 64, 5]
    *caches, meta = paged(kv_len, query_len, 2, 32, 16, 2, torch.float32)
    meta.window = window
    spans = {2: [(20, 75), (80, 128), (128, 130)], 3: [(3, 60)], 4: [(10, 64)], 5: [(20, 33)]}
    meta.last_keys = spans_of(query_len, kv_len, spans)
    q, inputs = random(sum(query_len), 8, 32), caches
    if name:
        inputs = [quantized(name, cache) for cache in caches]
        caches = [plain(cache) for cache in inputs]
    want = attention(q, *caches, 0.2, meta)
    assert row_error(attention(q, *caches, 0.2, replace(meta, last_keys=None)), want) > 0.1
    for back_end in (cuda, cuda_deterministic, Kernels()):
        meta.plan = meta.counts = None
        back_end.prepare(meta, 8, inputs[0])
        out = back_end.attention(AttentionInputs(q, *inputs, 0.2), meta).view(q.shape)
        assert row_error(out, want) < BOUND[torch.float32]


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def test_graph_with_fewer_entries_than_room() -> None:
    """In a graph of a mixed step the device alone knows where decodes end and padding begins."""
    kv_len, query_len, num_decodes = [40, 300, 129, 64, 90], [1, 1, 7, 64, 33], 2
    k_cache, v_cache, meta = paged(kv_len, query_len, 2, 64, 16, num_decodes, torch.float32)
    total = sum(query_len)
    q = random(total + 11, 8, 64)
    ref = attention(q[:total], k_cache, v_cache, 0.125, meta)
    meta.counts = torch.tensor([num_decodes, 5], dtype=torch.int32, device=DEVICE)
    padding = torch.tensor([total + 11] * 4, dtype=torch.int32, device=DEVICE)
    meta.query_start = torch.cat([meta.query_start, padding])
    meta.kv_len = torch.cat([meta.kv_len, torch.tensor([11, 0, 0, 0], device=DEVICE).int()])
    meta.block_table = torch.nn.functional.pad(meta.block_table, (0, 0, 0, 4))
    meta.num_decodes = 9
    cuda.prepare(meta, 8, k_cache)
    for _ in range(2):
        out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.125), meta).view(q.shape)
        assert row_error(out[:total], ref) < BOUND[torch.float32]
        assert not out[total:].any()


def test_batch_order_does_not_matter() -> None:
    """Permuting the entries permutes the output bit by bit."""
    lengths = [700, 3, 129, 1100, 64, 16]
    k_cache, v_cache, meta = paged(lengths, [1] * 6, 2, 64, 16, 6, torch.float32)
    q = random(6, 8, 64)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=DEVICE)
    outs = []
    for index in (torch.arange(6, device=DEVICE), order):
        split = plan(meta.kv_len[index], 8, k_cache, meta.max_kv_len, number(6))
        ordered = replace(meta, block_table=meta.block_table[index], plan=split)
        out = torch.full_like(q, torch.nan)
        attention_decode(AttentionInputs(q[index], k_cache, v_cache, 0.125), ordered, out)
        outs.append(out)
    assert torch.equal(outs[0][order], outs[1])


def rows_of(
    kv_len: list[int], query_len: list[int], num_decodes: int, tables: torch.Tensor, q: torch.Tensor
) -> AttentionMeta:
    """Return metadata of entries over the same caches. q: all their queries."""
    starts = torch.tensor([0, *query_len]).cumsum(0).int().to(DEVICE)
    assert len(q) == starts[-1]
    return AttentionMeta(
        positions=torch.empty(0),
        slots=torch.empty(0),
        query_start=starts,
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=DEVICE),
        block_table=tables,
        num_decodes=num_decodes,
        max_kv_len=max(kv_len),
    )


@pytest.mark.parametrize(("block_size", "heads"), [(1, (4, 2)), (16, (3, 1))], ids=str)
def test_deterministic_rows_ignore_the_rest(
    block_size: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deterministic kernels a query is the same bit by bit alone, among decodes, in one chunk
    and in chunks that begin anywhere; with the others it is not, or this test tests nothing."""
    multiply_rows_apart(monkeypatch)
    torch.manual_seed(3)
    num_heads, num_kv_heads = heads
    total = 80
    k_cache, v_cache, meta = paged([total, 90], [total, 1], num_kv_heads, 64, block_size, 0,
                                   torch.float32)  # fmt: skip
    mine, other = meta.block_table[:1], meta.block_table[1:]
    q = random(total, num_heads, 64)

    def attend(back_end: Any, kv_len: list[int], query_len: list[int], decodes: int,
               tables: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:  # fmt: skip
        step = rows_of(kv_len, query_len, decodes, tables, queries)
        back_end.prepare(step, num_heads, k_cache)
        return back_end.attention(AttentionInputs(queries, k_cache, v_cache, 0.125), step)

    def cuts(back_end: Any) -> list[torch.Tensor]:
        """Return the last query's results, computed beside different rows."""
        last, last_but = q[-1:], q[total - 7 :]
        return [
            part[-1]
            for part in (
                attend(back_end, [total], [total], 0, mine, q),
                attend(back_end, [total], [1], 1, mine, last),
                attend(back_end, [total], [7], 0, mine, last_but),
                attend(back_end, [total], [1], 0, mine, last),
                attend(back_end, [90, total], [1, 1], 2, torch.cat((other, mine)),
                       torch.cat((q[:1], last))),
                attend(back_end, [90, total], [1, 33], 1, torch.cat((other, mine)),
                       torch.cat((q[:1], q[total - 33 :]))),
            )
        ]  # fmt: skip

    first, *others = cuts(cuda_deterministic)
    assert all(torch.equal(first, out) for out in others)
    if DEVICE == "cuda":  # sums of so few keys round alike on some CPUs
        first, *others = cuts(cuda)
        assert not all(torch.equal(first, out) for out in others)


def test_outliers_do_not_overflow() -> None:
    """Scores in the thousands: a softmax without its maximum, or in half precision, gives NaN."""
    k_cache, v_cache, meta = paged([200, 90], [1, 40], 2, 64, 16, 1, torch.float16)
    q = random(41, 4, 64, dtype=torch.float16) * 100
    out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.125), meta)
    ref = attention(q, k_cache, v_cache, 0.125, meta)
    assert row_error(out.view(q.shape), ref) < 2e-3


def test_plan_covers_every_key_once() -> None:
    """A key in no split, in two, or an empty split; splits beyond the workspace."""
    torch.manual_seed(1)
    for trial in range(8):
        count = [1, 2, 7, 33][trial % 4]
        lengths = torch.randint(0, [40, 900, 20000][trial % 3], (count,), dtype=torch.int32)
        cache = random(1, 2, 16, 16)
        longest = int(lengths.max()) + 1
        split = plan(lengths.to(DEVICE), 4, cache, longest, number(count))
        listed = split.items[: int(split.count[0])].tolist()
        assert len(listed) <= len(split.items)
        seen: dict[int, list[tuple[int, int]]] = {}
        for index, (entry, begin, end, splits, first, *_) in enumerate(listed):
            seen.setdefault(entry, []).append((begin, end))
            assert first <= index < first + splits
        for entry, length in enumerate(lengths.tolist()):
            parts = seen[entry]
            assert parts[0][0] == 0 and parts[-1][1] == length
            assert all(a[1] == b[0] for a, b in pairwise(parts))
            assert all(a < b for a, b in parts) or length == 0


@gpu
def test_block_ids_beyond_int32_offsets() -> None:
    """The element offset of a late block overflows 32 bits."""
    head_dim, block_size, num_kv_heads = 128, 128, 8
    num_blocks = 2**31 // (head_dim * block_size * num_kv_heads) + 64
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    v_cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    _, _, meta = paged([300, 700], [1, 90], num_kv_heads, head_dim, block_size, 1, torch.bfloat16)
    meta.block_table = torch.arange(num_blocks - 12, num_blocks, device="cuda").int().view(2, 6)
    for cache in (k_cache, v_cache):
        cache[-12:] = random(12, *shape[1:], dtype=torch.bfloat16)
    q = random(91, 32, head_dim, dtype=torch.bfloat16)
    out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.09), meta)
    ref = attention(q, k_cache, v_cache, 0.09, meta)
    assert row_error(out.view(q.shape), ref) < BOUND[torch.bfloat16]


@gpu
@pytest.mark.parametrize("case", ["64 x 1000", "1 x 32768", "1024 mixed", "long and short"])
def test_decode_at_size(case: str) -> None:
    """A race between splits, or a workspace too small, shows only when the device is full."""
    torch.manual_seed(0)
    if case == "1024 mixed":
        lengths = torch.randint(1, 600, (1024,)).tolist()
    else:
        long = [20000, *[100] * 39]
        lengths = {"64 x 1000": [1000] * 64, "1 x 32768": [32768], "long and short": long}[case]
    count = len(lengths)
    k_cache, v_cache, meta = paged(lengths, [1] * count, 8, 128, 16, count, torch.bfloat16)
    q = random(count, 32, 128, dtype=torch.bfloat16)
    cuda.prepare(meta, 32, k_cache)
    first = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.09), meta)
    assert row_error(first.view(q.shape), attention(q, k_cache, v_cache, 0.09, meta)) < 4e-3
    for _ in range(20):
        assert torch.equal(cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.09), meta), first)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prefix", [32 << 10, 128 << 10])
def test_prefill_after_a_long_prefix(prefix: int, dtype: torch.dtype) -> None:
    """Sums over far more keys than elsewhere here: rounding that adds up with them, or one key that
    is lost among thousands of tiles."""
    torch.manual_seed(0)
    k_cache, v_cache, meta = paged([prefix + 256], [256], 2, 128, 16, 0, dtype)
    q = random(256, 8, 128, dtype=dtype)
    out = cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.09), meta).view(q.shape)
    for head in range(2):  # a slice at a time: scores of all would be gigabytes
        mine, own = slice(4 * head, 4 * head + 4), slice(head, head + 1)
        ref = attention(q[:, mine], k_cache[:, own], v_cache[:, own], 0.09, meta)
        assert row_error(out[:, mine], ref) < BOUND[dtype]


@gpu
def test_one_graph_serves_all_lengths() -> None:
    """A grid or a plan that was sized by the lengths at capture."""
    k_cache, v_cache, meta = paged([3000, 40, 700], [1] * 3, 8, 128, 16, 3, torch.bfloat16)
    q = random(3, 32, 128, dtype=torch.bfloat16)
    lengths = meta.kv_len.clone()
    meta.kv_len.fill_(1)

    def step() -> torch.Tensor:
        meta.plan = None
        cuda.prepare(meta, 32, k_cache)
        q.mul_(1)  # the plan is read before the wait on the last launch (kernels/launch/pdl.py)
        return cuda.attention(AttentionInputs(q, k_cache, v_cache, 0.09), meta)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    meta.kv_len.copy_(lengths)
    graph.replay()
    ref = attention(q, k_cache, v_cache, 0.09, meta)
    assert row_error(out.view(q.shape), ref) < BOUND[torch.bfloat16]
