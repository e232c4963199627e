"""DecodeGroup: the requests that get exactly one token in each of the group's steps.

Usually there is one group, and every step of the engine is one of its steps. A pipeline has a group
(micro-batch) for each stage, and each step of the engine is a step of one of them (`next_group`). A
thousand requests must cost the host well under a millisecond a step, so that nothing here is
written for each request in each step. The group consists of five parallel lists, from which each
step's batch is copied. Positions are a constant plus the number of the group's step. Rare events
are looked up by the step at which they happen:

 position of a request's token at step t    base + t
 the request needs a block at               t = blocks * block_size - base  ->  _block_due[t]
 its last token is sampled at               t = limit - 2 - base            ->  _last_sample[t]

With drafts, positions of a request also grow by the accepted draft tokens (`advance`). The events
of the next step are then found by a scan over all members. Once a step has passed in which no
member accepted drafts, the tables of events are rebuilt.
A request that cannot run in a step must leave the group (see `Scheduler`), and may join again
later.
"""

from collections.abc import Collection, Sequence
from typing import Any

from engine.scheduling.request import Request, RequestPhase


class DecodeGroup:
    """The decoding requests of the engine, or of one micro-batch: each gets one token a step.

    Membership changes by `join` and `leave`, O(1) each; members have no order.

    step_index: the number of steps of the group so far.
    last_step: the number of the group's last step among all steps of the engine.
    micro_batch: the number of this group.
    """

    def __init__(self, block_size: int, num_groups: int = 1, micro_batch: int = 0) -> None:
        self.micro_batch = micro_batch
        self.step_index = self.last_step = 0
        self._block_size = block_size
        # number of KV groups, each of which adds one block to a table for each block_size tokens
        self._num_groups = num_groups
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.bases: list[int] = []
        self._sum_of_bases = 0
        self.ids: list[int] = []
        self.token_lists: list[list[int]] = []  # the requests' own token_ids, not copies
        # step index -> members. A request that has left is skipped when its step comes. Blocks are
        # due within block_size steps. Last samples may be far ahead, so `leave` removes theirs.
        self._block_due: dict[int, list[Request]] = {}
        self._last_sample: dict[int, dict[Request, None]] = {}
        # _advanced: whether members have accepted drafts since the last step. _scattered: whether
        # _block_due and _last_sample are empty, because accepted drafts have made them wrong.
        self._advanced = self._scattered = False

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def context(self) -> int:
        """The number of tokens whose KV the next step reads, over all members."""
        return self._sum_of_bases + (self.step_index + 2) * len(self.requests)

    def take_step(self, step: int) -> None:
        """Count a step of the group.

        step: the number of the step among all steps of the engine.
        """
        self.step_index += 1
        self.last_step = step

    def join(self, request: Request) -> None:
        """Add a request from the next step on; its num_computed is not updated from now on."""
        base = request.num_computed - self.step_index - 1
        request.base = base
        request.micro_batch = self.micro_batch
        request.group_index = len(self.requests)
        request.phase = RequestPhase.DECODING
        self.requests.append(request)
        self.rows.append(request.row)
        self.bases.append(base)
        self._sum_of_bases += base
        self.ids.append(request.id)
        self.token_lists.append(request.token_ids)
        self._expect_events(request)

    def leave(self, request: Request) -> None:
        """Remove a request before the next step, and set its num_computed; the caller sets its
        phase."""
        index, last = request.group_index, self.requests[-1]
        for values in (self.requests, self.rows, self.bases, self.ids, self.token_lists):
            _swap_remove(values, index)
        last.group_index = index
        request.group_index = -1
        self._sum_of_bases -= request.base
        request.num_computed = request.base + self.step_index + 1
        request.last_step = self.last_step
        key = request.limit - 2 - request.base
        members = self._last_sample.get(key)
        if members is not None:  # None if `last_samples` has returned them
            members.pop(request, None)
            if not members:
                del self._last_sample[key]

    def advance(self, members: Sequence[tuple[Request, int]]) -> list[Request]:
        """Advance members by the drafts that they accepted, between two steps.

        Returns the members whose last token was sampled, or is sampled in the step in flight.

        members: (request, number of accepted draft tokens) pairs.
        """
        bases, finishing = self.bases, []
        for request, count in members:
            bases[request.group_index] = base = request.base = request.base + count
            self._sum_of_bases += count
            if request.limit - 2 - base <= self.step_index:
                finishing.append(request)
        self._advanced = self._scattered = True
        self._block_due.clear()
        self._last_sample.clear()
        return finishing

    def block_due(self, step_index: int) -> list[Request]:
        """Return the members that need a new block for their token of this step.

        Call this once a step.
        """
        size, groups = self._block_size, self._num_groups
        if self._advanced:
            self._advanced = False
            at = step_index
            return [r for r in self.requests if r.base + at == len(r.blocks) // groups * size]
        if self._scattered:
            self._scattered = False
            for request in self.requests:
                self._expect_events(request)
        due = self._block_due.pop(step_index, None)
        if due is None:
            return []
        members = [
            r
            for r in due
            if r.group_index >= 0
            and r.micro_batch == self.micro_batch
            and r.base + step_index == len(r.blocks) // groups * size
        ]
        return list(dict.fromkeys(members))  # a request that left and joined again is listed twice

    def extended(self, request: Request) -> None:
        """Record that the request's table has a further block in each KV group."""
        self._expect_block(request)

    def last_samples(self) -> list[Request]:
        """Return the members whose last token this step samples. Call this once a step."""
        index = self.step_index
        if self._scattered:
            return [r for r in self.requests if r.limit - 2 - r.base == index]
        return list(self._last_sample.pop(index, ()))

    def _expect_events(self, request: Request) -> None:
        if self._scattered:
            return
        self._expect_block(request)
        self._last_sample.setdefault(request.limit - 2 - request.base, {})[request] = None

    def _expect_block(self, request: Request) -> None:
        if self._scattered:
            return
        due = len(request.blocks) // self._num_groups * self._block_size - request.base
        self._block_due.setdefault(due, []).append(request)


def next_group(groups: Sequence[DecodeGroup], busy: Collection[int]) -> DecodeGroup:
    """Return the group of the next step: the non-empty group that has waited longest.

    If all free groups are empty, an empty group is returned. Members beyond a group's equal share
    move to the smallest group, so that all stages have equal work.

    busy: numbers of the micro-batches that cannot run in the step; at least one is free.
    """
    free = [group for group in groups if group.micro_batch not in busy]
    group_due = min(free, key=lambda group: (not group, group.last_step))
    share = -(-sum(map(len, groups)) // len(groups))
    while len(group_due) > share:
        request = group_due.requests[-1]
        group_due.leave(request)
        min(groups, key=len).join(request)
    return group_due


def _swap_remove(values: list[Any], index: int) -> None:
    values[index] = values[-1]
    values.pop()
