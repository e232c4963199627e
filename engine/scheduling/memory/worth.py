"""Worth: which blocks are worth a copy to the host, and which loads are worth waiting for.

Copies cost bandwidth, so blocks are stored by second use (`HostPlan.everything` stores all):

 a block that a request found in the prefix cache, or that was evicted and computed again
 all blocks of a request that continues an earlier one: the next turn of a conversation
 all blocks of a preempted request

A prefix is loaded if that takes less time than computing its tokens, by the rates of the last
copies and of the largest steps.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.scheduling.memory.host_plan import HostCopies, HostPlan
from engine.scheduling.request import Request

# maximum number of remembered hashes of evicted blocks, and of requests' last blocks
_REMEMBERED = 1 << 17
# fixed seconds of a load: before the first byte, and from the last byte until the request is queued
_LAUNCH_SECONDS = 0.0003


class Worth:
    """The policy that decides which blocks are copied to the host, and which prefixes are loaded.

    It depends on earlier uses of blocks and on measured rates of copies and steps.
    """

    def __init__(self, plan: HostPlan, copies: HostCopies) -> None:
        self._plan = plan
        self._copies = copies
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # evicted hashes, oldest first
        # hashes of the last blocks of ended requests
        self._ends: OrderedDict[bytes, None] = OrderedDict()
        self._token_seconds = 0.0  # seconds per prompt token in the largest steps; 0 = unknown
        self._largest = 0

    def forget_uses(self) -> None:
        """Forget which blocks were used."""
        self._ends.clear()
        self._evicted.clear()

    def start(self, request: Request, hashes: Sequence[bytes], num_cached: int) -> None:
        """Set `request.num_reused`, the number of leading blocks to store, as the request starts.

        hashes: the hashes of the blocks that the request could share.
        num_cached: leading blocks that it found in the prefix cache.
        """
        again = request.num_cached >= 0  # whether it was preempted
        ends, evicted = self._ends, self._evicted
        if self._plan.everything or again or any(map(ends.__contains__, reversed(hashes))):
            request.num_reused = sys.maxsize
            return
        count = num_cached
        while count < len(hashes) and hashes[count] in evicted:
            count += 1
        request.num_reused = count

    def leave(self, request: Request, block_size: int) -> Sequence[bytes]:
        """Return the hashes of the blocks to store when a request leaves the batch, in order.

        Its blocks are in the prefix cache already, under these hashes.
        """
        hashes = request.hashes[: request.num_registered]
        if not request.cacheable or not hashes:
            return ()
        prompt = min(len(hashes), request.num_prompt // block_size)
        for end in {prompt, len(hashes)} - {0}:
            _remember(self._ends, hashes[end - 1])
        return hashes[: request.num_reused]

    def evicted(self, digests: Iterable[bytes]) -> None:
        """Record that blocks have left the prefix cache of the device."""
        for digest in digests:
            _remember(self._evicted, digest)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Update the time of a prompt token from a step that computed `tokens` prompt tokens."""
        if 2 * tokens < self._largest or not tokens:
            return
        self._largest = max(self._largest, tokens)
        new, old = seconds / tokens, self._token_seconds
        self._token_seconds = new if not old else (new + old) / 2

    def loading(self, tokens: int, size: int, from_disk: int = 0, read_rate: float = 0.0) -> bool:
        """Whether loading `size` bytes takes less time than computing the tokens.

        The result is True while a time is unknown, but False below `HostPlan.least_tokens`.

        from_disk: number of bytes that must be read from disk first.
        read_rate: bytes read from disk a second; 0 = unknown.
        """
        if tokens < self._plan.least_tokens:
            return False
        rate, compute = self._copies.load_rate, tokens * self._token_seconds
        seconds = size / rate if rate else 0.0
        if read_rate:
            seconds += from_disk / read_rate
        return not (seconds and compute) or seconds + _LAUNCH_SECONDS < compute


def _remember(hashes: OrderedDict[bytes, None], digest: bytes) -> None:
    hashes[digest] = None
    hashes.move_to_end(digest)
    if len(hashes) > _REMEMBERED:
        hashes.popitem(last=False)
