"""CpuCopies: copies of KV blocks on the CPU, which are done when the call returns."""

import logging
import time
from collections.abc import Callable, Collection, Sequence

import torch

from engine.batch import Batch
from engine.runner.caches.copied_items import WORTH_TIMING, CopiedItems, Pairs
from engine.runner.caches.host_slots import HostSlots

logger = logging.getLogger("manta.engine")


class CpuCopies:
    """The copies of an engine on the CPU (`engine.scheduling.memory.host_plan.HostCopies`).

    num_states: number of slots for snapshots, equal on all ranks, even if this rank has no
        recurrent layer.
    """

    def __init__(
        self, blocks: HostSlots, states: HostSlots | None = None, num_states: int = 0
    ) -> None:
        self.blocks = blocks
        self.states = states
        self.num_states = num_states
        self._done: list[tuple[int, bool]] = []
        self._lost: frozenset[int] = frozenset()  # slots whose last store failed
        self.load_rate = self.store_seconds = self.load_seconds = 0.0

    @property
    def storing(self) -> bool:
        """Whether a copy to the host is in flight."""
        return False

    def room(self) -> int:
        return self.blocks.count

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        began = time.perf_counter()
        copied = CopiedItems.stored(pairs, states)
        self._lost -= copied.slots
        try:
            self._copy(copied, to_host=True)
        except Exception:
            logger.warning("KV blocks were not copied to the host", exc_info=True)
            self._lost |= copied.slots
            return False
        self.store_seconds += time.perf_counter() - began
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        began = time.perf_counter()
        copied = CopiedItems.loaded(pairs, states)
        try:
            if self._lost & copied.slots:
                raise RuntimeError("they had not got there")
            self._copy(copied, to_host=False)
        except Exception:
            logger.warning("KV blocks were not loaded from the host", exc_info=True)
            self._done.append((ticket, False))
            return False
        seconds = time.perf_counter() - began
        self.load_seconds += seconds
        size = copied.num_bytes(self.blocks, self.states)
        if size >= WORTH_TIMING:
            self.load_rate = size / seconds
        self._done.append((ticket, True))
        return True

    @torch.inference_mode()
    def _copy(self, copied: CopiedItems, *, to_host: bool) -> None:
        _copy(self.blocks, copied.blocks, copied.block_slots, to_host)
        if self.states is not None:
            _copy(self.states, copied.states, copied.state_slots, to_host)

    def finished(self) -> list[tuple[int, bool]]:
        done, self._done = self._done, []
        return done

    def ending(self) -> dict[int, float]:
        return {ticket: 0.0 for ticket, succeeded in self._done if succeeded}

    def before(self, batch: Batch) -> None:
        """Do nothing, as all copies are done."""

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing, as all copies are done."""

    def stores_end(self) -> Callable[[], None]:
        return self.wait

    def loads_end(self) -> Callable[[], None]:
        return self.wait


def _copy(slots: HostSlots, items: Sequence[int], numbers: Sequence[int], to_host: bool) -> None:
    """Copy between device items and slots.

    items, numbers: the items, and the slot of each.
    """
    at, memories = 0, [slots.slot(number) for number in numbers]
    for part in slots.parts:
        storage = part()
        rows, _, width = storage.shape
        for item, memory in zip(items, memories, strict=True):
            place = memory[at : at + rows * width].view(rows, width)
            if to_host:
                place.copy_(storage[:, item])
            else:
                storage[:, item].copy_(place)
        at += rows * width
