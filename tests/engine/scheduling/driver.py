"""Driver: an engine core on a fake device, whose invariants are checked at every step.

The state machine, the random runs and the tests of planted faults use it."""

import random
from collections.abc import Sequence
from typing import Any

from engine.batch import Batch
from engine.messages import EngineRequest
from engine.scheduling.request import Request, RequestPhase
from tests.fakes import (
    VIRTUAL,
    FakeCopies,
    Output,
    collect,
    expected,
    make_core,
    make_prompt,
    make_request,
    virtual_tokens,
)


class Driver:
    """A driver of an engine core, which asserts every invariant that is visible from outside.

    After each step: texts are prefixes of each request's text when it runs alone; a block's
        references equal its users; free + used = total; the first request of the queue is neither
        overtaken nor starved.
        At each launch: budget, rows and blocks (FakeRunner); a block that others use is not
        written; a block is read only by requests of the same adapter and salt; no request exceeds
        its limit.
    """

    def __init__(self, **changes: Any) -> None:
        self.core, self.runner = make_core(**changes)
        self.scheduler = self.core.scheduler
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.outputs: dict[int, Output] = {}
        self.aborted: set[int] = set()
        self.refused: set[int] = set()
        self._next_id = 0
        self._owner: dict[int, tuple[str, str]] = {}  # block -> adapter and salt of its contents
        if self.scheduler.tier is not None:
            copies = self.scheduler.tier.copies
            assert isinstance(copies, FakeCopies)
            copies.owners = self._owner
        if self.scheduler.moves is not None:
            copies = self.scheduler.moves.copies
            assert isinstance(copies, FakeCopies)
            copies.owners = self._owner
        self._scopes: dict[int, tuple[str, str]] = {}  # request id -> its adapter and salt
        self._tables: dict[int, dict[int, int]] = {}  # row -> index -> block, as launched
        self._head: Request | None = None
        self._blockers: set[int] = set()
        self._patience = 0
        launch = self.runner.launch

        def watched(batch: Batch) -> Any:
            self._check_batch(batch)
            return launch(batch)

        self.runner.launch = watched  # type: ignore[method-assign]

    def add_request(self, prompt: int | list[int] = 8, **fields: Any) -> int:
        self._next_id += 1
        message = make_request(self._next_id, prompt, **fields)
        self._scopes[message.id] = (message.adapter, message.cache_salt)
        self.expected[message.id] = self._expect(message)
        self.core.add_request(message)
        if message.id in self.scheduler.requests:  # for drafters of tests/drafters.py
            self.scheduler.requests[message.id].prediction = self.expected[message.id][0]
        return message.id

    def _expect(self, message: EngineRequest) -> tuple[list[int], str]:
        room = self.core.config.max_model_len - (message.params.max_tokens != 0)
        if message.num_prompt_tokens + virtual_tokens(message.adapter) > room:
            self.refused.add(message.id)
            return [], "error"
        if message.seed in self.runner.fail and message.params.max_tokens != 0:
            return [], "error"
        return expected(message, self.core.config)

    def step(self) -> None:
        before = self.scheduler.counters.preemptions
        deltas = self.core.step()
        collect(deltas, self.outputs)
        self.core.check_integrity()
        config = self.core.config
        assert self.runner.max_in_flight <= config.depth
        for request_id in {delta.id for delta in deltas}:
            output = self.outputs[request_id]
            tokens, finish = self.expected[request_id]
            if output.finish in ("", "abort"):
                assert output.tokens == tokens[: len(output.tokens)], f"request {request_id}"
            else:
                assert (output.tokens, output.finish) == (tokens, finish), f"request {request_id}"
            if request_id not in self.refused and output.tokens:
                assert output.deltas[0].cached >= 0, "the first delta says what was cached"
                assert all(delta.cached < 0 for delta in output.deltas[1:])
        self._check_starvation(self.scheduler.counters.preemptions > before)

    def abort(self, request_id: int) -> None:
        if request_id in self.scheduler.requests or request_id in self.core._preparing:
            self.aborted.add(request_id)
        self.core.abort([request_id])

    def finish(self) -> None:
        """Run until idle. Asserts that every request has ended exactly once, and that no row or
        block is held."""
        steps = 0
        while self.core.has_work():
            self.step()
            steps += 1
            assert steps < 20_000, "the engine never becomes idle"
        assert all(pool.num_free == pool.num_blocks for pool in self.scheduler.memory.pools)
        assert self.outputs.keys() == self.expected.keys(), "a request vanished"
        for request_id, output in self.outputs.items():
            finish = "abort" if request_id in self.aborted else self.expected[request_id][1]
            assert output.finish == finish
        self.expected.clear()
        self.outputs.clear()

    @property
    def _searching(self) -> bool:
        """Whether the core bisects the requests of a failed step, which then run first, in
        groups."""
        return self.core._recovery.bisection is not None

    # ---- what is checked -----------------------------------------------------------------------

    def _check_batch(self, batch: Batch) -> None:
        size, num_blocks = self.core.config.block_size, self.core.config.num_blocks
        batch = self.runner.in_one(batch)
        by_row = {r.row: r for r in self.scheduler.running.values()}
        fresh = {new.row for new in batch.new_rows}
        for row in fresh:
            self._tables[row] = {}
        for row, index, block in batch.new_blocks:
            self._tables[row][index] = block
        groups = self.scheduler.memory.pools[0].num_groups
        users: dict[int, list[Request]] = {}
        for request in by_row.values():
            for block in self.scheduler.memory.pools[request.kv_rank].held(request):
                users.setdefault(request.kv_rank * num_blocks + block, []).append(request)
        for prefix in batch.prefixes:
            for block in prefix.blocks:
                self._owner[block] = self._scopes[users[block][0].id]
        entries = list(zip(batch.rows, batch.starts, batch.lengths, batch.samples, strict=True))
        uncertain = self.runner.uncertain if self.runner.in_flight else {}
        for row, start, length, samples in entries:
            request = by_row[row]
            assert start + length + samples <= request.limit, "beyond max_tokens or the context"
            last = start + length + uncertain.get(row, 0)
            for index in range(start // size * groups, -(-last // size) * groups):
                block = self._tables[row].get(index)
                if block is None:  # this KV group has no block here
                    continue
                for other in users.get(block, ()):
                    assert other is request or other.row in fresh, "a shared block is written"
                self._owner[block] = self._scopes[request.id]
        for row, start, length, _ in entries:
            request = by_row[row]
            for index, block in enumerate(request.blocks[: -(-(start + length) // size) * groups]):
                if block >= 0:
                    block += request.kv_rank * num_blocks
                    assert block == self._tables[row][index], "the device has another table"
                    assert self._owner[block] == self._scopes[request.id], "a tenant's block leaks"
        if fresh and self.scheduler.queue.waiting and not self._searching:
            started = max(by_row[row].order for row in fresh)
            assert started < self.scheduler.queue.waiting[0].order, "somebody was passed over"

    def _check_starvation(self, preempted: bool) -> None:
        """Assert that the first request of the queue does not starve.

        It must start at the latest a few steps after the end of all requests that were running, or
        pulling their prefixes, when it became the first, or that precede it. Requests that wait for
        adapters may wait longer.
        """
        head = self.scheduler.queue.waiting[0] if self.scheduler.queue.waiting else None
        queue = self.scheduler.queue
        waits = bool(queue.waiting_for_adapter or queue.waiting_for_blocks)
        holders = self._holders()
        if head is not self._head or preempted or self._searching or waits:
            self._head = head
            self._blockers = set(holders)
            self._patience = 4
        elif head is not None and not any(
            number in self._blockers or (request is not None and request < head)
            for number, request in holders.items()
        ):
            self._patience -= 1
            assert self._patience > 0, "the first of the queue starves"

    def _holders(self) -> dict[int, Request | None]:
        """Return the requests that hold blocks, by id: those that run, and those that pull blocks.

        A request that was aborted while it pulled blocks is None.
        """
        holders: dict[int, Request | None] = {r.id: r for r in self.scheduler.running.values()}
        if self.scheduler.moves is not None:
            for number in self.scheduler.moves.waiting():
                holders[number] = self.core._preparing.get(number)
        return holders


def random_run(
    seed: int, steps: int = 120, priorities: Sequence[int] = (0, 0, 1), **changes: Any
) -> Driver:
    """Run random requests on an engine core, and return the driver after `finish`.

    Requests have shared prefixes, salts, adapters and priorities, are long or short, fail, are
    aborted, or have no limit; caches are reset meanwhile.
    """
    rng = random.Random(seed)
    driver = Driver(**({"num_blocks": 40, "max_num_seqs": 8, "fail": (13,)} | changes))
    stems = [[2 + rng.randrange(48) for _ in range(40)] for _ in range(2)]
    stems.append([5, 6, 7, 8, 9] * 8)  # blocks with equal tokens after different prefixes
    stems.append([4] * 40)
    adapters = ["", "", "lora", "lora2", *VIRTUAL]
    if "kinds" in changes:
        adapters.remove("keys")  # prefix tuning is only for models with full attention
    for _ in range(steps):
        action = rng.random()
        if action < 0.35:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, 40)] + [2 + rng.randrange(48)] * rng.randrange(3)
            fields: dict[str, Any] = {
                "max_tokens": rng.choice([1, 2, 5, 20, 60, None]),
                "seed": rng.choice([1, 2, 3, 13]),
                "cache_salt": rng.choice(["", "", "tenant"]),
                "adapter": rng.choice(adapters),
                "priority": rng.choice(priorities),
                "ignore_eos": rng.random() < 0.3,
            }
            if rng.random() < 0.2:
                fields["prompt_logprobs"] = 0
                fields["max_tokens"] = rng.choice([0, 5])
            if rng.random() < 0.2:
                fields["logprobs"] = 0
            if "images" in changes and rng.random() < 0.7:
                pictures = [rng.choice([rng.randrange(10), stem[:3]]) for _ in range(5)]
                fields |= make_prompt(stem[: rng.randrange(9)], *pictures, [7])
                prompt = fields.pop("prompt")
            for choice in range(rng.choice([1, 1, 1, 3])):
                driver.add_request(prompt, choice=choice, **fields)
        elif action < 0.45 and driver.scheduler.requests:
            driver.abort(rng.choice(list(driver.scheduler.requests)))
        elif action < 0.46:
            driver.core.reset_prefix_cache()
        else:
            driver.step()
    driver.finish()
    assert not any(r.phase is not RequestPhase.ENDED for r in driver.scheduler.requests.values())
    return driver
