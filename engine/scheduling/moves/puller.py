"""Pull: the threads that receive KV blocks of one request from another replica.

Blocks arrive in slots of host memory, and the step loop copies them to the device. A pull ends by
itself: with all blocks, with an error, or at its deadline.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.messages import KVSource
from engine.scheduling.memory.prefix_hash import DIGEST_SIZE
from engine.scheduling.moves.source import MAX_STRIPES
from engine.scheduling.moves.wire import IDLE_SECONDS, LAST, Ask, Join, Offer, Peer, PeerError

PULL_SECONDS = 10.0  # longest time of a pull; its request is computed afterwards
_STRIPE_BYTES = 4 << 20  # bytes that are worth a connection of their own
_MOST_STRIPES = 4


@dataclass(eq=False, slots=True)
class Pull:
    """A pull in progress.

    request: id of the request that waits for it.
    hashes: of all blocks that the request can share.
    near: leading blocks that this engine had when the pull began.
    groups: blocks of each position.
    cancelled: whether nobody wants the blocks any more.
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

    @property
    def deadline(self) -> float:
        return self.began + PULL_SECONDS


class Puller:
    """The receiving side of an engine.

    memory: the bytes of each slot.
    arrived: called from any thread with a pull, an index in its table, and the slot that has the
        block. The callee gives the slot back (`give_back`).
    ended: called from any thread when a pull's threads have ended, with the error or "".
    """

    def __init__(
        self,
        memory: Sequence[memoryview],
        slots: Sequence[int],
        arrived: Callable[[Pull, int, int], None],
        ended: Callable[[Pull, str], None],
    ) -> None:
        self._memory = memory
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._arrived, self._ended = arrived, ended

    def begin(self, pull: Pull) -> None:
        """Begin a pull."""
        threading.Thread(target=self._run, args=(pull,), name="kv-pull", daemon=True).start()

    def give_back(self, slot: int) -> None:
        """Let the slot receive another block."""
        self._free.put(slot)

    def _run(self, pull: Pull) -> None:
        error = ""
        try:
            self._pull(pull)
        except PeerError as failure:
            error = str(failure)
        except Exception as failure:  # a request waits for the end of this thread
            error = f"{type(failure).__name__}: {failure}"
        self._ended(pull, error)

    def _pull(self, pull: Pull) -> None:
        size = (len(pull.hashes) - pull.near) * pull.groups * pull.block_bytes
        stripes = max(1, min(_MOST_STRIPES, MAX_STRIPES, size // _STRIPE_BYTES))
        peer = self._connect(pull)
        errors: list[str] = []
        others: list[threading.Thread] = []
        try:
            peer.send_message(Ask(pull.compatibility, b"".join(pull.hashes), pull.near, stripes))
            offer = peer.receive_message()
            if not isinstance(offer, Offer):
                raise PeerError("no offer")
            if offer.refusal:
                raise PeerError(offer.refusal)
            if offer.block_bytes != pull.block_bytes:
                raise PeerError(f"blocks of {offer.block_bytes} bytes, not {pull.block_bytes}")
            most = len(pull.hashes) * pull.groups
            if not all(0 <= index < most for index in offer.indices):
                raise PeerError("an index out of range")
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
            peer.close()
            for thread in others:
                thread.join()
        if errors:
            raise PeerError(errors[0])

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
            self._arrived(pull, index, slot)


def split(hashes: bytes) -> list[bytes]:
    """Return the hashes that an Ask has joined. Raises PeerError."""
    if len(hashes) % DIGEST_SIZE:
        raise PeerError("hashes of another length")
    return [hashes[at : at + DIGEST_SIZE] for at in range(0, len(hashes), DIGEST_SIZE)]
