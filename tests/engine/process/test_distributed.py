"""Places as GPUs have them, whose groups and links are torch.distributed's: on processes of the CPU
with gloo in NCCL's place."""

from pathlib import Path

import pytest

from tests.engine.process.ranked import run_ranks

RANK = """
import os
import sys
import torch
import torch.distributed as dist
from engine.parallel import rendezvous
rendezvous.BACKEND = "gloo"

rank, size, stages, file = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
each = size // stages
handed_on = rendezvous.Activations(2, 8, 5, torch.float32)
device = torch.device("cpu")
store = dist.FileStore(file, size)
place = rendezvous.distributed(rank, size, stages, device, store, handed_on, False)
assert (place.group.rank, place.group.size) == (rank % each, each)
assert place.stage.number == rank // each and not place.recovers
assert place.world.least(7 - rank) == 8 - size
first, last = place.stage.first, place.stage.last
for step in range(1, 4):
    x = torch.full((3, 5), float(step)) if first else place.link.receive(3)
    # Twice of what comes in and the numbers of this stage's ranks, which tell them apart.
    x = place.group.all_reduce(x + rank)
    place.link.send(x)
for step in range(1, 4) if first else ():
    x, want = place.link.receive(3), float(step)
    for stage in range(stages):
        want = each * want + sum(range(stage * each, (stage + 1) * each))
    assert torch.equal(x, torch.full((3, 5), want)), (rank, step, x, want)
    begin, end = place.group.share(5)
    whole = place.group.gather_columns(x[:, begin:end] + torch.arange(begin, end), 5)
    assert torch.equal(whole, x + torch.arange(5))
    assert place.group.gather(torch.tensor([rank])).flatten().tolist() == [*range(each)]
    told = place.group.broadcast(torch.tensor([rank + 9]))
    assert told.tolist() == [9]
place.world.least(0)
os._exit(0)  # as ranks do: gloo's threads may still run when the interpreter takes things apart
"""


@pytest.mark.slow
def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    """Bugs: a sum over another stage's ranks; activations of another rank, or of another step;
    ranks that make their groups in orders of their own and wait for each other for ever."""
    run_ranks(RANK, 4, "4", "2", str(tmp_path / "store"))
