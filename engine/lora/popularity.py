"""Popularity: how often each name was asked for; what is long ago counts less. No torch here."""

FADE = 1.002  # a request counts half as much as one that came 350 later
_MOST = 1e100


class Popularity:
    """Counts grow instead of fading, and are scaled down before they overflow; names that nobody
    has asked for since long before then are forgotten."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._gain = 1.0  # what a request counts now

    def count(self, name: str) -> None:
        """It was asked for."""
        self._gain *= FADE
        self._counts[name] = self._counts.get(name, 0.0) + self._gain
        if self._gain > _MOST:
            kept = {name: count / _MOST for name, count in self._counts.items()}
            self._counts = {name: count for name, count in kept.items() if count > 1e-9}
            self._gain /= _MOST

    def __getitem__(self, name: str) -> float:
        """Comparable with others of this moment; a single request now is about `one`."""
        return self._counts.get(name, 0.0)

    @property
    def one(self) -> float:
        return self._gain
