"""Snapshots: states of recurrent layers, kept so that other requests can continue from them.

A recurrent layer overwrites its state with each token, so that a request can continue from the
middle of another one only if the state was copied at that point. A snapshot is the state after the
last token of a block, and is identified by that block's hash. A prefix hit ends at a snapshot, if
all groups of layers with keys have their blocks. Snapshots are taken at these block borders:

 at the end of a prompt          if it is `worth` tokens after the last one: the next turn of a
                                 conversation continues there, or later:
 every `gap` tokens of output    one for each request, replaced by the next; the first where the
                                 prompt's last block ends
 where cached blocks end         two prompts differ from there on, and a third may come that shares
                                 the prefix, such as a system prompt
 every `every` tokens            of a long prompt

A request's snapshots are at least `gap` tokens apart: computing so few tokens again is faster than
copying a state. A chunk of a prompt ends where a snapshot is taken, which adds a step.

A snapshot has separate memory, or lies in a row that no request has: there are as many rows as
requests that may ever run, and a state is as large as the keys of thousands of tokens. A request
that needs a row takes an empty one, or that of the least recently used snapshot. The device copies
rows to snapshots at the beginning of the step that takes the request further, then snapshots to
rows, in the order in which requests begin. So a later decision in a step may use what an earlier
one set up.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config.kv_groups import KVGroups
from kernels.kv.format import KVFormat

# Tokens that a GPU computes in the time of reading the weights for a small step. On an H200 with a
# mixture of 512 experts, a step of 16 tokens takes 5 ms, and 512 more tokens in another step take 6
# ms.
WORTH = 512


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The settings that decide at which positions recurrent states are copied to snapshots.

    slots: number of snapshots with separate memory; 0 = no request reuses a prefix.
    every, gap, worth: numbers of tokens, see the module.
    """

    slots: int
    every: int
    gap: int = 64
    worth: int = 0

    @classmethod
    def of(
        cls,
        groups: KVGroups,
        form: KVFormat,
        block_size: int,
        step_tokens: int,
        slots: int,
        device_type: str,
    ) -> "SnapshotPlan":
        """Return the plan of a model.

        `every` is the number of tokens whose KV takes as much memory as a snapshot, but at least
        step_tokens, so that no full step is split.

        form: the format of the KV cache.
        step_tokens: the maximum number of tokens in a step.
        """
        token = sum(num_bytes for _, num_bytes in groups.token_bytes(form).values())
        every = max(groups.state_bytes // token, step_tokens)
        worth = WORTH if device_type == "cuda" else 0
        return cls(slots, -(-every // block_size) * block_size, worth=worth)

    def cuts(self, tokens: int) -> int:
        """Return the maximum number of steps that snapshots add to a prompt of `tokens` tokens."""
        return tokens // self.every + 2 if self.slots else 0


class Computed(Protocol):
    """The interface of a request that snapshots need (`engine.scheduling.request.Request`)."""

    row: int
    hashes: list[bytes]
    cacheable: bool
    num_computed: int
    marks: "Marks | None"

    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)
class Marks:
    """The positions, in tokens, that decide where a running request's snapshots are taken."""

    last: int = 0  # position of the newest snapshot that it has taken or started from
    border: int = -1  # position where its chunk ends for a snapshot; -1 = none
    branch: int = 0  # end of its cached blocks when it started, which may lack a snapshot
    rolling: bytes = b""  # hash of the newest snapshot of its output


class Snapshots:
    """The snapshots of recurrent states, each in a slot: an unused row, or separate memory.

    Slots from `first` on are separate memory. The least recently used snapshot is evicted first.
    `forget` is called for each block that leaves the prefix cache.

    resident: whether all groups of layers have the block of a hash.
    free_rows: rows that neither a request nor a snapshot has; taking a row removes it from this
        list.
    """

    def __init__(
        self,
        plan: SnapshotPlan,
        block_size: int,
        resident: Callable[[bytes], bool],
        free_rows: list[int],
        first: int,
    ) -> None:
        self.plan = plan
        self._block_size = block_size
        self._resident = resident
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # hash -> slot, oldest first
        self._first = first
        self._free = list(range(first + plan.slots - 1, first - 1, -1))
        self._free_rows = free_rows
        self._steps: dict[bytes, int] = {}  # hash -> the step that takes the snapshot
        # hashes of snapshots of running outputs, each replaced by its request's next one
        self._rolling: set[bytes] = set()
        self._to_save: dict[int, int] = {}  # slot -> row, copied at the beginning of the next step
        self._to_resume: set[int] = set()  # slots that the next step copies to rows
        # slots with separate memory, reserved for states from the host
        self._reserved: set[int] = set()
        self.evicted = 0  # number of snapshots evicted for room while their blocks were cached

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """The number of snapshots that fit as long as no other request begins."""
        return len(self._slots) + len(self._free) + len(self._free_rows) if self.plan.slots else 0

    @property
    def rows(self) -> list[int]:
        """The rows in which snapshots lie."""
        return [slot for slot in self._slots.values() if slot < self._first]

    # ---- taking snapshots ----------------------------------------------------------------------

    def advance(self, request: Computed, step: int) -> int:
        """Schedule a snapshot of a request outside the decode group, if one is due at its position.

        Returns how many tokens the request's chunk may have, up to the next snapshot. The chunk
        runs in this step or a later one.
        """
        marks, at = request.marks, request.num_computed
        remaining = request.num_tokens - at
        if marks is None or not request.cacheable:
            return remaining
        if at == marks.border:
            self._take_snapshot(request, marks, at, step, rolling=False)
        elif remaining == 1:
            self.decoded(request, at, step)
        if remaining == 1:
            return remaining
        plan, size = self.plan, self._block_size
        end = (request.num_tokens - 1) // size * size
        least = max(at + 1, marks.last + plan.gap)
        wanted = [marks.branch, -(-least // plan.every) * plan.every]
        if end - marks.last >= plan.worth:
            wanted.append(end)
        marks.border = min((place for place in wanted if least <= place <= end), default=-1)
        return remaining if marks.border < 0 else marks.border - at

    def decoded(self, request: Computed, position: int, step: int) -> None:
        """Schedule a snapshot of a decoding request's state, if one is due at `position`.

        The step computes the request's token at that position.
        """
        marks = request.marks
        if marks is None or position % self._block_size or not request.cacheable:
            return
        if position - marks.last >= self.plan.gap:
            self._take_snapshot(request, marks, position, step, rolling=True)

    def room(self, request: Computed, position: int) -> int:
        """Return the maximum number of drafts of a decode at `position`, so that its step does not
        pass a border where a snapshot will be due."""
        marks, size = request.marks, self._block_size
        if marks is None or not request.cacheable or not self.plan.slots:
            return self.plan.every
        due = max(marks.last + self.plan.gap, position + 1)
        return -(-due // size) * size - 1 - position

    def _take_snapshot(
        self, request: Computed, marks: Marks, position: int, step: int, *, rolling: bool
    ) -> None:
        digest = request.hashes[position // self._block_size - 1]
        if digest in self._slots:
            self._slots.move_to_end(digest)
            marks.last = position
            return
        if not self.plan.slots or not self._resident(digest):
            return
        if rolling:
            if marks.rolling in self._rolling:
                self.forget(marks.rolling)
            elif 2 * len(self._rolling) >= self.capacity:
                return  # snapshots of running outputs leave half of the slots to others
            marks.rolling = digest
            self._rolling.add(digest)
        if not (self._free or self._free_rows):
            self.forget(next(iter(self._slots)))
            self.evicted += 1
        slot = (self._free or self._free_rows).pop()
        self._slots[digest] = slot
        self._steps[digest] = step
        self._to_save[slot] = request.row
        marks.last = position

    def take_saves(self) -> list[tuple[int, int]]:
        """Return (row, slot) of each state to copy before the step; each is returned once."""
        pairs = [(row, slot) for slot, row in self._to_save.items()]
        self._to_save.clear()
        self._to_resume.clear()
        return pairs

    # ---- states in host memory -----------------------------------------------------------------

    def saved(self, digest: bytes, done_step: int) -> int:
        """Return the slot of a block's snapshot; -1 = there is none, or it is not taken yet.

        done_step: the last step that is done.
        """
        slot = self._slots.get(digest, -1)
        return slot if slot >= 0 and self._steps[digest] <= done_step else -1

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def reserve(self) -> int:
        """Reserve and return a slot for a state that comes from the host; follow with `adopt`.

        The oldest snapshot is evicted if no slot is free. Returns -1 if all are in use.

        The slot has separate memory, and the step that is being scheduled does not use it.
        """
        busy = self._to_save.keys() | self._to_resume
        slot = next((slot for slot in reversed(self._free) if slot not in busy), -1)
        if slot < 0:
            oldest = (d for d, s in self._slots.items() if s >= self._first and s not in busy)
            digest = next(oldest, None)
            if digest is None:
                return -1
            slot = self._slots[digest]
            self.forget(digest)
            self.evicted += 1
        self._free.remove(slot)
        self._reserved.add(slot)
        return slot

    def adopt(self, slot: int, digest: bytes) -> None:
        """Register a loaded state in its reserved slot as a block's snapshot.

        The slot is freed instead if the digest is b"", or its block has left the cache or already
        has a snapshot.
        """
        self._reserved.remove(slot)
        if not digest or digest in self._slots or not self._resident(digest):
            self._free.append(slot)
        else:
            self._slots[digest], self._steps[digest] = slot, 0

    # ---- starting from snapshots ---------------------------------------------------------------

    def match(
        self, hashes: Sequence[bytes], table_of: Callable[[Sequence[bytes]], list[int]], groups: int
    ) -> tuple[list[int], int]:
        """Return the block table of the longest prefix from which a request can continue, and the
        number of cached positions, which may reach beyond the last snapshot.

        A position is block_size tokens.

        table_of: `BlockManager.match_prefix`.
        groups: number of groups of layers.
        """
        table = table_of(hashes)
        cached = len(table) // groups
        for count in range(cached, 0, -1):
            if hashes[count - 1] not in self._slots:
                continue
            if count < cached:
                table = table_of(hashes[:count])
            if len(table) == count * groups:
                return table, cached
        return [], cached

    def give_row(self, beginning: bytes) -> int:
        """Return a row for a request if `free_rows` has none; at least one snapshot must lie in a
        row.

        beginning: the hash of the block from which the request continues; b"" = none.
        """
        for digest, slot in self._slots.items():
            if slot < self._first and digest != beginning:
                self.forget(digest)
                self.evicted += 1
                return self._free_rows.pop()
        return self._slots[beginning]  # the only snapshot in a row: see `begin`

    def begin(self, request: Computed, cached: int) -> int:
        """Start a request at num_computed, in its row; return the slot from which to copy its
        state.

        The slot is -1 if the request has no state yet, or has it already in its row.

        cached: see `match`.
        """
        begin = request.num_computed
        request.marks = Marks(last=begin, branch=cached * self._block_size)
        if not begin:
            return -1
        digest = request.hashes[begin // self._block_size - 1]
        slot = self._slots[digest]
        self._rolling.discard(digest)
        # the snapshot's row becomes the request's, after any pending copy into it
        if slot == request.row:
            del self._slots[digest], self._steps[digest]
            return -1
        self._slots.move_to_end(digest)
        self._to_resume.add(slot)
        return slot

    # ---- dropping snapshots --------------------------------------------------------------------

    def leave(self, request: Computed) -> None:
        """End a request that frees its row; its newest snapshot of output is kept."""
        if request.marks is not None:
            self._rolling.discard(request.marks.rolling)
            request.marks = None

    def forget(self, digest: bytes) -> None:
        """Drop a block's snapshot, for example because the block has left the prefix cache.

        A copy into its slot that is scheduled for this step still takes place, as a request that
        begins in this step may start from the snapshot.
        """
        slot = self._slots.pop(digest, None)
        if slot is not None:
            (self._free_rows if slot < self._first else self._free).append(slot)
            self._rolling.discard(digest)
            del self._steps[digest]

    def forget_after(self, step: int) -> None:
        """Drop the snapshots taken by steps after `step`, whose results are dropped."""
        self._to_save.clear()
        for digest in [digest for digest, taken_at in self._steps.items() if taken_at > step]:
            self.forget(digest)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        own = [slot for slot in self._slots.values() if slot >= self._first]
        every = list(range(self._first, self._first + self.plan.slots))
        assert sorted([*own, *self._free, *self._reserved]) == every, "a snapshot is lost or shared"
        assert self._steps.keys() == self._slots.keys()
        assert self._rolling <= self._slots.keys()
        assert all(map(self._resident, self._slots)), "a snapshot has outlived its block"
