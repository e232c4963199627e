"""StepBuilder, LaunchedStep, StepOutcome: a step while it is built, launched and done.

State that outlasts a step belongs to the scheduler. Add lines to `build` and `accept` with care:
they run for every request in every step.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from engine.batch import Batch, Proposal, StepResult, TokenLogprobs
from engine.messages import Delta
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts.speculation import Verification
from engine.scheduling.request import Request, RequestPhase

if TYPE_CHECKING:
    from engine.structured.constraint import Constraint

_Item = TypeVar("_Item")


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step. The scheduler then ends requests, first those that failed."""

    deltas: list[Delta]
    num_tokens: int  # sampled tokens that are in deltas
    failed: list[Request]  # requests whose cached keys may be wrong
    ended: list[Request]  # other requests whose last delta is in `deltas`


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. Lists are in batch order: sampling entries first, then the others.

    Entries of drafts, which come after the other decodes, are not counted in lists and indices.
    """

    step: int
    requests: list[Request]  # [num_entries]
    starts: list[int]  # [num_entries]
    ids: list[int]  # [num_samples]
    token_lists: list[list[int]]  # [num_samples] the requests' own token_ids, to append to
    firsts: list[int]  # entries that may return their request's first delta
    finishing: list[int]  # entries whose request ends with this step, whatever is sampled
    micro_batch: int = 0  # number of the decode group
    began: float = 0.0  # time.perf_counter() at the launch
    decodes: int = 0  # decode entries, entries of drafts included
    verifications: Sequence[Verification] = ()  # one a draft, in entries' order
    context: int = 0  # tokens whose keys the decodes read
    num_drafts: int = 0
    proposals: Sequence[tuple[Request, int]] = ()  # in the order of the batch's proposals
    prompt_tokens: int = 0  # tokens of its chunks
    num_images: int = 0  # images that it encodes
    ahead_tokens: int = 0  # embeddings that it encodes for later steps
    ahead: Sequence[Request] = ()  # the requests that need these
    some_ended: bool = False  # whether a request has ended since the launch
    constrained: Sequence[int] = ()  # entries that sample under a grammar
    # drafts' constraints, whose masks come after those of `constrained`
    later: "list[tuple[Verification, Constraint]]" = field(default_factory=list)
    awaits_masks: bool = False  # whether some constrained entries had an unknown last token

    def forbid_after(self, place: int) -> None:
        """Accept no token after a draft, as no token may follow it.

        place: of the draft's constraint in `later`.
        """
        verification, later = self.later[place]
        before = next(
            at for at, constraint in enumerate(verification.constraints) if constraint is later
        )
        verification.most = min(verification.most, before)

    def accept(self, result: StepResult, end_tokens: set[int]) -> StepOutcome:
        """Append the token of each request that has not ended, and find the requests that end.

        Legal once.

        end_tokens: end tokens of all requests. Only if one of them was sampled, the request is
            asked whether the token ends it.
        """
        assert result.step == self.step
        drafted: _DraftResult | None = None
        if self.verifications:
            result, drafted = self._split(result)
        tokens, requests = result.tokens, self.requests
        assert len(tokens) == len(self.ids)
        dropped: list[int] = []  # entries of requests that ended before
        if self.some_ended:
            dropped = [i for i, r in enumerate(requests) if r.phase is RequestPhase.ENDED]
        failed = {i: why for i, why in result.errors.items() if i not in dropped}
        completed = self._complete(tokens, dropped, failed) if self.constrained else {}
        over = {*dropped, *failed}
        unseen = [entry for entry in over if entry < len(tokens)]
        for entry in unseen:
            self.token_lists[entry] = []

        for token_list, token in zip(self.token_lists, tokens, strict=True):
            token_list.append(token)
        deltas = [Delta(i, [token]) for i, token in zip(self.ids, tokens, strict=True)]

        for entry, items in result.prompt_logprobs.items():
            requests[entry].collect_prompt_logprobs(self.starts[entry], items)
        for entry, ids in result.routes.items():
            if (routes := requests[entry].routes) is not None:
                routes.put(self.starts[entry], ids)
        for entry, part in result.pooled.items():
            if (pooled := requests[entry].pooled) is not None:
                pooled.add_chunk(self.starts[entry], part)
        for entry, item in result.logprobs.items():
            deltas[entry].logprobs = [item]
        for entry in self.firsts:
            if entry not in failed:
                requests[entry].deliver_first(deltas[entry])
        for entry, why in failed.items():
            if entry >= len(tokens):  # a chunk that does not sample
                deltas.append(Delta(requests[entry].id, [], "error", error=why))
            else:
                deltas[entry].token_ids = []
                deltas[entry].logprobs = None
                deltas[entry].finish, deltas[entry].error = "error", why
        ended: list[int] = []
        for entry, stop_token in completed.items():
            deltas[entry].finish, deltas[entry].stop_token = "stop", stop_token
            ended.append(entry)
        if not end_tokens.isdisjoint(tokens):
            for entry in [i for i, token in enumerate(tokens) if token in end_tokens]:
                if entry not in over and requests[entry].stops_at(tokens[entry]):
                    deltas[entry].finish = "stop"
                    deltas[entry].stop_token = tokens[entry]
                    ended.append(entry)
        over.update(ended)
        num_tokens = len(tokens) - len(unseen)
        if drafted is not None:
            num_tokens += self._accept_drafts(
                drafted, tokens, deltas, over, failed, ended, end_tokens
            )
        for entry in self.finishing:
            if entry in over:
                continue
            if entry < len(tokens):
                delta = deltas[entry]
            else:  # max_tokens = 0: no token, only prompt log-probabilities
                delta = Delta(requests[entry].id, [])
                requests[entry].deliver_first(delta)
                deltas.append(delta)
            delta.finish = "length"
            ended.append(entry)
        last = {requests[entry].id: requests[entry] for entry in ended if requests[entry].routes}
        for delta in deltas if last else ():
            if delta.id in last:
                last[delta.id].deliver_routes(delta)
        for entry in reversed(dropped):
            if entry < len(tokens):
                del deltas[entry]
        return StepOutcome(
            deltas,
            num_tokens,
            failed=[requests[entry] for entry in failed],
            ended=[requests[entry] for entry in ended],
        )

    def _split(self, result: StepResult) -> tuple[StepResult, "_DraftResult"]:
        """Split a result into the result without draft entries, and the result of draft entries."""
        first, stop = self.decodes - self.num_drafts, self.decodes

        def without(items: Mapping[int, _Item]) -> dict[int, _Item]:
            earlier = {entry: item for entry, item in items.items() if entry < first}
            later = {entry: item for entry, item in items.items() if entry >= stop}
            return earlier | {entry - self.num_drafts: item for entry, item in later.items()}

        def only(items: Mapping[int, _Item]) -> dict[int, _Item]:
            return {entry - first: item for entry, item in items.items() if first <= entry < stop}

        drafted = _DraftResult(
            result.tokens[first:stop], only(result.logprobs), only(result.errors)
        )
        others = replace(
            result,
            tokens=result.tokens[:first] + result.tokens[stop:],
            logprobs=without(result.logprobs),
            prompt_logprobs=without(result.prompt_logprobs),
            routes=without(result.routes),
            pooled=without(result.pooled),
            errors=without(result.errors),
        )
        return others, drafted

    def _accept_drafts(
        self,
        drafted: "_DraftResult",
        tokens: list[int],
        deltas: list[Delta],
        over: set[int],
        failed: dict[int, str],
        ended: list[int],
        end_tokens: set[int],
    ) -> int:
        """Append the tokens that accepted drafts add to their requests; return their number.

        tokens: the sampled tokens of entries that are not drafts.
        over: entries whose requests have ended or failed. The call adds to `failed` and `ended`.
        """
        first = gained = 0
        read: Callable[[], Sequence[Sequence[int]]] | None = None
        computed: Sequence[Sequence[int]] = ()
        for verification in self.verifications:
            drafts, entry = verification.drafts, verification.entry
            if verification.read is not None:
                if verification.read is not read:  # one step has computed all of them
                    read = verification.read
                    computed = read()
                drafts[:] = computed[verification.place][: len(drafts)]
            sampled = drafted.tokens[first : first + len(drafts)]
            accepted = verification.synthetic  # blocks may have cut drafts since
            if accepted < 0:
                accepted, token = 0, tokens[entry]
                for draft, following in zip(drafts, sampled, strict=True):
                    if draft != token:
                        break
                    accepted, token = accepted + 1, following
            verification.accepted = accepted = min(accepted, len(drafts), verification.most)
            if not accepted:
                first += len(drafts)
                continue
            request, delta = verification.request, deltas[entry]
            for at, token in enumerate(sampled[:accepted], start=first):
                if entry in over:
                    break
                ends = False
                stop_token: int | None = token
                why = drafted.errors.get(at, "")
                if request.constraint is not None and not why:
                    try:
                        ends, stop_token = _advance(request.constraint, token)
                    except ValueError as error:
                        why = str(error)
                if why:
                    failed[entry] = delta.error = why
                    delta.finish = "error"
                    over.add(entry)
                    break
                request.token_ids.append(token)
                delta.token_ids.append(token)
                if delta.logprobs is not None:
                    delta.logprobs.append(drafted.logprobs[at])
                verification.gained += 1
                if ends or (token in end_tokens and request.stops_at(token)):
                    delta.finish, delta.stop_token = "stop", stop_token
                elif len(request.token_ids) == request.limit:
                    delta.finish = "length"
                else:
                    continue
                ended.append(entry)
                over.add(entry)
            first += len(drafts)
            gained += verification.gained
        return gained

    def _complete(
        self, tokens: list[int], dropped: list[int], failed: dict[int, str]
    ) -> dict[int, int | None]:
        """Advance the grammars by their tokens; return the entries that end. Adds to `failed`.

        The result is entry -> its end token, or None if only an end token could follow.
        """
        ended: dict[int, int | None] = {}
        for entry in self.constrained:
            constraint = self.requests[entry].constraint
            if entry in dropped or entry in failed or constraint is None:
                continue
            try:
                ends, stop_token = _advance(constraint, tokens[entry])
                if ends:
                    ended[entry] = stop_token
            except ValueError as error:
                failed[entry] = str(error)
        return ended


@dataclass(slots=True)
class _DraftResult:
    """The samples of the entries of drafts. The keys of the maps are indices of `tokens`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


def _advance(constraint: "Constraint", token: int) -> tuple[bool, int | None]:
    """Advance a grammar by a sampled token; return whether the text ends, and its end token.

    The end token is None if only an end token could follow. Raises ValueError as `accept_token`.
    """
    if constraint.ends_with(token):
        return True, token
    return constraint.accept_token(token), None


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the engine's start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    out_of_memory: int = 0
    snapshots_taken: int = 0
    drafts: int = 0  # decodes with drafts
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(
        default_factory=list
    )  # drafts that were right, by position

    def count_drafts(self, verifications: Sequence[Verification]) -> None:
        """Count the decodes with drafts of a step."""
        self.drafts += len(verifications)
        counts = self.accepted_by_position
        for verification in verifications:
            drafted = len(verification.drafts)
            self.draft_tokens += drafted
            if drafted > len(counts):
                counts += [0] * (drafted - len(counts))
            for position in range(verification.accepted):
                counts[position] += 1


@dataclass(slots=True)
class StepBuilder:
    """A step while it is being built."""

    batch: Batch
    verifications: list[Verification] = field(default_factory=list)
    # (decoding request or request of a sampling chunk, how many new drafts the step computes)
    proposals: list[tuple[Request, int]] = field(default_factory=list)
    joined: list[Request] = field(default_factory=list)  # requests that joined the decode group
    # (request, length) of each sampling chunk
    sampling: list[tuple[Request, int]] = field(default_factory=list)
    # Chunks that do not reach the end of their request's known tokens, so that they do not sample.
    prefill_only: list[tuple[Request, int]] = field(default_factory=list)
    prompt_limit: int = 0  # the most prompt tokens of its chunks
    chunk_tokens: int = 0
    batch_decodes: int = 1 << 62  # further decodes of batch work
    batch_tokens: int = 1 << 62  # further prompt tokens of batch work
    scored_tokens: int = 0  # prompt tokens of the chunks that need log-probabilities
    preempted: bool = False
    # Rank -> number of blocks, among those that will be released, that a request already waits for.
    owed: Counter[int] = field(default_factory=Counter)

    def build(self, group: DecodeGroup) -> LaunchedStep:
        """Complete the batch: one token for each decode, drafts, then chunks; no request changes.

        It counts as a step of the decode group.
        """
        batch, step = self.batch, self.batch.step
        context = group.context
        group.take_step(step)
        index, num_decodes = group.step_index, len(group)
        chunks = self.sampling + self.prefill_only
        batch.num_decodes = num_decodes
        batch.rows = group.rows.copy()
        batch.starts = [base + index for base in group.bases]
        starts = batch.starts
        requests, ids = group.requests.copy(), group.ids.copy()
        token_lists = group.token_lists.copy()
        if self.verifications:
            starts = batch.starts.copy()
            context += self._add_drafts()
            num_decodes = batch.num_decodes
        batch.lengths = [1] * num_decodes
        num_samples = num_decodes + len(self.sampling)
        batch.samples = [True] * num_samples + [False] * len(self.prefill_only)
        for request, _ in self.sampling:
            ids.append(request.id)
            token_lists.append(request.token_ids)
        for request, length in chunks:
            batch.rows.append(request.row)
            batch.starts.append(request.num_computed)
            batch.lengths.append(length)
            requests.append(request)
        if self.verifications:
            starts += batch.starts[num_decodes:]
        if self.proposals:
            self._add_proposals(num_decodes, num_decodes - len(group))
        return LaunchedStep(
            step,
            requests,
            starts,
            ids,
            token_lists,
            firsts=[r.group_index for r in self.joined if r.group_index >= 0 and not r.delivered],
            finishing=[r.group_index for r in group.last_samples()],
            micro_batch=group.micro_batch,
            began=time.perf_counter(),
            decodes=num_decodes,
            verifications=self.verifications,
            num_drafts=num_decodes - len(ids) + len(self.sampling),
            proposals=self.proposals,
            context=context,
            prompt_tokens=self.chunk_tokens,
        )

    def _add_drafts(self) -> int:
        """Add a decode for each draft; return the number of tokens whose keys these read."""
        batch, context = self.batch, 0
        for verification in self.verifications:
            verification.entry = entry = verification.request.group_index
            row, first, drafts = batch.rows[entry], batch.starts[entry] + 1, verification.drafts
            batch.drafts.append((row, first, drafts))
            batch.rows += [row] * len(drafts)
            batch.starts += range(first, first + len(drafts))
            context += sum(range(first + 1, first + 1 + len(drafts)))
        batch.num_decodes = len(batch.rows)
        return context

    def _add_proposals(self, num_decodes: int, num_drafts: int) -> None:
        """Add the proposals to the batch, whose entries are complete."""
        # request -> the entry of its first draft, their number, and of those accepted by chance
        verified, at = dict[Request, tuple[int, int, int]](), num_decodes - num_drafts
        for verification in self.verifications:
            drafted = len(verification.drafts)
            verified[verification.request] = at, drafted, min(verification.synthetic, drafted)
            at += drafted
        chunks = {request: num_decodes + i for i, (request, _) in enumerate(self.sampling)}
        for request, count in self.proposals:
            entry = request.group_index
            if entry < 0:
                entry = chunks[request]
            first, drafted, synthetic = verified.get(request, (entry, 0, -1))
            self.batch.proposals.append(
                Proposal(request.row, entry, first, drafted, count, synthetic)
            )
