"""DeviceSlots: the adapter in each device slot, and promises of slots to waiting adapters.

The evicted adapter is the one with the fewest recent requests, not the least recently used one.
With many more adapters than slots, most adapters are not needed again soon after their upload. With
LRU each of them would evict an adapter that is needed soon. An adapter with waiting requests is
evicted only if all adapters have some.

Every row that may still use a slot pins the slot, and a pinned slot is not replaced. When all slots
are pinned and an adapter waits, the slot with the fewest rows is promised to that adapter. No
further request starts on a promised slot, and when its last row ends the waiting adapter gets the
slot. So no adapter starves.
"""

from dataclasses import dataclass

from engine.lora.tiers.adapter import Adapter
from engine.lora.tiers.popularity import Popularity


@dataclass(slots=True, eq=False)
class Slot:
    index: int
    adapter: Adapter | None = None
    ready: bool = False
    pins: int = 0
    promised: Adapter | None = None
    used: int = 0  # number of the call of `touch` that was its last use

    @property
    def wanted(self) -> bool:
        """Whether running or waiting requests use the slot's adapter."""
        return self.adapter is not None and self.adapter.users > 0


class DeviceSlots:
    """The slots of device memory for adapters: which adapter each has, and which is replaced.

    count: the number of slots.
    """

    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]
        self._clock = 0
        self.popularity = Popularity()  # counts of requests by adapter name

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def touch(self, slot: Slot) -> None:
        """Mark the slot as the most recently used one."""
        self._clock += 1
        slot.used = self._clock

    def free(self, adapter: Adapter) -> Slot | None:
        """Return an unused slot into which to load an adapter; None if all slots are in use.

        The slot is empty, promised to the adapter, or that of least value.
        """
        free = [
            slot
            for slot in self._slots
            if not slot.pins
            and (slot.ready or slot.adapter is None)
            and slot.promised in (None, adapter)
        ]
        return min(free, key=self._worth, default=None)

    def _worth(self, slot: Slot) -> tuple[bool, bool, float, int]:
        """Return the slot's value as a sort key; the slot of least value is replaced first.

        The key is (whether the slot has an adapter, whether the adapter has requests, the
        adapter's popularity, last use). The popularity of an adapter with requests counts as 0.
        """
        adapter = slot.adapter
        if adapter is None:
            return (False, False, 0.0, 0)
        # Adapters with requests have popularity 0, so that last use decides among them and each
        # gets a turn.
        asked = 0.0 if slot.wanted else self.popularity[adapter.info.name]
        return (True, slot.wanted, asked, slot.used)

    def give(self, slot: Slot, adapter: Adapter) -> None:
        """Assign an unused device slot to an adapter, and remove the slot's previous adapter.

        The caller uploads the adapter's weights and then sets slot.ready.
        """
        assert adapter.slot is None and not slot.pins
        if slot.adapter is not None:
            slot.adapter.slot = None
        slot.adapter, slot.ready, adapter.slot = adapter, False, slot
        self.touch(slot)

    def empty_slot(self, slot: Slot) -> None:
        """Remove the adapter from an unused slot."""
        assert slot.adapter is not None and not slot.pins
        slot.adapter.slot = None
        slot.adapter, slot.ready = None, False

    def promise(self, adapter: Adapter) -> None:
        """Promise a slot to an adapter, which gets it when the requests that use the slot have
        ended.

        At most half of the slots (but at least one) are promised, so that new requests can start on
        the other slots.
        """
        if any(slot.promised is adapter for slot in self._slots):
            return
        open_slots = [slot for slot in self._slots if slot.promised is None and slot.ready]
        if len(self._slots) - len(open_slots) < max(1, len(self._slots) // 2):
            victim = min(open_slots, key=lambda s: (s.pins, s.used), default=None)
            if victim is not None:
                victim.promised = adapter

    def unpromise(self, adapter: Adapter) -> list[Adapter]:
        """Withdraw the adapter's promise; return adapters whose slots accept new requests again."""
        opened = []
        for slot in self._slots:
            if slot.promised is adapter:
                slot.promised = None
                if slot.adapter is not None:
                    opened.append(slot.adapter)
        return opened

    def due(self) -> list[Adapter]:
        """Return the adapters whose promised slots are unused now."""
        return [s.promised for s in self._slots if s.promised is not None and not s.pins]

    @property
    def resident(self) -> list[str]:
        """The names of the adapters on the device; the one to be evicted next is last."""
        slots = [s for s in self._slots if s.adapter is not None and s.ready]
        slots.sort(key=self._worth, reverse=True)
        return [s.adapter.info.name for s in slots if s.adapter is not None]

    def check_integrity(self, pins: dict[int, int]) -> None:
        """Assert that pins and adapters of all slots are consistent.

        pins: slot index -> number of rows that use it.
        """
        for slot in self._slots:
            assert slot.pins == pins.get(slot.index, 0), f"slot {slot.index}: pins are lost"
            assert slot.adapter is None or slot.adapter.slot is slot
            assert slot.adapter is not None or not (slot.ready or slot.pins)
