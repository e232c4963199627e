"""route(work, snapshots) -> replica: which replica gives a request its first tokens soonest. Pure;
no clock, no Ray.

The score is in seconds, from measured rates, so a CPU replica is just a slow one:

    backlog + prompt tokens
    -----------------------  +  output tokens x (base + per sequence x (sequences + 1))
     measured prompt rate

What this router has sent since the snapshot was taken is booked on top of it, so that a burst
between two frames spreads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

_OUTPUT_HORIZON = 64  # output tokens that count: users feel the beginning, and nobody knows the end
_TIE = 1.05  # scores this close are equal: measured rates are no better than that


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks of a replica, in tokens."""

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One replica, one step old, and what was sent there since."""

    replica: str
    waiting_tokens: int  # prompt tokens accepted and not computed
    sequences: int  # running and waiting
    booked_tokens: int  # prompt tokens sent and not yet seen in the replica's own figures
    booked_sequences: int
    free_tokens: int  # KV space
    prompt_rate: float  # tokens/s, measured
    base_seconds: float  # of a step, however few sequences it has
    sequence_seconds: float  # that each sequence adds to a step
    available: bool = True  # connected, not draining


class StepModel:
    """A step's duration as base + per sequence x sequences, fitted to what was seen.

    Least squares with older steps fading. A GPU comes out nearly flat, a CPU nearly proportional;
    until the number of sequences has varied, half of the duration is taken to be of either kind.
    """

    _FADE = 0.98  # weight of the past at each step: about fifty steps count

    def __init__(self) -> None:
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def observe(self, sequences: int, seconds: float) -> None:
        fade = self._FADE
        self._weight = self._weight * fade + 1
        self._n = self._n * fade + sequences
        self._s = self._s * fade + seconds
        self._nn = self._nn * fade + sequences * sequences
        self._ns = self._ns * fade + sequences * seconds

    def fit(self) -> tuple[float, float]:
        """(base, per sequence) in seconds; zeros before the first step."""
        if not self._n:
            return 0.0, 0.0
        n, s = self._n / self._weight, self._s / self._weight
        variance = self._nn / self._weight - n * n
        slope = s / n / 2
        if variance > 0.25:
            slope = min(max(0.0, (self._ns / self._weight - n * s) / variance), s / n)
        return s - slope * n, slope


def score(work: Work, at: Snapshot) -> tuple[bool, float]:
    """(does not fit now, seconds); smaller is better. Space comes first: what does not fit waits
    for others to end."""
    backlog = at.waiting_tokens + at.booked_tokens + work.prompt_tokens * work.sequences
    crowd = at.sequences + at.booked_sequences + work.sequences
    output = min(work.max_tokens, _OUTPUT_HORIZON)
    step = at.base_seconds + at.sequence_seconds * crowd
    return backlog > at.free_tokens, backlog / at.prompt_rate + output * step


def route(
    work: Work, snapshots: Iterable[Snapshot], random: Random, *, avoid: str = ""
) -> str | None:
    """The replica with the best score, by lot among equals; None if none is available.

    avoid: a replica to take only if there is no other, e.g. the one that has just failed this
    request.
    """
    scored = sorted(
        ((snapshot.replica == avoid, *score(work, snapshot)), snapshot.replica)
        for snapshot in snapshots
        if snapshot.available
    )
    if not scored:
        return None
    (avoided, full, best), _ = scored[0]
    equal = [
        replica
        for (is_avoided, is_full, seconds), replica in scored
        if (is_avoided, is_full) == (avoided, full) and seconds <= best * _TIE
    ]
    return random.choice(equal)
