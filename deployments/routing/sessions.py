"""Sessions: the replicas at which sessions were last, as far as this router knows."""

from collections import OrderedDict

_MOST = 1 << 16  # sessions that are remembered; others begin anew, by their hashes


class Sessions:
    """The last replica of each session that a client names, in bounded memory.

    Names are digests: sessions of different API keys differ.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._places: OrderedDict[bytes, str] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._places)

    def place(self, session: bytes) -> str:
        """Return the name of the replica that had the session last; "" = unknown."""
        return self._places.get(session, "")

    def note(self, session: bytes, replica: str) -> None:
        """Record the replica of a session's last request; the oldest session beyond `most` goes."""
        self._places[session] = replica
        self._places.move_to_end(session)
        if len(self._places) > self._most:
            self._places.popitem(last=False)
