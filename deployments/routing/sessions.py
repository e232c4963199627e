"""Sessions: records the replica that each client session used last, as far as this router knows."""

from collections import OrderedDict

_MOST = 1 << 16  # maximum number of remembered sessions; forgotten ones count as new


class Sessions:
    """The last replica of each session, for the `most` most recent sessions.

    A session is identified by a digest of its name and the client's API key.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._places: OrderedDict[bytes, str] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._places)

    def place(self, session: bytes) -> str:
        """Return the name of the replica that the session used last; "": unknown."""
        return self._places.get(session, "")

    def note(self, session: bytes, replica: str) -> None:
        """Record the replica of a session's last request; beyond `most` drop the oldest session."""
        self._places[session] = replica
        self._places.move_to_end(session)
        if len(self._places) > self._most:
            self._places.popitem(last=False)
