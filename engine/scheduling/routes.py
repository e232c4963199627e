"""RequestRoutes: the experts that each MoE layer has chosen for each token of a request."""

import numpy as np
from numpy.typing import NDArray

from engine.messages import RoutedExperts


class RequestRoutes:
    """The chosen experts of a request's tokens, by position.

    If a token is computed again (preemption, rejected draft), its experts replace the earlier ones.
    """

    def __init__(self) -> None:
        self._ids: NDArray[np.integer] | None = None  # [capacity, layers, chosen]

    def put(self, start: int, ids: NDArray[np.integer]) -> None:
        """Store the experts of tokens from position `start` on: ids [n, layers, chosen]."""
        end = start + len(ids)
        known = self._ids
        if known is None or len(known) < end:
            grown = np.zeros((2 * end, *ids.shape[1:]), ids.dtype)
            if known is not None:
                grown[: len(known)] = known
            self._ids = known = grown
        known[start:end] = ids

    def answer(self, begin: int, end: int) -> RoutedExperts | None:
        """Return the experts of tokens begin .. end - 1; None if none was stored."""
        if self._ids is None or end <= begin:
            return None
        ids = self._ids[begin:end]
        return RoutedExperts(ids.shape, ids.dtype.name, ids.tobytes())
