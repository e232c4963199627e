"""Event ids: each event's id contains the state of the stream, from which any router can resume it.

An id is opaque to clients. It contains the stream's format version, start time and number, a
fingerprint of the engines' input, and for each choice the number of tokens sent, their checksum and
the choice's phase. A MAC covers these, the request's body and its caller. The tokens are not in the
id: replicas remember those of running and recently ended streams (stream_memory.py). Tokens that no
replica remembers are generated again from the seed and compared with the checksum. So an id has
some 60 characters, however long the answer is.
"""

import hashlib
import hmac
import secrets
import struct
import time
from array import array
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import NO_RETRY, ApiError, invalid
from deployments.api.http.exchange import HttpExchange

WANTED = b"x-event-ids"  # a request's header: "1" asks for ids
LAST = b"last-event-id"

# Seconds from the stream's start for which its ids are valid.
LIFE_SECONDS = 86400
OPENED, ENDED, FINISHED = 1, 2, 3  # phases of a choice; 0: before its first event

_VERSION = 1
_HEAD = struct.Struct(">BI12s4s")  # a multiple of 3 bytes: constant in base64
_MAC_BYTES = 12
# Maximum characters of an id; with 32 prompts of 8 choices an id has 3,500.
_MAX_ID = 8192


@dataclass(slots=True)
class ChoiceProgress:
    """The part of one choice that a client has received.

    tokens: the number of output tokens received
    check: the CRC-32 of these tokens
    cached: the number of cached prompt tokens, as usage reports it
    phase: OPENED after the choice's first event, ENDED after the event with its last text, FINISHED
        after the event with its finish_reason
    """

    phase: int = 0
    tokens: int = 0
    check: int = 0
    cached: int = 0

    def encode(self) -> bytes:
        encoded = _varint(self.tokens << 2 | self.phase)
        if self.tokens:
            encoded += self.check.to_bytes(4, "big") + _varint(self.cached)
        return encoded


class EventIds:
    """The generator of the event ids of one streamed answer.

    shown: the progress of each choice; for a resumed stream at first that in `Last-Event-ID`
    told: 1 after usage was sent, else 0; for answers in items, the number of events sent
    """

    def __init__(self, secret: bytes, binding: bytes, number: bytes, created: int) -> None:
        self.number = number
        self.created = created
        self.shown: list[ChoiceProgress] = []
        self.told = 0
        self.resumed = False
        self._secret = secret
        self._binding = binding
        self._asked = b""  # the call's fingerprint, set by `bind`
        self._parts: list[bytes] = []
        self._prefix = b""

    @property
    def seed(self) -> int:
        """The default seed of the request, which is the same when the stream is resumed."""
        return int.from_bytes(hashlib.blake2b(self.number, digest_size=8).digest(), "big") >> 1

    def bind(self, call: GenerationCall) -> None:
        """Set the call to which the ids belong, and the call's seed and stream names.

        Raises ApiError 409 if the call differs from that of the resumed stream, because an adapter
        was replaced or the template contains the date.
        """
        asked = fingerprint(call)
        count = len(call.prompts) * call.common.params.n
        if self.resumed and (asked != self._asked or count != len(self.shown)):
            raise ApiError(
                409,
                "stream_changed",
                "the stream cannot go on: its adapter or its prompt is not what it was",
                param="last-event-id",
                headers=NO_RETRY,
            )
        self._asked = asked
        if not self.resumed:
            self.shown = [ChoiceProgress() for _ in range(count)]
        call.common.seed = self.seed
        call.streams = [f"{self.number.hex()}.{i}" for i in range(len(call.prompts))]
        head = _HEAD.pack(_VERSION, self.created, self.number, asked)
        self._prefix = b"id: " + b2a_base64(head, newline=False)
        self._mac = hashlib.blake2b(self._binding + head, key=self._secret, digest_size=_MAC_BYTES)
        self._parts = [_varint(self.told), *(progress.encode() for progress in self.shown)]

    def took(self, index: int, token_ids: Sequence[int], cached: int, ended: bool) -> None:
        """Record tokens of a choice that the next event contains, in that event's id.

        index: number of the choice. cached: number of cached tokens of its prompt.
        ended: whether all of the choice's text has been sent with these tokens.
        """
        if not (token_ids or ended):
            return
        shown = self.shown[index]
        if not shown.tokens:
            shown.cached = cached
        shown.tokens += len(token_ids)
        shown.check = checksum(token_ids, shown.check)
        shown.phase = ENDED if ended else OPENED
        self._parts[index + 1] = shown.encode()

    def enter(self, index: int, phase: int) -> None:
        """Record the phase of a choice for the next event, which has no tokens."""
        self.shown[index].phase = phase
        self._parts[index + 1] = self.shown[index].encode()

    def tell(self, count: int) -> None:
        self.told = count
        self._parts[0] = _varint(count)

    def line(self) -> bytes:
        """Return the `id` line for the next event."""
        position = b"".join(self._parts)
        mac = self._mac.copy()
        mac.update(position)
        return b"%b%b\n" % (self._prefix, b2a_base64(position + mac.digest(), newline=False))

    @classmethod
    def parse(cls, text: bytes, secret: bytes, binding: bytes) -> "EventIds":
        """Decode a client's event id, and verify its MAC and age.

        secret: the MAC's key.
        binding: what the id belongs to: the request's path, the digest of its body, its caller.
        Raises ApiError 400 invalid_event_id, event_id_expired.
        """
        try:
            raw = a2b_base64(text if len(text) <= _MAX_ID else b"", strict_mode=True)
        except Base64Error:
            raw = b""
        if b2a_base64(raw, newline=False) != text:
            # Bytes have several spellings in base64, only one of which is valid.
            raise _unknown()
        signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if len(signed) <= _HEAD.size or signed[0] != _VERSION:
            raise _unknown()
        expected = hashlib.blake2b(binding, key=secret, digest_size=_MAC_BYTES)
        expected.update(signed)
        if not hmac.compare_digest(mac, expected.digest()):
            raise _unknown()
        _, created, number, asked = _HEAD.unpack_from(signed)
        if time.time() > created + LIFE_SECONDS:
            raise invalid(
                f"this id is of a stream that began more than {LIFE_SECONDS // 3600} hours ago",
                LAST.decode(),
                "event_id_expired",
            )
        ids = cls(secret, binding, number, created)
        ids.resumed = True
        ids._asked = asked
        ids.told, at = _read_varint(signed, _HEAD.size)
        while at < len(signed):
            value, at = _read_varint(signed, at)
            shown = ChoiceProgress(value & 3, value >> 2)
            if shown.tokens:
                shown.check = int.from_bytes(signed[at : at + 4], "big")
                shown.cached, at = _read_varint(signed, at + 4)
            ids.shown.append(shown)
        return ids


def event_ids(exchange: HttpExchange, caller: str, secret: bytes) -> EventIds | None:
    """Return the event ids of a request; None if the request neither asks for ids nor resumes a
    stream.

    The body must have been read before. Raises ApiError 400 invalid_event_id, event_id_expired.

    caller: the id of the request's caller
    """
    last = b"".join(exchange.headers.get(LAST, [])[:1])
    if not last and exchange.headers.get(WANTED) != [b"1"]:
        return None
    bound = (exchange.path.encode(), exchange.digest, caller.encode())
    binding = b"".join(len(part).to_bytes(2, "big") + part for part in bound)
    if last:
        return EventIds.parse(last, secret, binding)
    return EventIds(secret, binding, secrets.token_bytes(12), int(time.time()))


def fingerprint(call: GenerationCall) -> bytes:
    """Return a hash of the engines' input: the prompts' token ids and the adapter's revision.

    The same body may result in another input later.
    """
    digest = hashlib.blake2b(digest_size=4)
    digest.update(call.common.adapter_key.encode())
    for ids in call.prompts:
        digest.update(b"/")
        digest.update(array("I", ids).tobytes())
    return digest.digest()


def checksum(token_ids: Sequence[int], before: int = 0) -> int:
    """Return the CRC-32 of a choice's tokens. before: the checksum of the tokens before these."""
    return crc32(array("I", token_ids).tobytes(), before)


def _unknown() -> ApiError:
    return invalid(
        "this is no id of a stream with this body, path and key; repeat the request as it was",
        LAST.decode(),
        "invalid_event_id",
    )


def _varint(value: int) -> bytes:
    if value < 128:
        return value.to_bytes(1, "big")
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
