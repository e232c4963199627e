"""Connections to a replica's channel that have not proved the secret: few places, and few lines."""

import asyncio
import logging
from collections.abc import Iterator

from deployments.transport.channel import ReplicaEnd

logger = logging.getLogger("manta.replica")

_PLACES = 64
_LINE_SECONDS = 10.0  # of the log, between two lines


class UnauthenticatedConnections:
    """Who comes last gets a place, because a router proves itself within a round trip and whoever
    stays is none: when all are taken, it is that of the eldest of the address that has the most. So
    nobody can keep routers out by holding connections, least of all from another machine.

    Connections that end so are logged together: one line at once, the next ones summed up.
    """

    def __init__(self) -> None:
        self._places: dict[ReplicaEnd, str] = {}  # -> address; eldest first
        self._refused = 0  # since the last line
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[ReplicaEnd]:
        return iter(tuple(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def add(self, connection: ReplicaEnd) -> None:
        if len(self._places) >= _PLACES:
            counts: dict[str, int] = {}
            for address in self._places.values():
                counts[address] = counts.get(address, 0) + 1
            most = max(counts, key=counts.__getitem__)
            victim = next(one for one, address in self._places.items() if address == most)
            del self._places[victim]
            victim.close("others came who have no handshake yet either")
        self._places[connection] = connection.address

    def discard(self, connection: ReplicaEnd) -> None:
        self._places.pop(connection, None)

    def refused(self, connection: ReplicaEnd, reason: str) -> None:
        """It has ended as a stranger."""
        self.discard(connection)
        self._refused += 1
        self._last = f"{connection.peer}: {reason}"
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        self._timer = None
        if not self._refused:
            return
        if self._refused == 1:
            logger.warning("refused %s", self._last)
        else:
            logger.warning("refused %d connections, the last %s", self._refused, self._last)
        self._refused = 0
        self._timer = asyncio.get_running_loop().call_later(_LINE_SECONDS, self._tell)
