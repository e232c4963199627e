"""An authenticated TCP connection between a router and an engine replica.

A frame is a little-endian uint32 length and that many bytes of msgpack. The replica listens and
sends the first frame:

  replica -> router   Hello(version, nonce)
  router  -> replica  Proof(nonce, mac, name)     mac = HMAC(secret, "router"  + both nonces)
  replica -> router   Welcome(mac)                mac = HMAC(secret, "replica" + both nonces)
  then                router: Submit | Abort | Heartbeat | AddAdapter | AdapterVersion | Recall
                              | UpdateWeights | Control
                      replica: StepFrame | Failed | AdapterAnswer | Recalled | Answer

A peer is disconnected if it does not prove the secret in time, or sends a frame that is too large
or cannot be decoded. Each side sends a frame at least every `heartbeat` seconds and disconnects a
peer that is silent for `timeout` seconds, so a lost machine is noticed long before Ray notices it.
A peer that does not read is disconnected when its backlog exceeds the limit. So memory stays
bounded, and the router can move its requests to other replicas.

The module uses `asyncio.Protocol` directly, because asyncio's streams need a task switch per frame.
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
    Answer,
    Control,
    Delta,
    EngineRequest,
    EngineStats,
    Failed,
    StepFrame,
    TransferWeights,
    UpdateWeights,
)

VERSION = 4
_HEADER = struct.Struct("<I")
_NONCE_BYTES = 32
_MAX_HANDSHAKE_FRAME = 1024  # bytes: the maximum that is buffered for a peer before its proof


# When a replica may start a choice. "": immediately; "alone": while no other suspect of a death
# runs; "after": after all suspects.
Start = Literal["", "alone", "after"]


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The replica's first frame, with the nonce for the router's proof."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, array_like=True, tag="proof"):
    """The router's proof that it knows the secret. name: the router's name, for logs only."""

    nonce: bytes
    mac: bytes
    name: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """The replica's proof that it knows the secret."""

    mac: bytes


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """The adapter of a request and the path of its files; `EngineRequest.adapter` is
    "name@revision".

    path: folder or URL of the adapter's files.
    version: version of the adapter's record; 0: the request has begun and keeps this revision, even
        if there is a newer one.
    """

    name: str
    revision: str
    path: str
    version: int


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """An order to start one choice. request.id is the router's number of the choice, unique on the
    connection.

    prefix_hashes: joined hashes of the prompt (prefix_index.py), which the replica forwards to
        other routers.
    adapter: adapter of the request, if it has one.
    start: when the replica may start the choice.
    deaths: names of the replicas that the choice may have killed (replica/suspect_queue.py).
    stream: name under which the replica remembers the tokens (replica/stream_memory.py); "": the
        tokens are not remembered.
    """

    request: EngineRequest
    prefix_hashes: bytes = b""
    adapter: AdapterRef | None = None
    start: Start = ""
    deaths: list[str] = []
    stream: str = ""


class AdapterVersion(msgspec.Struct, array_like=True, tag="adapter_version"):
    """An order to set the current revision of an adapter; revision "": the adapter was removed.

    The replica then refuses new requests with older versions, and drops other revisions. The answer
    is an AdapterAnswer.
    """

    ticket: int
    name: str
    version: int
    revision: str = ""


class Recall(msgspec.Struct, array_like=True, tag="recall"):
    """A request for the remembered tokens of streams. The answer is a Recalled."""

    ticket: int
    streams: list[str]


class StreamRecord(msgspec.Struct, array_like=True):
    """The output of one choice of a stream.

    token_ids: the output so far.
    finish, stop_token: fields of the Delta that ended the choice; "" and None if it has not ended.
    """

    stream: str
    choice: int
    token_ids: list[int]
    finish: str = ""
    stop_token: int | None = None


class Recalled(msgspec.Struct, array_like=True, tag="recalled"):
    """The records of all choices of those requested streams that the replica remembers."""

    ticket: int
    records: list[StreamRecord]


class Heartbeat(msgspec.Struct, array_like=True, tag="beat"):
    """A router's frame that shows that the router is alive, if it has nothing else to send."""


_encoder = msgspec.msgpack.Encoder()
FromRouter = (
    Submit
    | Abort
    | AddAdapter
    | AdapterVersion
    | Recall
    | UpdateWeights
    | TransferWeights
    | Control
)
FromReplica = StepFrame | Failed | AdapterAnswer | Recalled | Answer

_from_router = msgspec.msgpack.Decoder(Proof | Heartbeat | FromRouter)
_from_replica = msgspec.msgpack.Decoder(Hello | Welcome | FromReplica)


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """The limits of a channel, in seconds and bytes.

    handshake: maximum duration of a handshake; 3 s is long for three frames inside a cluster, and
        short for a port scanner.
    heartbeat: maximum time between two frames from one side.
    timeout: silence after which a peer counts as lost: five heartbeats, so that an interpreter may
        stall for a second. Missed heartbeats are counted rather than seconds, so that a process
        that was itself stopped does not blame its peers.
    max_frame: maximum size of a frame; 128 MiB is enough for the pixels of a request's images, and
        for the logprobs of a 400,000-token prompt.
    max_backlog: maximum unsent bytes for a peer that does not read.
    """

    handshake: float = 3.0
    heartbeat: float = 0.5
    timeout: float = 2.5
    max_frame: int = 128 * 2**20
    max_backlog: int = 64 * 2**20


class ChannelConnection(asyncio.Protocol):
    """The base class of both ends of a channel: frames, heartbeats and limits.

    on_close: called exactly once, with the connection and the reason.
    """

    def __init__(
        self,
        secret: bytes,
        limits: ChannelLimits,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_close: Callable[[Any, str], None],
    ) -> None:
        # Whether both sides have proved the secret.
        self.open = False
        # Whether the connection was closed because the peer was silent.
        self.silent = False
        self.peer = ""
        self.address = ""  # the peer's address, without the port
        self._secret = secret
        self._limits = limits
        self._decode = decoder.decode
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tail = bytearray()  # the received part of an incomplete frame
        self._max_frame = _MAX_HANDSHAKE_FRAME
        self._heard = False  # whether bytes have arrived since the last tick
        self._missed = 0  # ticks in a row without bytes
        self._sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""
        self._nonce = secrets.token_bytes(_NONCE_BYTES)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        if self._reason:  # closed before it was established
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
        """Send a message as one frame. On a closed connection it is dropped, as the owner is
        notified by `on_close`."""
        transport = self._transport
        if transport is None or self._reason:
            return
        payload = _encoder.encode(message)
        transport.write(_HEADER.pack(len(payload)) + payload)
        self._sent = self._loop.time()
        if transport.get_write_buffer_size() > self._limits.max_backlog:
            self.close("the peer does not read")

    def close(self, reason: str) -> None:
        """Close the connection immediately. Idempotent; the first reason is kept."""
        if self._reason:
            return
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # -- for the two ends

    def _receive(self, message: Any) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        """Send a frame that shows that this end is alive."""
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
    """The replica's end of a connection, which the router has opened.

    on_made: called when the connection is new and the router has proved nothing.
    on_open: called when the handshake has succeeded.
    on_message: called with each message of the router.
    stats: returns the replica's present stats, for heartbeats.
    """

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
        self.index = -1  # index of this connection at the replica
        self.live: set[int] = set()  # the engine's ids of this router's unfinished requests
        self.router = ""
        # Content of this router's next frame (see StepFrame): prefix hashes that other routers have
        # sent, hashes that the engine has evicted (`gone`) or moved to host memory or disk
        # (`lowered`), and the ids of the router's requests that the stats count now.
        self.prefix_hashes = bytearray()
        self.gone, self.lowered = bytearray(), bytearray()
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
        """Send a frame with stats, deltas, and the prefix hashes and request ids that were
        collected for this router's next frame."""
        taken, self.taken = self.taken, []
        prefix_hashes = bytes(self.prefix_hashes)
        gone, lowered = bytes(self.gone), bytes(self.lowered)
        for sent in (self.prefix_hashes, self.gone, self.lowered):
            sent.clear()
        self.send(StepFrame(stats, deltas, prefix_hashes, 0, taken, gone, lowered))

    def since_sent(self, now: float) -> float:
        """Return the seconds since the last frame to this router. now: the loop's time."""
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
    """The router's end of a connection, which it opens.

    name: name of the router, for the replica's logs.
    on_open: called when the handshake has succeeded.
    on_frame: called with each message of the replica.
    """

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
