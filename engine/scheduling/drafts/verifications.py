"""Verifications: the drafts that a step verifies, as lists with an element for each decode.

Proposals are the drafts that a model computes in a step, which the next step verifies.

Hundreds of requests have drafts in a step, so numpy does the work that all requests need. Only
requests with accepted drafts are handled in a Python loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.request import Request

if TYPE_CHECKING:
    from engine.structured.constraint import Constraint

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Proposals:
    """The drafts that a step computes on the device, in the order of `Batch.proposals`.

    They continue the text as of that step, so that only the next step can verify them.

    requests, counts: the requests, and the number of drafts of each.
    """

    requests: Sequence[Request]
    counts: Sequence[int]
    _read: Callable[[], Any] | None = None

    def receive(self, read: Callable[[], Any]) -> None:
        """Store the function that returns the drafts, once the step is done."""
        self._read = read

    def read(self) -> Any:
        """Wait for the drafts and return them, [requests, drafts], after the step is done."""
        assert self._read is not None, "the step that computes the drafts is not done"
        return self._read()


@dataclass(slots=True)
class Verifications:
    """The drafts of a step's decodes. Requests without drafts are left out.
    requests: the requests.
    entries: the index of each request's decode among the step's entries.
    lengths: the numbers of drafts, at least 1.
    drafts: each request's draft tokens; ON_DEVICE stands for tokens of a model. Requests may share
        a list, so lists are never changed.
    read, places: for drafts of a model, `read()[place]` begins with a request's tokens; read is
        None if `drafts` has them.
    synthetic: how many drafts to accept whatever is sampled; None = those that equal the samples.
    constraints: index of a request -> its constraint after each draft, if it has a grammar or
        lists of tokens.
    forced: indices of requests whose drafts a grammar forces.
    most: index of a request -> its maximum number of accepted drafts, as later masks are invalid.
    accepted: the numbers of drafts that equal the sampled tokens, once the step is done.
    gained: number of draft tokens appended to each request; below `accepted` if the request ended.
    """

    requests: list[Request] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    read: Callable[[], Any] | None = None
    places: list[int] = field(default_factory=list)
    synthetic: list[int] | None = None
    constraints: "dict[int, Sequence[Constraint]]" = field(default_factory=dict)
    forced: set[int] = field(default_factory=set)
    most: dict[int, int] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    gained: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def cut(self, lengths: Sequence[int]) -> None:
        """Shorten each request's drafts to a length; a request with length 0 is removed."""
        staying = [at for at, length in enumerate(lengths) if length]
        self.lengths = [lengths[at] for at in staying]
        self.drafts = [self.drafts[at][: lengths[at]] for at in staying]
        if len(staying) == len(lengths):
            return
        self.requests = [self.requests[at] for at in staying]
        self.entries = [self.entries[at] for at in staying]
        self.places = [self.places[at] for at in staying] if self.places else []
        if self.synthetic is not None:
            self.synthetic = [self.synthetic[at] for at in staying]
        self.constraints = {
            new: self.constraints[at] for new, at in enumerate(staying) if at in self.constraints
        }
        self.forced = {new for new, at in enumerate(staying) if at in self.forced}

    def settle(self, tokens: Sequence[int], sampled: Sequence[int]) -> None:
        """Set `accepted` from the sampled tokens.

        tokens: the sampled tokens of the step's entries that are not drafts.
        sampled: the tokens sampled at the drafts' entries, in order.
        """
        if self.synthetic is None:
            accepted = self._equal(np.asarray(tokens), np.asarray(sampled))
        else:
            accepted = np.minimum(self.synthetic, self.lengths)
        for at, most in self.most.items():
            accepted[at] = min(accepted[at], most)
        self.accepted = accepted.tolist()

    def _equal(self, tokens: Ints, sampled: Ints) -> Ints:
        """Return how many leading drafts of each request equal the sampled tokens."""
        counts, width = np.asarray(self.lengths), max(self.lengths)
        used = np.arange(width) < counts[:, None]
        # column i: the token sampled at the place of draft i, column 0 by the decode itself
        right = np.full((len(counts), width + 1), -1)
        right[:, 0] = tokens[self.entries]
        right[:, 1:][used] = sampled
        if self.read is None:
            drafts = np.full(used.shape, -1)
            drafts[used] = np.fromiter(chain.from_iterable(self.drafts), np.int64, len(sampled))
        else:
            drafts = np.asarray(self.read())[self.places, :width]
        agree = used & (drafts == right[:, :-1])
        return np.logical_and.accumulate(agree, axis=1).sum(1)
