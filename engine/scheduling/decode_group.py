"""DecodeGroup: the requests that get exactly one token in every step.

A thousand of them must cost the host well under a millisecond a step, so nothing here is written
per request and step. The group is five parallel lists that batches are copied from, positions are a
constant plus the step number, and what happens rarely is looked up by the step in which it happens:

    start of a request at step s      base + s
    it needs a new block at           s = positions * block_size - base        -> _block_due[s]
    it samples its last token at      s = limit - 2 - base                     -> _last_sample[s]

A request that cannot run in a step has to leave (see `Scheduler`), and may join again later.
"""

from typing import Any

from engine.scheduling.request import Request, RequestPhase


class DecodeGroup:
    """Membership changes by `join` and `leave`, O(1) each; the order of members means nothing."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._num_groups = num_groups  # entries of a table for each position
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.bases: list[int] = []
        self.ids: list[int] = []
        self.token_lists: list[list[int]] = []  # the requests' token_ids, not copies
        # An entry whose member has left is skipped when its step comes. Blocks are due within
        # block_size steps. Last samples may be far in the future, so `leave` removes their entries.
        self._block_due: dict[int, list[Request]] = {}
        self._last_sample: dict[int, dict[Request, None]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def join(self, request: Request, next_step: int) -> None:
        """Add a request from next_step on. Its num_computed is read now and then goes stale."""
        base = request.num_computed - next_step
        request.base = base
        request.slot = len(self.requests)
        request.phase = RequestPhase.DECODING
        self.requests.append(request)
        self.rows.append(request.row)
        self.bases.append(base)
        self.ids.append(request.id)
        self.token_lists.append(request.token_ids)
        self._expect_block(request)
        self._last_sample.setdefault(request.limit - 2 - base, {})[request] = None

    def leave(self, request: Request, next_step: int) -> None:
        """Remove a request before next_step. Writes its num_computed; the caller sets the phase."""
        slot, last = request.slot, self.requests[-1]
        for values in (self.requests, self.rows, self.bases, self.ids, self.token_lists):
            _swap_remove(values, slot)
        last.slot = slot
        request.slot = -1
        request.num_computed = request.base + next_step
        request.last_step = next_step - 1
        key = request.limit - 2 - request.base
        members = self._last_sample.get(key)
        if members is not None:  # else `last_samples` has handed it out
            members.pop(request, None)
            if not members:
                del self._last_sample[key]

    def block_due(self, step: int) -> list[Request]:
        """Members whose token of this step begins a block that they do not have. Asked once."""
        due = self._block_due.pop(step, None)
        if due is None:
            return []
        size, groups = self._block_size, self._num_groups
        members = [
            r for r in due if r.slot >= 0 and r.base + step == len(r.blocks) // groups * size
        ]
        return list(dict.fromkeys(members))  # a request that left and joined again is in it twice

    def extended(self, request: Request) -> None:
        """Its table has the next position."""
        self._expect_block(request)

    def last_samples(self, step: int) -> list[Request]:
        """Members that may not run after this step: it samples their last token. Asked once."""
        return list(self._last_sample.pop(step, ()))

    def _expect_block(self, request: Request) -> None:
        step = len(request.blocks) // self._num_groups * self._block_size - request.base
        self._block_due.setdefault(step, []).append(request)


def _swap_remove(values: list[Any], index: int) -> None:
    values[index] = values[-1]
    values.pop()
