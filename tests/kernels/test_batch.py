"""Batch assembly by Triton kernels: the same step as on the CPU, padding and updates included."""

import pytest
import torch

from engine.batch import Batch, NewRow
from engine.runner import inputs
from engine.runner.inputs import CpuInputs, CudaInputs, DeviceStep
from engine.runner.request_rows import RequestRows
from engine.sampling_params import SamplingParams
from kernels.metadata import AttentionMeta
from tests.batches import BLOCK_SIZE, MAX_LEN, RandomSteps
from tests.kernels.oracle import DEVICE

pytestmark = pytest.mark.triton

NUM_ROWS = 6


class Unpinned:
    """Staging memory of the same size that is not pinned, as there is no device."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int32)
        self.array = self.tensor.numpy()


class Pair:
    """The two ways to lay out a step, each with rows of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, groups: int = 1, *, axes: bool = False
    ) -> None:
        if DEVICE == "cpu":
            monkeypatch.setattr(inputs, "_Staging", Unpinned)
        device = torch.device(DEVICE)
        self.rows = [
            RequestRows.allocate(NUM_ROWS, MAX_LEN, BLOCK_SIZE, where, groups, axes=axes)
            for where in (torch.device("cpu"), device)
        ]
        self.cpu = CpuInputs(self.rows[0], BLOCK_SIZE)
        self.cuda = CudaInputs(self.rows[1], BLOCK_SIZE, NUM_ROWS * MAX_LEN, device)

    def sampled(self, steps: RandomSteps, step: DeviceStep) -> None:
        """Store the sampled tokens in the rows of both; each is its position plus its row."""
        rows, positions = step.sample_rows, step.sample_positions
        tokens = (rows + positions).int()
        for own in self.rows:
            own.tokens[rows.to(own.tokens.device), positions.to(own.tokens.device)] = tokens.to(
                own.tokens.device
            )
        steps.sampled(rows.tolist(), tokens.tolist())


def same(step: DeviceStep, want: DeviceStep) -> None:
    for name in ("token_ids", "last", "sample_rows", "sample_positions"):
        ours, theirs = getattr(step, name), getattr(want, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.tolist() == theirs.tolist(), name
            assert ours.dtype == theirs.dtype
    for actual, meta in zip(step.metas, want.metas, strict=True):
        for name in ("positions", "slots", "query_start", "kv_len"):
            assert getattr(actual, name).tolist() == getattr(meta, name).tolist(), name
        for name in ("num_decodes", "max_kv_len"):
            assert getattr(actual, name) == getattr(meta, name), name
        assert (actual.rotary is None) == (meta.rotary is None)
        if actual.rotary is not None and meta.rotary is not None:
            assert actual.rotary.rows.tolist() == meta.rotary.rows.tolist()
            assert actual.rotary.rows.dtype == meta.rotary.rows.dtype == torch.int32
    same_tables(step.metas, want)


def same_tables(metas: list[AttentionMeta], want: DeviceStep) -> None:
    """Assert equal block tables up to each entry's last block, behind which nothing is read."""
    for actual, meta in zip(metas, want.metas, strict=True):
        for entry, kv_len in enumerate(meta.kv_len.tolist()):
            used = -(-kv_len // BLOCK_SIZE)
            ours, theirs = actual.block_table[entry, :used], meta.block_table[entry, :used]
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_the_cpu(seed: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a token is read from another row, or a key written into another request's block, or
    another group's."""
    pair, steps = Pair(monkeypatch, groups), RandomSteps(NUM_ROWS, seed, groups)
    for _ in range(8):
        batch, _ = steps.next()
        want = pair.cpu.assemble(batch)
        same(pair.cuda.assemble(batch), want)
        assert pair.rows[0].tokens.tolist() == pair.rows[1].tokens.tolist()
        assert pair.rows[0].block_table.tolist() == pair.rows[1].block_table.tolist()
        pair.sampled(steps, want)


def test_tokens_stand_at_the_delta_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: behind an image a token is rotated by its index, or by another row's delta."""
    pair, steps = Pair(monkeypatch, axes=True), RandomSteps(NUM_ROWS, 0)
    deltas = torch.tensor([0, -3, -1, 0, -2, 0, 0], dtype=torch.int32)
    for rows in pair.rows:
        assert rows.deltas is not None
        rows.deltas.copy_(deltas)
    for _ in range(4):
        batch, layout = steps.next()
        want = pair.cpu.assemble(batch)
        places = want.metas[0].rotary
        assert places is not None and places.table is None
        per_token = deltas[batch.rows].repeat_interleave(torch.tensor(batch.lengths))
        assert places.rows.tolist() == (torch.tensor(layout.positions) + per_token).tolist()
        same(pair.cuda.assemble(batch), want)
        pair.sampled(steps, want)


def test_drafts_are_read_in_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a draft lands at another position, or a new row's tokens or blocks move by it."""
    pair = Pair(monkeypatch)
    params = SamplingParams()
    fresh = NewRow(1, [3, 4, 5], 3, params, seed=0, choice=0, stop_ids=())
    first = Batch(1, [1], [0], [3], [True], 0, [fresh], [(1, 0, 7), (1, 1, 2)])
    second = Batch(2, [1, 1, 1, 4], [2, 3, 4, 0], [1] * 3 + [2], [True] * 4, 3)
    second.new_rows = [NewRow(4, [8, 9], 2, params, seed=0, choice=0, stop_ids=())]
    second.new_blocks = [(4, 0, 5)]
    second.drafts = [(1, 3, [11, 12])]
    for batch in (first, second):
        want = pair.cpu.assemble(batch)
        same(pair.cuda.assemble(batch), want)
    assert want.token_ids.tolist() == [5, 11, 12, 8, 9]
    assert want.sample_positions.tolist() == [3, 4, 5, 2]
    assert pair.rows[0].tokens.tolist() == pair.rows[1].tokens.tolist()


def test_accepted_drafts_move_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after accepted drafts a token is read, written or sampled at the position before them,
    or another row moves."""
    pair = Pair(monkeypatch)
    blocks = [(row, index, 10 * row + index) for row in (1, 3, 4) for index in range(3)]
    texts = {1: [5, 6, 7, 8, 9], 3: [2, 3, 4], 4: [8, 9]}
    fresh = [
        NewRow(row, text, 1, SamplingParams(), seed=0, choice=0, stop_ids=())
        for row, text in texts.items()
    ]
    starts, accepted = [2, 1, 3, 0], {1: 2, 3: 1, 4: 0}
    sizes = [1, 1, 1, 2], [True] * 4, 3
    unsettled = Batch(1, [1, 3, 1, 4], starts, *sizes, fresh, blocks, unsettled=2)
    for rows in pair.rows:
        for row, count in accepted.items():
            rows.accepted[row] = count
    moved = [start + accepted[row] for start, row in zip(starts, unsettled.rows, strict=True)]
    settled = Batch(1, unsettled.rows, moved, *sizes)
    ahead = [pair.cpu.assemble(unsettled), pair.cuda.assemble(unsettled)]
    want = pair.cpu.assemble(settled)
    assert want.metas[0].positions.tolist() == [4, 2, 5, 0, 1]
    assert want.token_ids.tolist() == [9, 4, 0, 8, 9]
    for step in ahead:
        assert step.metas[0].max_kv_len >= want.metas[0].max_kv_len
        step.metas[0].max_kv_len = want.metas[0].max_kv_len
        same(step, want)
    pair.cuda.upload(unsettled, NUM_ROWS, 2 * NUM_ROWS)  # as for a CUDA graph
    _, (meta, *_) = pair.cuda.lay_out(NUM_ROWS, 2 * NUM_ROWS, NUM_ROWS, MAX_LEN)
    assert meta.positions.tolist()[:5] == [4, 2, 5, 0, 1]


def test_padding_writes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused entry of a graph overwrites keys of whoever owns block 0."""
    pair, steps = Pair(monkeypatch), RandomSteps(NUM_ROWS, 0)
    for _ in range(6):
        batch, layout = steps.next(decodes_only=True)
        want = pair.cpu.assemble(batch)
        count = len(batch.rows)
        pair.cuda.upload(batch, NUM_ROWS, NUM_ROWS)
        token_ids, metas = pair.cuda.lay_out(NUM_ROWS, NUM_ROWS, NUM_ROWS, MAX_LEN)
        (meta,) = metas
        assert token_ids.tolist()[:count] == layout.token_ids
        assert meta.positions.tolist() == layout.positions + [0] * (NUM_ROWS - count)
        assert meta.slots.tolist() == layout.slots[0] + [-1] * (NUM_ROWS - count)
        assert meta.query_start.tolist() == list(range(NUM_ROWS + 1))
        assert meta.kv_len.tolist() == layout.kv_len + [1] * (NUM_ROWS - count)
        assert pair.cuda.rows.tolist()[count:NUM_ROWS] == [NUM_ROWS] * (NUM_ROWS - count)
        same_tables(metas, want)
        pair.sampled(steps, want)


def test_mixed_padding_writes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that fill up a graph of a mixed step are someone's, or a padding sample's token
    lands in a request's row."""
    pair, steps = Pair(monkeypatch), RandomSteps(NUM_ROWS, 1)
    mixed = 0
    for _ in range(12):
        batch, layout = steps.next()
        want = pair.cpu.assemble(batch)
        count = len(batch.rows)
        if batch.num_decodes == count or count == NUM_ROWS:
            pair.cuda.assemble(batch)
            pair.sampled(steps, want)
            continue
        mixed += 1
        size = batch.num_tokens + MAX_LEN // 2
        pair.cuda.upload(batch, NUM_ROWS, size)
        token_ids, metas = pair.cuda.lay_out(NUM_ROWS, size, NUM_ROWS, MAX_LEN)
        (meta,) = metas
        assert token_ids.tolist()[: batch.num_tokens] == layout.token_ids
        assert meta.slots.tolist() == layout.slots[0] + [-1] * (size - batch.num_tokens)
        assert meta.counts is not None and meta.counts.tolist() == [batch.num_decodes, count]
        num_samples = sum(batch.samples)
        which = pair.cuda.which[:NUM_ROWS]
        assert pair.cuda.last[:num_samples].tolist() == want.last.tolist()  # type: ignore[union-attr]
        assert pair.cuda.rows[which].tolist() == want.sample_rows.tolist() + [NUM_ROWS] * (
            NUM_ROWS - num_samples
        )
        assert meta.kv_len[which].tolist()[:num_samples] == want.sample_positions.tolist()
        same_tables(metas, want)
        pair.sampled(steps, want)
    assert mixed >= 3


def test_updates_beyond_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with more new tokens than the pinned buffer takes writes past its end."""
    monkeypatch.setattr(inputs, "UPDATE_CAPACITY", 40)
    pair, steps = Pair(monkeypatch), RandomSteps(NUM_ROWS, 4)
    for _ in range(4):
        batch, _ = steps.next()
        want = pair.cpu.assemble(batch)
        same(pair.cuda.assemble(batch), want)
        pair.sampled(steps, want)
