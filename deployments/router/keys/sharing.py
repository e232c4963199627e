"""SharedCounts: what the routers of an application have counted of keys with limits, through Ray's
own key-value store, so that a key's limit is one for all routers and a router's end forgets
nothing.

Everything here blocks, and raises OSError if the store cannot be had."""

from collections.abc import Collection

import msgspec

from deployments.api.key_limits import KeyCount
from deployments.store import prefix, store

_Counts = dict[str, KeyCount]


class SharedCounts:
    def __init__(self, app: str, router: str) -> None:
        self._folder = f"{prefix(app)}keys/"
        self._own = self._folder + router
        self._put = b""

    def base(self, spent: dict[str, dict[str, int]]) -> None:
        """spent: of UsageLog, from before this application. The first router's word stays: a later
        one would count the application's own work twice."""
        for place, length in (("before-day", 10), ("before-month", 7)):
            counts = {
                key: KeyCount(0, 0, period, tokens)
                for key, totals in spent.items()
                for period, tokens in totals.items()
                if len(period) == length
            }
            store("put", self._folder + place, msgspec.msgpack.encode(counts), overwrite=False)

    def exchange(self, counts: _Counts, periods: Collection[str]) -> dict[str, _Counts]:
        """Tell the own counts; all the others'. periods: the current ones; a router that
        has counted nothing in them is forgotten."""
        data = msgspec.msgpack.encode(counts)
        if data != self._put:
            store("put", self._own, data)
            self._put = data
        found: dict[str, _Counts] = {}
        for raw in store("list", self._folder):
            key = raw.decode() if isinstance(raw, bytes) else raw
            if key == self._own or (value := store("get", key)) is None:
                continue
            told = msgspec.msgpack.decode(value, type=_Counts)
            if not told or any(count.period in periods for count in told.values()):
                found[key] = told
            else:
                store("del", key)
        return found
