"""One planted fault for each invariant; the suite must notice every one of them.

A fault replaces one method by a wrong one. `suite` is a short form of the other test files: a few
random lives, and the checks that random lives cannot make. A fault that passes it is a hole in the
tests.
"""

from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduling import preparation, queue, request, scheduler
from engine.scheduling.core import EngineCore
from engine.scheduling.decode_group import DecodeGroup
from engine.scheduling.memory import block_manager, request_memory
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.prefix_hash import extend_hashes, root_hash
from engine.scheduling.memory.request_memory import DeferredRelease, RequestMemory
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling import test_block_manager, test_core, test_scheduler
from tests.engine.scheduling.driver import random_run

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def fault(plant: Plant) -> Plant:
    FAULTS[plant.__name__] = plant
    return plant


def suite() -> None:
    """Check what is quickest first: most faults are noticed by then."""
    test_block_manager.test_least_recently_used_goes_first_and_tails_before_heads()
    test_block_manager.test_sharing_makes_recently_used()
    test_scheduler.test_the_latest_of_the_lowest_priority_is_preempted(True)
    test_scheduler.test_stops_and_their_reasons()
    test_scheduler.test_a_half_computed_block_is_not_found()
    test_scheduler.test_one_failing_entry_ends_one_request()
    test_scheduler.test_choices_of_one_prompt_share_its_blocks_within_one_step()
    test_scheduler.test_prompt_logprobs_survive_a_preemption()
    test_scheduler.test_logprobs_travel_with_their_tokens_and_the_prompts_once()
    for policy in ("sum", "reserved", "peak"):
        test_scheduler.test_careful_policies_never_preempt(policy)
        test_scheduler.test_what_fits_alone_always_starts(policy)
    test_core.test_a_reset_cache_is_not_read()
    test_core.test_a_resumed_request_goes_on_as_if_nothing_had_happened()
    for seed in range(6):
        changes: dict[str, Any] = {"max_num_batched_tokens": 7} if seed % 3 == 2 else {}
        random_run(seed, num_blocks=34, **changes)
    random_run(6, num_blocks=34, max_num_seqs=12, kv_ranks=2)
    test_scheduler.test_future_peak_equals_brute_force()


def test_the_suite_passes_without_a_fault() -> None:
    """Bug: faults "caught" by a suite that fails anyway."""
    suite()


@fault
def a_reference_is_not_dropped(patch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free
    patch.setattr(BlockManager, "free", lambda self, blocks: free(self, blocks[1:]))


@fault
def blocks_are_freed_while_a_step_uses_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_memory, "DeferredRelease", lambda step, *held: DeferredRelease(0, *held))


@fault
def blocks_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        request_memory, "DeferredRelease", lambda step, *held: DeferredRelease(step + 10**9, *held)
    )


@fault
def the_budget_is_one_too_large(patch: pytest.MonkeyPatch) -> None:
    budget = Scheduler._budget
    patch.setattr(Scheduler, "_budget", lambda self, builder: budget(self, builder) + 1)


@fault
def a_shared_block_is_written(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def wrong(self: Scheduler, r: Request, memory: Any, builder: Any) -> bool:
        started = start(self, r, memory, builder)
        if started and r.num_computed > 0:
            r.num_computed -= 1  # computes the last cached token again
        return started

    patch.setattr(Scheduler, "_start", wrong)


@fault
def the_last_token_is_cached_too(patch: pytest.MonkeyPatch) -> None:
    prefix = BlockManager.hash_prefix

    def wrong(self: BlockManager, r: Request, count: int) -> list[bytes]:
        return prefix(self, r, max(count, len(r.token_ids) // self.block_size))

    patch.setattr(BlockManager, "hash_prefix", wrong)


@fault
def the_salt_is_not_in_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "root_hash", lambda model, adapter, salt: root_hash(model, adapter, ""))


@fault
def the_adapter_is_not_in_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "root_hash", lambda model, adapter, salt: root_hash(model, "", salt))


@fault
def hashes_are_not_chained(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        hashes: list[bytes], root: bytes, tokens: list[int], size: int, count: int, *_: Any
    ) -> None:
        for index in range(len(hashes), count):
            own: list[bytes] = []
            extend_hashes(own, root, tokens[index * size : (index + 1) * size], size, 1)
            hashes += own

    patch.setattr(block_manager, "extend_hashes", wrong)


@fault
def blocks_are_named_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    hash_blocks = BlockManager.hash_blocks

    def wrong(self: BlockManager, r: Request, num_computed: int) -> None:
        hash_blocks(self, r, len(r.blocks) * self.block_size)

    patch.setattr(BlockManager, "hash_blocks", wrong)


@fault
def an_evicted_block_keeps_its_name(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: BlockManager, count: int) -> None:
        for _ in range(count):
            block, _ = self._evictable.popitem(last=False)
            self._free.append(block)

    patch.setattr(BlockManager, "evict", wrong)


@fault
def the_newest_block_is_evicted_first(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: BlockManager, count: int) -> None:
        for _ in range(count):
            block, _ = self._evictable.popitem(last=True)
            self._forget([block])
            self._free.append(block)

    patch.setattr(BlockManager, "evict", wrong)


@fault
def a_head_is_evicted_before_its_tail(patch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free
    patch.setattr(BlockManager, "free", lambda self, blocks: free(self, blocks[::-1]))


@fault
def a_row_keeps_its_last_request(patch: pytest.MonkeyPatch) -> None:
    build = Scheduler._build

    def wrong(self: Scheduler, builder: Any) -> Any:
        batch = build(self, builder)
        batch.new_rows = [new for new in batch.new_rows if batch.step < 12]
        return batch

    patch.setattr(Scheduler, "_build", wrong)


@fault
def a_block_is_not_uploaded(patch: pytest.MonkeyPatch) -> None:
    grow = Scheduler._grow_decodes

    def wrong(self: Scheduler, builder: Any) -> None:
        grow(self, builder)
        builder.batch.new_blocks.clear()

    patch.setattr(Scheduler, "_grow_decodes", wrong)


@fault
def a_block_comes_one_token_late(patch: pytest.MonkeyPatch) -> None:
    due = DecodeGroup.block_due
    patch.setattr(DecodeGroup, "block_due", lambda self, step: due(self, step - 1))


@fault
def an_extra_token_surfaces(patch: pytest.MonkeyPatch) -> None:
    update = Scheduler.update

    def wrong(self: Scheduler, result: Any) -> Any:
        self.in_flight[0].some_ended = False
        return update(self, result)

    patch.setattr(Scheduler, "update", wrong)


@fault
def the_token_in_flight_is_lost_by_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def wrong(self: Scheduler, victim: Request, builder: Any) -> None:
        for launched in self.in_flight:
            launched.token_lists = [
                [] if tokens is victim.token_ids else tokens for tokens in launched.token_lists
            ]
        preempt(self, victim, builder)

    patch.setattr(Scheduler, "_preempt", wrong)


@fault
def the_first_in_order_is_preempted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_memory, "max", lambda *a, key=None: _first(a, key), raising=False)


def _first(args: Any, key: Any) -> Any:
    return max(*args) if key is None else min(*args, key=key)


@fault
def the_newest_is_admitted_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "insort", lambda line, r: line.insert(0, r))


@fault
def admission_forgets_to_try_again(patch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def wrong(self: Scheduler, builder: Any) -> None:
        if not any(r.num_cached < 0 and len(r.token_ids) > 20 for r in self.queue.waiting[:1]):
            admit(self, builder)

    patch.setattr(Scheduler, "_admit", wrong)


@fault
def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    _longer(patch, 1)


@fault
def one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    _longer(patch, -1)


def _longer(patch: pytest.MonkeyPatch, by: int) -> None:
    class Wrong(Request):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self.params.max_tokens:
                self.limit = max(len(self.token_ids) + 1, self.limit + by)

    patch.setattr(preparation, "Request", Wrong)


@fault
def end_tokens_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "stops_at", lambda self, token: False)


@fault
def min_tokens_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "stops_at", lambda self, token: token in self.stop_ids)


@fault
def output_is_counted_from_the_resume(patch: pytest.MonkeyPatch) -> None:
    class Wrong(Request):
        def __init__(self, message: Any, *args: Any) -> None:
            message.num_prompt_tokens = len(message.token_ids)
            super().__init__(message, *args)

    patch.setattr(preparation, "Request", Wrong)


@fault
def an_aborted_request_keeps_its_row(patch: pytest.MonkeyPatch) -> None:
    give_back = RequestMemory.give_back

    def wrong(self: RequestMemory, done_step: int) -> list[DeferredRelease]:
        freed = give_back(self, done_step)
        self.free_rows[:] = [row for row in self.free_rows if row != 3]
        return freed

    patch.setattr(RequestMemory, "give_back", wrong)


@fault
def blocks_are_another_ranks(patch: pytest.MonkeyPatch) -> None:
    class Wrong(DeferredRelease):
        def __init__(self, step: int, row: int, kv_rank: int, *held: Any) -> None:
            super().__init__(step, row, 0, *held)

    patch.setattr(request_memory, "DeferredRelease", Wrong)


@fault
def a_prefix_is_found_on_another_rank(patch: pytest.MonkeyPatch) -> None:
    find = scheduler.find_start

    def wrong(r: Request, hashes: Any, pools: Any, *others: Any) -> Any:
        start = find(r, hashes, pools, *others)
        if start is None or not start.cached or len(pools) == 1:
            return start
        for block in start.cached:  # taken for one of the other's
            if pools[1 - start.kv_rank]._refs[block] == 0:
                return start
        return start._replace(kv_rank=1 - start.kv_rank)

    patch.setattr(scheduler, "find_start", wrong)


@fault
def one_row_is_given_to_two(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def wrong(self: Scheduler, r: Request, memory: Any, builder: Any) -> bool:
        started = start(self, r, memory, builder)
        if started and r.row == 2:
            self.memory.free_rows.append(2)
        return started

    patch.setattr(Scheduler, "_start", wrong)


@fault
def a_failed_requests_keys_stay_cached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestMemory, "discard_cached", lambda self, r: None)


@fault
def a_reset_cache_goes_on_being_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestMemory, "reset_prefix_cache", lambda self: self.pools[0].reset())


@fault
def logprobs_of_the_prompt_come_twice(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Request, start: int, items: Any) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += items

    patch.setattr(Request, "collect_prompt_logprobs", wrong)


@fault
def three_steps_are_in_flight(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: EngineCore) -> Any:
        batch = self.scheduler.schedule()
        if batch is not None:
            self._pending.append(self._runner.launch(batch))
        deltas = self._outbox.copy()
        self._outbox.clear()
        if self._pending and (batch is None or len(self._pending) > 2):
            deltas += self.scheduler.update(self._pending.popleft().wait())
        return deltas

    patch.setattr(EngineCore, "step", wrong)


@fault
def the_peak_is_sorted_upside_down(patch: pytest.MonkeyPatch) -> None:
    from engine.scheduling import admission

    class Upside:
        def __getattr__(self, name: str) -> Any:
            import numpy as np

            if name == "argsort":
                return lambda values, kind: np.argsort(-values, kind=kind)
            return getattr(np, name)

    patch.setattr(admission, "np", Upside())


@fault
def a_careful_policy_forgets_who_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestMemory, "_footprints", lambda self, rank, step_index_of: [])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an invariant that no test would see broken."""
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        suite()
