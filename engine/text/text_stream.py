"""TextStream: converts token ids to text incrementally, exactly and quickly.

The text depends only on the ids, not on how they are split into calls. `tokenizers.DecodeStream`
cannot be used: it drops an incomplete character at the end, and it raises errors or differs for
invalid UTF-8, which models produce at high temperatures.
"""

import codecs
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("manta-replace-each-byte", _replace_each_byte)


def _byte_of_char() -> dict[str, int]:
    """Return the map of GPT-2's printable characters to the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    for byte in range(256):
        if byte not in plain:
            table[chr(256 + len(table) - len(plain))] = byte
    return table


BYTE_OF_CHAR = _byte_of_char()


_CHARACTER = 4  # maximum bytes of a character in UTF-8
_TAIL = 6  # number of preceding tokens on which the start of a text may depend


def _unfinished(utf8: codecs.IncrementalDecoder) -> str:
    """Return the replacement characters of the incomplete character that a decoder holds back."""
    state = utf8.getstate()
    text = utf8.decode(b"", True)
    utf8.setstate(state)
    return text


class _DecodeStream(Protocol):
    """An incremental decoder of token ids, for one kind of tokenizer."""

    def feed(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...

    def follow(self, token_ids: Sequence[int]) -> str:
        """Start the stream after a prompt, whose text is not returned.

        Returns the replacement characters (U+FFFD) at the end of the prompt's text, if its last
        character is incomplete; else "".
        """
        ...

    def state(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


class _Pieces(dict[int, Any]):
    """A table of each token's contribution to the text, filled on first use.

    It is filled on demand, as a vocabulary may have 150,000 tokens and an answer uses few.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool, scheme: "_Scheme") -> None:
        super().__init__()
        self._token_of = tokenizer.backend.id_to_token
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._scheme = scheme

    def __missing__(self, token_id: int) -> Any:
        token = None if token_id in self._skipped else self._token_of(token_id)
        piece = self[token_id] = self._scheme.piece(token)
        return piece


class _Scheme:
    """The rules by which a tokenizer joins tokens to text, read from tokenizer.json's `decoder`."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        decoder = tokenizer.backend.decoder
        spec = {} if decoder is None else json.loads(decoder.__getstate__())
        steps = spec.get("decoders", [spec])
        kinds = [step.get("type") for step in steps]
        self.replace: list[tuple[str, str]] = []
        self.strip = ("", 0)
        self.kind = "window"
        if kinds == ["ByteLevel"]:
            self.kind = "bytes"
            return
        for step in steps:
            if step.get("type") == "Replace" and "String" in step["pattern"]:
                self.replace.append((step["pattern"]["String"], step["content"]))
            elif step.get("type") == "Strip":
                self.strip = (step["content"], step["start"])
        order = [kind for kind in kinds if kind != "Replace"]
        plain = len(self.replace) == kinds.count("Replace") and kinds[: len(self.replace)] == [
            "Replace"
        ] * len(self.replace)
        tail = all(step.get("stop", 0) == 0 for step in steps if step.get("type") == "Strip")
        if (
            plain
            and tail
            and order in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])
        ):
            self.kind = "fallback"

    def piece(self, token: str | None) -> Any:
        """Return the contribution of a token to the text.

        For a byte-level tokenizer the result is bytes. With byte fallback it is a str, bytes for a
        token <0xNN>, and None for an unknown id.

        token: the token as in the vocabulary; None = an unknown id.
        """
        if self.kind == "bytes":
            if token is None:
                return b""
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token with a character outside the table
                return token.encode()
        if token is None:
            return None
        for old, new in self.replace:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token
        return token


class _ByteStream:
    """A stream for byte-level tokenizers (GPT-2's style): the joined tokens are UTF-8 bytes."""

    def __init__(self, pieces: _Pieces) -> None:
        self._piece = pieces.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def follow(self, token_ids: Sequence[int]) -> str:
        tail = b""
        for token in reversed(token_ids):
            tail = self._piece(token) + tail
            # an incomplete character at the end begins within these bytes
            if len(tail) >= _CHARACTER:
                break
        self._utf8.decode(tail)
        return _unfinished(self._utf8) if self._utf8.getstate()[0] else ""

    def state(self) -> Any:
        return self._utf8.getstate()

    def restore(self, state: Any) -> None:
        self._utf8.setstate(state)


class _FallbackStream:
    """A stream for byte-fallback tokenizers (sentencepiece's style).

    Tokens are text, and characters outside the vocabulary are sequences of byte tokens.

    Bytes that never become a character are replaced one by one, and valid characters next to them
    are kept, as sentencepiece does. (`tokenizers` replaces the whole run of byte tokens, so
    every newline of a Llama 2 would be held back until the next token.)
    """

    def __init__(self, pieces: _Pieces, strip: tuple[str, int]) -> None:
        self._piece = pieces.__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("manta-replace-each-byte")
        self._strip, self._left = (
            strip  # number of characters that may still be stripped from the start of the text
        )

    def feed(self, token_ids: Sequence[int]) -> str:
        decode = self._utf8.decode
        out = []
        open_bytes = bool(self._utf8.getstate()[0])
        for piece in map(self._piece, token_ids):
            if type(piece) is str:
                if open_bytes:
                    out.append(decode(b"", True))
                    open_bytes = False
                out.append(piece)
            elif piece is not None:
                out.append(decode(piece))
                open_bytes = True
        return self._stripped("".join(out)) if self._left else "".join(out)

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", True))

    def follow(self, token_ids: Sequence[int]) -> str:
        for token in token_ids:  # only the text's start may be stripped
            if not self._left:
                break
            self.feed([token])
        self._utf8.reset()
        tail: list[bytes] = []
        for token in reversed(token_ids):
            piece = self._piece(token)
            if type(piece) is str or sum(map(len, tail)) >= _CHARACTER:
                break
            tail += [] if piece is None else [piece]
        self._utf8.decode(b"".join(reversed(tail)))
        return _unfinished(self._utf8)

    def _stripped(self, text: str) -> str:
        while self._left and text:
            if text[0] != self._strip:
                self._left = 0
            else:
                text = text[1:]
                self._left -= 1
        return text

    def state(self) -> Any:
        return self._utf8.getstate(), self._left

    def restore(self, state: Any) -> None:
        utf8, self._left = state
        self._utf8.setstate(utf8)


class _WindowStream:
    """A stream for any other decoder: it decodes a window of recent tokens, and emits the new text.

    The window starts where the text last ended with a complete character. It includes the previous
    token, on which a decoder's spaces may depend.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool) -> None:
        self._backend = tokenizer.backend
        self._skip = skip_special
        self._special = tokenizer.special_ids
        self._ids: list[int] = []
        self._read = 0  # number of leading _ids whose text is emitted

    def _text(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip)
        return text

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token) for token in token_ids])

    def _step(self, token: int, final: bool = False) -> str:
        if not final:
            self._ids.append(token)
        before, after = self._text(self._ids[: self._read]), self._text(self._ids)
        if len(after) <= len(before) or (
            after.endswith("\ufffd") and not final and len(self._ids) - self._read < 8
        ):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        return self._step(-1, final=True) if len(self._ids) > self._read else ""

    def follow(self, token_ids: Sequence[int]) -> str:
        shown = 0
        for token in reversed(token_ids):
            self._ids.append(token)
            shown += not (self._skip and token in self._special)
            if shown == _TAIL:
                break
        self._ids.reverse()
        text = self._text(self._ids)
        self._read = len(self._ids)
        # A character has at most _CHARACTER bytes, and as many tokens.
        while self._read and len(self._ids) - self._read < _CHARACTER:
            whole = self._text(self._ids[: self._read])
            if not whole.endswith("\ufffd"):
                return text[len(whole) :]
            self._read -= 1
        self._read = len(self._ids)
        return ""

    def state(self) -> Any:
        return list(self._ids), self._read

    def restore(self, state: Any) -> None:
        self._ids, self._read = list(state[0]), state[1]


class Tables:
    """The tables that all streams of one tokenizer share."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.scheme = _Scheme(tokenizer)
        self.pieces = {skip: _Pieces(tokenizer, skip, self.scheme) for skip in (False, True)}
        self._backend = tokenizer.backend

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" for an id outside the vocabulary."""
        if self.scheme.kind == "window":
            text: str = self._backend.decode([token_id], skip_special_tokens=False)
            return text.encode()
        piece = self.pieces[False][token_id]
        return b"" if piece is None else piece.encode() if isinstance(piece, str) else piece


class TextStream:
    """An incremental decoder of one sequence of token ids.

    ``feed`` returns the characters that are final; an incomplete UTF-8 sequence is held back.
    ``finish`` returns the rest. The joined results equal ``Tokenizer.decode`` of all ids, however
    the ids are split. The cost is O(1) per token.

    prompt: the ids before the text. The text is the part of ``decode(prompt + ids)`` after
        ``decode(prompt)``. If the prompt ends inside a character that the ids complete, the text
        begins with that character.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> None:
        tables = tokenizer.tables
        pieces = tables.pieces[skip_special_tokens]
        stream: _DecodeStream
        if tables.scheme.kind == "bytes":
            stream = _ByteStream(pieces)
        elif tables.scheme.kind == "fallback":
            stream = _FallbackStream(pieces, tables.scheme.strip)
        else:
            stream = _WindowStream(tokenizer, skip_special_tokens)
        if prompt and (shown := stream.follow(prompt)):
            stream = _BehindUnfinished(stream, shown)
        self.feed = stream.feed
        self.finish = stream.finish
        self.state = stream.state
        self.restore = stream.restore


class _BehindUnfinished:
    """A stream after a prompt whose last character is incomplete.

    shown: the replacement characters in the prompt's text for that character, which are not
        repeated if the output does not complete the character.
    """

    def __init__(self, stream: _DecodeStream, shown: str) -> None:
        self._stream = stream
        self._shown = shown

    def _rest(self, text: str) -> str:
        if text and self._shown:
            text, self._shown = text.removeprefix(self._shown), ""
        return text

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._rest(self._stream.feed(token_ids))

    def finish(self) -> str:
        return self._rest(self._stream.finish())

    def follow(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("a text follows one prompt")

    def state(self) -> Any:
        return self._stream.state(), self._shown

    def restore(self, state: Any) -> None:
        inner, self._shown = state
        self._stream.restore(inner)
