"""PrefixIndex: records which replica has which prefix, as far as this router knows, in bounded
memory.

The index has two sources: this router's own requests, and those of other routers, whose prefix
hashes a replica forwards with its next frame. Replicas also report evicted prefixes. The index is
as large as the caches. A wrong entry costs one prefill, after which it is correct. docs/routing.md
compares this with reporting every block to all routers.

A prefix is named by a chain of hashes, one for each `STRIDE` tokens. For each hash the index stores
the set of replicas that have it, as the bits of an integer.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.images.image import Image
from engine.messages import PREFIX_BYTES, PREFIX_STRIDE
from engine.scheduling.memory.prefix_hash import extend_hashes, root_hash

# Tokens per hash: four blocks. A finer stride would cost memory and find 32 more tokens on average.
STRIDE = PREFIX_STRIDE
# Bytes of a hash; short, as a collision only costs a prefill on the wrong replica.
HASH_BYTES = PREFIX_BYTES
FORWARDED_HASHES = 64  # number of leading hashes of a request that are forwarded to other routers
_LIMIT = 2**19  # maximum of (hash, holder) pairs: 33 million tokens, 80 to 120 MB


def hash_prefix(
    token_ids: Sequence[int], adapter: str = "", salt: str = "", images: Sequence[Image] = ()
) -> list[bytes]:
    """Return the chained prefix hashes of a prompt, one for each STRIDE tokens.

    No hash covers the last token, which is always computed.

    adapter: adapter as "name@revision"; "": none.
    salt: cache salt of the request.
    images: the images of the prompt, in its order.
    """
    prefix_hashes: list[bytes] = []
    if len(token_ids) <= STRIDE:
        return prefix_hashes
    root = root_hash("", adapter, salt)
    extend_hashes(prefix_hashes, root, token_ids, STRIDE, (len(token_ids) - 1) // STRIDE, images)
    return [prefix_hash[:HASH_BYTES] for prefix_hash in prefix_hashes]


def pack_hashes(prefix_hashes: Sequence[bytes]) -> bytes:
    """Join the first FORWARDED_HASHES hashes of a prompt, for the message to other routers."""
    return b"".join(prefix_hashes[:FORWARDED_HASHES])


def unpack_hashes(prefix_hashes: bytes) -> list[bytes]:
    """Split the hashes that `pack_hashes` joined."""
    return [prefix_hashes[at : at + HASH_BYTES] for at in range(0, len(prefix_hashes), HASH_BYTES)]


class PrefixIndex:
    """The replicas that hold each prefix, as far as this router knows.

    Here replicas are called holders, and are identified by their columns in routing.Fleet.

    The least recently used hashes are dropped beyond `capacity` or `limit` pairs.

    capacity: number of (hash, holder) pairs that the replicas' caches can hold.
    limit: maximum number of these pairs, so that the index's memory is bounded.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.capacity = 0
        self._limit = limit
        self._holders: OrderedDict[bytes, int] = OrderedDict()  # hash -> holders, oldest first
        # hash -> bit set of the holders that have it only in host memory or on disk
        self._lower: dict[bytes, int] = {}
        self._size = 0
        self._gone = 0  # bit set of holders whose pairs are to be dropped by the next sweep

    def __len__(self) -> int:
        return self._size

    def match(self, prefix_hashes: Sequence[bytes], limit: int = 4) -> list[tuple[int, int]]:
        """Return up to `limit` pairs (holders, number of leading hashes), the largest number first.

        Holders are a bit set of the columns whose replicas have exactly this number of leading
        hashes, so each replica is in at most one pair.
        """
        matches: list[tuple[int, int]] = []
        get = self._holders.get
        at, held = 0, ~self._gone
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

    def lowered(self, prefix_hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return (index in prefix_hashes, holders) for each hash that some replicas have only in
        host memory or on disk. Holders are a bit set of these replicas' columns."""
        lower, held = self._lower, ~self._gone
        if not lower:
            return []
        known = ((index, held & lower.get(name, 0)) for index, name in enumerate(prefix_hashes))
        return [(index, holders) for index, holders in known if holders]

    def lower(self, prefix_hashes: Sequence[bytes], holder: int) -> None:
        """Record that a replica has a prefix only in host memory or on disk."""
        bit = 1 << holder
        for prefix_hash in prefix_hashes:
            if self._holders.get(prefix_hash, 0) & bit:
                self._lower[prefix_hash] = self._lower.get(prefix_hash, 0) | bit

    def _raise(self, prefix_hash: bytes, holders: int) -> None:
        """Record that replicas no longer have a hash only in host memory or on disk: it is on the
        device, or evicted.

        holders: bit set of the replicas.
        """
        if low := self._lower.get(prefix_hash, 0) & holders:
            self._lower[prefix_hash] ^= low
            if not self._lower[prefix_hash]:
                del self._lower[prefix_hash]

    def add_prefix(self, prefix_hashes: Sequence[bytes], holder: int) -> None:
        """Record that a replica will cache a prefix, because a request with it was sent there."""
        holders = self._holders
        bit = 1 << holder
        if self._gone & bit:
            self._sweep()
        # The hashes are added from the prompt's end, so that its head is the most recently used.
        for prefix_hash in reversed(prefix_hashes):
            known = holders.get(prefix_hash, 0)
            if not known & bit:
                holders[prefix_hash] = known | bit
                self._size += 1
            holders.move_to_end(prefix_hash)
            if self._lower:
                self._raise(prefix_hash, bit)
        most = min(self.capacity or self._limit, self._limit)
        while self._size > most:
            dropped, gone = holders.popitem(last=False)
            self._size -= gone.bit_count()
            self._lower.pop(dropped, None)

    def remove(self, prefix_hashes: Sequence[bytes], holder: int) -> None:
        """Record that a replica no longer has the prefixes with these hashes."""
        bit = 1 << holder
        for prefix_hash in prefix_hashes:
            known = self._holders.get(prefix_hash, 0)
            if known & bit:
                self._raise(prefix_hash, bit)
                self._size -= 1
                if known == bit:
                    del self._holders[prefix_hash]
                else:
                    self._holders[prefix_hash] = known ^ bit

    def forget(self, holder: int) -> None:
        """Remove all hashes of a replica that is gone or has lost its cache.

        The replica's pairs are ignored, and remain until one of the removed holders gets a prefix
        again. Then one scan drops the pairs of all removed holders, which takes 0.1 s if the index
        is full.
        """
        self._gone |= 1 << holder

    def _sweep(self) -> None:
        """Drop the (hash, holder) pairs of all holders that were removed by `forget`."""
        present, holders = ~self._gone, self._holders
        stale = [(name, known) for name, known in holders.items() if known & self._gone]
        for name, known in stale:
            self._raise(name, self._gone)
            if known & present:
                holders[name] = known & present
            else:
                del holders[name]
            self._size -= (known & self._gone).bit_count()
        self._gone = 0
