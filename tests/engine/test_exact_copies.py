"""Copies of KV blocks and recurrent states, checked byte by byte on the CPU and on CUDA.

On CUDA each copy waits on its stream first, so that steps and other copies overtake it unless they
wait for it. Sizes and data are small, as no rate is measured.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.kv_groups import kv_groups
from engine.resolve import resolve
from engine.runner.caches import cuda_copies
from engine.runner.caches.host_copies import Copies, host_copies
from engine.runner.caches.kv_cache import KVCache
from engine.scheduling.core import EngineCore
from engine.scheduling.memory.host_plan import Name
from engine.scheduling.moves.shared import OwnSlots, PeerSlots
from kernels.exported_memory import ExportedMemory
from tests.engine.test_host_kv import DEVICES, LATENTS, PLAIN, RECURRENT, WINDOWS, core_of
from tests.engine.test_memory import config_of
from tests.engine.test_moves import MOVES, PROMPT, Cores, kv_source

BLOCKS, SLOTS, ROWS, SNAPSHOTS = 200, 160, 5, 6
COUNT = 70  # blocks of a copy: three pieces on CUDA
PAUSE = 40_000_000  # cycles before each copy, about 20 ms
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "int8": (PLAIN, {"kv_dtype": "int8"}),
    "int4": (PLAIN, {"kv_dtype": "int4"}),
    "windows": (WINDOWS, {}),
    "latents": (LATENTS, {}),
    "states": (RECURRENT, {}),
}
MOVED = [kind for kind in KINDS if kind != "states"]  # moves refuse recurrent models


def dtype_of(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


@dataclass
class Memory:
    """The caches of a model and of its drafter, of random bytes, with their host slots.

    blocks, states: the bytes of the device's blocks and states, uint8 [rows, items, bytes] each.
    """

    caches: list[KVCache]
    copies: Copies
    blocks: list[Tensor]
    states: list[Tensor]

    @classmethod
    def random(
        cls, kind: str, device: str, folder: Path, seed: int, memory: Tensor | None = None
    ) -> "Memory":
        """Allocate caches of random bytes; `memory` is that of the slots, if not new memory."""
        torch.manual_seed(seed)
        place = torch.device(device)
        caches = [cache_of(kind, device, folder) for _ in range(2)]
        blocks = [cache.storage.flatten(0, 1).view(torch.uint8) for cache in caches]
        own = caches[0].states
        states = [] if own is None else [s.flatten(2).view(torch.uint8) for s in own.storages]
        for items in (*blocks, *states):
            items.copy_(torch.randint(0, 256, items.shape, dtype=torch.uint8))
        reread = kind in ("windows", "states")  # as of `engine.factory.runner`
        copies = host_copies(
            caches, SLOTS, SLOTS if own else 0, place, after_steps=reread, memory=memory
        )
        return cls(caches, copies, blocks, states)

    def bytes(self) -> list[Tensor]:
        """Return the bytes of blocks and states, copied on the device in the order of its work."""
        return [items.clone() for items in (*self.blocks, *self.states)]


def cache_of(kind: str, device: str, folder: Path) -> KVCache:
    changes, options = KINDS[kind]
    config = config_of(folder, changes, dtype=dtype_of(device), **(options | {"device": device}))
    resolved = resolve(config)
    groups, place = kv_groups(resolved.model), torch.device(device)
    sizes = {"rows": ROWS, "snapshots": SNAPSHOTS}
    return KVCache.allocate(groups, BLOCKS, 4, resolved.dtype, place, resolved.kv, **sizes)


def assert_equal(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for items, other in zip(ours, wanted, strict=True):
        assert items.numel() and torch.equal(items.cpu(), other.cpu())


def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each copy on CUDA wait on its stream first."""
    enqueue = cuda_copies._enqueue

    def after_pause(slots: Any, items: Any, numbers: Any, stream: Any, to_host: bool) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(PAUSE)
        enqueue(slots, items, numbers, stream, to_host)

    monkeypatch.setattr(cuda_copies, "_enqueue", after_pause)


def write(items: Tensor, numbers: Sequence[int], value: int) -> None:
    """Write one value into all bytes of items, as a step does that is launched now."""
    items[:, numbers[0] : numbers[-1] + 1] = value  # a slice, as an index list would be uploaded


def reading(blocks: Sequence[int], states: Sequence[int]) -> Batch:
    """Return a step that reads or writes blocks and states."""
    return Batch(
        1,
        new_blocks=[(0, index, block) for index, block in enumerate(blocks)],
        resumed_states=[(0, slot) for slot in states],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_run_beside_a_store_and_a_load(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a copy has another cache's, layer's or neighbour's bytes; a step writes blocks whose
    store has not ended, or reads blocks whose load has not; a load reads slots before their store;
    a load is said to be ending that has not begun, or to be done after its first piece."""
    memory = Memory.random(kind, device, tmp_path, 1)
    copies, cuda = memory.copies, device == "cuda"
    before = [items.cpu() for items in memory.bytes()]
    blocks, slots = list(range(3, 3 + COUNT)), torch.randperm(SLOTS)[:COUNT].tolist()
    states, places = ([0, 1, 2], [5, 2, 4]) if memory.states else ([], [])
    # fewer are loaded than were stored, elsewhere and in another order
    sources, targets = blocks[:0:-1], list(range(101, 100 + COUNT))
    loads = list(zip(slots[:0:-1], targets, strict=True))
    if cuda:
        pause(monkeypatch)

    copies.store(list(zip(blocks, slots, strict=True)), list(zip(states, places, strict=True)))
    assert copies.storing == cuda
    copies.before(reading(blocks, states))
    for items in memory.blocks:  # the step overwrites what is being stored
        write(items, blocks, 7)
    for items in memory.states:
        write(items, states, 7)
    copies.load(1, loads, [(2, 7), (5, 8)] if states else [])
    if cuda:
        assert copies.ending() == {} and not copies.stored(slots), "the stores have not ended"
    deadline = time.monotonic() + 30
    while not (ending := copies.ending()):
        assert time.monotonic() < deadline, "the load never begins"
    assert ending.keys() == {1} and (ending[1] > 0) == cuda
    assert copies.stored(slots, places)
    if cuda:
        assert copies.finished() == [], "its other pieces have not begun"
    copies.before(reading(targets, [7, 8] if states else []))
    seen = memory.bytes()  # by the step that was launched while the load was in flight
    copies.loads_end()()
    assert copies.finished() == [(1, True)] and copies.ending() == {}

    wanted = [items.clone() for items in before]
    for items in wanted[: len(memory.blocks)]:
        items[:, targets], items[:, blocks] = items[:, sources], 7
    for items in wanted[len(memory.blocks) :]:
        items[:, [7, 8]], items[:, states] = items[:, [1, 0]], 7
    assert_equal(seen, wanted)
    assert_equal(memory.bytes(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["windows", "states"])
def test_a_load_waits_for_steps_that_read_its_blocks(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a step in flight reads a block that its window has passed, or a snapshot, and a load
    overwrites them meanwhile; a store copies blocks of a load that has not ended."""
    memory = Memory.random(kind, device, tmp_path, 2)
    copies, before = memory.copies, [items.cpu() for items in memory.bytes()]
    copies.store([(3, 0), (4, 1)], [(0, 0)] if memory.states else [])
    copies.stores_end()()
    if device == "cuda":
        torch.cuda._sleep(PAUSE)  # a step that is still running
    seen = memory.bytes()
    copies.load(1, [(1, 9), (0, 150)], [(0, 8)] if memory.states else [])
    pause(monkeypatch)
    copies.load(2, [(0, 151)])
    copies.store([(151, 7)])  # while its load is in flight
    copies.load(3, [(7, 10)])
    copies.wait()
    assert copies.finished() == [(1, True), (2, True), (3, True)]
    assert_equal(seen, before)
    wanted = [items.clone() for items in before]
    for items in wanted[: len(memory.blocks)]:
        items[:, [9, 150, 151, 10]] = items[:, [4, 3, 3, 3]]
    for items in wanted[len(memory.blocks) :]:
        items[:, 8] = items[:, 0]
    assert_equal(memory.bytes(), wanted)


@dataclass
class StagedMemory:
    """Memory beside the host slots, in which a source stages blocks. On the CPU it is the host's.

    In one process the puller uses the source's address: CUDA opens handles of other processes only.
    """

    address: int
    owner: Any

    @classmethod
    def of(cls, device: str, num_bytes: int) -> "StagedMemory":
        if device == "cuda":
            exported = ExportedMemory(num_bytes, torch.device(device))
            return cls(exported.address, exported)
        pages = np.zeros(num_bytes, np.uint8)
        return cls(pages.ctypes.data, pages)

    def close(self) -> None:
        """Do nothing, as the test's process ends soon."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("staged", ["host slots", "device slots"])
@pytest.mark.parametrize("kind", MOVED)
def test_blocks_go_from_pool_to_pool(
    kind: str, staged: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the slots of another process have the addresses of own ones, or of each other's kind of
    memory; a step reads moved blocks before they have come; neighbours are overwritten."""
    block_bytes = 2 * cache_of(kind, device, tmp_path).storage.nbytes // BLOCKS
    own = OwnSlots(SLOTS, block_bytes)
    pinned = torch.from_numpy(np.frombuffer(own.memory, np.uint8))
    source = Memory.random(kind, device, tmp_path, 3, pinned)
    target = Memory.random(kind, device, tmp_path, 4)
    assert source.copies.blocks.num_bytes == block_bytes
    firsts = source.bytes(), target.bytes()
    slots = torch.randperm(SLOTS)[:COUNT]
    if staged == "device slots":
        memory = StagedMemory.of(device, SLOTS * block_bytes)
        source.copies.blocks.add_device(memory)
        first = target.copies.blocks.attach_device(memory, SLOTS)
        slots += SLOTS
    else:
        first = target.copies.blocks.attach(PeerSlots(own.place()).memory)
    numbers, blocks = slots.tolist(), torch.randperm(BLOCKS)[:COUNT].tolist()
    places = torch.randperm(BLOCKS)[:COUNT].tolist()
    if device == "cuda":
        pause(monkeypatch)
    assert source.copies.blocks.on_device(numbers) == (staged == "device slots")

    assert source.copies.store(list(zip(blocks, numbers, strict=True)))
    source.copies.stores_end()()
    pairs = [(first + slot, place) for slot, place in zip(numbers, places, strict=True)]
    assert target.copies.load(1, pairs)
    target.copies.before(reading(places, []))
    seen = target.bytes()
    target.copies.loads_end()()
    assert target.copies.finished() == [(1, True)]
    wanted = [items.clone() for items in firsts[1]]
    for items, theirs in zip(wanted, firsts[0], strict=True):
        items[:, places] = theirs[:, blocks]
    assert_equal(seen, wanted)
    assert_equal(source.bytes(), firsts[0])
    target.copies.blocks.detach(first)


def cached_blocks(core: EngineCore) -> dict[Name, int]:
    """Return the blocks in a core's prefix cache by group and hash."""
    (pool,) = core.scheduler.memory.pools
    names = {pool.name_of(block): block for block in range(pool.num_blocks)}
    return {name: block for name, block in names.items() if name is not None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])
@pytest.mark.parametrize("kind", MOVED)
def test_a_pull_has_the_bytes_of_its_source(
    kind: str, shared: bool, device: str, tmp_path: Path
) -> None:
    """Bugs: a pulled block has the hash of another one; blocks are computed that were to be pulled.

    The source's blocks are exchanged first, so that no engine could compute what they have.
    """
    changes, options = KINDS[kind]
    options = MOVES | options | {"device": device, "dtype": dtype_of(device), "num_blocks": 90}
    options["deterministic"] = kind != "latents" or device == "cpu"  # refused for latents on CUDA
    one, other = (core_of(tmp_path, changes, **options) for _ in range(2))
    cores = Cores(one, other)
    cores.run(one, PROMPT, max_tokens=1)
    theirs = cached_blocks(one)
    storage, ours = (core._runner.kv.storage for core in (one, other))  # type: ignore[attr-defined]
    blocks = list(theirs.values())
    assert len(blocks) >= 15
    storage[:, :, blocks] = storage[:, :, [*blocks[1:], blocks[0]]]
    # CUDA opens device memory of other processes only
    source = msgspec.structs.replace(kv_source(one, shared), device=False)
    cores.run(other, PROMPT, max_tokens=1, source=source)
    stats = other.stats()
    assert (stats.moved_tokens, stats.shared_moves, stats.failed_moves) == (60, shared, 0)
    pulled = [(block, theirs[name]) for name, block in cached_blocks(other).items()]
    assert len(pulled) * ours.nbytes // ours.shape[2] == stats.moved_bytes
    for block, other_block in pulled:
        moved, wanted = ours[:, :, block], storage[:, :, other_block]
        assert torch.equal(moved.view(torch.uint8), wanted.view(torch.uint8))
    cores.settle()
