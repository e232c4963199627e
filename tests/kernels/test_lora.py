"""Grouped shrink and expand against float64, with mixed ranks, missing parts and base rows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.lora.device import make_tiles
from engine.lora.weights import padded
from kernels.metadata import LoraLinear, LoraStep
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, row_error

pytestmark = pytest.mark.triton

lora = pytest.importorskip("kernels.lora")
activation = pytest.importorskip("kernels.activation")

MATRICES = dict[int, tuple[Tensor, Tensor]]
reference = Kernels()
GATES = {"silu": activation.silu_mul, "gelu_pytorch_tanh": activation.gelu_tanh_mul}


def make_step(
    slots: list[int],
    layers: list[LoraLinear],
    ranks: list[dict[int, int]],
    max_rank: int,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> LoraStep:
    """Return a step with random matrices, laid out as in engine.lora.weights, and NaN behind them.

    ranks: for each slot, part -> rank.
    """
    sizes = [(layer.in_features, out) for layer in layers for out in layer.outs]
    table = torch.zeros(len(ranks), len(sizes), 4, dtype=torch.int32)
    slab = torch.full((len(ranks), max_rank * sum(a + b for a, b in sizes)), torch.nan, dtype=dtype)
    parts: list[MATRICES] = []
    for slot, of_part in enumerate(ranks):
        at, views = 0, {}
        for part, rank in of_part.items():
            width, height = sizes[part]
            full = padded(rank)
            b = at + full * width
            table[slot, part, :3] = torch.tensor([full, at // 16, b // 16])
            end = b + full * height
            slab[slot, at:end] = torch.randn(end - at, dtype=dtype)
            down, up = slab[slot, at:b].view(full, width), slab[slot, b:end].view(height, full)
            down[rank:], up[:, rank:] = 0, 0
            views[part] = (down[:rank], up[:, :rank])
            at = end
        parts.append(views)
    sorted_slots = np.asarray(slots, dtype=np.int16)
    order = np.argsort(sorted_slots, kind="stable")
    block = lora.tile_rows(1 if deterministic else len(slots), len(ranks))
    tiles = make_tiles(sorted_slots[order], block)
    tiles = np.concatenate((tiles, [[-1, 0, 0]] * 2))  # as a graph has them
    segments = [
        (slot, torch.tensor([i for i, other in enumerate(slots) if other == slot]))
        for slot in sorted(set(slots) - {-1})
    ]
    return LoraStep(
        torch.from_numpy(order).int().to(DEVICE),
        torch.from_numpy(tiles).int().to(DEVICE),
        block,
        slab.to(DEVICE),
        table.to(DEVICE),
        torch.full(
            (lora.partial_size(len(slots), max_rank, deterministic),), float("nan"), device=DEVICE
        ),
        max_rank,
        segments,
        parts,
        deterministic,
    )


def widened(step: LoraStep) -> LoraStep:
    parts = [{n: (a.double(), b.double()) for n, (a, b) in of.items()} for of in step.parts]
    return LoraStep(
        step.order, step.tiles, 0, step.slab, step.table, step.partial, 0, step.segments, parts
    )


LAYERS = [LoraLinear(0, 96, (80, 48, 48)), LoraLinear(3, 64, (96,)), LoraLinear(4, 72, (160, 160))]
SLOTS = {
    "one": [0],
    "base alone": [-1, -1, -1],
    "mixed": [2, -1, 0, 1, 0, -1, 2, 2, 1, 0, 3],
    "many": [i % 5 - 1 for i in range(150)],
    "one of many rows": [1] * 40,
}
RANKS = [
    {0: 16, 1: 32, 2: 16, 3: 16, 4: 16, 5: 32},
    {0: 16, 2: 16, 5: 16},  # some parts are left alone
    dict.fromkeys(range(6), 48),
    {},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("layer", LAYERS, ids=["qkv", "out", "gate_up"])
def test_add_and_gate(name: str, layer: LoraLinear, dtype: torch.dtype) -> None:
    """A wrong row, rank, part or split shows; base rows are to the bit what they are in a step
    without adapters."""
    torch.manual_seed(0)
    slots = SLOTS[name]
    step = make_step(slots, LAYERS, RANKS, 48, dtype)
    x = torch.randn(len(slots), layer.in_features, dtype=dtype, device=DEVICE) / 8
    y = torch.randn(len(slots), sum(layer.outs), dtype=dtype, device=DEVICE)
    before = y.clone()
    base = [i for i, slot in enumerate(slots) if slot in (-1, 3)]
    want = reference.lora_add(y.double().cpu(), x.double().cpu(), layer, widened(step))
    if len(layer.outs) == 2:
        for gate in ("silu", "gelu_pytorch_tanh"):
            gated = lora.lora_gated(y.clone(), x, layer, step, gate)
            assert row_error(gated.cpu(), reference.GATES[gate](want)) < 2 * BOUND[dtype]
            assert torch.equal(gated[base], GATES[gate](before[base]))
    got = lora.lora_add(y, x, layer, step)
    assert got is y
    assert row_error(got.cpu(), want) < 2 * BOUND[dtype]
    assert torch.equal(got[base], before[base])


@pytest.mark.parametrize(
    ("count", "num_slots", "rows"),
    [(300, 1, 32), (300, 2, 32), (700, 2, 64), pytest.param(2100, 2, 64, marks=pytest.mark.slow)],
)
def test_large_tiles(count: int, num_slots: int, rows: int) -> None:
    """Bug: every other step here is so small that its tiles have 16 rows; those of 32 and 64, wide
    programs and fewer splits, which prompts use, were compared with nothing."""
    torch.manual_seed(0)
    layers = [LoraLinear(0, 520, (80, 80)), LoraLinear(2, 264, (272,))]
    slots = [i % 7 % (num_slots + 1) - 1 for i in range(count)]
    step = make_step(slots, layers, [{0: 16, 1: 48, 2: 32}, {0: 32, 2: 16}][:num_slots], 48,
                     DTYPES[0])  # fmt: skip
    assert step.block_m == rows
    base = [i for i, slot in enumerate(slots) if slot == -1]
    for layer in layers:
        x = torch.randn(count, layer.in_features, dtype=DTYPES[0], device=DEVICE) / 64
        y = torch.randn(count, sum(layer.outs), dtype=DTYPES[0], device=DEVICE)
        want = reference.lora_add(y.double().cpu(), x.double().cpu(), layer, widened(step))
        if len(layer.outs) == 2:
            gated = lora.lora_gated(y.clone(), x, layer, step, "silu")
            assert row_error(gated.cpu(), reference.silu_mul(want)) < 2 * BOUND[DTYPES[0]]
            assert torch.equal(gated[base], activation.silu_mul(y[base]))
        got = lora.lora_add(y.clone(), x, layer, step)
        assert row_error(got.cpu(), want) < 2 * BOUND[DTYPES[0]]
        assert torch.equal(got[base], y[base])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_8_and_256_in_one_batch(dtype: torch.dtype) -> None:
    """The smallest and the largest rank of one step, also on the two parts of one layer: one that
    is read with the other's width, or whose filling up is not zero, shows."""
    torch.manual_seed(0)
    layer = LoraLinear(0, 520, (80, 80))
    ranks = [{0: 8, 1: 8}, {0: 256, 1: 256}, {0: 256, 1: 8}, {1: 256}, {0: 8}]
    slots = [3, -1, 0, 1, 4, 2, -1, 1, 0, 2, 4, 1, 3]
    count = len(slots)
    step = make_step(slots, [layer], ranks, 256, dtype)
    assert lora.num_splits(count, 2, layer.in_features) > 1
    x = torch.randn(count, layer.in_features, dtype=dtype, device=DEVICE) / 64
    y = torch.randn(count, 160, dtype=dtype, device=DEVICE)
    want = reference.lora_add(y.double().cpu(), x.double().cpu(), layer, widened(step))
    base = [i for i, slot in enumerate(slots) if slot == -1]
    gated = lora.lora_gated(y.clone(), x, layer, step, "silu")
    assert row_error(gated.cpu(), reference.silu_mul(want)) < 2 * BOUND[dtype]
    assert torch.equal(gated[base], activation.silu_mul(y[base]))
    assert row_error(lora.lora_add(y.clone(), x, layer, step).cpu(), want) < 2 * BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_and_rank_blocks(dtype: torch.dtype) -> None:
    """Columns in eight pieces, and a rank of several blocks."""
    torch.manual_seed(0)
    layer = LoraLinear(0, 2100, (32,))
    step = make_step([0, 1, -1], [layer], [{0: 160}, {0: 16}], 160, dtype)
    assert lora.num_splits(3, 1, layer.in_features) > 2
    x = torch.randn(3, layer.in_features, dtype=dtype, device=DEVICE) / 64
    y = torch.zeros(3, 32, dtype=dtype, device=DEVICE)
    want = reference.lora_add(y.double().cpu(), x.double().cpu(), layer, widened(step))
    assert row_error(lora.lora_add(y, x, layer, step)[:2].cpu(), want[:2]) < 2 * BOUND[dtype]


def test_deterministic_rows_ignore_the_rest() -> None:
    """With deterministic steps a token is the same bit by bit alone and in a large step; without,
    sums are split by the number of tokens, or this test tests nothing."""
    torch.manual_seed(0)
    layer = LoraLinear(0, 2100, (32, 32))
    slots = [i % 3 - 1 for i in range(140)]
    x = torch.randn(140, layer.in_features, device=DEVICE) / 64
    y = torch.randn(140, 64, device=DEVICE)

    def differ(deterministic: bool) -> bool:
        outs = []
        for count in (140, 3):
            torch.manual_seed(1)  # the same matrices
            step = make_step(slots[:count], [layer], [{0: 32}, {0: 16, 1: 48}], 48, torch.float32,
                             deterministic)  # fmt: skip
            part = x[:count].contiguous()
            gated = lora.lora_gated(y[:count].clone(), part, layer, step, "silu")
            added = lora.lora_add(y[:count].clone(), part, layer, step)
            outs.append(torch.cat((added, gated), dim=1)[:3])
        return not torch.equal(*outs)

    assert not differ(True)
    assert differ(False)


def test_tiles() -> None:
    """Each token in one tile, of one slot, and never more tiles than a graph has room for."""
    generator = np.random.default_rng(0)
    for block in (16, 32):
        for _ in range(100):
            kinds = int(generator.integers(1, 20))
            count = int(generator.integers(1, 300))
            slots = np.sort(generator.integers(-1, kinds, count)).astype(np.int16)
            tiles = make_tiles(slots, block)
            assert len(tiles) <= count // block + min(kinds + 1, count)
            covered = [i for _, first, n in tiles for i in range(first, first + n)]
            assert covered == list(range(count))
            for slot, first, n in tiles:
                assert 1 <= n <= block and (slots[first : first + n] == slot).all()


def test_room_for_partial_sums() -> None:
    """Buffers are allocated once; a step of any size must fit."""
    room, fixed = (lora.partial_size(1500, 64, flag) for flag in (False, True))
    for count, parts in ((n, p) for n in range(1, 1501, 7) for p in (1, 2, 3)):
        assert count * parts * lora.num_splits(count, parts, 14336) * 64 <= room
        assert count * parts * lora.num_splits(1, parts, 14336) * 64 <= fixed
