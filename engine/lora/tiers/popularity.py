"""Popularity: how often each name was requested; recent requests count more. No torch here."""

FADE = 1.002  # a request counts half as much as one that came 350 later
# Seconds, in which it loses as much again: for servers so quiet that 350 requests take a day. The
# most that a name can count, 500 requests, is less than a single one of nine hours later.
HALF_LIFE = 3600.0
_MOST = 1e100


class Popularity:
    """Counts of requests by name, of which recent ones count more.

    Counts grow instead of fading, and are scaled down before they overflow. Names whose last
    request was long before then are forgotten. now: seconds of any one clock.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._gain = 1.0  # what a request counted at `_last`
        self._last = 0.0

    def count(self, name: str, now: float) -> None:
        """Count a request for this name."""
        self._gain = self.one(now) * FADE
        self._last = now
        self._counts[name] = self._counts.get(name, 0.0) + self._gain
        if self._gain > _MOST:
            counts = {name: count / self._gain for name, count in self._counts.items()}
            self._counts = {name: count for name, count in counts.items() if count > 1e-9}
            self._gain = 1.0

    def __getitem__(self, name: str) -> float:
        """The name's count, comparable with other counts of the same moment."""
        return self._counts.get(name, 0.0)

    def one(self, now: float) -> float:
        """Return about what a single request counts now."""
        # After 500 half-lives nothing is left of what was, and a float ends at 2 ** 1024.
        lives = min(max(0.0, now - self._last) / HALF_LIFE, 500.0) if self._counts else 0.0
        return self._gain * 2.0**lives
