"""SourceServer: the threads that send a replica's KV blocks to others.

A connection's thread hands the puller's order to the step loop, which holds the blocks and stages
them in host memory. The thread then sends what is staged. So the step loop never waits for a peer,
and a peer that does not read costs its own stripe only.
"""

import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.scheduling.moves.wire import (
    IDLE_SECONDS,
    LAST,
    Ask,
    Join,
    Offer,
    Peer,
    PeerError,
)

logger = logging.getLogger("manta.engine")

LEASE_SECONDS = 30.0  # longest time for which blocks are held for a pull
MAX_STRIPES = 8
_GREETING_SECONDS = 2.0
_MAX_CONNECTIONS = 64

Staged = tuple[int, int]  # (index in the request's table, slot with the block's bytes)


@dataclass(eq=False, slots=True)
class Order:
    """A pull that the step loop has to answer, and then to stage.

    answer: gets the offer, once.
    staged: of each stripe, the blocks to send in order; None ends it.
    num_sent: blocks sent so far.
    ended: set when no block is left to send.
    """

    ask: Ask
    deadline: float
    ticket: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    answer: "queue.SimpleQueue[Offer]" = field(default_factory=queue.SimpleQueue)
    staged: "list[queue.SimpleQueue[Staged | None]]" = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    num_sent: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.staged = [queue.SimpleQueue() for _ in range(self.ask.stripes)]


class SourceServer:
    """The listener of one engine, and a thread for each connection.

    memory: the bytes of each staging slot.
    ordered: called from any thread with a new order.
    sent: called from any thread when a slot's bytes are not needed any more.
    lost: called from any thread when a stripe of an order cannot be sent.
    """

    def __init__(
        self,
        memory: Sequence[memoryview],
        ordered: Callable[[Order], None],
        sent: Callable[[Order, int], None],
        lost: Callable[[Order], None],
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self.port = 0
        self._memory = memory
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
        """Drop an order that has ended; no connection may join it any more."""
        self._orders.pop(order.ticket, None)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="kv-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        peer = Peer(sock, time.monotonic() + _GREETING_SECONDS)
        try:
            peer.greet(self.secret)
            message = peer.receive_message()
            if isinstance(message, Ask):
                self._take_order(peer, message)
            elif isinstance(message, Join):
                order = self._orders.get(message.ticket)
                if order is not None:
                    self._send_stripe(peer, order, message.stripe)
        except PeerError as error:
            logger.debug("a pull of KV blocks ended: %s", error)
        finally:
            peer.close()
            self._room.release()

    def _take_order(self, peer: Peer, ask: Ask) -> None:
        if not 1 <= ask.stripes <= MAX_STRIPES:
            raise PeerError(f"{ask.stripes} stripes")
        peer.deadline = time.monotonic() + LEASE_SECONDS
        order = Order(ask, peer.deadline)
        self._orders[order.ticket] = order
        self._ordered(order)
        try:
            offer = order.answer.get(timeout=LEASE_SECONDS)
            peer.send_message(offer)
        except (PeerError, queue.Empty):
            self._lost(order)
            raise PeerError("the puller left before the offer") from None
        if offer.refusal:
            return
        self._send_stripe(peer, order, 0)
        sent = -1
        while not order.ended.wait(2 * IDLE_SECONDS):
            if order.num_sent == sent:  # a stripe that nobody has joined, or that stands still
                self._lost(order)
                return
            sent = order.num_sent

    def _send_stripe(self, peer: Peer, order: Order, stripe: int) -> None:
        if not 0 <= stripe < order.ask.stripes or stripe in order.joined:
            raise PeerError(f"stripe {stripe}")
        order.joined.add(stripe)
        peer.deadline = order.deadline
        staged = order.staged[stripe]
        try:
            while True:
                seconds = max(0.0, order.deadline - time.monotonic())
                block = staged.get(timeout=seconds)
                if block is None:
                    peer.send_number(LAST)
                    return
                index, slot = block
                try:
                    peer.send_number(index)
                    peer.send(self._memory[slot])
                finally:
                    self._sent(order, slot)
        except (PeerError, queue.Empty) as error:
            self._lost(order)
            raise PeerError(str(error) or "the lease has expired") from None
