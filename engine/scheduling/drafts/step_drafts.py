"""StepDrafts: adds drafts and their blocks to a step that is scheduled, and applies its result.

speculation.py chooses drafts. This module adds those for which rows, tokens and blocks suffice, and
applies the accepted drafts to their requests.
"""

from collections.abc import Sequence

from engine.batch import Batch, StepResult
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.drafts.verifications import Verifications
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.request_memory import RequestMemory
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.step import LaunchedStep, SchedulerCounters, StepBuilder


class StepDrafts:
    """The part of the scheduler that adds drafts, and blocks for them, to each step.

    ahead: whether a step may be launched while drafts of a model are verified. Its positions are
        then those after no accepted draft, to which the device adds the accepted ones. Snapshots of
        recurrent states need exact positions.
    """

    def __init__(
        self,
        speculation: Speculation,
        config: CoreConfig,
        memory: RequestMemory,
        counters: SchedulerCounters,
    ) -> None:
        self.speculation = speculation
        self.ahead = config.async_scheduling and config.micro_batches == 1
        self.ahead &= speculation.computes and config.snapshots is None
        # the newest step, if it has drafts and is in flight
        self._newest: LaunchedStep | None = None
        # whether the next step may be launched before the newest one's accepted drafts are known,
        # as there are blocks for the tokens after all drafts
        self._has_room = False
        self._config, self._memory, self._counters = config, memory, counters
        # for models with recurrent states: the value of `Batch.settled` of the next batch
        self._settled: list[tuple[int, int]] = []

    @property
    def waits(self) -> bool:
        """Whether no step may be launched before the result of the one in flight is known."""
        alone = self._newest is not None and not self._has_room
        return alone or self.speculation.awaited is not None

    @property
    def unsettled(self) -> Verifications | None:
        """The drafts that the newest step verifies, while it is in flight."""
        return None if self._newest is None else self._newest.verifications

    def drop_steps(self) -> None:
        """Forget the steps in flight, whose results are dropped."""
        self._settled.clear()
        self._newest = None
        self.speculation.awaited = None
        self.speculation.proposals = None

    def add(self, builder: StepBuilder, group: DecodeGroup, room: int, constrained: bool) -> None:
        """Add the drafts that a step verifies, and those that it computes, to a step.

        Call this only when no step is in flight, or `ahead`.

        group: the step's decodes.
        room: the maximum number of drafts to verify, by free rows and tokens.
        constrained: whether some requests may have grammars or lists of tokens.
        """
        self._add_drafts(builder, group, room, constrained)
        if self.speculation.computes:
            self._add_proposals(builder, group)

    def _add_drafts(
        self, builder: StepBuilder, group: DecodeGroup, room: int, constrained: bool
    ) -> None:
        """Add drafts of decoding requests, as far as free blocks allow.

        No request is preempted for drafts, and each running request keeps a free block.

        room, constrained: see `Speculation.choose`.
        """
        snapshots = self._memory.snapshots
        if snapshots is not None:
            self._take_snapshots(snapshots, group, builder.batch.step)
        chosen = self.speculation.choose(group.requests, room, constrained=constrained)
        if not chosen:
            return
        requests, bases, lengths = chosen.requests, group.bases, chosen.lengths
        first = group.step_index + 2
        firsts = [bases[entry] + first for entry in chosen.entries]
        if snapshots is not None:
            lengths = [
                min(length, snapshots.room(request, first - 1))
                for request, first, length in zip(requests, firsts, lengths, strict=True)
            ]
        if chosen.read is None:  # drafts of a model got blocks when they were computed
            lengths = self._reserve(requests, firsts, lengths, builder, group)
        if lengths != chosen.lengths:
            chosen.cut(lengths)
        builder.verifications = chosen if chosen else None

    def _take_snapshots(self, snapshots: Snapshots, group: DecodeGroup, step: int) -> None:
        """Take the snapshots that are due for decoding requests.

        Blocks reserved for drafts are hashed here, once their tokens are accepted.
        """
        index, size = group.step_index + 1, self._config.block_size
        for request in group.requests:
            position = request.base + index
            if not position % size:
                self._memory.pool(request).hash_blocks(request, position)
                snapshots.decoded(request, position, step)

    def _add_proposals(self, builder: StepBuilder, group: DecodeGroup) -> None:
        """Let the step compute drafts for requests that sample, as far as free blocks allow.

        Each request gets blocks for its next token and all drafts, as the next step verifies them.
        Positions count all drafts as accepted, those of a step in flight included.
        """
        index = group.step_index + 1
        requests, lasts = group.requests, [base + index for base in group.bases]
        unsettled = self.unsettled
        if unsettled is not None:
            for request, length in zip(unsettled.requests, unsettled.lengths, strict=True):
                if request.group_index >= 0:
                    lasts[request.group_index] += length
        if builder.sampling:
            requests = requests + [request for request, _ in builder.sampling]
            lasts += [request.num_computed + length - 1 for request, length in builder.sampling]
        verifications = builder.verifications
        if verifications is not None:
            for entry, length in zip(verifications.entries, verifications.lengths, strict=True):
                lasts[entry] += length
        indices, counts = self.speculation.compute(requests, lasts)
        chosen = [requests[at] for at in indices]
        firsts = [lasts[at] + 2 for at in indices]
        counts = self._reserve(chosen, firsts, counts, builder, group)
        if not all(counts):
            indices = [number for number, count in zip(indices, counts, strict=True) if count]
            counts = [count for count in counts if count]
        builder.proposals = indices, counts
        self._has_room = self.ahead and self._give_room(lasts, builder, group)

    def _give_room(self, lasts: Sequence[int], builder: StepBuilder, group: DecodeGroup) -> bool:
        """Allocate blocks for the tokens after verified drafts, as far as blocks are free.

        Returns whether all are there. The next step can then be launched before it is known which
        drafts are accepted.

        lasts: the position of each request's last token or draft.
        """
        verifications = builder.verifications
        if verifications is None:
            return True
        groups, size = len(self._config.kinds), self._config.block_size
        short = [
            (request, lasts[entry] + 1)
            for request, entry in zip(verifications.requests, verifications.entries, strict=True)
            if len(request.blocks) // groups * size <= lasts[entry] + 1
        ]
        if not short:
            return True
        # a request has no block for its last possible token
        if any(position > request.limit - 2 for request, position in short):
            return False
        requests, firsts = [request for request, _ in short], [position for _, position in short]
        return all(self._reserve(requests, firsts, [1] * len(short), builder, group))

    def _reserve(
        self,
        requests: Sequence[Request],
        firsts: Sequence[int],
        lengths: list[int],
        builder: StepBuilder,
        group: DecodeGroup,
    ) -> list[int]:
        """Allocate free blocks for draft tokens; return for how many tokens each request has
        blocks.

        firsts: the position of each request's first draft token.
        lengths: the wanted number of draft tokens of each request, which bounds the result.
        """
        groups, size, memory = len(self._config.kinds), self._config.block_size, self._memory
        short = [
            at
            for at, (request, first, length) in enumerate(
                zip(requests, firsts, lengths, strict=True)
            )
            if len(request.blocks) // groups * size < first + length
        ]
        if not short:
            return lengths
        some, pool = [requests[at] for at in short], memory.pools[0]
        cost = pool.next_cost(some[0])
        if (
            len(memory.pools) == 1
            and self._extends(pool)
            and pool.num_free >= (len(memory.running) + len(some)) * cost
            and all(
                (len(requests[at].blocks) // groups + 1) * size >= firsts[at] + lengths[at]
                for at in short
            )
        ):  # one block for each request is enough, as almost always
            builder.batch.new_blocks += pool.extend(some)
            for request in some:
                if request.group_index >= 0:
                    group.extended(request)
            return lengths
        lengths = lengths.copy()
        for at in short:
            first = firsts[at]
            places = self._places(requests[at], first + lengths[at], builder, group)
            lengths[at] = max(0, min(lengths[at], places - first))
        return lengths

    def _extends(self, pool: BlockManager) -> bool:
        """Whether drafts may take blocks of a pool before their request needs them."""
        # other admission strategies rely on tables without blocks beyond a window's need
        return pool.regions is None and (pool.whole or self._config.admission == "optimistic")

    def _places(
        self, request: Request, tokens: int, builder: StepBuilder, group: DecodeGroup
    ) -> int:
        """Extend a request's table towards `tokens` tokens; return for how many it has blocks now.

        Each running request keeps a free block.
        """
        memory, size = self._memory, self._config.block_size
        pool = memory.pool(request)
        places = len(request.blocks) // pool.num_groups * size
        if places >= tokens or not self._extends(pool):
            return places
        free = pool.num_free - len(memory.running) * pool.next_cost(request)
        count = max(0, min(-(-(tokens - places) // size), free // pool.next_cost(request)))
        if count:
            builder.batch.new_blocks += pool.extend((request,), count)
            if request.group_index >= 0:
                group.extended(request)
        return places + count * size

    def launched(self, step: LaunchedStep, batch: Batch) -> None:
        """Complete a step's batch just before the launch."""
        batch.dormant = self.speculation.dormant
        batch.settled, self._settled = self._settled, []
        if self.unsettled is not None:
            batch.unsettled = max(self.unsettled.lengths)
        self.speculation.proposals = step.proposals
        self._newest = step if step.num_drafts or step.proposals is not None else None

    def update(
        self, step: LaunchedStep, result: StepResult, groups: Sequence[DecodeGroup]
    ) -> list[Request]:
        """Apply a step's result to drafts, after its tokens were appended to the requests.

        Returns the requests whose last token was sampled, or is sampled in the step in flight.

        groups: the decode groups of the scheduler, by micro-batch.
        """
        if self._newest is step:
            self._newest = None
        if step.proposals is not None:
            step.proposals.receive(result.drafts)
        if step.verifications is None:
            return []
        return self._observe(step.verifications, groups[step.micro_batch])

    def _observe(self, verifications: Verifications, group: DecodeGroup) -> list[Request]:
        """Advance requests by their accepted draft tokens; count drafts and accepted ones.

        See `update` for the result.
        """
        decoding, computing = RequestPhase.DECODING, RequestPhase.COMPUTING
        advanced = []
        for request, gained in zip(verifications.requests, verifications.gained, strict=True):
            if request.phase is decoding:
                advanced.append((request, gained))
            elif request.phase is computing:  # it has left the group meanwhile
                request.num_computed += gained
        finishing = group.advance(advanced) if advanced else []
        if self._memory.snapshots is not None:
            self._settled += [(request.row, 1 + gained) for request, gained in advanced]
        self._counters.count_drafts(verifications)
        self.speculation.observe(verifications)
        return finishing
