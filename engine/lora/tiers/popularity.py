"""Popularity: an exponentially decayed count of requests for each adapter. No torch here."""

FADE = 1.002  # a request counts half as much as one that comes 350 requests later
# Seconds after which counts also halve, for servers so quiet that 350 requests take a day. The
# largest count, of 500 requests, is less than one new request after nine hours.
HALF_LIFE = 3600.0
_MOST = 1e100


class Popularity:
    """The exponentially decayed counts of requests by name.

    A new request adds more than an earlier one, so that earlier counts need no update. Before they
    overflow, all counts are scaled down and negligible ones are dropped. `now` is in seconds of any
    one clock.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._gain = 1.0  # amount that a request at `_last` added to its name's count
        self._last = 0.0

    def count(self, name: str, now: float) -> None:
        """Add a request's weight to the count of this name; now: the time of the request."""
        self._gain = self.request_units(now) * FADE
        self._last = now
        self._counts[name] = self._counts.get(name, 0.0) + self._gain
        if self._gain > _MOST:
            counts = {name: count / self._gain for name, count in self._counts.items()}
            self._counts = {name: count for name, count in counts.items() if count > 1e-9}
            self._gain = 1.0

    def __getitem__(self, name: str) -> float:
        """Return the name's count, comparable with other counts read at the same time."""
        return self._counts.get(name, 0.0)

    def request_units(self, now: float) -> float:
        """Return the weight of a request at `now`, in the units of the names' counts.

        It is the newest request's weight, doubled with each HALF_LIFE since then. `count` adds FADE
        times as much to a name's count.
        """
        # After 500 half-lives earlier counts are negligible, and a float ends at 2 ** 1024.
        lives = min(max(0.0, now - self._last) / HALF_LIFE, 500.0) if self._counts else 0.0
        return self._gain * 2.0**lives
