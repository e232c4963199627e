"""The protocol by which a replica pulls KV blocks from another one, by TCP or shared memory.

The puller connects, and both prove that they know the source's secret:

 source   MAGIC, nonce
 puller   nonce, HMAC("puller", nonces)
 source   HMAC("source", nonces)
 puller   Ask on the first connection, Join on further ones: one MessagePack frame
 source   Offer (to an Ask)
 source   blocks of this connection's stripe: index, bytes

A stripe is every n-th block of the offer, where n is the number of connections. Both ends have
time limits for each read and write, and for the whole pull. Any error ends the connection. The
puller then computes the blocks that it has not received.

On one machine the bytes stay in the source's slots, of device or host memory, from which the
puller's device copies them:

 puller   Locate, once
 source   Place
 puller   Ask with a proof that it reads the key in the memory at this place
 source   Offer with its own proof; without both proofs the blocks are sent as above
 source   announcements of filled slots, in the offer's order: how many, the slots' numbers, and
          their fill numbers (`SharedSlots`); how many = 0: the source gives up
 puller   meanwhile, the numbers of the slots that it has read

When the puller has read all slots of an offer, both ends keep the connection for its next Ask.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
NO_NUMBERS: Numbers = np.zeros(0, np.int64)

MAGIC = b"manta-kv-3"
IDLE_SECONDS = 2.0  # maximum seconds without a byte from the peer
LAST = 0xFFFFFFFF  # sent instead of an index after the last block
NUMBER = struct.Struct("<I")

_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAX_FRAME = 16 << 20  # bytes; an Ask has 16 for each block position of its prefix


class PeerError(Exception):
    """An error of a connection to another replica: lost, timed out, or with invalid messages."""


class PeerClosed(PeerError):
    """An error of a connection that the other replica has closed."""


class Locate(msgspec.Struct, array_like=True, tag="locate"):
    """The message that asks where in memory the source has its slots."""


class Place(msgspec.Struct, array_like=True, tag="place"):
    """The place where a process of the source's machine finds the source's slots.

    pid, file: the source's process id and file descriptor of the memory; 0 = it shares none.
    count, slot_bytes: number and size of the slots.
    device_count, handle: number of the slots in device memory, which follow those in host memory,
        and the handle that opens them; 0 and empty = there are none.
    """

    pid: int = 0
    file: int = 0
    count: int = 0
    slot_bytes: int = 0
    device_count: int = 0
    handle: bytes = b""


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """The puller's request to hold blocks, and to send those that it lacks.

    compatibility: digest of what the blocks depend on in the puller's engine; see `BlockMoves`.
    hashes: the hashes of the request's blocks, joined.
    near: number of leading blocks that the puller has.
    stripes: number of connections.
    proof: `Peer.memory_proof` of a puller that has mapped the source's slots; else empty.
    on_device: whether that puller reads the slots in device memory, instead of those in host
        memory.
    """

    compatibility: bytes
    hashes: bytes
    near: int
    stripes: int
    proof: bytes = b""
    on_device: bool = False


class Join(msgspec.Struct, array_like=True, tag="join"):
    """The puller's request to send one stripe of an offer over this connection."""

    ticket: bytes
    stripe: int


class Offer(msgspec.Struct, array_like=True, tag="offer"):
    """The blocks that the source holds and sends.

    refusal: why the source sends no blocks; "" = it sends some.
    ticket: name by which a Join refers to the offer.
    indices: the blocks' places in the request's table, in the order of sending.
    block_bytes: size of each.
    proof: the source's `Peer.memory_proof`, if the bytes stay in its slots; else empty.
    """

    refusal: str = ""
    ticket: bytes = b""
    indices: list[int] = []
    block_bytes: int = 0
    proof: bytes = b""


Message = Ask | Join | Locate | Offer | Place


class Peer:
    """One end of a connection, with blocking reads and writes that have time limits.

    deadline: monotonic seconds after which every read and write fails.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self._nonces = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.sock.close()

    def shut(self) -> None:
        """End all reads and writes of the connection, in all threads."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def readable(self, seconds: float) -> bool:
        """Wait at most `seconds` for bytes or the stream's end; return whether either has come."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLIN)
        except ValueError:
            raise PeerError("the connection is closed") from None
        return bool(poll.poll(1000 * min(seconds, self._seconds_left())))

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline. Raises PeerError after it."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise PeerError("it took too long")
        return seconds

    def _limit(self) -> None:
        self.sock.settimeout(min(self._seconds_left(), IDLE_SECONDS))

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises PeerError."""
        view = memoryview(data)
        try:
            while view:
                self._limit()
                view = view[self.sock.send(view) :]
        except OSError as error:
            raise _error_of("sending", error) from error

    def send_now(self, data: bytes) -> bytes:
        """Send what the system's buffer takes at once; return the rest. Raises PeerError."""
        self._limit()
        try:
            return data[os.write(self.sock.fileno(), data) :]  # `sock.send` would wait for room
        except BlockingIOError:
            return data
        except OSError as error:
            raise _error_of("sending", error) from error

    def fill(self, view: memoryview) -> None:
        """Fill the view with received bytes. Raises PeerError."""
        try:
            while view:
                self._limit()
                count = self.sock.recv_into(view)
                if not count:
                    raise PeerClosed("the peer closed the connection")
                view = view[count:]
        except OSError as error:
            raise _error_of("receiving", error) from error

    def receive(self, count: int) -> bytes:
        """Return `count` received bytes. Raises PeerError."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def send_number(self, number: int) -> None:
        self.send(NUMBER.pack(number))

    def receive_number(self) -> int:
        number: int = NUMBER.unpack(self.receive(NUMBER.size))[0]
        return number

    def receive_numbers(self, most: int) -> list[int]:
        """Return the slot numbers that the puller has sent, one to `most`. Raises PeerError."""
        self._limit()
        try:
            data = self.sock.recv(most * NUMBER.size)
        except OSError as error:
            raise _error_of("receiving", error) from error
        if not data:
            raise PeerClosed("the peer closed the connection")
        return unpack_numbers(data + self.receive(-len(data) % NUMBER.size))

    def announce(self, slots: Sequence[int], fills: Numbers) -> None:
        """Announce the filled slots of the next blocks, and their fill numbers, to the puller.

        No slots end the announcements.
        """
        self.send(NUMBER.pack(len(slots)) + pack_numbers(slots) + pack_numbers(fills))

    def receive_announced(self, most: int) -> tuple[Numbers, Numbers]:
        """Return the slots and fill numbers of one `announce`, at most `most` of each. Raises
        PeerError."""
        count = self.receive_number()
        if count > most:
            raise PeerError(f"{count} blocks instead of {most}")
        numbers = np.frombuffer(self.receive(2 * count * NUMBER.size), "<u4").astype(np.int64)
        return numbers[:count], numbers[count:]

    def send_message(self, message: Message) -> None:
        self.send(frame_of(message))

    def receive_message(self) -> Message:
        """Return the message of the next frame. Raises PeerError."""
        size = self.receive_number()
        if size > _MAX_FRAME:
            raise PeerError(f"a frame of {size} bytes")
        try:
            return msgspec.msgpack.decode(self.receive(size), type=Message)
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
        self._nonces = nonces
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
        self._nonces = nonces

    def memory_proof(self, role: bytes, key: bytes) -> bytes:
        """Return the proof of a role ("puller", "source") that it can read the slots' key."""
        return _mac(key, b"memory of " + role, self._nonces)


def frame_of(message: Message) -> bytes:
    """Return the frame of a message: its size, and its bytes."""
    payload = msgspec.msgpack.encode(message)
    return NUMBER.pack(len(payload)) + payload


def pack_numbers(numbers: Sequence[int] | Numbers) -> bytes:
    """Return the bytes of numbers below 2**32."""
    return np.asarray(numbers, "<u4").tobytes()


def unpack_numbers(data: bytes) -> list[int]:
    """Return the numbers whose bytes `pack_numbers` has returned."""
    return np.frombuffer(data, "<u4").tolist()


def _error_of(doing: str, error: OSError) -> PeerError:
    closed = isinstance(error, ConnectionError)
    return (PeerClosed if closed else PeerError)(f"{doing} failed: {error}")


def _mac(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, MAGIC + b"/" + role + b"/" + nonces, hashlib.sha256).digest()
