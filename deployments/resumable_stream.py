"""ResumableStream: the client side of a stream that survives broken connections.

The class uses only the standard library, and opens no connections. Its owner passes received data
to `feed`, and reconnects with `headers` after `pause`.
"""

import json
import random
import time

WANTED = "x-event-ids"  # request header; "1" asks the server for event ids
LAST = "Last-Event-ID"

PATIENCE = 60.0  # seconds without data after which a stream is given up
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0  # seconds between attempts, doubled each time
_LONGEST_TOLD = 5.0  # maximum seconds of a Retry-After that are waited
# Statuses that a recovering service may send; 404 comes from Serve's proxy while it starts.
_AGAIN = frozenset({404, 408, 425, 429, 500, 502, 503, 504})
# Beginnings of the last event in streams of /v1/responses and /v1/messages; chats end with [DONE].
_ENDS = tuple(
    b'{"type":"%b"' % kind
    for kind in (
        *(b"response.completed", b"response.incomplete", b"response.failed"),
        *(b"message_stop", b"error"),
    )
)


class ResumableStream:
    """The state of a streamed answer across several connections.

    patience: seconds without data after which the stream is given up.
    finished: whether the stream has ended: by [DONE], its dialect's last event or an error event.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.finished = False
        self._patience = patience
        self._last = ""
        # Whether an event without an id was passed to the reader, so that the stream cannot be
        # resumed.
        self._shown = False
        self._buffer = b""
        self._news = time.monotonic()
        self._wait = _FIRST_WAIT

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the first request, or for the next attempt to resume."""
        return {WANTED: "1", **({LAST: self._last} if self._last else {})}

    def feed(self, data: bytes) -> bytes:
        """Process received data, and return the events that are complete now, for the reader.

        An incomplete event is dropped when the stream breaks, because the server sends it again.
        """
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        end = self._buffer.rfind(b"\n\n") + 2
        if end < 2:
            return b""
        whole, self._buffer = self._buffer[:end], self._buffer[end:]
        for block in whole.split(b"\n\n"):
            self._look(block)
        self.heard()
        return whole

    def heard(self) -> None:
        """Record that data has arrived: restart the time limit `patience`, and reset the wait
        before the next attempt.
        """
        self._news = time.monotonic()
        self._wait = _FIRST_WAIT

    def _look(self, block: bytes) -> None:
        id, data = "", []
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            if name == b"id":
                id = value.strip().decode("latin-1")
            elif name == b"data":
                data.append(value.strip())
        if not data:
            return
        text = b"\n".join(data)
        if text == b"[DONE]" or text.startswith(_ENDS) or _is_error(text):
            self.finished = True
        elif id:
            self._last = id
        else:
            self._shown = True

    def pause(self, status: int = 0, headers: dict[str, str] | None = None) -> float | None:
        """Return the seconds to wait before the next attempt; None if the stream is given up.

        status: HTTP status of a failed attempt to resume; 0: the stream broke.
        headers: headers of that response, with lower-case names.
        """
        headers = headers or {}
        self._buffer = b""
        given_up = time.monotonic() > self._news + self._patience
        refused = status and (status not in _AGAIN or headers.get("x-should-retry") == "false")
        if self.finished or self._shown or given_up or refused:
            return None
        wait, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)
        try:
            seconds = float(headers.get("retry-after", 0))
        except ValueError:
            seconds = 0.0
        return max(wait * random.uniform(0.5, 1.0), min(seconds, _LONGEST_TOLD))


def _is_error(data: bytes) -> bool:
    if not data.startswith(b'{"error"'):
        return False
    try:
        return "error" in json.loads(data)
    except ValueError:
        return False
