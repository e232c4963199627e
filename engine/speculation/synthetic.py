"""SyntheticAcceptance, AnyDrafter: speculation with given acceptance rates, for benchmarks.

A hash of seed and position decides how many drafts are accepted, whatever their tokens are. The
output then differs from that without speculation.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul


class SyntheticAcceptance:
    """The pseudo-random acceptance of drafts at given rates, for benchmarks.

    rates: the acceptance probability of each draft of a step, if all drafts before it are accepted.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        # the probability that each draft and all before it are accepted, scaled to the hash, the
        # last first
        self._least = [round(share * 2**32) for share in accumulate(rates, mul)][::-1]

    def accepted(self, places: Iterable[tuple[int, int, int]]) -> list[int]:
        """Return the maximum number of leading drafts of each request that are accepted.

        places: (seed, choice, position of the first draft) of each request.
        """
        # The hash of a tuple of integers is cheap, and the same in all processes.
        least, most = self._least, len(self._least)
        return [most - bisect_right(least, hash(place) & 0xFFFFFFFF) for place in places]


class AnyDrafts:
    """Drafts that repeat the text's last token."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_tokens = len(token_ids)
        self._last = token_ids[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self.num_tokens += len(tokens)
        self._last = tokens[-1]

    def propose(self, most: int) -> list[int]:
        """Return `most` drafts, each the text's last token."""
        return [self._last] * most

    def end(self) -> None:
        """Do nothing."""


class AnyDrafter:
    """The drafter of synthetic acceptance, which always has drafts."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> AnyDrafts:
        """Return the drafts of a request."""
        return AnyDrafts(token_ids)
