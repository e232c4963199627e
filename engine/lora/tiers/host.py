"""HostMemory: the adapters in host memory, with a budget of bytes. No torch here."""

import time
from collections import OrderedDict
from collections.abc import Callable, Container

from engine.lora.tiers.adapter import Adapter, LoadedAdapter

# Seconds without use after which an adapter leaves host memory, even if there is room. A day, so
# that an adapter that is only used by day stays overnight.
UNUSED_SECONDS = 86_400.0


class HostMemory:
    """The adapters whose weights are in host memory, within a budget of bytes.

    budget: maximum bytes; adapters that running requests may need again are kept even beyond it.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        # adapter -> time of its last use; least recently used first
        self._adapters: OrderedDict[Adapter, float] = OrderedDict()
        self.num_bytes = 0

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._budget

    def keep(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        """Store an adapter's loaded weights, as the most recently used."""
        adapter.weights, adapter.digest = loaded.weights, loaded.digest
        adapter.host_bytes = loaded.host_bytes
        self.num_bytes += loaded.host_bytes
        self._adapters[adapter] = self._clock()

    def touch(self, adapter: Adapter) -> None:
        """Mark the adapter as the most recently used, if its weights are in host memory."""
        if adapter.weights is not None:
            self._adapters[adapter] = self._clock()
            self._adapters.move_to_end(adapter)

    def forget(self, adapter: Adapter) -> None:
        if adapter.weights is not None:
            self.num_bytes -= adapter.host_bytes
            adapter.weights = None
            del self._adapters[adapter]

    @property
    def has_unused(self) -> bool:
        """Whether some adapter was not used for UNUSED_SECONDS."""
        oldest = next(iter(self._adapters.values()), None)
        return oldest is not None and self._clock() - oldest > UNUSED_SECONDS

    def drop_unused(self) -> None:
        """Drop adapters that were not used for UNUSED_SECONDS.

        An adapter with requests, or one that is being uploaded, is marked as used instead.
        """
        while self.has_unused:
            adapter = next(iter(self._adapters))
            if adapter.users or (adapter.slot is not None and not adapter.slot.ready):
                self.touch(adapter)
            else:
                self.forget(adapter)

    def evict(self, wanted: Container[Adapter]) -> None:
        """Drop the least recently used adapters until the budget is met.

        The newest adapter is kept in any case, so that it can be uploaded. Adapters that are being
        uploaded, or that started requests may need again, are kept too.

        wanted: adapters that wait for a slot, which are kept.
        """
        newest = next(reversed(self._adapters), None)
        for adapter in list(self._adapters):
            if self.num_bytes <= self._budget:
                return
            uploading = adapter.slot is not None and not adapter.slot.ready
            if adapter is newest or adapter.started or uploading or adapter in wanted:
                continue
            # a retired adapter with users stays, as it could not be read again
            if not (adapter.retired and adapter.users):
                self.forget(adapter)

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(adapter.host_bytes for adapter in self._adapters)
