"""Speculation, Verification: which drafts a step verifies, and what became of them.

engine/speculation/ proposes tokens and lengths. This file asks it for the requests of a step, and
`LaunchedStep.accept` keeps the drafts that equal what was sampled. A request with drafts must have
no token in flight. So `Scheduler.schedule` lets the device become idle first, and one step runs at
a time while any request has drafts.

Drafts of a model are computed on the device at the end of a step (`Batch.proposals`), and are
verified in the next step. That step is launched while they are computed, as the host needs their
number alone: it reads them with the next result. The step that computes drafts pays for them, so
what is worth its row is asked when a step is to compute drafts, and all that were computed are
verified.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.scheduling.request import Request
from engine.speculation.computed import ON_DEVICE, ComputedDrafter, ComputedDrafts
from engine.speculation.drafter import Drafter, Drafts
from engine.speculation.lengths import DraftLengths, DraftRecord
from engine.speculation.lookup import Lookup
from engine.speculation.model_lengths import ModelLengths
from engine.speculation.settings import MAX_TOKENS, SpeculationSettings
from engine.speculation.synthetic import AnyDrafter, SyntheticAcceptance

if TYPE_CHECKING:
    from engine.structured.constraint import Constraint

logger = logging.getLogger("manta.engine")

_READ = 8_192  # tokens that drafters may read in a step, so that no step waits for them: 2 ms
_FEW = 16  # new tokens of a request that do not count


@dataclass(slots=True)
class RequestDrafts:
    """The source of a request's drafts, and the record of how many were accepted."""

    source: Drafts
    record: DraftRecord


@dataclass(slots=True)
class Verification:
    """The drafts of a decode in a step.

    drafts: the tokens; ON_DEVICE for those of a model, until the step's samples are known.
    read, place: `read()[place]` has the tokens of a model's drafts; None = `drafts` has them.
    entry: index of the request's decode among the step's entries.
    synthetic: how many drafts to accept whatever is sampled; -1 = those that equal the samples.
    constraints: those of the request after each of the drafts, if it has a grammar or lists.
    forced: whether the drafts are what the grammar forces, and not the drafter's.
    most: the most drafts to accept, as no mask of later ones is valid.
    accepted: drafts that equal the sampled tokens, once the step is done.
    gained: tokens that the text got beyond the decode's own; fewer than `accepted` if it ended.
    """

    request: Request
    drafts: list[int]
    entry: int = -1
    synthetic: int = -1
    constraints: "Sequence[Constraint]" = ()
    forced: bool = False
    most: int = MAX_TOKENS
    accepted: int = 0
    gained: int = 0
    read: Callable[[], Sequence[Sequence[int]]] | None = None
    place: int = 0

    def follow(self, constraint: "Constraint") -> None:
        """Set `constraints`, from that of the known text, and drop drafts that it forbids."""
        constraints: list[Constraint] = []
        for token in self.drafts:
            later = constraint.after(token)
            if later is None:
                break
            constraints.append(later)
            constraint = later
        del self.drafts[len(constraints) :]
        self.constraints = constraints


class Speculation:
    """The drafts of an engine's steps.

    awaited: a request whose drafts wait for its token in flight, so that no step may be launched
        before; None = there is none.
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
        lookup: the drafter, if it is look-up. Drafts that rest are tried again when it sees texts
            that repeat; those of other drafters after a time.
        """
        self.computes = isinstance(drafter, ComputedDrafter)  # whether steps compute drafts
        self.awaited: Request | None = None
        self._awaited_length = 0  # drafts that were worth waiting for
        self._drafter = drafter
        self._lengths = lengths
        self._acceptance = acceptance
        self._lookup = lookup
        self._looked = 0  # requests looked at while drafts rested
        self._unread = _READ  # tokens that drafters may still read in this step

    @classmethod
    def of(cls, settings: SpeculationSettings | None) -> "Speculation | None":
        """Return the speculation of an engine; None = off.

        settings: those of an engine that can speculate, see `check_speculation`; None = off.
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
        """Whether a drafter need not read the tokens of steps; see `ModelLengths.dormant`."""
        return self.computes and self._lengths.dormant

    def peek(self, requests: Sequence[Request], *, constrained: bool = False) -> None:
        """Set `awaited` to the first request with drafts for tokens after the one in flight.

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
    ) -> list[Verification]:
        """Return the drafts to verify of decoding requests that have no token in flight.

        room: the most drafts in all.
        constrained: whether some of them may have grammars or lists of tokens.
        """
        awaited, self.awaited = self.awaited, None
        if not requests or room <= 0:
            return []
        if self.computes:
            return self._synthesise(_cut(self._computed(requests), room))
        asks = awaited is not None or self._begin_step(requests) > 0  # else `peek` began it
        if not asks and not constrained:
            return []
        chosen = []
        for request in requests:
            forced = self._forced(request) if constrained else []
            drafts = forced or (self._propose(request) if asks else [])
            if not drafts:
                continue
            length = len(forced) or self._worth(request, len(drafts))
            if request is awaited:
                length = max(length, self._awaited_length)
            verification = Verification(request, drafts[:length], forced=bool(forced))
            if request.constraint is not None:
                verification.follow(request.constraint)
            if verification.drafts:
                chosen.append(verification)
        return self._synthesise(_cut(chosen, room))

    def _synthesise(self, verifications: list[Verification]) -> list[Verification]:
        """Return the verifications, with synthetic acceptance if the engine has it."""
        if self._acceptance is not None:
            for verification in verifications:
                request, drafted = verification.request, len(verification.drafts)
                verification.synthetic = self._acceptance.accepted(
                    request.seed, request.choice, len(request.token_ids), drafted
                )
        return verifications

    def compute(self, lasts: Mapping[Request, int]) -> list[tuple[Request, int]]:
        """Return for which requests a step computes drafts after sampling, and how many.

        lasts: of each request that samples in the step the position of its last token or draft.
        """
        lengths = self._lengths
        if not self.computes or not lasts or not (most := lengths.begin_step(len(lasts))):
            return []
        counts = []
        for request, last in lasts.items():
            room = request.limit - last - 3  # the next token, the drafts, and one more
            # as `_may_draft`, without a call for each request
            if room > 0 and request.speculates and request.constraint is None:
                own = request.drafts or self._begun(request)
                count = lengths.worth(own.record, min(room, most))
                if count:
                    counts.append((request, count))
        return counts

    def receive(
        self,
        proposals: Sequence[tuple[Request, int]],
        read: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        """Note the drafts that a step computes for requests, whose texts have the step's tokens.

        proposals: the requests, and how many drafts each gets.
        read: returns the drafts of each, in the same order, once they are computed.
        """
        for place, (request, count) in enumerate(proposals):
            own: RequestDrafts | None = request.drafts
            if own is not None:
                source = own.source
                assert isinstance(source, ComputedDrafts)
                source.continued = len(request.token_ids) - request.num_virtual
                source.count, source.place, source.read = count, place, read

    def expect(self, request: Request) -> None:
        """Note that a request begins to decode."""
        if request.prediction:
            self._lengths.wake()

    def observe(self, verifications: Sequence[Verification]) -> None:
        """Note what a step accepted."""
        lengths = self._lengths
        for verification in verifications:
            own: RequestDrafts | None = verification.request.drafts
            if verification.forced:
                lengths.observe_forced(verification.accepted)
            elif own is not None:
                drafted = len(verification.drafts)
                lengths.observe_drafts(own.record, drafted, verification.accepted)

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Record the time of a step, by which the number of drafts is chosen.

        entries: requests that decoded; 0 if the step computed prompts too
        drafts: draft tokens of all requests
        """
        self._lengths.observe_step(entries, drafts, seconds)

    def forget_steps(self) -> None:
        """Forget the measured times of steps: those of warm-up include compilation."""
        self._lengths.forget_steps()

    def end(self, request: Request) -> None:
        """Forget a request that ends, and let later requests draft from its answer."""
        own, request.drafts = request.drafts, None
        if own is not None:
            self._text_known(request, own.source)
            own.source.end()
        elif self._lookup is not None and self._may_draft(request):
            self._lookup.remember(request.token_ids, request.num_prompt, request.root)

    def _begin_step(self, requests: Sequence[Request]) -> int:
        """Begin a step; see `DraftLengths.begin_step`. While drafts rest, look at a request."""
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
        return 0 if own is None else self._lengths.worth(own.record, length)

    def _propose(self, request: Request, ahead: int = 0) -> list[int]:
        """Return the request's drafts, as many as its length and the controller allow.

        ahead: tokens in flight, which the first drafts guess.
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

    @staticmethod
    def _computed(requests: Sequence[Request]) -> list[Verification]:
        """Return the verifications of the drafts that the last step computed for requests."""
        verifications = []
        for request in requests:
            own: RequestDrafts | None = request.drafts
            if own is None:
                continue
            source, known = own.source, len(request.token_ids)
            assert isinstance(source, ComputedDrafts)
            if source.continued == known - request.num_virtual:  # else the text has grown since
                count = min(source.count, request.limit - known - 1)
                if count > 0:
                    drafts = [ON_DEVICE] * count
                    verifications.append(
                        Verification(request, drafts, read=source.read, place=source.place)
                    )
        return verifications

    def _may_draft(self, request: Request, room: int = 1) -> bool:
        """Whether a request may have drafts, of at most `room` tokens."""
        # Models draft without masks, and drafts accepted by chance are in no grammar.
        free = request.constraint is None or not (self.computes or self._acceptance)
        return request.speculates and free and room > 0

    def _forced(self, request: Request) -> list[int]:
        """Return the tokens that the request's grammar forces after its known tokens."""
        room = _room(request)
        if request.constraint is None or not self._may_draft(request, room):
            return []
        return request.constraint.forced()[: min(room, MAX_TOKENS)]

    def _begun(self, request: Request) -> RequestDrafts:
        """Return the request's drafts; the first call makes them."""
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
    """Return the most drafts of a request that can still count: a step adds one token more than
    drafts."""
    return request.limit - len(request.token_ids) - 1


def _cut(chosen: list[Verification], room: int) -> list[Verification]:
    """Shorten the longest drafts until at most `room` tokens are left; a request loses its last
    draft only when none has more."""
    lengths = [len(verification.drafts) for verification in chosen]
    if sum(lengths) <= room:
        return chosen
    longest = max(lengths)
    while longest > 1 and sum(min(longest, len(v.drafts)) for v in chosen) > room:
        longest -= 1
    for verification in chosen:
        del verification.drafts[longest:]
    return chosen[:room] if longest == 1 else chosen
