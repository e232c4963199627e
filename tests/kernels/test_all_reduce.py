"""All-reduce over the memory of peers.

In the interpreter ranks run one after the other, and what they wait for is there already. On a GPU
ranks are streams of it that really wait, in CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import all_reduce
from kernels.all_reduce import PeerMemory, region_bytes
from kernels.norm import rms_norm
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, grid, random, row_error

EPS = 1e-5
Call = Callable[[PeerMemory, Tensor], Tensor]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use so few programs and small tiles that programs have several units, and units several
    rows."""
    monkeypatch.setattr(all_reduce, "PROGRAMS", 3)
    monkeypatch.setattr(all_reduce, "TILE", 1 << 10)


def ranks_of(size: int) -> tuple[list[Tensor], list[PeerMemory]]:
    """Return the memory regions of ranks and their peer memories, with a short time limit."""
    device = torch.device(DEVICE)
    regions = [
        torch.zeros(region_bytes(size), dtype=torch.uint8, device=device) for _ in range(size)
    ]
    at = [region.data_ptr() for region in regions]
    return regions, [replace(PeerMemory.over(r, at, device), patience=1 << 22) for r in range(size)]


def all_have_come(regions: list[Tensor], programs: int) -> None:
    """Set the signals as if all ranks had arrived at every call, and reset the counts of calls."""
    size = len(regions)
    for region in regions:
        words = region[: 8 * programs * (size + 1)].view(torch.int64)
        words[: programs * size] = 1 << 40  # signals
        words[programs * size :] = 0  # calls


def one_after_the_other(size: int, waits: int, call: Call, given: list[Tensor]) -> list[Tensor]:
    """Return the result of each rank's call, computed rank after rank.

    All ranks run once for each wait and once more, each time as if it were the first call. Then
    what they wait for is in its place.
    """
    regions, ranks = ranks_of(size)
    actual: list[Tensor] = []
    for _ in range(waits + 1):
        all_have_come(regions, ranks[0].programs)
        actual = [call(rank, x.clone()) for rank, x in zip(ranks, given, strict=True)]
    assert all(int(rank.missing_rank) == -1 for rank in ranks)
    return actual


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    grid(DTYPES, [(2, (1, 100)), (2, (3, 300)), (2, (13, 96)), (3, (8, 17)), (4, (5, 96))]),
    ids=str,
)
def test_sums_are_those_of_the_ranks_in_their_order(
    few_programs: None, dtype: torch.dtype, sizes: tuple[int, tuple[int, int]]
) -> None:
    """Bugs: a summand twice or not at all, at the end of a message that fills no tile; other bits
    on one rank, or by two shots, or onto a residual; the norm of what was there before the sum, or
    of another row of a unit; a last unit that is not full."""
    size, shape = sizes
    inputs = [random(*shape, dtype=dtype) for _ in range(size)]
    residual, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype)
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    want = total.to(dtype)
    added = (residual.float() + want.float()).to(dtype)

    def onto(call: Callable[[PeerMemory], Callable[[Tensor, Tensor], Tensor]]) -> Call:
        return lambda rank, x: call(rank)(x, residual.clone())

    def normed(rank: PeerMemory, x: Tensor) -> Tensor:
        sums = residual.clone()
        out = rank.norm_one_shot(x, sums, weight, EPS)
        return torch.stack([sums, out])

    for waits, plain, call in (
        (1, PeerMemory.one_shot, onto(lambda rank: rank.one_shot)),
        (2, PeerMemory.two_shot, onto(lambda rank: rank.two_shot)),
    ):
        for actual in one_after_the_other(size, waits, plain, inputs):
            assert torch.equal(actual, want)
        for actual in one_after_the_other(size, waits, call, inputs):
            assert torch.equal(actual, added)
    for actual in one_after_the_other(size, 1, normed, inputs):
        assert torch.equal(actual[0], added)
        wide = added.double()
        ref = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        assert row_error(actual[1], ref) < BOUND[dtype]


@pytest.mark.triton
@pytest.mark.parametrize("rows", [7, 12])
def test_norms_of_more_rows_than_there_is_memory_for(
    few_programs: None, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Bugs: rows between two pieces of a message that are left out or read twice; a piece that is
    larger than the slots, whose last rows are written over the next turn's."""
    monkeypatch.setattr(all_reduce, "LARGEST", 3 << 10)  # two rows of 128 for each of 3 programs
    inputs = [random(rows, 100, dtype=torch.float32) for _ in range(2)]
    residual, weight = random(rows, 100, dtype=torch.float32), random(100, dtype=torch.float32)
    added = residual + (inputs[0] + inputs[1])

    def normed(rank: PeerMemory, x: Tensor) -> Tensor:
        sums = residual.clone()
        out = rank.norm_one_shot(x, sums, weight, EPS)
        return torch.stack([sums, out])

    for actual in one_after_the_other(2, 1, normed, inputs):
        assert torch.equal(actual[0], added)
        # Two kernels may add the squares of a row in two orders.
        assert row_error(actual[1], rms_norm(added, weight, EPS)) < BOUND[torch.float32]


@pytest.mark.triton
def test_gathers_have_what_each_rank_brings(few_programs: None) -> None:
    """Bugs: numbers that are no floats; what a rank that reads nothing fails to bring."""
    inputs = [torch.arange(7, device=DEVICE) + 10 * rank for rank in range(3)]
    for ranks in (3, 1):
        actual = one_after_the_other(3, 1, lambda rank, x, n=ranks: rank.gather(x, n), inputs)
        for tensor in actual:
            assert torch.equal(tensor, torch.stack(inputs[:ranks]))

    def rank_0_reads(rank: PeerMemory, x: Tensor) -> Tensor:
        return rank.gather(x, 0 if rank.rank else 3)

    first, *others = one_after_the_other(3, 1, rank_0_reads, inputs)
    assert torch.equal(first, torch.stack(inputs)) and all(not len(tensor) for tensor in others)


@pytest.mark.triton
@pytest.mark.parametrize("call", [PeerMemory.one_shot, PeerMemory.two_shot])
def test_a_rank_that_does_not_come_is_named(call: Call) -> None:
    """Bugs: a wait without an end; a sum of what was there before, which looks like one; each of a
    step's sums waits as long as the first."""
    _, ranks = ranks_of(3)
    for patience in (3, 1 << 40):
        late = replace(ranks[0], patience=patience)
        actual = call(late, random(2, 40))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert int(late.missing_rank) == 2 and actual.isnan().all()


@pytest.mark.triton
def test_what_fits() -> None:
    """A row that is longer than a slot; no row."""
    rank = ranks_of(2)[1][0]
    rows = torch.empty(2, rank.slot // 4)
    assert rank.norm_fits(rows) and not rank.norm_fits(rows[:0])
    assert not rank.norm_fits(rows.new_empty(1, rows.shape[1] + 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, shape",
    [(2, (1, 4096)), (2, (256, 4096)), (2, (131, 2048)), (3, (7, 2880)), (4, (16, 4096))],
)
def test_ranks_meet_in_graphs(size: int, shape: tuple[int, int]) -> None:
    """Bugs: a rank that reads what another has not written yet, or has written already for the next
    sum; a count that a replayed graph does not go on with; other bits on another rank; a wait that
    keeps the other rank from running."""
    regions, ranks = ranks_of(size)
    device = torch.device(DEVICE)
    base = [torch.randn(shape, device=device).bfloat16() for _ in range(size)]
    before, weight = base[0] / 3, base[1][0].contiguous()
    turn = [torch.zeros(1, device=device) for _ in range(size)]
    wrong = [torch.zeros(4, dtype=torch.int64, device=device) for _ in range(size)]

    def step(number: int) -> None:
        """Run a rank's calls with new numbers, and count wrong results on the device."""
        rank = ranks[number]
        turn[number].add_(1)
        inputs = [(tensor.float() * turn[number]).bfloat16() for tensor in base]
        total = inputs[0].float()
        for x in inputs[1:]:
            total = total + x.float()
        want, mine = total.bfloat16(), inputs[number]
        added = (before.float() + want.float()).bfloat16()
        wrong[number][0] += (rank.one_shot(mine.clone()) != want).sum()
        wrong[number][1] += (rank.two_shot(mine.clone(), before.clone()) != added).sum()
        sums = before.clone()
        normed = rank.norm_one_shot(mine.clone(), sums, weight, EPS)
        wrong[number][2] += (sums != added).sum() + (normed != rms_norm(sums, weight, EPS)).sum()
        wrong[number][3] += (rank.gather(mine, size) != torch.stack(inputs)).sum()

    # One rank's kernels cannot be loaded while another's waits in this process.
    for number in range(size):
        all_have_come(regions, ranks[0].programs)
        step(number)
    torch.cuda.synchronize()
    for buffer in (*regions, *turn, *wrong):
        buffer.zero_()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(size)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(size)]
    for number in range(size):
        with torch.cuda.graph(graphs[number], stream=streams[number]):
            step(number)
    for _ in range(1000):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(int(rank.missing_rank) == -1 for rank in ranks)
    assert [int(buffer.item()) for buffer in turn] == [1000] * size
    assert [buffer.tolist() for buffer in wrong] == [[0] * 4] * size
