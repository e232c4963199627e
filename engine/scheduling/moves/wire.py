"""The protocol by which a replica pulls KV blocks from another one, over TCP.

The puller connects, and both prove that they know the source's secret:

 source   MAGIC, nonce
 puller   nonce, HMAC("puller", nonces)
 source   HMAC("source", nonces)
 puller   Ask on the first connection, Join on further ones: one MessagePack frame
 source   Offer (to an Ask)
 source   blocks of this connection's stripe: index, bytes

A stripe is every n-th block of the offer, where n is the number of connections. Both ends have
time limits for each read and write, and for the whole pull. Whatever is wrong ends the connection.
The puller then has fewer blocks, which costs computing and nothing else.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time

import msgspec

MAGIC = b"manta-kv-1"
IDLE_SECONDS = 2.0  # longest time without a byte from the peer
LAST = 0xFFFFFFFF  # instead of an index: no block follows

_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAX_FRAME = 16 << 20  # bytes; 16 hashes of a block fill 256
_LENGTH = struct.Struct("<I")


class PeerError(Exception):
    """An error of a connection to another replica: it is lost, late, or speaks nonsense."""


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """The order to hold blocks, and to send those that the puller lacks.

    compatibility: of the puller's engine; see `BlockMoves`.
    hashes: of the request's blocks, joined.
    near: leading blocks that the puller has.
    stripes: number of connections.
    """

    compatibility: bytes
    hashes: bytes
    near: int
    stripes: int


class Join(msgspec.Struct, array_like=True, tag="join"):
    """The order to send one stripe of an offer over this connection."""

    ticket: bytes
    stripe: int


class Offer(msgspec.Struct, array_like=True, tag="offer"):
    """The blocks that the source holds and sends.

    refusal: why it sends none; "": it sends some.
    ticket: name of the offer, for a Join.
    indices: of the blocks in the request's table, in the order of sending.
    block_bytes: size of each.
    """

    refusal: str = ""
    ticket: bytes = b""
    indices: list[int] = []
    block_bytes: int = 0


class Peer:
    """One end of a connection, with blocking reads and writes that have time limits.

    deadline: monotonic seconds after which every read and write fails.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.sock.close()

    def _limit(self) -> None:
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise PeerError("it took too long")
        self.sock.settimeout(min(seconds, IDLE_SECONDS))

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises PeerError."""
        view = memoryview(data)
        try:
            while view:
                self._limit()
                view = view[self.sock.send(view) :]
        except OSError as error:
            raise PeerError(f"sending failed: {error}") from error

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as the view has. Raises PeerError."""
        try:
            while view:
                self._limit()
                count = self.sock.recv_into(view)
                if not count:
                    raise PeerError("the peer closed the connection")
                view = view[count:]
        except OSError as error:
            raise PeerError(f"receiving failed: {error}") from error

    def receive(self, count: int) -> bytes:
        """Return that many received bytes. Raises PeerError."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def send_number(self, number: int) -> None:
        self.send(_LENGTH.pack(number))

    def receive_number(self) -> int:
        number: int = _LENGTH.unpack(self.receive(_LENGTH.size))[0]
        return number

    def send_message(self, message: Ask | Join | Offer) -> None:
        payload = msgspec.msgpack.encode(message)
        self.send(_LENGTH.pack(len(payload)) + payload)

    def receive_message(self) -> Ask | Join | Offer:
        """Return the message of the next frame. Raises PeerError."""
        size = self.receive_number()
        if size > _MAX_FRAME:
            raise PeerError(f"a frame of {size} bytes")
        try:
            return msgspec.msgpack.decode(self.receive(size), type=Ask | Join | Offer)
        except msgspec.MsgspecError as error:
            raise PeerError(f"a frame that does not decode: {error}") from error

    # -- the proofs of the secret

    def greet(self, secret: bytes) -> None:
        """Prove the secret as the source, and check the puller's proof. Raises PeerError."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.send(MAGIC + nonce)
        proof = self.receive(_NONCE_BYTES + _MAC_BYTES)
        nonces = nonce + proof[:_NONCE_BYTES]
        if not hmac.compare_digest(proof[_NONCE_BYTES:], _mac(secret, b"puller", nonces)):
            raise PeerError("the peer does not know the secret")
        self.send(_mac(secret, b"source", nonces))

    def introduce(self, secret: bytes) -> None:
        """Prove the secret as the puller, and check the source's proof. Raises PeerError."""
        greeting = self.receive(len(MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise PeerError("the peer is no source of KV blocks of this version")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = greeting[len(MAGIC) :] + nonce
        self.send(nonce + _mac(secret, b"puller", nonces))
        if not hmac.compare_digest(self.receive(_MAC_BYTES), _mac(secret, b"source", nonces)):
            raise PeerError("the source does not know the secret")


def _mac(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, MAGIC + b"/" + role + b"/" + nonces, hashlib.sha256).digest()
