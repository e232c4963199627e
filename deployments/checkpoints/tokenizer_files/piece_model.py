"""PieceModel: parses a SentencePiece model file, without the sentencepiece package.

The file is a protocol buffer of sentencepiece_model.proto, whose field numbers are stable.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of pieces
# Number of the model type BPE; 1 is Unigram.
BPE = 2


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A SentencePiece model.

    tokens, scores, kinds: texts, scores and types of the pieces, by id.
    kind: number of the model's type; see the constant BPE.
    ids: ids of bos, eos, pad and unk; -1: none.
    charsmap: the compiled character map; empty if texts are not normalised.
    prefix: whether each text gets a space before it.
    collapse: whether spaces at the ends are dropped, and runs of spaces become one.
    suffix: whether a space belongs to the word before it instead of the word after it.
    """

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    kind: int
    byte_fallback: bool
    ids: dict[str, int]
    charsmap: bytes
    prefix: bool
    collapse: bool
    suffix: bool

    @classmethod
    def parse(cls, content: bytes) -> "PieceModel":
        """Parse a file's content. Raises ValueError if it is not a SentencePiece model."""
        tokens: list[str] = []
        scores: list[float] = []
        kinds: list[int] = []
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for field, value in _fields(content):
            if field == 1:
                piece = dict(_fields(_message(value)))
                tokens.append(_message(piece.get(1, b"")).decode())
                scores.append(struct.unpack("<f", _message(piece.get(2, bytes(4))))[0])
                kinds.append(_number(piece, 3, NORMAL))
            elif field == 2:
                trainer = dict(_fields(_message(value)))
            elif field == 3:
                normalizer = dict(_fields(_message(value)))
        if not tokens or not trainer or not normalizer:  # in this order in the file
            raise ValueError("it ends too early")
        places = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
        ids = {name: _number(trainer, *place) for name, place in places.items()}
        return cls(
            tokens,
            scores,
            kinds,
            _number(trainer, 3, 1),
            bool(_number(trainer, 35, 0)),
            {name: index for name, index in ids.items() if 0 <= index < len(tokens)},
            _message(normalizer.get(2, b"")),
            bool(_number(normalizer, 3, 1)),
            bool(_number(normalizer, 4, 1)),
            bool(_number(trainer, 24, 0)),
        )


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has another type than SentencePiece's")
    return value


def _number(message: dict[int, int | bytes], field: int, default: int) -> int:
    """Return the value of an int32 field of a message; negative numbers are encoded as 64-bit
    integers."""
    value = message.get(field, default)
    if isinstance(value, bytes):
        raise ValueError("a field has another type than SentencePiece's")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a protocol buffer message; varints as int, others as bytes."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(content, at)
            yield key >> 3, number
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is no protocol buffer")
        if at + size > len(content):
            raise ValueError("it ends too early")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise ValueError("it ends inside a number")
        byte = content[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
