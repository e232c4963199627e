"""Pull: the threads that receive KV blocks of one request from another replica.

Blocks arrive in slots of host memory, and the step loop copies them to the device. A source on the
same machine shares the slots that it has filled (shared.py); other sources send bytes over TCP. A
pull ends by itself: with all blocks, with an error, or at its deadline.

The connection of a pull that read the source's shared slots is kept. The step loop itself sends the
next pull's Ask message over the connection, so that the source begins before a thread of this
engine has run.
"""

import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.messages import KVSource
from engine.scheduling.memory.prefix_hash import DIGEST_SIZE
from engine.scheduling.moves.shared import Borrowed, PeerSlots, Sharing
from engine.scheduling.moves.source import MAX_STRIPES
from engine.scheduling.moves.wire import (
    IDLE_SECONDS,
    LAST,
    Ask,
    Join,
    Locate,
    Message,
    Offer,
    Peer,
    PeerClosed,
    PeerError,
    Place,
    frame_of,
)

logger = logging.getLogger("manta.engine")

PULL_SECONDS = 10.0  # timeout of a pull, after which its request computes its prompt
_STRIPE_BYTES = 4 << 20  # minimum bytes of a pull for each further TCP connection
_MOST_STRIPES = 4
_MOST_SOURCES = 64  # maximum number of remembered sources, with or without mapped memory
# maximum number of kept connections to a source, which has room for 64 of all replicas
_MOST_KEPT = 2


@dataclass(eq=False, slots=True)
class Pull:
    """A pull in progress: the transfer of one request's KV blocks from another replica.

    request: id of the request that waits for the pull.
    hashes: the hashes of all blocks that the request can share.
    near: number of leading blocks that this engine had when the pull began.
    groups: number of KV groups, each of which has a block at each position.
    cancelled: whether the blocks are not needed any more.
    borrowed: the source's slots, if the blocks are read from them.
    """

    request: int
    source: KVSource
    compatibility: bytes
    hashes: Sequence[bytes]
    near: int
    groups: int
    block_bytes: int
    began: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    borrowed: Borrowed | None = None

    @property
    def deadline(self) -> float:
        return self.began + PULL_SECONDS


class Arrival(NamedTuple):
    """Blocks that have arrived: the index of each in the pull's table, and the slot that has it.

    last: whether no other block of the pull comes.
    """

    indices: list[int]
    slots: list[int]
    last: bool = False


class _Asked(NamedTuple):
    """An ask over a kept connection, whose last bytes are not sent yet."""

    peer: Peer
    slots: PeerSlots
    unsent: bytes


class Puller:
    """The receiver of KV blocks from other replicas, with a thread for each pull.

    memory: the bytes of each slot.
    arrived: called from any thread with a pull and blocks that it has received. The callee returns
        their slots by `give_back`.
    ended: called from any thread when a pull's threads have ended without a last arrival, with the
        error or "".
    sharing: reads the slots of other engines on this machine; None = all blocks come over TCP.
    gone: called from any thread with the slots of an engine that has ended.
    """

    def __init__(
        self,
        memory: Sequence[memoryview],
        slots: Sequence[int],
        arrived: Callable[[Pull, Arrival], None],
        ended: Callable[[Pull, str], None],
        sharing: Sharing | None = None,
        gone: Callable[[PeerSlots], None] = lambda slots: None,
    ) -> None:
        self._memory = memory
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._arrived, self._ended = arrived, ended
        self._sharing, self._gone = sharing, gone
        self._sources: dict[KVSource, PeerSlots | None] = {}
        self._mapping = threading.Lock()
        self._keeping = threading.Lock()  # for `PeerSlots.kept`
        self._copies: queue.SimpleQueue[tuple[Callable[[], None], ...] | None]
        self._copies = queue.SimpleQueue()
        self._watching = False

    def begin(self, pull: Pull) -> None:
        """Ask a source for the blocks of a pull, and start the thread that receives them."""
        asked = self._ask_kept(pull)
        threading.Thread(target=self._run, args=(pull, asked), name="kv-pull", daemon=True).start()

    def watch(
        self, end: Callable[[], None], close: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        """Let a thread call `close`, then `ended`, once `end`, which waits for a copy, has
        returned.

        Copies end in the order of these calls.
        """
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="kv-copies", daemon=True).start()
        self._copies.put((end, close, ended))

    def close(self) -> None:
        """Close the connections that no pull uses, and end the thread of `watch`."""
        with self._mapping:
            for slots in self._sources.values():
                if slots is not None:
                    self._drop_kept(slots)
        self._copies.put(None)

    def _watch(self) -> None:
        while (copy := self._copies.get()) is not None:
            end, close, ended = copy
            try:
                end()
                close()
            except Exception as error:  # the step loop finds it out
                logger.warning("a copy of KV blocks has failed: %s", error)
            ended()
            del copy, end, close, ended  # they hold the memory of a source, which may end

    def _ask_kept(self, pull: Pull) -> _Asked | None:
        """Send a pull's ask over a kept connection; return None if there is none that works."""
        slots = self._sources.get(pull.source)
        while slots is not None:
            with self._keeping:
                if not slots.kept:
                    return None
                peer = slots.kept.pop()
            peer.deadline = pull.deadline
            try:
                return _Asked(peer, slots, peer.send_now(frame_of(_ask(pull, peer, slots))))
            except PeerError:
                peer.close()
        return None

    def _keep(self, peer: Peer, slots: PeerSlots) -> None:
        """Keep the connection of a pull that has ended, for the next one."""
        with self._keeping:
            if slots.kept is not None and len(slots.kept) < _MOST_KEPT:
                slots.kept.append(peer)
                return
        peer.close()

    def _drop_kept(self, slots: PeerSlots) -> None:
        """Close the kept connections to a source, and keep no further one."""
        with self._keeping:
            peers, slots.kept = slots.kept, None
        for peer in peers or ():
            peer.close()

    def give_back(self, slots: Sequence[int], pull: Pull) -> None:
        """Free the slots that have received blocks of a pull."""
        if pull.borrowed is not None:
            pull.borrowed.give_back(slots)
            return
        for slot in slots:
            self._free.put(slot)

    def _run(self, pull: Pull, asked: _Asked | None) -> None:
        error = ""
        try:
            self._pull(pull, asked)
        except PeerError as failure:
            error = str(failure)
        # any error must be reported, as a request waits for the end of this thread
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        if pull.borrowed is None or error:
            self._ended(pull, error)
        if pull.borrowed is not None:
            pull.borrowed.end(succeeded=not error)
        self._drop_dead()

    def _pull(self, pull: Pull, asked: _Asked | None) -> None:
        if asked is not None:
            peer, slots, unsent = asked
            try:
                peer.send(unsent)
                message = peer.receive_message()
            except PeerClosed:  # the source closed the kept connection before it took the ask
                peer.close()
            except BaseException:
                peer.close()
                raise
            else:
                self._take(pull, peer, slots, message)
                return
        peer = self._connect(pull)
        try:
            lent = self._slots_of(pull.source, peer)
            peer.send_message(_ask(pull, peer, lent))
            message = peer.receive_message()
        except BaseException:
            peer.close()
            raise
        self._take(pull, peer, lent, message)

    def _take(self, pull: Pull, peer: Peer, slots: PeerSlots | None, offer: Message) -> None:
        """Receive the blocks that a source offers, over one connection or more."""
        stripes = _stripes(pull)
        errors: list[str] = []
        others: list[threading.Thread] = []
        try:
            if not isinstance(offer, Offer):
                raise PeerError("no offer")
            if offer.refusal:
                raise PeerError(offer.refusal)
            if offer.block_bytes != pull.block_bytes:
                raise PeerError(f"blocks of {offer.block_bytes} bytes, not {pull.block_bytes}")
            most = len(pull.hashes) * pull.groups
            if not offer.indices or min(offer.indices) < 0 or max(offer.indices) >= most:
                raise PeerError("an index out of range")
            if offer.proof:
                self._borrow(pull, peer, slots, offer)
                return
            for stripe in range(1, min(stripes, len(offer.indices))):
                thread = threading.Thread(
                    target=self._join,
                    args=(pull, offer, stripe, stripes, errors),
                    name="kv-pull",
                    daemon=True,
                )
                thread.start()
                others.append(thread)
            self._receive(pull, peer, offer.indices[::stripes])
        finally:
            if pull.borrowed is None:
                peer.close()
            for thread in others:
                thread.join()
        if errors:
            raise PeerError(errors[0])

    def _slots_of(self, source: KVSource, peer: Peer) -> PeerSlots | None:
        """Return the source's slots, mapped at the first pull; None if they cannot be mapped."""
        if self._sharing is None or not source.shared:
            return None
        with self._mapping:
            if source in self._sources:
                return self._sources[source]
            peer.send_message(Locate())
            place = peer.receive_message()
            if not isinstance(place, Place):
                raise PeerError("no place")
            slots = self._map(source, place, self._sharing)
            if len(self._sources) < _MOST_SOURCES:
                self._sources[source] = slots
            return slots

    def _map(self, source: KVSource, place: Place, sharing: Sharing) -> PeerSlots | None:
        name = f"{source.host}:{source.port}"
        try:
            if not place.pid:
                raise ValueError("it shares no memory")
            if place.slot_bytes != sharing.own.slot_bytes:
                raise ValueError("its blocks have another size")
            slots = PeerSlots(place)
        except (OSError, ValueError) as error:
            logger.info("KV blocks from %s come over TCP: %s", name, error)
            return None
        if source.device and place.device_count:
            try:
                slots.first = sharing.attach_device(place.handle, place.count)
            except RuntimeError as error:
                logger.info("KV blocks from %s do not come from its GPU: %s", name, error)
            else:
                slots.on_device = True
                logger.info("KV blocks from %s come from the memory of its GPU", name)
                return slots
        try:
            slots.first = sharing.attach(slots.memory)
        except RuntimeError as error:
            logger.warning(
                "KV blocks from %s come over TCP: %s. Raise the limit of locked memory (ulimit -l, "
                "or the container's memlock)",
                name,
                error,
            )
            return None
        logger.info("KV blocks from %s come by shared memory", name)
        return slots

    def _drop_dead(self) -> None:
        """Forget the slots of engines that have ended, so that their memory becomes free."""
        with self._mapping:
            for source, slots in list(self._sources.items()):
                if slots is not None and not slots.alive:
                    del self._sources[source]
                    self._drop_kept(slots)
                    self._gone(slots)

    def _borrow(self, pull: Pull, peer: Peer, slots: PeerSlots | None, offer: Offer) -> None:
        """Receive announcements of the source's filled slots, and pass each block to `arrived`."""
        if slots is None or not hmac.compare_digest(
            offer.proof, peer.memory_proof(b"source", slots.key)
        ):
            raise PeerError("the source does not read the memory that it named")
        borrowed = pull.borrowed = Borrowed(peer, slots, self._keep)
        wanted, at = len(offer.indices), 0
        while at < wanted:
            while not peer.readable(IDLE_SECONDS):
                # A source without free slots sends nothing until this engine has read some.
                if not borrowed.num_lent:
                    raise PeerError("the source says nothing")
            if pull.cancelled:
                raise PeerError("cancelled")
            lent, fills = peer.receive_announced(wanted - at)
            if not len(lent):
                raise PeerError("the source gave up its blocks")
            if not slots.lends(lent):
                raise PeerError(f"blocks in slots {lent.tolist()}")
            indices = offer.indices[at : at + len(lent)]
            at += len(lent)
            self._arrived(pull, Arrival(indices, borrowed.lend(lent, fills), at == wanted))

    def _join(self, pull: Pull, offer: Offer, stripe: int, stripes: int, errors: list[str]) -> None:
        try:
            peer = self._connect(pull)
            try:
                peer.send_message(Join(offer.ticket, stripe))
                self._receive(pull, peer, offer.indices[stripe::stripes])
            finally:
                peer.close()
        except Exception as error:
            errors.append(str(error))

    def _connect(self, pull: Pull) -> Peer:
        source = pull.source
        seconds = pull.deadline - time.monotonic()
        if seconds <= 0:
            raise PeerError("it took too long")
        try:
            sock = socket.create_connection(
                (source.host, source.port), timeout=min(seconds, IDLE_SECONDS)
            )
        except OSError as error:
            raise PeerError(f"cannot connect: {error}") from error
        peer = Peer(sock, pull.deadline)
        try:
            peer.introduce(bytes.fromhex(source.secret))
        except BaseException:
            peer.close()
            raise
        return peer

    def _receive(self, pull: Pull, peer: Peer, indices: Sequence[int]) -> None:
        """Receive the blocks of one stripe."""
        for index in indices:
            if pull.cancelled:
                raise PeerError("cancelled")
            came = peer.receive_number()
            if came == LAST:
                raise PeerError("the source gave up its blocks")
            if came != index:
                raise PeerError(f"block {came} instead of {index}")
            try:
                slot = self._free.get(timeout=max(0.0, pull.deadline - time.monotonic()))
            except queue.Empty:
                raise PeerError("it took too long") from None
            try:
                peer.fill(self._memory[slot])
            except BaseException:
                self._free.put(slot)
                raise
            self._arrived(pull, Arrival([index], [slot]))


def _ask(pull: Pull, peer: Peer, slots: PeerSlots | None) -> Ask:
    """Return the Ask message for a pull's blocks.

    slots: the source's slots, if this process can read them.
    """
    proof, on_device = b"", False
    if slots is not None:
        proof, on_device = peer.memory_proof(b"puller", slots.key), slots.on_device
    hashes = b"".join(pull.hashes)
    return Ask(pull.compatibility, hashes, pull.near, _stripes(pull), proof, on_device)


def _stripes(pull: Pull) -> int:
    """Return the number of connections for a pull whose bytes are sent over TCP."""
    size = (len(pull.hashes) - pull.near) * pull.groups * pull.block_bytes
    return max(1, min(_MOST_STRIPES, MAX_STRIPES, size // _STRIPE_BYTES))


def split(hashes: bytes) -> list[bytes]:
    """Return the hashes that an Ask has joined. Raises PeerError."""
    if len(hashes) % DIGEST_SIZE:
        raise PeerError("hashes of another length")
    digests: list[bytes] = np.frombuffer(hashes, f"V{DIGEST_SIZE}").tolist()
    return digests
