"""SourceServer: the threads that send a replica's KV blocks to other replicas.

A connection's thread passes the puller's order to the step loop, which holds the blocks and copies
them to slots (staging). The thread then sends the slots' bytes, or the numbers of the shared slots.
So the step loop never waits for a peer, and a peer that does not read delays only its own stripe.
"""

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduling.moves.shared import OwnSlots
from engine.scheduling.moves.wire import (
    IDLE_SECONDS,
    LAST,
    NO_NUMBERS,
    Ask,
    Join,
    Locate,
    Message,
    Numbers,
    Offer,
    Peer,
    PeerError,
    Place,
)

logger = logging.getLogger("manta.engine")

LEASE_SECONDS = 30.0  # maximum seconds for which blocks are held for a pull
LENT_SECONDS = 10.0  # maximum seconds in which a puller reads no slot; its step may be long
MAX_STRIPES = 8
_GREETING_SECONDS = 2.0
_KEPT_SECONDS = 600.0  # longest time of a connection without an ask
_MAX_CONNECTIONS = 64


class Staged(NamedTuple):
    """Blocks that are being copied to slots.

    indices: the blocks' places in the request's table.
    fills: the slots' fill numbers; empty if other processes cannot map the slots.
    copied: waits, in any thread, until the bytes are in the slots; raises RuntimeError.
    """

    indices: list[int]
    slots: list[int]
    fills: Numbers
    copied: Callable[[], None]


@dataclass(eq=False, slots=True)
class Order:
    """A pull by another replica, which the step loop answers and whose blocks it stages.

    proof: `Offer.proof`, if the puller reads the shared slots itself, over one connection.
    on_device: whether the puller reads slots in device memory.
    answer: a queue that receives the offer, once.
    staged: for each stripe a queue of batches of blocks to send, in order; None ends a stripe.
    num_sent: number of blocks sent so far.
    ended: set when no block is left to send.
    """

    ask: Ask
    deadline: float
    proof: bytes = b""
    on_device: bool = False
    ticket: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    answer: "queue.SimpleQueue[Offer]" = field(default_factory=queue.SimpleQueue)
    staged: "list[queue.SimpleQueue[Staged | None]]" = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    num_sent: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        stripes = 1 if self.proof else self.ask.stripes
        self.staged = [queue.SimpleQueue() for _ in range(stripes)]


class SourceServer:
    """The server of an engine from which other replicas pull KV blocks.

    It has a thread that listens, and one for each connection.

    memory: the bytes of each staging slot.
    ordered: called from any thread with a new order.
    sent: called from any thread when the bytes of slots are not needed any more.
    lost: called from any thread when a stripe of an order cannot be sent.
    shared: the slots, if other processes can map them; else None.
    """

    def __init__(
        self,
        memory: Sequence[memoryview],
        ordered: Callable[[Order], None],
        sent: Callable[[Order, Sequence[int]], None],
        lost: Callable[[Order], None],
        shared: OwnSlots | None = None,
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self.port = 0
        self._memory, self._shared = memory, shared
        self._ordered, self._sent, self._lost = ordered, sent, lost
        self._orders: dict[bytes, Order] = {}
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._listener: socket.socket | None = None

    def listen(self, host: str) -> None:
        """Listen on a free port of an address. Raises OSError."""
        self._listener = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-source", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        if self._listener is not None:
            self._listener.close()

    def forget(self, order: Order) -> None:
        """Remove an order that has ended, so that no connection can join it."""
        self._orders.pop(order.ticket, None)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the socket was closed
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="kv-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        peer = Peer(sock, time.monotonic() + _GREETING_SECONDS)
        try:
            peer.greet(self.secret)
            while self._serve_message(peer, peer.receive_message()):
                peer.deadline = time.monotonic() + 2 * _KEPT_SECONDS
                if not peer.readable(_KEPT_SECONDS):
                    break
                peer.deadline = time.monotonic() + _GREETING_SECONDS
        except PeerError as error:
            logger.debug("a pull of KV blocks ended: %s", error)
        finally:
            peer.close()
            self._room.release()

    def _serve_message(self, peer: Peer, message: Message) -> bool:
        """Do what a message asks for; return whether the connection may bring a further one."""
        if isinstance(message, Locate):
            peer.send_message(Place() if self._shared is None else self._shared.place())
            return True
        if isinstance(message, Ask):
            return self._take_order(peer, message)
        if isinstance(message, Join):
            order = self._orders.get(message.ticket)
            if order is not None:
                self._send_stripe(peer, order, message.stripe)
        return False

    def _take_order(self, peer: Peer, ask: Ask) -> bool:
        """Send the blocks that an ask names; return whether the puller has read all of them from
        this process's slots."""
        if not 1 <= ask.stripes <= MAX_STRIPES:
            raise PeerError(f"{ask.stripes} stripes")
        peer.deadline = time.monotonic() + LEASE_SECONDS
        proof = self._check_proof(peer, ask)
        has_device_slots = self._shared is not None and self._shared.device_count > 0
        on_device = bool(proof) and ask.on_device and has_device_slots
        order = Order(ask, peer.deadline, proof, on_device)
        self._orders[order.ticket] = order
        self._ordered(order)
        try:
            offer = order.answer.get(timeout=LEASE_SECONDS)
            peer.send_message(offer)
        except (PeerError, queue.Empty):
            self._lost(order)
            raise PeerError("the puller left before the offer") from None
        if offer.refusal:
            return False
        if order.proof:
            self._lend_slots(peer, order, len(offer.indices))
            return True
        self._send_stripe(peer, order, 0)
        sent = -1
        while not order.ended.wait(2 * IDLE_SECONDS):
            # a stripe has no connection, or its connection does not progress
            if order.num_sent == sent:
                self._lost(order)
                break
            sent = order.num_sent
        return False

    def _check_proof(self, peer: Peer, ask: Ask) -> bytes:
        """Return the source's `memory_proof`; empty if the puller has sent no valid one."""
        if self._shared is None or not ask.proof:
            return b""
        key = self._shared.key
        if not hmac.compare_digest(ask.proof, peer.memory_proof(b"puller", key)):
            return b""
        return peer.memory_proof(b"source", key)

    def _lend_slots(self, peer: Peer, order: Order, count: int) -> None:
        """Announce the slots of `count` blocks as they are filled, and take each back when the
        puller has read it.

        Raises PeerError if the puller has not read all.
        """
        lent: set[int] = set()
        staged, ended = order.staged[0], False
        try:
            while lent or not ended:
                if lent and (ended or staged.empty()):  # no slot is filled until some are back
                    self._take_back(peer, order, lent)
                    continue
                batch = staged.get(timeout=max(0.0, order.deadline - time.monotonic()))
                if batch is not None:
                    lent.update(batch.slots)
                    batch.copied()
                    peer.announce(batch.slots, batch.fills)
                    count -= len(batch.slots)
                    continue
                ended = True
                if count:
                    peer.announce((), NO_NUMBERS)
            if count:
                raise PeerError("the step loop has dropped the order")
        except (PeerError, RuntimeError, queue.Empty) as error:
            self._lost(order)
            raise PeerError(str(error) or "the lease has expired") from None
        finally:
            if lent:  # fill numbers tell a puller that still runs that it has lost the slots
                self._sent(order, list(lent))

    def _take_back(self, peer: Peer, order: Order, lent: set[int]) -> None:
        """Wait for slots that the puller has read. Raises PeerError."""
        if not peer.readable(LENT_SECONDS):
            raise PeerError("it does not read")
        slots = peer.receive_numbers(len(lent))
        if len(lent) - len(lent.difference(slots)) != len(slots):
            raise PeerError(f"slots {slots} were not lent")
        lent.difference_update(slots)
        self._sent(order, slots)

    def _send_stripe(self, peer: Peer, order: Order, stripe: int) -> None:
        if not 0 <= stripe < len(order.staged) or stripe in order.joined:
            raise PeerError(f"stripe {stripe}")
        order.joined.add(stripe)
        peer.deadline = order.deadline
        staged = order.staged[stripe]
        unsent: list[int] = []
        try:
            while True:
                seconds = max(0.0, order.deadline - time.monotonic())
                batch = staged.get(timeout=seconds)
                if batch is None:
                    peer.send_number(LAST)
                    return
                unsent += batch.slots
                batch.copied()
                for index, slot in zip(batch.indices, batch.slots, strict=True):
                    peer.send_number(index)
                    peer.send(self._memory[slot])
                    unsent.remove(slot)
                    self._sent(order, [slot])
        except (PeerError, RuntimeError, queue.Empty) as error:
            self._lost(order)
            raise PeerError(str(error) or "the lease has expired") from None
        finally:
            if unsent:
                self._sent(order, unsent)
