"""One authenticated TCP connection between a router and an engine replica.

A frame is a little-endian uint32 length and that many bytes of msgpack. The replica listens and
speaks first:

    replica -> router   Hello(version, nonce)
    router  -> replica  Proof(nonce, mac, name)     mac = HMAC(secret, "router"  + both nonces)
    replica -> router   Welcome(mac)                mac = HMAC(secret, "replica" + both nonces)
    then                router: Submit | Abort | Heartbeat | AddAdapter | AdapterVersion | Recall
                        replica: StepFrame | Failed | AdapterAnswer | Recalled

A peer is cut off if it cannot prove the secret in time, or sends a frame that is too large or does
not decode. Each side sends a frame at least every `heartbeat` seconds and gives up on a peer that
is silent for `timeout` seconds, so a lost machine is noticed long before the cluster notices it. A
peer that does not read is cut off when its backlog passes the write bound. So memory stays bounded,
and the router can go on with its requests elsewhere.

Plain `asyncio.Protocol`, because asyncio's streams cost a task switch a frame.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from engine.messages import (
    Abort,
    AdapterAnswer,
    AddAdapter,
    Delta,
    EngineRequest,
    EngineStats,
    Failed,
    StepFrame,
)

VERSION = 4
_HEADER = struct.Struct("<I")
_NONCE_BYTES = 32
_MAX_HANDSHAKE_FRAME = 1024  # bytes: the most that an unproven peer can make us hold


# When a replica may start a choice: at once; alone among the suspects of a death; or after them.
Start = Literal["", "alone", "after"]


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The replica's first frame."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, array_like=True, tag="proof"):
    """Proves that the router knows the secret. name: for logs only."""

    nonce: bytes
    mac: bytes
    name: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """Proves that the replica knows the secret too."""

    mac: bytes


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """The facts that a replica needs of a request's adapter: `request.adapter` is "name@revision".

    path: where its files are. version: of its record; 0: the request has begun and keeps this
    revision, though there may be a newer one.
    """

    name: str
    revision: str
    path: str
    version: int


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Start one choice. request.id is the router's own number, unique on its connection.

    prefix_hashes: of the prompt (prefix_index.py), joined; the replica passes them on to its
    other routers. adapter: of the request, if it has one. start: when the choice does. deaths:
    replicas that it may have killed (replica/suspect_queue.py). stream: keep its tokens under this
    name (replica/stream_memory.py); "": no client will ask for them.
    """

    request: EngineRequest
    prefix_hashes: bytes = b""
    adapter: AdapterRef | None = None
    start: Start = ""
    deaths: list[str] = []
    stream: str = ""


class AdapterVersion(msgspec.Struct, array_like=True, tag="adapter_version"):
    """Say which revision an adapter's name means from now on; "": none. Requests of older versions
    that have not begun are refused, and other revisions are forgotten. Answered by an
    AdapterAnswer."""

    ticket: int
    name: str
    version: int
    revision: str = ""


class Recall(msgspec.Struct, array_like=True, tag="recall"):
    """Ask for the tokens of these streams. Answered by a Recalled."""

    ticket: int
    streams: list[str]


class StreamRecord(msgspec.Struct, array_like=True):
    """A choice of a stream. token_ids: its output. finish, stop_token: as the Delta that ended it
    has them; "" if none did."""

    stream: str
    choice: int
    token_ids: list[int]
    finish: str = ""
    stop_token: int | None = None


class Recalled(msgspec.Struct, array_like=True, tag="recalled"):
    """The records of all that the replica knows of the choices of the streams."""

    ticket: int
    records: list[StreamRecord]


class Heartbeat(msgspec.Struct, array_like=True, tag="beat"):
    """Say that the router is alive and has nothing else to send."""


_encoder = msgspec.msgpack.Encoder()
FromRouter = Submit | Abort | AddAdapter | AdapterVersion | Recall
FromReplica = StepFrame | Failed | AdapterAnswer | Recalled

_from_router = msgspec.msgpack.Decoder(Proof | Heartbeat | FromRouter)
_from_replica = msgspec.msgpack.Decoder(Hello | Welcome | FromReplica)


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """The bounds of a channel, in seconds and bytes.

    handshake: 3 s is long for three frames inside a cluster and short for a port scanner.
    heartbeat, timeout: five missed heartbeats, so that a second of stalled interpreter is not taken
    for a death. Heartbeats are counted, not seconds: a process that was stopped itself has missed
    none.
    max_frame: 32 MiB holds prompt logprobs of a 100,000-token prompt.
    max_backlog: bytes waiting for a peer that does not read.
    """

    handshake: float = 3.0
    heartbeat: float = 0.5
    timeout: float = 2.5
    max_frame: int = 32 * 2**20
    max_backlog: int = 64 * 2**20


class ChannelConnection(asyncio.Protocol):
    """The part that both ends share: frames, liveness, bounds. `on_close(connection, reason)` is
    called exactly once."""

    def __init__(
        self,
        secret: bytes,
        limits: ChannelLimits,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_close: Callable[[Any, str], None],
    ) -> None:
        self.open = False  # both sides have proved the secret
        self.silent = False  # it was closed because nothing came
        self.peer = ""
        self.address = ""  # of the peer, without the port
        self._secret = secret
        self._limits = limits
        self._decode = decoder.decode
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tail = bytearray()  # the beginning of a frame that has not come whole
        self._max_frame = _MAX_HANDSHAKE_FRAME
        self._heard = False  # bytes have come since the last tick
        self._missed = 0  # ticks in a row without
        self._sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not one by class
        if self._reason:  # closed before it was made
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer)
        self.address = str(peer[0]) if isinstance(peer, tuple) else self.peer
        self._timer = self._loop.call_later(
            self._limits.handshake, self.close, "no handshake in time"
        )

    def data_received(self, data: bytes) -> None:
        self._heard = True
        buffer: bytes | bytearray = data
        if self._tail:
            self._tail += data
            buffer = self._tail
        end = len(buffer)
        position = 0
        with memoryview(buffer) as view:
            while end - position >= 4:
                (size,) = _HEADER.unpack_from(buffer, position)
                if size > self._max_frame:
                    self.close(f"a frame of {size} bytes")
                    return
                if end - position - 4 < size:
                    break
                begin = position + 4
                position = begin + size
                try:
                    message = self._decode(view[begin:position])
                except msgspec.MsgspecError as error:
                    self.close(f"a frame that does not decode: {error}")
                    return
                self._receive(message)
                if self._reason:
                    return
        if buffer is self._tail:
            del self._tail[:position]
        elif position < end:
            self._tail = bytearray(data[position:])

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.open = False
        if not self._reason:
            self._reason = f"connection lost: {error or 'closed by the peer'}"
        self._on_close(self, self._reason)

    # -- for the owner

    def send(self, message: Any) -> None:
        """Queue one frame. A message to a connection that has ended is dropped: `on_close` tells
        the owner."""
        transport = self._transport
        if transport is None or self._reason:
            return
        payload = _encoder.encode(message)
        transport.write(_HEADER.pack(len(payload)) + payload)
        self._sent = self._loop.time()
        if transport.get_write_buffer_size() > self._limits.max_backlog:
            self.close("the peer does not read")

    def close(self, reason: str) -> None:
        """End the connection at once. Idempotent; the first reason stays."""
        if self._reason:
            return
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # -- for the two ends

    def _receive(self, message: Any) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        """Tell the peer that this end is alive."""
        self.send(Heartbeat())

    def _mac(self, role: bytes, replica_nonce: bytes, router_nonce: bytes) -> bytes:
        text = b"manta-channel-%d/" % VERSION + role + b"/" + replica_nonce + router_nonce
        return hmac.new(self._secret, text, hashlib.sha256).digest()

    def _opened(self) -> None:
        self.open = True
        self._max_frame = self._limits.max_frame
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._limits.heartbeat, self._tick)

    def _tick(self) -> None:
        limits = self._limits
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False
        if self._missed * limits.heartbeat >= limits.timeout:
            self.silent = not self._reason
            self.close(f"silent for {self._missed * limits.heartbeat:.3g} s")
            return
        if self._loop.time() - self._sent >= limits.heartbeat * 0.9:
            self._beat()
        self._timer = self._loop.call_later(self._limits.heartbeat, self._tick)


class ReplicaEnd(ChannelConnection):
    """The replica's end, which listens. on_made: the connection is new and has proved nothing.
    on_message gets a router's messages; stats() is for a heartbeat."""

    def __init__(
        self,
        secret: bytes,
        limits: ChannelLimits,
        *,
        on_open: Callable[["ReplicaEnd"], None],
        on_message: Callable[["ReplicaEnd", FromRouter], None],
        on_close: Callable[["ReplicaEnd", str], None],
        stats: Callable[[], EngineStats],
        on_made: Callable[["ReplicaEnd"], None] = lambda _: None,
    ) -> None:
        super().__init__(secret, limits, _from_router, on_close)
        self.index = -1  # the replica's number for it
        self.live: set[int] = set()  # engine ids of its unfinished requests
        self.router = ""
        # For this router's next frame: prefix hashes that other routers have sent, and its own
        # requests that the replica's figures count by now.
        self.prefix_hashes = bytearray()
        self.taken: list[int] = []
        self._on_made = on_made
        self._on_open = on_open
        self._on_message = on_message
        self._stats = stats

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._on_made(self)
        self.send(Hello(VERSION, self._nonce))

    def send_frame(self, stats: EngineStats, deltas: list[Delta]) -> None:
        """Send a frame with the replica's newest stats, and what else this router has to know."""
        taken, self.taken = self.taken, []
        prefix_hashes = bytes(self.prefix_hashes)
        self.prefix_hashes.clear()
        self.send(StepFrame(stats, deltas, prefix_hashes, taken=taken))

    def since_sent(self, now: float) -> float:
        """Return the seconds since the last frame to this router; now is the loop's time."""
        return now - self._sent

    def _receive(self, message: Any) -> None:
        if self.open:
            if isinstance(message, FromRouter):
                self._on_message(self, message)
            elif isinstance(message, Proof):
                self.close("a second handshake")
            return
        if not isinstance(message, Proof) or len(message.nonce) != _NONCE_BYTES:
            self.close("no proof of the secret")
            return
        if not hmac.compare_digest(message.mac, self._mac(b"router", self._nonce, message.nonce)):
            self.close("wrong secret")
            return
        self.router = message.name[:64]
        self.send(Welcome(self._mac(b"replica", self._nonce, message.nonce)))
        self._opened()
        self._on_open(self)

    def _beat(self) -> None:
        self.send_frame(self._stats(), [])


class RouterEnd(ChannelConnection):
    """The router's end, which connects. on_frame gets a replica's messages."""

    def __init__(
        self,
        secret: bytes,
        limits: ChannelLimits,
        name: str,
        *,
        on_open: Callable[["RouterEnd"], None],
        on_frame: Callable[["RouterEnd", FromReplica], None],
        on_close: Callable[["RouterEnd", str], None],
    ) -> None:
        super().__init__(secret, limits, _from_replica, on_close)
        self._name = name
        self._on_open = on_open
        self._on_frame = on_frame
        self._replica_nonce = b""

    def _receive(self, message: Any) -> None:
        if self.open:
            if isinstance(message, FromReplica):
                self._on_frame(self, message)
            else:
                self.close("a second handshake")
            return
        if isinstance(message, Hello) and not self._replica_nonce:
            if message.version != VERSION:
                self.close(f"the replica speaks version {message.version}, we speak {VERSION}")
            elif len(message.nonce) != _NONCE_BYTES:
                self.close("a nonce of the wrong length")
            else:
                self._replica_nonce = message.nonce
                mac = self._mac(b"router", message.nonce, self._nonce)
                self.send(Proof(self._nonce, mac, self._name))
        elif isinstance(message, Welcome) and self._replica_nonce:
            expected = self._mac(b"replica", self._replica_nonce, self._nonce)
            if not hmac.compare_digest(message.mac, expected):
                self.close("the replica does not know the secret")
                return
            self._opened()
            self._on_open(self)
        else:
            self.close("not a replica")
