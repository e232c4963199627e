"""Speculation: chooses the drafts that a step verifies, and learns which were accepted.

engine/speculation/ proposes tokens and lengths. This file calls it for the requests of a step, and
`LaunchedStep.accept` keeps the drafts that equal what was sampled.

Drafts of look-up are tokens that the host knows, so a request with drafts must have no token in
flight. `Scheduler.schedule` then lets the device become idle first, and one step runs at a time
while any request has drafts.

Drafts of a model are computed on the device at the end of a step (`Batch.proposals`), and are
verified in the next step. That step is launched one batch ahead, as the host needs only the drafts'
number: the device adds accepted drafts to positions, and the host reads the tokens with the next
result. Computing a draft already costs time, so whether it is worth that is decided before, and all
computed drafts are verified.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.scheduling.drafts.verifications import Proposals, Verifications
from engine.scheduling.request import Request
from engine.speculation.computed import ON_DEVICE, ComputedDrafter
from engine.speculation.drafter import Drafter, Drafts
from engine.speculation.lengths import DraftLengths, DraftRecord
from engine.speculation.lookup import Lookup
from engine.speculation.model_lengths import ModelLengths
from engine.speculation.settings import MAX_TOKENS, SpeculationSettings
from engine.speculation.synthetic import AnyDrafter, SyntheticAcceptance

if TYPE_CHECKING:
    from engine.structured.constraint import Constraint

logger = logging.getLogger("manta.engine")

_READ = 8_192  # maximum number of tokens that drafters read in a step, which takes the host 2 ms
_FEW = 16  # number of unread tokens of a request up to which they do not count against `_READ`
_ON_DEVICE = [[ON_DEVICE] * count for count in range(MAX_TOKENS + 1)]  # index: number of drafts


@dataclass(slots=True)
class RequestDrafts:
    """The source of a request's drafts, and the record of how many were accepted."""

    source: Drafts
    record: DraftRecord


class Speculation:
    """The speculation of an engine: which requests get drafts, how many, and from which drafter.

    awaited: a request whose drafts wait for its token in flight, so that no step may be launched
        before; None = there is none.
    proposals: the drafts that the last launched step computes; None = none.
    """

    def __init__(
        self,
        drafter: Drafter,
        lengths: DraftLengths | ModelLengths,
        acceptance: SyntheticAcceptance | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """Set up the speculation of an engine.

        acceptance: accepts drafts by chance, for benchmarks.
        lookup: the drafter, if it is look-up. Paused drafts are then resumed when a request's text
            repeats itself; drafts of other drafters are resumed after a time.
        """
        self.computes = isinstance(drafter, ComputedDrafter)  # whether steps compute drafts
        self.awaited: Request | None = None
        self._awaited_length = 0  # number of drafts of `awaited` that were worth waiting for
        self._drafter = drafter
        self._lengths = lengths
        self._acceptance = acceptance
        self._lookup = lookup
        # number of checks for repeated text while drafts are paused; selects the request to check
        self._looked = 0
        self._unread = _READ  # tokens that drafters may still read in this step
        self.proposals: Proposals | None = None

    @classmethod
    def of(cls, settings: SpeculationSettings | None) -> "Speculation | None":
        """Return the speculation of an engine; None if it is off.

        settings: the settings that `check_speculation` returned; None = off.
        """
        if settings is None:
            return None
        acceptance = SyntheticAcceptance(settings.rates) if settings.rates else None
        if acceptance is not None:
            rates = " ".join(map(str, settings.rates))
            logger.warning(
                "speculation accepts drafts by chance (%s), so texts are not the model's: "
                "engine.speculation has rates, which are for benchmarks",
                rates,
            )
        if settings.by_model:
            return cls(ComputedDrafter(), ModelLengths(settings.tokens), acceptance)
        if acceptance is not None:
            return cls(AnyDrafter(), DraftLengths(settings.tokens), acceptance)
        lookup = Lookup(settings.lookup)
        return cls(lookup, DraftLengths(settings.tokens), lookup=lookup)

    @property
    def dormant(self) -> bool:
        """Whether the drafter may skip the tokens of steps; see `ModelLengths.dormant`."""
        return self.computes and self._lengths.dormant

    def peek(self, requests: Sequence[Request], *, constrained: bool = False) -> None:
        """Set `awaited` to the first request with drafts for tokens after its token in flight.

        constrained: whether some of them may have grammars or lists of tokens.
        """
        self.awaited = None
        if not requests:
            return
        asks = self._begin_step(requests)
        if self.computes:  # a step that computes drafts is not launched before the last one is done
            if asks:
                able = (r for r in requests if self._may_draft(r, _room(r) - 1))
                self.awaited = next(able, None)
            return
        if not asks and not constrained:
            return
        for request in requests:
            if constrained and len(self._forced(request)) > 1:
                self.awaited, self._awaited_length = request, 0
                return
            drafts = self._propose(request, ahead=1) if asks else []
            if len(drafts) > 1 and (length := self._worth(request, len(drafts) - 1)):
                self.awaited, self._awaited_length = request, length
                return

    def choose(
        self, requests: Sequence[Request], room: int, *, constrained: bool = False
    ) -> Verifications:
        """Return the drafts to verify, for decoding requests. Drafts that the host knows continue
        known texts, so that these requests have no token in flight.

        requests: in the order of the step's entries.
        room: the maximum number of drafts of all requests together.
        constrained: whether some of them may have grammars or lists of tokens.
        """
        awaited, self.awaited = self.awaited, None
        proposals, self.proposals = self.proposals, None
        chosen = Verifications()
        if not requests or room <= 0:
            return chosen
        if self.computes:
            if proposals is not None:
                self._add_computed(chosen, requests, proposals)
        else:
            asks = awaited is not None or self._begin_step(requests) > 0  # otherwise `peek` did
            if not asks and not constrained:
                return chosen
            self._add_proposed(chosen, requests, awaited, asks, constrained)
        if sum(chosen.lengths) > room:
            chosen.cut(_cut(chosen.lengths, room))
        if self._acceptance is not None:
            places = [(r.seed, r.choice, len(r.token_ids)) for r in chosen.requests]
            chosen.synthetic = self._acceptance.accepted(places)
        return chosen

    def _add_computed(
        self, chosen: Verifications, requests: Sequence[Request], proposals: Proposals
    ) -> None:
        """Add the drafts that the last step computes for requests to `chosen`."""
        computed = dict(zip(proposals.requests, enumerate(proposals.counts), strict=True))
        chosen.entries = [entry for entry, r in enumerate(requests) if r in computed]
        chosen.requests = [requests[entry] for entry in chosen.entries]
        own = [computed[request] for request in chosen.requests]
        chosen.places = [place for place, _ in own]
        chosen.lengths = [length for _, length in own]
        chosen.drafts = [_ON_DEVICE[length] for length in chosen.lengths]
        chosen.read = proposals.read

    def _add_proposed(
        self,
        chosen: Verifications,
        requests: Sequence[Request],
        awaited: Request | None,
        asks: bool,
        constrained: bool,
    ) -> None:
        """Add the drafts that the drafter proposes or a grammar forces to `chosen`.

        awaited: the request for whose drafts the step has waited.
        asks: whether to use the drafter, not only grammars.
        """
        for entry, request in enumerate(requests):
            forced = self._forced(request) if constrained else []
            drafts = forced or (self._propose(request) if asks else [])
            if not drafts:
                continue
            length = len(forced) or self._worth(request, len(drafts))
            if request is awaited:
                length = max(length, self._awaited_length)
            del drafts[length:]
            constraints: Sequence[Constraint] = ()
            if request.constraint is not None:
                constraints = _after(request.constraint, drafts)
            if not drafts:
                continue
            if constraints:
                chosen.constraints[len(chosen)] = constraints
            if forced:
                chosen.forced.add(len(chosen))
            chosen.requests.append(request)
            chosen.entries.append(entry)
            chosen.lengths.append(len(drafts))
            chosen.drafts.append(drafts)

    def compute(
        self, requests: Sequence[Request], lasts: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests for which a step computes drafts after sampling, and how many.

        requests: the requests that sample in the step.
        lasts: the position of each request's last token or draft.
        Returns (indices in `requests`, the number of drafts of each).
        """
        lengths = self._lengths
        if not self.computes or not requests or not (most := lengths.begin_step(len(requests))):
            return [], []
        # the test of `_may_draft`, inlined for speed; a request gets this step's token, the next
        # step's drafts and one more token
        indices = [
            at
            for at, (request, last) in enumerate(zip(requests, lasts, strict=True))
            if request.limit - last > 3 and request.speculates and request.constraint is None
        ]
        able = [requests[at] for at in indices]
        records = [(request.drafts or self._begun(request)).record for request in able]
        rooms = [requests[at].limit - lasts[at] - 3 for at in indices]
        counts = lengths.worth(records, [room if room < most else most for room in rooms])
        if all(counts):
            return indices, counts
        worth = [(at, count) for at, count in zip(indices, counts, strict=True) if count]
        return [at for at, _ in worth], [count for _, count in worth]

    def expect(self, request: Request) -> None:
        """Resume paused drafts at once if the request that begins to decode has a prediction."""
        if request.prediction:
            self._lengths.wake()

    def observe(self, verifications: Verifications) -> None:
        """Update the acceptance rates, from which later draft lengths are chosen, with a step's
        drafts."""
        forced, accepted = verifications.forced, verifications.accepted
        for at in forced:
            self._lengths.observe_forced(accepted[at])
        own = [(at, r.drafts) for at, r in enumerate(verifications.requests) if r.drafts]
        if forced:
            own = [(at, drafts) for at, drafts in own if at not in forced]
        self._lengths.observe_drafts(
            [drafts.record for _, drafts in own],
            [verifications.lengths[at] for at, _ in own],
            [accepted[at] for at, _ in own],
        )

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Record the time of a step, on which the lengths of later drafts depend.

        entries: the number of decodes; 0 if the step computed prompts too.
        drafts: the number of draft tokens of all decodes.
        """
        self._lengths.observe_step(entries, drafts, seconds)

    def forget_steps(self) -> None:
        """Forget the measured times of steps, as the times of warm-up include compilation."""
        self._lengths.forget_steps()

    def end(self, request: Request) -> None:
        """Drop the drafts of a request that ends; look-up keeps its text for later requests."""
        own, request.drafts = request.drafts, None
        if own is not None:
            self._text_known(request, own.source)
            own.source.end()
        elif self._lookup is not None and self._may_draft(request):
            self._lookup.remember(request.token_ids, request.num_prompt, request.root)

    def _begin_step(self, requests: Sequence[Request]) -> int:
        """Begin a step; return the maximum number of drafts of a request in it.

        While drafts are paused, one request is checked for repeated text now and then.
        """
        most = self._lengths.begin_step(len(requests))
        if most:
            self._unread = _READ
        elif (lookup := self._lookup) is not None and (length := self._lengths.look_due()):
            self._looked += 1
            request = requests[self._looked % len(requests)]
            self._lengths.note_look(
                self._may_draft(request) and lookup.repeats(request.token_ids, request.root, length)
            )
        return most

    def _worth(self, request: Request, length: int) -> int:
        own: RequestDrafts | None = request.drafts
        return 0 if own is None else self._lengths.worth([own.record], [length])[0]

    def _propose(self, request: Request, ahead: int = 0) -> list[int]:
        """Return the drafter's drafts for a request, up to the length that the controller allows.

        ahead: the number of tokens in flight, which the first drafts predict.
        """
        room = _room(request)
        if not self._may_draft(request, room - ahead):
            return []
        own: RequestDrafts | None = request.drafts
        read = 0 if own is None else own.source.num_tokens + request.num_virtual
        missing = len(request.token_ids) - read
        if missing > _FEW:
            if self._unread <= 0:
                return []
            self._unread -= missing
        own = self._begun(request)
        most = self._lengths.limit(own.record)
        if not most:
            return []
        self._text_known(request, own.source)
        return own.source.propose(min(room, most + ahead))

    def _may_draft(self, request: Request, room: int = 1) -> bool:
        """Whether a request may have drafts; `room` is the maximum number of them."""
        # Draft models sample without masks, and synthetic acceptance ignores grammars.
        free = request.constraint is None or not (self.computes or self._acceptance)
        return request.speculates and free and room > 0

    def _forced(self, request: Request) -> list[int]:
        """Return the tokens that the request's grammar forces after its known tokens."""
        room = _room(request)
        if request.constraint is None or not self._may_draft(request, room):
            return []
        return request.constraint.forced()[: min(room, MAX_TOKENS)]

    def _begun(self, request: Request) -> RequestDrafts:
        """Return the request's record of drafts, which the first call creates."""
        if request.drafts is None:
            virtual = request.num_virtual
            source = self._drafter.begin(
                request.token_ids[virtual:],
                request.num_prompt - virtual,
                request.prediction,
                request.root,
            )
            request.drafts = RequestDrafts(source, DraftRecord())
        return request.drafts

    @staticmethod
    def _text_known(request: Request, source: Drafts) -> None:
        missing = len(request.token_ids) - request.num_virtual - source.num_tokens
        if missing > 0:
            source.extend(request.token_ids[-missing:])


def _room(request: Request) -> int:
    """Return the maximum number of drafts of a request, whose limit must also hold one more
    token."""
    return request.limit - len(request.token_ids) - 1


def _cut(lengths: list[int], room: int) -> list[int]:
    """Return the lengths of drafts, cut to `room` in all. The longest are cut first; a request
    loses its only draft if no other has two."""
    longest = max(lengths)
    while longest > 1 and sum(min(longest, length) for length in lengths) > room:
        longest -= 1
    if longest == 1:
        return [int(at < room) for at in range(len(lengths))]
    return [min(longest, length) for length in lengths]


def _after(constraint: "Constraint", drafts: list[int]) -> "list[Constraint]":
    """Return the constraints after each draft, and drop the drafts that they forbid."""
    constraints: list[Constraint] = []
    for token in drafts:
        later = constraint.after(token)
        if later is None:
            break
        constraints.append(later)
        constraint = later
    del drafts[len(constraints) :]
    return constraints
