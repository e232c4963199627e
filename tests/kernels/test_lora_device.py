"""The device's slots and step metadata with the kernels that read them, in the interpreter."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.lora import device as device_module
from engine.lora.device import LoraDevice
from engine.lora.weights import HostLora, padded
from kernels.metadata import LoraLinear
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, row_error

pytestmark = pytest.mark.triton

lora = pytest.importorskip("kernels.lora")

LAYERS = [LoraLinear(0, 96, (80, 48, 48)), LoraLinear(3, 64, (160, 160))]
SIZES = [(layer.in_features, out) for layer in LAYERS for out in layer.outs]
SLOTS, MAX_RANK, TOKENS = 4, 40, 24


def host_lora(ranks: dict[int, int], generator: torch.Generator) -> HostLora:
    """Return random matrices of these ranks, laid out as by LoraReader."""
    table = torch.zeros(len(SIZES), 4, dtype=torch.int32)
    pieces, parts, at = [], {}, 0
    for part, rank in ranks.items():
        width, height = SIZES[part]
        a, b = (torch.zeros(n, padded(rank)) for n in (width, height))
        a[:, :rank] = torch.randn(width, rank, generator=generator)
        b[:, :rank] = torch.randn(height, rank, generator=generator)
        end = at + a.numel()
        table[part, :3] = torch.tensor([padded(rank), at // 16, end // 16])
        pieces += [a.t().reshape(-1), b.reshape(-1)]
        parts[part] = (a.t().contiguous(), b)
        at = end + b.numel()
    return HostLora(torch.cat(pieces), table, parts)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LoraDevice:
    """Return a LoraDevice as on CUDA, on whichever device this runs."""

    def without(make: Any) -> Any:
        return lambda *size, device=None, pin_memory=False, **fields: make(
            *size, device=DEVICE, **fields
        )

    on_host = SimpleNamespace(zeros=without(torch.zeros), empty=without(torch.empty))
    if DEVICE == "cpu":
        monkeypatch.setattr(
            device_module, "torch", SimpleNamespace(**(vars(torch) | vars(on_host)))
        )

    def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
        for source, target in pairs:
            target.copy_(source)

    elements = padded(MAX_RANK) * sum(a + b for a, b in SIZES)
    uploader: Any = SimpleNamespace(device=torch.device("cuda"), copy=copy)
    rows = {"max_rows": 8, "max_tokens": TOKENS, "layouts": 2}
    return LoraDevice(SLOTS, elements, len(SIZES), MAX_RANK, torch.float32, uploader, **rows)


@pytest.mark.slow
def test_one_graph_for_every_step(device: LoraDevice) -> None:
    """A graph is recorded once: what it reads must lie where it was, and as many tiles as it was
    recorded with must do for any mixture of adapters, none at all, and other adapters in the slots.
    What an earlier step left behind must not be seen."""
    generator = torch.Generator().manual_seed(0)
    steps = {count: device.graph_step(count) for count in (8, TOKENS)}
    shapes = {count: step.tiles.shape for count, step in steps.items()}
    rng = np.random.default_rng(0)
    held: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(SLOTS)]
    for turn in range(12):
        slot = turn % SLOTS
        ranks = {part: int(rng.integers(1, MAX_RANK + 1)) for part in range(len(SIZES))}
        if turn % 3 == 1:
            del ranks[turn % len(SIZES)]
        loaded = host_lora(ranks, generator)
        device.upload(loaded, slot)
        held[slot] = loaded.parts
        count = 8 if turn % 2 else TOKENS
        used = int(rng.integers(1, count + 1))  # the rest is padding
        slots = rng.integers(-1, SLOTS, used).astype(np.int16)
        if turn == 5:
            slots[:] = -1
        device.upload_step(slots, count)
        step = steps[count]
        assert step.tiles.shape == shapes[count]
        segments = [
            (slot, torch.from_numpy(np.flatnonzero(slots == slot)))
            for slot in range(SLOTS)
            if slot in slots
        ]
        empty = torch.empty(0)
        wanted = type(step)(empty, empty, 0, empty, empty, empty, 0, segments, held)
        for layer in LAYERS:
            x = torch.randn(count, layer.in_features, generator=generator) / 8
            y = torch.randn(count, sum(layer.outs), generator=generator)
            want = Kernels().lora_add(y.clone(), x, layer, wanted)
            got = lora.lora_add(y.clone().to(DEVICE), x.to(DEVICE), layer, step).cpu()
            assert row_error(got, want) < 2 * BOUND[torch.float32]
            same = [i for i in range(count) if i >= used or slots[i] < 0]
            assert torch.equal(got[same], y[same])


def test_a_layout_of_some_tokens_lies_beside_that_of_all(device: LoraDevice) -> None:
    """Bugs: attention of a rank's own requests has laid out their adapters where those of all of
    the step's tokens are, which MLPs read behind it; two layouts a step write into the pinned
    memory that the step before is still copied from."""
    all_slots = np.asarray([0, -1, 2, 1, 0, 3, -1, 2], dtype=np.int16)
    whole = device.lay_out(all_slots)
    before = whole.order.clone(), whole.tiles.clone()
    own = device.lay_out(all_slots[[2, 5]], beside=True)
    assert torch.equal(whole.order, before[0]) and torch.equal(whole.tiles, before[1])
    assert sorted(own.tiles[own.tiles[:, 0] >= 0][:, 0].tolist()) == [2, 3]
    pinned = [layout.next_staging().data_ptr() for _ in range(2) for layout in device._layouts]
    assert len(set(pinned)) == 4


def test_warm_up_is_of_the_largest_rank(device: LoraDevice) -> None:
    """Bug: memory is proved with the adapters that happen to be listed first, and the first large
    one that comes is too much. The warm-up step has the largest rank on all parts of all slots,
    its matrices fill a slot, and its sums fit."""
    generator = torch.Generator().manual_seed(0)
    largest = host_lora(dict.fromkeys(range(len(SIZES)), MAX_RANK), generator)
    device.upload(largest, SLOTS - 1)
    assert largest.blob.numel() == device._slab.shape[1]
    device.forget()
    step = device.warm_up_step(TOKENS)
    assert (step.table[..., 0] == padded(MAX_RANK)).all()
    tiles = step.tiles[step.tiles[:, 2] > 0]
    assert set(tiles[:, 0].tolist()) == set(range(SLOTS)) and tiles[:, 2].sum() == TOKENS
    for layer in LAYERS:
        splits = lora.num_splits(TOKENS, len(layer.outs), layer.in_features)
        assert splits * len(layer.outs) * TOKENS * padded(MAX_RANK) <= step.partial.numel()
    device.forget()
    assert not step.table.any()
