"""Snapshots: states of recurrent layers, kept so that other requests can go on from them.

A recurrent layer writes over its state with each token, so nobody can go on from the middle of a
request unless the state was copied when it was there. A snapshot is the state behind the last
token of a block, and is known by that block's hash. A prefix hit begins where a snapshot is and all
groups of layers with keys have their blocks. Where snapshots are taken, all at borders of blocks:

    at the end of a prompt          that is `worth` tokens from the last one: the next turn of a
                                    conversation goes on there, or further on:
    every `gap` tokens of output    one a request, which the next one replaces; the first where the
                                    prompt's last block ends
    where cached blocks go on       two prompts part there, and a third may come: a system prompt
    every `every` tokens            of a long prompt

None is within `gap` tokens of the one before it: so few tokens are computed again more quickly than
a state is copied. Chunks of a prompt end where one is to be taken, which is a step more.

A snapshot lies in memory of its own, or in a row that no request has: there are as many rows as
requests may ever run, and a state is as large as the keys of thousands of tokens. A request that
needs a row takes an empty one, or that of the snapshot that has been unused for longest.

The device copies a row to a snapshot at the beginning of the step that takes the request further,
before any snapshot is copied to a row, and these in the order in which requests begin. So what is
decided last in a step may use what was decided first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config.kv_groups import KVGroups
from kernels.kv.format import KVFormat

# Tokens that a GPU computes while it reads the weights for a step of few: on an H200, of a mixture
# of 512 experts, a step of 16 tokens takes 5 ms, and 512 tokens more in another step take 6.
WORTH = 512


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """The plan of where snapshots are taken.

    slots: snapshots that have memory of their own; 0 = no prefix is found again.
    every, gap, worth: tokens, see the module.
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

        `every` becomes the tokens whose keys take as much memory as a snapshot. If a step computes
        more tokens, `every` becomes these, so that no full step is cut.
        form: the format of keys.
        step_tokens: the most tokens of a step.
        """
        token = sum(taken for _, taken in groups.token_bytes(form).values())
        every = max(groups.state_bytes // token, step_tokens)
        worth = WORTH if device_type == "cuda" else 0
        return cls(slots, -(-every // block_size) * block_size, worth=worth)

    def cuts(self, tokens: int) -> int:
        """Return the most steps that snapshots add to a chunked prompt of so many tokens."""
        return tokens // self.every + 2 if self.slots else 0


class Computed(Protocol):
    """The part of a request that snapshots need (`engine.scheduling.request.Request`)."""

    row: int
    hashes: list[bytes]
    cacheable: bool
    num_computed: int
    marks: "Marks | None"

    @property
    def num_tokens(self) -> int: ...


@dataclass(slots=True)
class Marks:
    """The snapshot marks of a running request. Positions are in tokens."""

    last: int = 0  # of the newest snapshot that it has taken or began from
    border: int = -1  # where its chunk is to end, and a snapshot to be taken
    branch: int = 0  # where cached blocks end that it could not go on from
    rolling: bytes = b""  # the newest snapshot of its output


class Snapshots:
    """The slots that hold states: rows, and behind these, from `first` on, slots of their own.

    The least recently used snapshot goes first. `forget` is called for each block that leaves the
    prefix cache.

    resident: whether all groups of layers have a block.
    free_rows: rows that neither a request nor a snapshot has; whoever takes a row removes it there.
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
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self._first = first
        self._free = list(range(first + plan.slots - 1, first - 1, -1))
        self._free_rows = free_rows
        self._steps: dict[bytes, int] = {}  # the step that takes it
        self._rolling: set[bytes] = set()  # that the request which has taken it will replace
        self._to_save: dict[int, int] = {}  # slot -> row, at the beginning of the next step
        self.evicted = 0  # to make room for others, their blocks still there; ever

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """The number of snapshots that there is memory for as long as no other request begins."""
        return len(self._slots) + len(self._free) + len(self._free_rows) if self.plan.slots else 0

    @property
    def rows(self) -> list[int]:
        """The rows that snapshots lie in."""
        return [slot for slot in self._slots.values() if slot < self._first]

    # ---- where they are taken ------------------------------------------------------------------

    def advance(self, request: Computed, step: int) -> int:
        """Take a snapshot of a request outside the decode group, if one is wanted where it is.

        Returns how many tokens the request's chunk may have, up to where the next snapshot is
        taken. The chunk is in this step or a later one.
        """
        marks, at = request.marks, request.num_computed
        left = request.num_tokens - at
        if marks is None or not request.cacheable:
            return left
        if at == marks.border:
            self._take(request, marks, at, step, rolling=False)
        elif left == 1:
            self.decoded(request, at, step)
        if left == 1:
            return left
        plan, size = self.plan, self._block_size
        end = (request.num_tokens - 1) // size * size
        least = max(at + 1, marks.last + plan.gap)
        wanted = [marks.branch, -(-least // plan.every) * plan.every]
        if end - marks.last >= plan.worth:
            wanted.append(end)
        marks.border = min((place for place in wanted if least <= place <= end), default=-1)
        return left if marks.border < 0 else marks.border - at

    def decoded(self, request: Computed, position: int, step: int) -> None:
        """Take a snapshot of a decoding request's output, if one is wanted at `position`.

        The step takes the request on from there by a token.
        """
        marks = request.marks
        if marks is None or position % self._block_size or not request.cacheable:
            return
        if position - marks.last >= self.plan.gap:
            self._take(request, marks, position, step, rolling=True)

    def _take(
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
                return  # what is under way leaves half to what is complete
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
        """Return (row, slot) of each state to copy before the step, each once."""
        pairs = [(row, slot) for slot, row in self._to_save.items()]
        self._to_save.clear()
        return pairs

    # ---- what begins from them -----------------------------------------------------------------

    def match(
        self, hashes: Sequence[bytes], table_of: Callable[[Sequence[bytes]], list[int]], groups: int
    ) -> tuple[list[int], int]:
        """Return the table of the longest prefix that a request can go on from. Changes nothing.

        The second number counts all cached positions of the prefix, with or without a snapshot.
        table_of: `BlockManager.match_prefix`.
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
        """Return a row for a request where `free_rows` has none; at least one snapshot lies in a
        row.

        beginning: the hash of the block that the request goes on from; b"" = none.
        """
        for digest, slot in self._slots.items():
            if slot < self._first and digest != beginning:
                self.forget(digest)
                self.evicted += 1
                return self._free_rows.pop()
        return self._slots[beginning]  # no other one: see `begin`

    def begin(self, request: Computed, cached: int) -> int:
        """Start a request at num_computed, in its row, and return the slot to copy its state from.

        The slot is -1 where the request has no state yet, or has it in its row.
        cached: see `match`.
        """
        begin = request.num_computed
        request.marks = Marks(last=begin, branch=cached * self._block_size)
        if not begin:
            return -1
        digest = request.hashes[begin // self._block_size - 1]
        slot = self._slots[digest]
        self._rolling.discard(digest)
        if slot == request.row:  # which is written over; if it is still to be copied there, it is
            del self._slots[digest], self._steps[digest]
            return -1
        self._slots.move_to_end(digest)
        return slot

    # ---- what is lost --------------------------------------------------------------------------

    def leave(self, request: Computed) -> None:
        """Let go of the request, which gives its row back; its newest snapshot is of its end."""
        if request.marks is not None:
            self._rolling.discard(request.marks.rolling)
            request.marks = None

    def forget(self, digest: bytes) -> None:
        """Drop a block's snapshot, because the block is not found again or the slot is needed.

        A copy to the slot that is due in this step is made. A request may have begun from the
        snapshot before the slot was given away.
        """
        slot = self._slots.pop(digest, None)
        if slot is not None:
            (self._free_rows if slot < self._first else self._free).append(slot)
            self._rolling.discard(digest)
            del self._steps[digest]

    def forget_after(self, step: int) -> None:
        """Drop the snapshots taken by steps after this one, which do not count."""
        self._to_save.clear()
        for digest in [digest for digest, taken in self._steps.items() if taken > step]:
            self.forget(digest)

    def check_integrity(self) -> None:
        """Assert the invariants."""
        own = [slot for slot in self._slots.values() if slot >= self._first]
        every = list(range(self._first, self._first + self.plan.slots))
        assert sorted(own + self._free) == every, "a snapshot is lost or shared"
        assert self._steps.keys() == self._slots.keys()
        assert self._rolling <= self._slots.keys()
        assert all(map(self._resident, self._slots)), "a snapshot has outlived its block"
