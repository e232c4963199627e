"""StepDrafts: the drafts of a step that is scheduled, their blocks, and what became of them.

speculation.py chooses drafts. Here they get the places that rows, tokens and blocks leave, and the
requests move on by those that were accepted.
"""

from collections.abc import Sequence

from engine.batch import Batch, StepResult
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.memory.request_memory import RequestMemory
from engine.scheduling.memory.snapshots import Snapshots
from engine.scheduling.request import Request, RequestPhase
from engine.scheduling.step import LaunchedStep, SchedulerCounters, StepBuilder


class StepDrafts:
    """The drafts of a scheduler's steps.

    verifying: whether a step that verifies or computes drafts is in flight.
    """

    def __init__(
        self,
        speculation: Speculation,
        config: CoreConfig,
        memory: RequestMemory,
        counters: SchedulerCounters,
    ) -> None:
        self.speculation = speculation
        self.verifying = False
        self._config, self._memory, self._counters = config, memory, counters
        # of models with recurrent states: the value of `settled` for the next batch
        self._settled: list[tuple[int, int]] = []

    @property
    def waits(self) -> bool:
        """Whether no step may be launched before the result of the one in flight is known."""
        return self.verifying or self.speculation.awaited is not None

    def drop_steps(self) -> None:
        """Forget the steps in flight, whose results are dropped."""
        self._settled.clear()
        self.verifying = False
        self.speculation.awaited = None

    def add(self, builder: StepBuilder, group: DecodeGroup, room: int, constrained: bool) -> None:
        """Add the drafts that a step verifies, and those that it computes, to a step.

        Legal when no step is in flight.

        group: the step's decodes.
        room: the most drafts to verify, by rows and tokens.
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
        """
        snapshots = self._memory.snapshots
        groups, size = len(self._config.kinds), self._config.block_size
        if snapshots is not None:
            self._take_snapshots(snapshots, group, builder.batch.step)
        for verification in self.speculation.choose(group.requests, room, constrained=constrained):
            request, drafts = verification.request, verification.drafts
            start = request.base + group.step_index + 1
            if snapshots is not None:
                del drafts[snapshots.room(request, start) :]
            wanted = start + 1 + len(drafts)
            if len(request.blocks) // groups * size < wanted:
                places = self._places(request, wanted, builder, group)
                if places < wanted:
                    del drafts[max(0, places - start - 1) :]
            if drafts:
                builder.verifications.append(verification)

    def _take_snapshots(self, snapshots: Snapshots, group: DecodeGroup, step: int) -> None:
        """Take the snapshots that are due of decoding requests.

        Blocks that were reserved for drafts are not yet hashed when their tokens are accepted.
        """
        index, size = group.step_index + 1, self._config.block_size
        for request in group.requests:
            position = request.base + index
            if not position % size:
                self._memory.pool(request).hash_blocks(request, position)
                snapshots.decoded(request, position, step)

    def _add_proposals(self, builder: StepBuilder, group: DecodeGroup) -> None:
        """Let the step compute drafts of requests that sample, as far as free blocks allow.

        A drafter's cache may keep the next token and all drafts but the last.
        """
        index = group.step_index + 1
        groups, size = len(self._config.kinds), self._config.block_size
        lasts = {request: request.base + index for request in group.requests}
        for request, length in builder.sampling:
            lasts[request] = request.num_computed + length - 1
        for verification in builder.verifications:
            lasts[verification.request] += len(verification.drafts)
        for request, count in self.speculation.compute(lasts):
            first = lasts[request] + 1
            if len(request.blocks) // groups * size < first + count:
                places = self._places(request, first + count, builder, group)
                count = min(count, places - first)
            if count > 0:
                builder.proposals.append((request, count))

    def _places(
        self, request: Request, tokens: int, builder: StepBuilder, group: DecodeGroup
    ) -> int:
        """Give a request free blocks, up to this many tokens; return how many its blocks hold then.

        Each running request keeps a free block.
        """
        memory, config = self._memory, self._config
        pool, size = memory.pool(request), config.block_size
        places = len(request.blocks) // pool.num_groups * size
        if places >= tokens or pool.regions is not None:
            return places
        # a table with more blocks than a window needs would break the other strategies
        if not pool.whole and config.admission != "optimistic":
            return places
        free = pool.num_free - len(memory.running) * pool.next_cost(request)
        count = max(0, min(-(-(tokens - places) // size), free // pool.next_cost(request)))
        if count:
            builder.batch.new_blocks += pool.extend((request,), count)
            if request.group_index >= 0:
                group.extended(request)
        return places + count * size

    def launched(self, step: LaunchedStep, batch: Batch) -> None:
        """Note a step as launched, and complete its batch."""
        batch.dormant = self.speculation.dormant
        batch.settled, self._settled = self._settled, []
        self.verifying = step.num_drafts > 0 or bool(step.proposals)

    def update(self, step: LaunchedStep, result: StepResult, groups: Sequence[DecodeGroup]) -> None:
        """Apply the result of a step in flight, whose tokens its requests have.

        groups: those of the scheduler, by micro-batch.
        """
        self.verifying = False  # a step with drafts is the only one in flight
        if not (step.verifications or step.proposals):
            return
        self._observe(step, groups)
        if step.proposals:
            self.speculation.receive(step.proposals, result.drafts)

    def _observe(self, step: LaunchedStep, groups: Sequence[DecodeGroup]) -> None:
        """Advance requests by their accepted draft tokens, and count drafted and accepted ones."""
        decoding, snapshots = RequestPhase.DECODING, self._memory.snapshots
        for verification in step.verifications:
            request = verification.request
            if request.phase is decoding:
                if verification.gained:
                    groups[request.micro_batch].advance(request, verification.gained)
                if snapshots is not None:
                    self._settled.append((request.row, 1 + verification.gained))
        self._counters.count_drafts(step.verifications)
        self.speculation.observe(step.verifications)
