"""PrefixIndex: which replica holds which prefix, as far as this router knows. Pure and bounded.

The index has two sources: what this router sent where, and what the other routers sent. Their
requests carry the hashes of their prefixes, and the replica passes these on with its next frame.
Replicas do not tell what their caches drop. The index is as large as the caches and forgets in the
same order. A wrong entry costs the computation of one prompt, after which it is right.
docs/routing.md has the cost of this, and that of telling all routers of every block instead.

A prefix is named by a chain of hashes, one for each `STRIDE` tokens. For each hash the index keeps
the set of its holders as the bits of an integer.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.scheduling.prefix_hash import extend_hashes, root_hash

STRIDE = 64  # tokens a hash: four blocks; finer costs memory and finds 32 tokens more on average
HASH_BYTES = 8  # a collision costs a wrong guess, nothing more
FORWARDED_HASHES = 64  # of a request's hashes: those that the other routers are told
_LIMIT = 2**19  # (hash, holder) pairs: 33 million tokens, 80 to 120 MB


def hash_prefix(token_ids: Sequence[int], adapter: str = "", salt: str = "") -> list[bytes]:
    """Return the hashes of a prompt; the last token is in none, because it is always computed."""
    prefix_hashes: list[bytes] = []
    if len(token_ids) <= STRIDE:
        return prefix_hashes
    root = root_hash("", adapter, salt)
    extend_hashes(prefix_hashes, root, token_ids, STRIDE, (len(token_ids) - 1) // STRIDE)
    return [prefix_hash[:HASH_BYTES] for prefix_hash in prefix_hashes]


def pack_hashes(prefix_hashes: Sequence[bytes]) -> bytes:
    """Return the hashes that other routers hear of: those of a prompt's head, which prompts
    share."""
    return b"".join(prefix_hashes[:FORWARDED_HASHES])


def unpack_hashes(prefix_hashes: bytes) -> list[bytes]:
    """Return the hashes that `pack_hashes` joined."""
    return [prefix_hashes[at : at + HASH_BYTES] for at in range(0, len(prefix_hashes), HASH_BYTES)]


class PrefixIndex:
    """The replicas that hold each prefix, as far as this router knows.

    Holders are small integers, the columns of routing.Fleet.

    capacity: pairs of hash and holder that the replicas' caches hold; beyond it, or `limit`, the
        hashes that were used least recently go.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.capacity = 0
        self._limit = limit
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # hash -> bit set, oldest first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def match(self, prefix_hashes: Sequence[bytes], limit: int = 4) -> list[tuple[int, int]]:
        """[(holders, hashes held)], most hashes first; each holder once, at most `limit` pairs."""
        matches: list[tuple[int, int]] = []
        get = self._holders.get
        at, held = 0, -1
        for prefix_hash in prefix_hashes:
            now = held & get(prefix_hash, 0)
            if now != held:
                if at:
                    matches.append((held ^ now, at))
                held = now
                if not held:
                    break
            at += 1
        if held > 0:
            matches.append((held, at))
        return matches[: -limit - 1 : -1]

    def add(self, prefix_hashes: Sequence[bytes], holder: int) -> None:
        """Note that `holder` will have these hashes: a request with this prefix was sent there."""
        holders = self._holders
        bit = 1 << holder
        for prefix_hash in reversed(prefix_hashes):  # the head is worth more than its tail
            known = holders.get(prefix_hash, 0)
            if not known & bit:
                holders[prefix_hash] = known | bit
                self._size += 1
            holders.move_to_end(prefix_hash)
        most = min(self.capacity or self._limit, self._limit)
        while self._size > most:
            _, gone = holders.popitem(last=False)
            self._size -= gone.bit_count()

    def remove(self, prefix_hashes: Sequence[bytes], holder: int) -> None:
        """Note that `holder` turned out not to have these hashes."""
        bit = 1 << holder
        for prefix_hash in prefix_hashes:
            known = self._holders.get(prefix_hash, 0)
            if known & bit:
                self._size -= 1
                if known == bit:
                    del self._holders[prefix_hash]
                else:
                    self._holders[prefix_hash] = known ^ bit

    def forget(self, holder: int) -> None:
        """Forget a replica that is gone, or whose cache is. A walk over everything: tens of ms when
        full."""
        bit = 1 << holder
        self.remove(
            [prefix_hash for prefix_hash, known in self._holders.items() if known & bit], holder
        )
