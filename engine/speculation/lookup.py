"""Look-up: drafts the tokens that followed an earlier occurrence of the text's last tokens.

This suits edits, summaries and code. The sources are the client's `prediction`, the prompt and the
answer so far, and earlier answers of the same key; the longest match is used. A draft is at most as
long as its match times `factor`, which gives as many tokens a step as n-gram look-up with a third
fewer draft tokens to verify. Texts without repeats get no drafts.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.answers import Answers
from engine.speculation.suffixes import BYTES_PER_TOKEN, Suffixes, stands_in

_TRIES = 8  # maximum number of occurrences of a token pair that a look-up compares
_WINDOW = 16_384  # number of a request's newest tokens that are searched for matches
# maximum tokens indexed in one call, which takes under 1 ms, so that a long prompt delays no step
_PIECE = 4_096
_SEEN = 4_096  # number of a text's newest tokens in which a check for repeats searches
# number of last prompt tokens that are stored with an answer, so that its first tokens can be
# matched
_LEAD = 16


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """The settings of look-up.

    min_match, max_match: the minimum number of matching tokens, and the maximum that is compared.
    factor: the maximum number of draft tokens for each token of the match.
    min_probability: a draft ends where its estimated probability falls below this. The estimates
        are shares among up to eight occurrences with equal matches.
    shared_tokens: the maximum number of stored tokens of earlier answers, over all keys; 0 =
        requests draft only from their own text.
    text_tokens: the maximum number of indexed tokens of all running requests together.
    """

    min_match: int = 1
    max_match: int = 24
    factor: float = 1.0
    min_probability: float = 0.1
    shared_tokens: int = 2**18
    text_tokens: int = 2**20

    def num_bytes(self, num_seqs: int, max_model_len: int) -> int:
        """Return the maximum host memory of look-up in bytes.

        num_seqs, max_model_len: the maximum numbers of running requests, and of tokens of each.
        """
        texts = num_seqs * min(2 * _WINDOW, max_model_len)
        return (self.shared_tokens + min(self.text_tokens, texts)) * BYTES_PER_TOKEN


class Lookup:
    """The drafter of prompt look-up (n-gram) speculation."""

    def __init__(self, options: LookupOptions) -> None:
        self.options = options
        self.answers = Answers(options.shared_tokens)
        # number of tokens of running requests that may still be indexed
        self.room = options.text_tokens

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> "LookupDrafts":
        """Return the drafts of a request; see `Drafter.begin`."""
        return LookupDrafts(self, token_ids, num_prompt, prediction, key)

    def remember(self, token_ids: list[int], num_prompt: int, key: bytes) -> None:
        """Store the answer of a request that never drafted, for later requests of the same key.

        token_ids: prompt and answer, a list that must not change.
        """
        if len(token_ids) > num_prompt:
            self.answers.add(key, token_ids, max(0, num_prompt - _LEAD))

    def repeats(self, token_ids: Sequence[int], key: bytes, length: int) -> bool:
        """Whether a text's last `length` tokens occur earlier, in the text or in other answers.

        The check needs no state of the request, and takes 12 ns for each token of the text.
        """
        seen = array("i", token_ids[-_SEEN:])
        end = seen[-length:].tobytes()
        del seen[-1:]
        return stands_in(seen, end) or self.answers.contain(key, end)


class LookupDrafts:
    """The drafts of one request, looked up in its own text and in earlier answers."""

    __slots__ = (
        "_answer_begin",
        "_answers",
        "_following",
        "_key",
        "_lookup",
        "_offset",
        "_options",
        "_text",
    )

    def __init__(
        self,
        lookup: Lookup,
        token_ids: Sequence[int],
        num_prompt: int,
        prediction: Sequence[int],
        key: bytes,
    ) -> None:
        expected = list(prediction[: _WINDOW // 2])
        cut = max(0, len(token_ids) - (_WINDOW - len(expected)))
        self._lookup, self._options, self._answers = lookup, lookup.options, lookup.answers
        self._key = key
        self._text = Suffixes(expected + list(token_ids[cut:]))
        # offset of the list's indices to those of the request's text
        self._offset = len(expected) - cut
        self._answer_begin = num_prompt
        # (length of the list, position of the match) of the last proposal, as the next draft
        # probably continues where it ended. A prediction is followed from the answer's first token
        # on.
        self._following = (num_prompt + self._offset, 0) if expected else None

    @property
    def num_tokens(self) -> int:
        """The length of the known text, prompt and output, in tokens."""
        return len(self._text.tokens) - self._offset

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self._text.tokens += tokens

    def propose(self, most: int) -> list[int]:
        """Return 0 to `most` tokens that may continue the text."""
        text = self._text
        if text.num_indexed < len(text.tokens):
            text = self._index()
        options, tokens = self._options, text.tokens
        length, places = text.longest(tokens, options.min_match, options.max_match, _TRIES)
        source: Suffixes[list[int]] | Suffixes[array[int]] = text
        if self._following is not None:
            then, place = self._following
            place += len(tokens) - then
            if place == 0:  # drafts of the answer's first token from a prediction
                return tokens[:most]
            match = text.match(tokens, place, options.max_match)
            if match >= max(length, options.min_match):
                length, places = match, [place]
        if length < options.max_match and (answers := self._answers.find(self._key)) is not None:
            shared, shared_places = answers.longest(
                tokens, options.min_match, options.max_match, _TRIES
            )
            if shared > length:
                source, length, places = answers, shared, shared_places
        if not length:
            return []
        if source is text:
            self._following = len(tokens), places[0]
        most = min(most, max(1, int(length * options.factor)))
        return source.follow(places, most, options.min_probability)

    def end(self) -> None:
        """Store the answer for later requests of the same key."""
        text = self._text
        self._lookup.room += text.num_indexed
        begin = max(0, self._answer_begin + self._offset)
        if len(text.tokens) > begin:
            self._answers.add(self._key, text.tokens, max(0, begin - _LEAD))

    def _index(self) -> Suffixes[list[int]]:
        """Index the tokens added since the last call, within limits, and return the index."""
        text, lookup = self._text, self._lookup
        if len(text.tokens) > 2 * _WINDOW:
            text = self._forget()
        known = text.num_indexed
        end = min(len(text.tokens), known + _PIECE, known + lookup.room)
        if end > known:
            text.index(end)
            lookup.room -= end - known
        return text

    def _forget(self) -> Suffixes[list[int]]:
        """Drop all but the newest tokens of a long text; return their new index, which is empty."""
        text = self._text
        self._lookup.room += text.num_indexed
        cut = len(text.tokens) - _WINDOW
        self._text = Suffixes(text.tokens[cut:])
        self._offset -= cut
        self._following = None
        return self._text
