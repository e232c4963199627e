"""States of layers after steps with drafts are those of the accepted tokens alone, whether the step
is laid out for itself or in the places of a CUDA graph."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.layers.recurrent.runs import compute_runs
from engine.runner.state_runs import StateVerification
from kernels import reference
from kernels.metadata import AttentionMeta

PAD, CHANNELS, TAPS = 6, 5, 4
KERNELS = reference.Kernels()


def layout(rows: Sequence[int], starts: Sequence[int], decodes: int) -> AttentionMeta:
    """Make a meta of entries of a token each, in a step that may be padded."""
    count = len(rows)
    return AttentionMeta(
        positions=torch.tensor(starts).int(),
        slots=torch.zeros(count, dtype=torch.int64),
        query_start=torch.arange(count + 1).int(),
        kv_len=torch.tensor(starts).int() + 1,
        block_table=torch.zeros(count, 1).int(),
        num_decodes=decodes,
        max_kv_len=99,
        rows=torch.tensor(rows),
    )


class Layer:
    """A layer with a convolution, whose state is the last inputs of each row."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.weights = torch.randn(CHANNELS, TAPS, generator=generator)
        self.tail = torch.randn(PAD + 1, TAPS - 1, CHANNELS, generator=generator)

    def kernel(self, inputs: Sequence[Tensor], states: Sequence[Tensor], meta: AttentionMeta):
        return KERNELS.causal_conv(inputs[0], self.weights, None, states[0], meta)

    def step(self, x: Tensor, meta: AttentionMeta) -> Tensor:
        return compute_runs(self.kernel, [x], [self.tail], meta)


# row 4 decodes alone, rows 2, 0 and 3 with drafts
ROWS, STARTS = [2, 4, 0, 3], [7, 9, 3, 0]
DRAFTS = [(2, 8, [1, 1, 1]), (0, 4, [1]), (3, 1, [1, 1])]


def batch() -> Batch:
    rows, starts = ROWS.copy(), STARTS.copy()
    for row, first, drafts in DRAFTS:
        rows += [row] * len(drafts)
        starts += range(first, first + len(drafts))
    count = len(rows)
    return Batch(1, rows, starts, [1] * count, [True] * count, count, drafts=DRAFTS)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("accepted", [{2: 4, 0: 2, 3: 3}, {2: 1, 0: 1, 3: 1}, {2: 3, 3: 1}])
def test_states_are_those_of_accepted_tokens(accepted: dict[int, int], graphed: bool) -> None:
    """Bugs: a rejected draft stays in a state; an accepted one is missing; the state of a request
    that has ended, or that has no drafts, is written; places of a graph keep another step's."""
    ours, plain = Layer(), Layer()
    generator = torch.Generator().manual_seed(5)
    step, states = batch(), StateVerification(PAD, torch.device("cpu"))
    x = torch.randn(len(step.rows), CHANNELS, generator=generator)
    meta = layout(step.rows, step.starts, len(step.rows))
    if graphed:
        padding = 16 - len(x)
        x = torch.cat((x, torch.zeros(padding, CHANNELS)))
        meta = layout([*step.rows, *[PAD] * padding], [*step.starts, *[0] * padding], 16)
        graph = states.graphed(16, meta)
        # what an earlier step has left there, of more runs than this one
        graph.fill([1] * 16, [9] * 16, range(16), [1, 2, 3, 4, 5, 0], [3] * 6, [2] * 6)
        graph.settled.fill([1, 2], [5, 6], [8, 8])
        states.upload(step, graph)
        meta.state_runs = graph.runs
    else:
        states.lay_out(step, [meta])
    before = ours.tail.clone()
    actual = ours.step(x, meta)
    assert torch.equal(ours.tail[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]]), "not known yet"

    at = {row: [entry] for entry, row in enumerate(ROWS)}
    for entry, row in enumerate(step.rows[len(ROWS) :], start=len(ROWS)):
        at[row].append(entry)
    for row, entries in at.items():
        count = accepted.get(row, 1 if row == 4 else 0)
        tail = before.clone()
        for number, entry in enumerate(entries):
            alone = layout([row], [step.starts[entry]], 1)
            want = KERNELS.causal_conv(x[entry : entry + 1], plain.weights, None, tail, alone)
            assert torch.equal(actual[entry : entry + 1], want), (row, number)
            if number + 1 == count:
                plain.tail[row] = tail[row]
    states.settle(list(accepted.items()))
    assert torch.equal(ours.tail[:PAD], plain.tail[:PAD])
