"""ChoiceDecoder: decodes one choice's tokens to text, and finds stop strings and end tokens.

The text depends only on the ids, not on how they are split into calls. After a failover a new
decoder gets the same prompt, and all emitted ids in a single call. It then continues exactly where
the old decoder was.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.sampling_params import SamplingParams
from engine.text.text_stream import TextStream

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer


class Decoded(msgspec.Struct, frozen=True):
    """The text of new tokens, and whether they end the choice (`ChoiceDecoder.feed`).

    text: new text, certain to belong to the output.
    finish_reason: None while the choice runs; "stop", "length", "abort" or "error".
    stop_reason: the stop string, or the id from stop_token_ids, that ended the choice; None for the
        model's own end token.
    num_tokens: how many tokens of this call belong to the output: those up to the end token, or to
        the token that completes a stop string.
    offsets: with ``offsets=True``, the character offset in the whole output where the text of each
        token begins.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    num_tokens: int
    offsets: list[int] = []


class ChoiceDecoder:
    """A decoder of one choice's tokens to text, which finds stop strings and end tokens.

    A stop string that ends within the first ``min_tokens`` tokens is ordinary text. Of several stop
    strings the one that is complete first applies, and of these the longest. Text is held back only
    while it may become a part of a stop string.

    prompt: the prompt's ids, as in `TextStream`.
    offsets: whether to set `Decoded.offsets`.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        params: SamplingParams,
        *,
        prompt: Sequence[int] = (),
        offsets: bool = False,
    ) -> None:
        self._stream = TextStream(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt=prompt
        )
        self._stops = params.stop
        self._stop_ids = params.stop_token_ids
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._offsets = offsets
        self._held = ""  # decoded text that may be the start of a stop string
        self._length = 0  # characters decoded so far, including held ones
        self.num_tokens = 0  # tokens of the output so far
        self.finished = False

    def feed(
        self, token_ids: Sequence[int], finish: str = "", stop_token: int | None = None
    ) -> Decoded:
        """Decode the tokens of a `Delta`; after the choice's end, return an empty text.

        finish, stop_token: the fields of the Delta.
        """
        if self.finished:
            return Decoded("", None, None, 0)
        shown = len(token_ids)
        if stop_token is not None and not self._include_stop:
            shown -= 1  # the end token belongs to the output but not to its text
        if self._stops or self._offsets:
            return self._feed_checked(token_ids, shown, finish, stop_token)
        text = self._stream.feed(token_ids if shown == len(token_ids) else token_ids[:shown])
        self.num_tokens += len(token_ids)
        if not finish:
            return Decoded(text, None, None, len(token_ids))
        return self._end(text + self._stream.finish(), finish, stop_token, len(token_ids), [])

    def _feed_checked(
        self, token_ids: Sequence[int], shown: int, finish: str, stop_token: int | None
    ) -> Decoded:
        out: list[str] = []
        offsets: list[int] = []
        banned = min(shown, max(0, self._min_tokens - self.num_tokens))
        # The first min_tokens tokens are decoded separately, so that their text is not searched for
        # stop strings. With offsets every token is decoded separately.
        cuts = list(range(1, shown + 1)) if self._offsets else sorted({banned, shown} - {0})
        begin = 0
        for cut in cuts:
            part = token_ids[begin:cut]
            offsets.append(self._length)
            before = self._stream.state()
            new = self._stream.feed(part)
            match = self._advance(new, search=cut > banned)
            if match is not None:
                text, stop, end = match
                count = begin + self._tokens_until(part, before, end, new)
                self.num_tokens += count
                self.finished = True
                out.append(text)
                kept_offsets = offsets[:count] if self._offsets else []
                return Decoded("".join(out), "stop", stop, count, kept_offsets)
            out.append(self._emit(final=False))
            begin = cut
        count = len(token_ids)
        self.num_tokens += count
        offsets += [self._length] * (count - len(offsets))
        if not self._offsets:
            offsets = []
        if not finish:
            return Decoded("".join(out), None, None, count, offsets)
        match = self._advance(self._stream.finish(), search=self.num_tokens > self._min_tokens)
        if match is not None:
            self.finished = True
            out.append(match[0])
            return Decoded("".join(out), "stop", match[1], count, offsets)
        out.append(self._emit(final=True))
        return self._end("".join(out), finish, stop_token, count, offsets)

    def _advance(self, new: str, *, search: bool) -> tuple[str, str, int] | None:
        """Append decoded text to the held text, and search for a stop string that is now complete.

        Returns (text to emit, the stop string, number of characters of `new` up to its end), or
        None without a stop string.
        """
        held = len(self._held)
        self._held += new
        self._length += len(new)
        if not search:
            return None
        matches = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := self._held.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if not matches:
            return None
        end, start, stop = min(matches)
        return self._held[: end if self._include_stop else start], stop, end - held

    def _emit(self, *, final: bool) -> str:
        """Return the held text that can no longer become part of a stop string.

        final: whether to return all held text.
        """
        text = self._held
        keep = (
            len(text)
            if final
            else min((open_at(text, stop) for stop in self._stops), default=len(text))
        )
        self._held = text[keep:]
        return text[:keep]

    def _tokens_until(self, part: Sequence[int], before: Any, end: int, new: str) -> int:
        """Return how many tokens of `part` are needed for the first `end` characters of its text.

        before: a copy of the text stream's state before `part`.
        new: the text of `part`.
        """
        if len(part) == 1:
            return 1
        self._stream.restore(before)
        size = 0
        for count, token in enumerate(part, 1):
            size += len(self._stream.feed([token]))
            if size >= end:
                return count
        raise AssertionError(f"{end} characters expected in {new!r}")

    def _end(
        self, text: str, finish: str, stop_token: int | None, count: int, offsets: list[int]
    ) -> Decoded:
        self.finished = True
        reason = stop_token if stop_token in self._stop_ids else None
        return Decoded(text, finish, reason, count, offsets)


def open_at(text: str, stop: str) -> int:
    """Return the index where the longest suffix of text begins that is a proper prefix of stop.

    Returns len(text) if there is none.
    """
    at = max(0, len(text) - len(stop) + 1)
    first = stop[0]
    while (at := text.find(first, at)) >= 0:
        if stop.startswith(text[at:]):
            return at
        at += 1
    return len(text)
