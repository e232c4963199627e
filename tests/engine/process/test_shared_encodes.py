"""Two ranks that divide the images of a step among them, on processes of the CPU with gloo."""

from pathlib import Path

import pytest

from engine.images.image import Image
from engine.runner.images import shares_of
from tests.engine.process.ranked import run_ranks

RANK = """
import os
import sys
import torch
import torch.distributed as dist
from engine.parallel.group import DistributedGroup
from engine.runner.images import StepImages
from engine.runner.request_rows import RequestRows
from tests.batches import tower_config
from tests.engine.process.test_shared_encodes import picture

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
device, seen = torch.device("cpu"), []


class Tower:
    def encode(self, pixels):
        seen.append([p.shape[2] for p in pixels])
        rows = [torch.full((p.shape[2], 3), float(p[0, 0, 0, 0])) for p in pixels]
        return torch.cat(rows)


group = DistributedGroup(rank, 2, dist.group.WORLD, device)
rows = RequestRows.allocate(2, 16, 4, device)
for apart in (False, True):
    cache = torch.zeros(24, 3)
    seen.clear()
    images = StepImages(
        tower_config(97, 3), rows, Tower(), cache, None, apart=apart, group=group
    )

    def check(*numbers):
        for number in numbers:
            held = cache[torch.from_numpy(images._slots[picture(number, 0).digest])]
            assert (held == number).all() and len(held), (number, held)

    images.encode([picture(1, 2)])  # one image: each rank encodes it
    assert seen == [[2]]
    images.encode([picture(2, 3), picture(3, 6), picture(4, 3)])
    check(1, 2, 3, 4)
    own = [[6]] if not rank else [[3], [3]] if apart else [[3, 3]]
    assert seen[1:] == own, (rank, seen)
    # places of dropped images are used again
    images.encode([picture(5, 5), picture(6, 7)], [picture(3, 0).digest, picture(1, 0).digest])
    check(2, 4, 5, 6)
    assert len(images._free) == 24 - 3 - 3 - 5 - 7
dist.barrier()
os._exit(0)  # as ranks do
"""


def picture(number: int, size: int) -> Image:
    pixels = bytes([number]) * (3 * size)
    return Image(bytes([number]) * 16, 1, size, size, (1, size), (1, 1, size), pixels)


def test_shares() -> None:
    """Bugs: a rank that gets all large images, or a single image that is sent around."""
    images = [picture(number, size) for number, size in enumerate((9, 1, 8, 2, 7))]
    shares = shares_of(images, 2, 0)
    assert sorted(image.size for share in shares for image in share) == [1, 2, 7, 8, 9]
    assert [sum(image.size for image in share) for share in shares] == [12, 15]
    assert shares_of(images, 2, 28) == shares_of(images, 1, 0) == [images]
    assert shares_of(images[:1], 2, 0) == [images[:1]]
    assert [len(share) for share in shares_of(images[:2], 4, 0)] == [1, 1, 0, 0]


@pytest.mark.slow
def test_two_ranks_encode_a_share_each(tmp_path: Path) -> None:
    """Bugs: both ranks encode all images, rows of one rank under another's digests, or places of
    dropped images that are never free again."""
    run_ranks(RANK, 2, str(tmp_path / "store"))
