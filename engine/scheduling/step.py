"""StepBuilder, LaunchedStep, StepOutcome: a step while it is built, launched and done.

State that outlasts a step belongs to the scheduler. Add lines to `build` and `accept` with care:
they run for every request in every step.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Batch, StepResult
from engine.messages import Delta
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.request import Request, RequestPhase


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step. The scheduler then ends requests, first those that failed."""

    deltas: list[Delta]
    num_tokens: int  # sampled tokens that are in deltas
    failed: list[Request]  # requests whose cached keys may be wrong
    ended: list[Request]  # other requests whose last delta is in `deltas`


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. Lists are in batch order: sampling entries first, then the others."""

    step: int
    requests: list[Request]  # [num_entries]
    starts: list[int]  # [num_entries]
    ids: list[int]  # [num_samples]
    token_lists: list[list[int]]  # [num_samples] the requests' own token_ids, to append to
    firsts: list[int]  # entries that may return their request's first delta
    finishing: list[int]  # entries whose request ends with this step, whatever is sampled
    micro_batch: int = 0  # number of the decode group
    began: float = 0.0  # time.perf_counter() at the launch
    decodes: int = 0
    context: int = 0  # tokens whose keys the decodes read
    prompt_tokens: int = 0  # tokens of its chunks
    some_ended: bool = False  # whether a request has ended since the launch
    constrained: Sequence[int] = ()  # entries that sample under a grammar
    awaits_masks: bool = False  # whether some of these had an unknown last token at the launch

    def accept(self, result: StepResult, end_tokens: set[int]) -> StepOutcome:
        """Append the token of each request that has not ended, and find the requests that end.

        Legal once.

        end_tokens: end tokens of all requests. Only if one of them was sampled, the request is
            asked whether the token ends it.
        """
        tokens, requests = result.tokens, self.requests
        assert result.step == self.step and len(tokens) == len(self.ids)
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
        for entry in reversed(dropped):
            if entry < len(tokens):
                del deltas[entry]
        return StepOutcome(
            deltas,
            len(tokens) - len(unseen),
            failed=[requests[entry] for entry in failed],
            ended=[requests[entry] for entry in ended],
        )

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
            if constraint.ends_with(tokens[entry]):
                ended[entry] = tokens[entry]
                continue
            try:
                if constraint.accept_token(tokens[entry]):
                    ended[entry] = None
            except ValueError as error:
                failed[entry] = str(error)
        return ended


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


@dataclass(slots=True)
class StepBuilder:
    """A step while it is being built."""

    batch: Batch
    joined: list[Request] = field(default_factory=list)  # requests that joined the decode group
    # (request, length) of each sampling chunk
    sampling: list[tuple[Request, int]] = field(default_factory=list)
    # Chunks that do not reach the end of their request's known tokens, so that they do not sample.
    prefill_only: list[tuple[Request, int]] = field(default_factory=list)
    prompt_limit: int = 0  # the most prompt tokens of its chunks
    chunk_tokens: int = 0
    scored_tokens: int = 0  # prompt tokens of the chunks that need log-probabilities
    preempted: bool = False
    # Rank -> number of blocks, among those that will be released, that a request already waits for.
    owed: Counter[int] = field(default_factory=Counter)

    def build(self, group: DecodeGroup) -> LaunchedStep:
        """Complete the batch: one token for each decode, then the chunks; no request changes.

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
        batch.lengths = [1] * num_decodes
        num_samples = num_decodes + len(self.sampling)
        batch.samples = [True] * num_samples + [False] * len(self.prefill_only)
        requests, ids = group.requests.copy(), group.ids.copy()
        token_lists = group.token_lists.copy()
        for request, _ in self.sampling:
            ids.append(request.id)
            token_lists.append(request.token_ids)
        for request, length in chunks:
            batch.rows.append(request.row)
            batch.starts.append(request.num_computed)
            batch.lengths.append(length)
            requests.append(request)
        return LaunchedStep(
            step,
            requests,
            batch.starts,
            ids,
            token_lists,
            firsts=[r.group_index for r in self.joined if r.group_index >= 0 and not r.delivered],
            finishing=[r.group_index for r in group.last_samples()],
            micro_batch=group.micro_batch,
            began=time.perf_counter(),
            decodes=num_decodes,
            context=context,
            prompt_tokens=self.chunk_tokens,
        )
