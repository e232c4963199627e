"""Popularity: an exponentially decayed count of requests for each adapter. No torch here."""

# growth of a request's weight, by which a request counts half as much as one 350 requests later
FADE = 1.002
# Seconds after which counts also halve, for servers with few requests. The largest count, of 500
# requests, is less than one new request after nine hours.
HALF_LIFE = 3600.0
_MOST = 1e100


class Popularity:
    """The exponentially decayed counts of requests by name.

    A new request adds more than an earlier one, so that earlier counts need no update. Before
    counts overflow, all are scaled down and negligible ones are dropped. `now` is in seconds,
    always of the same clock.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._gain = 1.0  # amount that a request at `_last` added to its name's count
        self._last = 0.0

    def count(self, name: str, now: float) -> None:
        """Add a request's weight to the count of a name. now: the time of the request."""
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

        This is the last request's weight, doubled with each HALF_LIFE since then. `count` adds FADE
        times as much to a name's count.
        """
        # Limited to 500 half-lives, after which earlier counts are negligible, as floats overflow
        # at 2 ** 1024.
        lives = min(max(0.0, now - self._last) / HALF_LIFE, 500.0) if self._counts else 0.0
        return self._gain * 2.0**lives
