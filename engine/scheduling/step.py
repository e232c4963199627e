"""StepBuilder, LaunchedStep, StepOutcome: a step that is being built, is launched, or is done.

State that outlasts a step belongs to the scheduler. Add lines to `build` and `accept` with care:
they run for every request in every step.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from engine.batch import (
    COUNT,
    ENTRY,
    FIRST_DRAFT,
    POSITION,
    ROW,
    SYNTHETIC,
    VERIFIED,
    Batch,
    StepResult,
    TokenLogprobs,
)
from engine.messages import Delta
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts.verifications import Proposals, Verifications
from engine.scheduling.request import Request, RequestPhase

if TYPE_CHECKING:
    from engine.structured.constraint import Constraint

_Item = TypeVar("_Item")


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step, by which the scheduler ends requests, failed ones first."""

    deltas: list[Delta]
    num_tokens: int  # number of sampled tokens in `deltas`
    failed: list[Request]  # requests that failed, whose cached KV may be wrong
    ended: list[Request]  # other requests whose last delta is in `deltas`


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, kept until its result has arrived.

    An entry is one sequence of the step: a decode, a draft token, or a prompt's chunk. Lists are in
    batch order: sampling entries first. Entries of drafts, which come after the other decodes in
    the batch, have no element in these lists and no index.
    """

    step: int
    requests: list[Request]  # [num_entries]
    starts: list[int]  # [num_entries]
    ids: list[int]  # [num_samples]
    token_lists: list[list[int]]  # [num_samples] the requests' own token_ids, to append to
    firsts: list[int]  # indices of entries that may return their request's first delta
    finishing: list[int]  # indices of entries whose request ends now, whatever is sampled
    micro_batch: int = 0  # number of the decode group
    began: float = 0.0  # time.perf_counter() at the launch
    decodes: int = 0  # number of decode entries, including those of drafts
    verifications: Verifications | None = None
    context: int = 0  # number of tokens whose KV the decodes read
    num_drafts: int = 0
    proposals: Proposals | None = None
    prompt_tokens: int = 0  # number of prompt tokens of its chunks
    num_images: int = 0  # number of images that it encodes
    ahead_tokens: int = 0  # number of embeddings that it encodes for later steps
    ahead: Sequence[Request] = ()  # the requests that need these embeddings
    some_ended: bool = False  # whether a request has ended since the launch
    constrained: Sequence[int] = ()  # indices of entries that sample under a grammar
    # Constraints after drafts, whose masks come after those of `constrained`: (index among
    # verifications, number of the draft, counted from 0, constraint after the draft)
    later: "list[tuple[int, int, Constraint]]" = field(default_factory=list)
    awaits_masks: bool = False  # whether some constrained entries had an unknown last token

    def forbid_after(self, place: int) -> None:
        """Reject a draft and those after it, as the constraint after the draft allows no token.

        place: the index of that constraint in `later`.
        """
        index, before, _ = self.later[place]
        assert self.verifications is not None
        most = self.verifications.most
        most[index] = min(most.get(index, before), before)

    def accept(self, result: StepResult, end_tokens: set[int]) -> StepOutcome:
        """Append the sampled token to each request that has not ended, and find requests that end
        now.

        Call this once.

        end_tokens: end tokens of all requests, for a quick test: `Request.stops_at` is called only
            if one of them was sampled.
        """
        assert result.step == self.step
        drafted: _DraftResult | None = None
        if self.verifications is not None:
            result, drafted = self._split(result)
        tokens, requests = result.tokens, self.requests
        assert len(tokens) == len(self.ids)
        dropped: list[int] = []  # indices of entries whose requests ended after the launch
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
        """Return the result without draft entries, and the samples at draft entries."""
        first, stop = self.decodes - self.num_drafts, self.decodes

        def without(items: Mapping[int, _Item]) -> Mapping[int, _Item]:
            if not items:
                return items
            earlier = {entry: item for entry, item in items.items() if entry < first}
            later = {entry: item for entry, item in items.items() if entry >= stop}
            return earlier | {entry - self.num_drafts: item for entry, item in later.items()}

        def only(items: Mapping[int, _Item]) -> Mapping[int, _Item]:
            if not items:
                return items
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
        """Append the tokens of accepted drafts to requests and deltas; return their number.

        Each verification records its accepted drafts, and grammars advance. Entries that end
        or fail are added to `over`, and to `ended` or `failed`.

        tokens: the sampled tokens of entries that are not drafts.
        over: indices of entries whose requests have ended or failed.
        """
        verifications = self.verifications
        assert verifications is not None
        verifications.settle(tokens, drafted.tokens)
        accepted, lengths = verifications.accepted, verifications.lengths
        firsts = accumulate(lengths[:-1], initial=0)
        verifications.gained = gained = [0] * len(accepted)
        columns = verifications.requests, verifications.entries, firsts, accepted
        rare = bool(over or drafted.logprobs or drafted.errors or self.constrained)
        may_end = not end_tokens.isdisjoint(drafted.tokens)
        for at, (request, entry, first, count) in enumerate(zip(*columns, strict=True)):
            if not count:
                continue
            delta, new = deltas[entry], drafted.tokens[first : first + count]
            if rare or (may_end and not end_tokens.isdisjoint(new)):
                gained[at] = self._accept_each(
                    drafted, request, delta, entry, range(first, first + count), over, failed, ended
                )
                continue
            text = request.token_ids
            text += new
            delta.token_ids += new
            gained[at] = count
            if len(text) == request.limit:
                delta.finish = "length"
                ended.append(entry)
                over.add(entry)
        return sum(gained)

    def _accept_each(
        self,
        drafted: "_DraftResult",
        request: Request,
        delta: Delta,
        entry: int,
        places: Iterable[int],
        over: set[int],
        failed: dict[int, str],
        ended: list[int],
    ) -> int:
        """Append a request's accepted tokens one by one; return the number of appended tokens.

        places: indices of the tokens in `drafted`.
        over, failed, ended: get the entries that end or fail, see `_accept_drafts`.
        """
        gained = 0
        for at in places:
            if entry in over:
                break
            token = drafted.tokens[at]
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
            gained += 1
            if ends or request.stops_at(token):
                delta.finish, delta.stop_token = "stop", stop_token
            elif len(request.token_ids) == request.limit:
                delta.finish = "length"
            else:
                continue
            ended.append(entry)
            over.add(entry)
        return gained

    def _complete(
        self, tokens: list[int], dropped: list[int], failed: dict[int, str]
    ) -> dict[int, int | None]:
        """Advance grammars by the sampled tokens; return entry -> end token of requests that end.

        The end token is None if only an end token could follow.

        dropped: indices of entries whose requests ended after the launch.
        failed: entry -> error; tokens that a grammar rejects are added.
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
    """The samples at a step's draft entries; the maps' keys are indices of `tokens`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


def _advance(constraint: "Constraint", token: int) -> tuple[bool, int | None]:
    """Advance a grammar by a sampled token; return (whether the text ends, its end token).

    The end token is None if only an end token could follow. Raises ValueError as `accept_token`.
    """
    if constraint.ends_with(token):
        return True, token
    return constraint.accept_token(token), None


@dataclass(slots=True)
class SchedulerCounters:
    """The scheduler's counts since the engine's start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    out_of_memory: int = 0
    snapshots_taken: int = 0
    drafts: int = 0  # number of decodes with drafts
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(
        default_factory=list
    )  # number of accepted draft tokens, by position in the draft

    def reset(self) -> None:
        """Set all counts to zero; the parts of the scheduler that count share this object."""
        for name, value in asdict(SchedulerCounters()).items():
            setattr(self, name, value)

    def count_drafts(self, verifications: Verifications) -> None:
        """Add a step's numbers of drafts, draft tokens and accepted tokens to the counters.

        Requests that ended before the step was done are left out.
        """
        lengths, right = verifications.lengths, verifications.accepted
        ended = [at for at, r in enumerate(verifications.requests) if r.phase is RequestPhase.ENDED]
        if ended:
            running = [at for at in range(len(lengths)) if at not in ended]
            lengths, right = [lengths[at] for at in running], [right[at] for at in running]
        counts = self.accepted_by_position
        self.drafts += len(lengths)
        self.draft_tokens += sum(lengths)
        counts += [0] * (max(lengths, default=0) - len(counts))
        for accepted, number in Counter(right).items():
            for position in range(accepted):
                counts[position] += number


@dataclass(slots=True)
class StepBuilder:
    """A step's entries while it is being scheduled; `build` turns them into a batch."""

    batch: Batch
    verifications: Verifications | None = None
    # Indices of the requests that get new drafts (in the group's requests, followed by those of
    # `sampling`), and the number of drafts of each.
    proposals: tuple[Sequence[int], Sequence[int]] = ((), ())
    joined: list[Request] = field(default_factory=list)  # requests that joined the decode group
    # (request, length) of each chunk that ends its request's known tokens, so that it samples
    sampling: list[tuple[Request, int]] = field(default_factory=list)
    # Chunks that do not reach the end of their request's known tokens, so that they do not sample.
    prefill_only: list[tuple[Request, int]] = field(default_factory=list)
    prompt_limit: int = 0  # maximum number of prompt tokens in the step's chunks
    chunk_tokens: int = 0
    batch_decodes: int = 1 << 62  # how many more decodes of batch work the step may have
    batch_tokens: int = 1 << 62  # how many more prompt tokens of batch work the step may have
    own_tokens: int = 0  # number of prompt tokens of requests that are not batch work
    scored_tokens: int = 0  # number of prompt tokens of the chunks that need log-probabilities
    preempted: bool = False
    # Rank -> number of blocks that will be released and that a request already waits for.
    owed: Counter[int] = field(default_factory=Counter)

    def empty(self, group: DecodeGroup) -> bool:
        """Whether the step has neither decodes nor chunks."""
        return not (group.requests or self.sampling or self.prefill_only)

    def build(self, group: DecodeGroup) -> LaunchedStep:
        """Complete the batch and return the step, which the group counts; requests are not changed.

        The batch has a token for each decode, then drafts, then chunks.
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
        if self.verifications is not None:
            starts = batch.starts.copy()
            context += self._add_drafts(self.verifications)
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
        if self.verifications is not None:
            starts += batch.starts[num_decodes:]
        indices, counts = self.proposals
        verifies = self.verifications is not None and self.verifications.read is not None
        if indices or verifies:
            self._add_proposals(len(group), indices, counts)
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
            proposals=Proposals([requests[index] for index in indices], counts)
            if indices
            else None,
            context=context,
            prompt_tokens=self.chunk_tokens,
        )

    def _add_drafts(self, verifications: Verifications) -> int:
        """Add a decode entry for each draft; return the number of tokens whose KV these read."""
        batch = self.batch
        entries, lengths = verifications.entries, np.asarray(verifications.lengths)
        rows = [batch.rows[entry] for entry in entries]
        firsts = [batch.starts[entry] + 1 for entry in entries]
        batch.drafts = list(zip(rows, firsts, verifications.drafts, strict=True))
        # consecutive positions for each request's drafts, without a loop over requests
        skips = np.asarray(firsts) + lengths - lengths.cumsum()
        positions = skips.repeat(lengths)
        positions += np.arange(len(positions))
        batch.rows += np.asarray(rows).repeat(lengths).tolist()
        batch.starts += positions.tolist()
        batch.num_decodes = len(batch.rows)
        return int(positions.sum()) + len(positions)

    def _add_proposals(self, decodes: int, indices: Sequence[int], counts: Sequence[int]) -> None:
        """Set `Batch.proposals`, the table of drafts to compute or count, once all entries are
        added.

        decodes: number of the group's decodes, not counting drafts.
        indices, counts: see `proposals`.
        """
        batch, verifications, first = self.batch, self.verifications, self.batch.num_decodes
        chunks = range(first, first + len(self.sampling))
        table = np.zeros((7, decodes + len(chunks)), np.int64)
        table[ROW, :decodes], table[POSITION, :decodes] = (
            batch.rows[:decodes],
            batch.starts[:decodes],
        )
        table[ENTRY, :decodes] = np.arange(decodes)
        for at, entry in enumerate(chunks, start=decodes):
            last = batch.starts[entry] + batch.lengths[entry] - 1
            table[: ENTRY + 1, at] = batch.rows[entry], last, entry
        table[FIRST_DRAFT], table[SYNTHETIC] = table[ENTRY], -1
        if verifications is not None:
            entries, lengths = verifications.entries, np.asarray(verifications.lengths)
            table[FIRST_DRAFT, entries] = decodes + lengths.cumsum() - lengths
            table[VERIFIED, entries] = lengths
            if verifications.synthetic is not None:
                table[SYNTHETIC, entries] = np.minimum(verifications.synthetic, lengths)
        counted: list[int] = []  # rows without new drafts, whose accepted drafts are counted
        if verifications is not None and len(indices) < table.shape[1]:
            counted = [*set(verifications.entries).difference(indices)]
        if counted or len(indices) < table.shape[1]:
            # `take` keeps the table's rows contiguous
            table = table.take([*indices, *counted], axis=1)
        table[COUNT, : len(indices)] = counts
        batch.proposals = table
