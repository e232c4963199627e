"""ResponseStore: stores answers of /v1/responses in the router's memory for later turns."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.api.http.errors import ApiError, shown
from deployments.api.http.json_body import JsonObject

SECONDS = 30 * 86400.0


@dataclass(slots=True)
class StoredResponse:
    """A stored answer of /v1/responses.

    response: the JSON of the answer
    items: the JSON of the conversation before the answer's output
    until: the expiry time of the entry, in monotonic seconds
    events: the recorded stream events, indexed by sequence_number; None if none were recorded
    """

    owner: str
    response: bytes
    items: bytes
    until: float
    events: list[bytes] | None = None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + sum(map(len, self.events or ()))


class ResponseStore:
    """A store of answers in one router's memory.

    If it exceeds max_bytes, the least recently used answers are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[str, StoredResponse] = OrderedDict()

    @property
    def on(self) -> bool:
        return self.max_bytes > 0

    def put(
        self,
        id: str,
        owner: str,
        response: Any,
        items: list[JsonObject],
        events: list[bytes] | None = None,
    ) -> None:
        answer, before = msgspec.json.encode(response), msgspec.json.encode(items)
        stored = StoredResponse(owner, answer, before, time.monotonic() + SECONDS, events)
        self._drop(id)
        if stored.size > self.max_bytes:
            return
        self._known[id] = stored
        self._bytes += stored.size
        while self._bytes > self.max_bytes:
            self._drop(next(iter(self._known)))

    def get(self, id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Return a stored answer.

        Raises ApiError 404 response_not_found, also for an answer of another key.
        """
        stored = self._known.get(id)
        if stored is not None and stored.until < time.monotonic():
            self._drop(id)
            stored = None
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                "response_not_found",
                f"there is no response {shown(id)}"
                + ("" if self.on else "; this service keeps none (http.store_bytes)"),
                param=param,
            )
        self._known.move_to_end(id)
        return stored

    def remove(self, id: str, owner: str) -> None:
        """Remove a stored answer. Raises ApiError 404 response_not_found."""
        self.get(id, owner)
        self._drop(id)

    def _drop(self, id: str) -> None:
        stored = self._known.pop(id, None)
        if stored is not None:
            self._bytes -= stored.size
