"""UnauthenticatedConnections: limits a replica's connections that have not proved the secret yet.

Their number and their log lines are bounded.
"""

import asyncio
import logging
from collections.abc import Iterator

from deployments.transport.channel import ReplicaEnd

logger = logging.getLogger("manta.replica")

_PLACES = 64
_LINE_SECONDS = 10.0  # minimum seconds between two log lines


class UnauthenticatedConnections:
    """A replica's connections, at most _PLACES, that have not proved that they know the secret.

    A new connection is always accepted. If there are already _PLACES connections, the oldest one
    from the address with the most connections is closed. A router proves the secret within a round
    trip, so old connections are not from routers. So no machine can block routers by opening
    connections.

    Connections that end without a proof are logged together: the first one immediately, later ones
    as a count.
    """

    def __init__(self) -> None:
        self._places: dict[ReplicaEnd, str] = {}  # connection -> address, oldest first
        self._refused = 0  # number of connections without a proof since the last log line
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
            victim = next(
                candidate for candidate, address in self._places.items() if address == most
            )
            del self._places[victim]
            victim.close("other connections came without a handshake")
        self._places[connection] = connection.address

    def discard(self, connection: ReplicaEnd) -> None:
        self._places.pop(connection, None)

    def refused(self, connection: ReplicaEnd, reason: str) -> None:
        """Count and log a connection that ended without a proof of the secret."""
        self.discard(connection)
        self._refused += 1
        self._last = f"{connection.peer}: {reason}"
        if self._timer is None:
            self._report()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        self._timer = None
        if not self._refused:
            return
        if self._refused == 1:
            logger.warning("refused %s", self._last)
        else:
            logger.warning("refused %d connections, the last %s", self._refused, self._last)
        self._refused = 0
        self._timer = asyncio.get_running_loop().call_later(_LINE_SECONDS, self._report)
