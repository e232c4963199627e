"""route(work, snapshots) -> replica: which replica gives a request its first tokens soonest. Pure;
no clock, no Ray.

The score is in seconds, from measured rates, so a CPU replica is just a slow one:

    backlog + prompt tokens                              seconds until the prompt is computed
    -----------------------   +   output x step x (n + 1) / max(n, 1)
     measured prompt rate                                seconds of the first output tokens, one
     sequence fuller

n is the sequences that ran when the step was measured. What this router has sent since the snapshot
was taken is booked on top of it, so that a burst between two frames spreads.
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
    step_seconds: float  # of a recent step
    available: bool = True  # connected, not draining


def score(work: Work, at: Snapshot) -> tuple[bool, float]:
    """(does not fit now, seconds); smaller is better. Space comes first: what does not fit waits
    for others to end."""
    backlog = at.waiting_tokens + at.booked_tokens + work.prompt_tokens * work.sequences
    measured = max(at.sequences, 1)
    crowd = at.sequences + at.booked_sequences + work.sequences
    output = min(work.max_tokens, _OUTPUT_HORIZON)
    seconds = backlog / at.prompt_rate + output * at.step_seconds * crowd / measured
    return backlog > at.free_tokens, seconds


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
