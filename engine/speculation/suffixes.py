"""Suffixes: finds earlier occurrences of a text's last tokens in a list of tokens.

    tokens    a  b  c  a  b  d  ...
    place              3            for a text that ends with "... c": tokens[3] came next
    chain     links each place after a token pair to the previous place after the same pair

A match is the number of equal tokens before a place, counted backwards. The index takes about 0.2
us and 160 bytes of host memory for each token, so both are bounded by bounding the tokens.
"""

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

BYTES_PER_TOKEN = 160  # measured in CPython 3.11: dictionary entries, keys, list and chain


Tokens = TypeVar("Tokens", list[int], "array[int]")


class Suffixes(Generic[Tokens]):
    """An index of the places of a text's token pairs, and of each token's last place.

    tokens: the text, which may grow; `index` indexes new tokens. Ids are below 2**24.
    """

    __slots__ = ("_chain", "_pairs", "_singles", "num_indexed", "tokens")

    def __init__(self, tokens: Tokens) -> None:
        self.tokens: Tokens = tokens
        self.num_indexed = 0  # number of leading tokens that are indexed
        self._chain = array("i")
        self._pairs: dict[int, int] = {}
        self._singles: dict[int, int] = {}

    def index(self, end: int) -> None:
        """Index the positions before `end` that are not indexed yet."""
        tokens, chain, pairs, singles = self.tokens, self._chain, self._pairs, self._singles
        for place in range(self.num_indexed, end):
            if place < 2:
                chain.append(-1)
                if place:
                    singles[tokens[0]] = place
                continue
            before = tokens[place - 1]
            pair = tokens[place - 2] << 24 | before
            chain.append(pairs.get(pair, -1))
            pairs[pair] = singles[before] = place
        self.num_indexed = max(self.num_indexed, end)

    def longest(
        self, text: Sequence[int], least: int, most: int, tries: int
    ) -> tuple[int, list[int]]:
        """Return (length of the longest match of a text's last tokens, its places, newest first).

        text: the text, at least one token.
        least, most: bounds of the match in tokens; for a shorter match the result is (0, []).
        tries: the maximum number of positions to compare, newest first.
        """
        if len(text) < 2 or (place := self._pairs.get(text[-2] << 24 | text[-1], -1)) < 0:
            place = self._singles.get(text[-1], -1) if least < 2 else -1
            return (0, []) if place < 0 else (1, [place])
        longest, places = max(least, 2) - 1, []
        for _ in range(tries):
            length = self.match(text, place, most)
            if length > longest:
                longest, places = length, [place]
            elif length == longest and places:
                places.append(place)
            place = self._chain[place]
            if place < 0:
                break
        return (longest, places) if places else (0, [])

    def match(self, text: Sequence[int], place: int, most: int) -> int:
        """Return how many tokens before `place` equal the text's last tokens, up to `most`."""
        tokens = self.tokens
        most = min(most, place, len(text))
        length = 0
        while length < most and tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        return length

    def follow(self, places: list[int], most: int, floor: float) -> list[int]:
        """Return a draft of up to `most` tokens, each the most frequent next token at the places.

        floor: the draft ends where the product of the tokens' shares falls below it.
        """
        tokens = self.tokens
        if len(places) == 1:
            return list(tokens[places[0] : places[0] + most])
        draft: list[int] = []
        likely = 1.0
        while len(draft) < most:
            counts: dict[int, int] = {}
            for place in places:
                if place < len(tokens):
                    counts[tokens[place]] = counts.get(tokens[place], 0) + 1
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)
            likely *= counts[token] / sum(counts.values())
            if likely < floor:
                break
            draft.append(token)
            places = [p + 1 for p in places if p < len(tokens) and tokens[p] == token]
        return draft


def stands_in(tokens: "array[int]", end: bytes) -> bool:
    """Whether an array contains a sequence of tokens; this takes 1 us for 4,000 tokens.

    end: the sequence, as bytes of int32 ids.
    """
    place = tokens.tobytes().rfind(end)
    return place >= 0 and place % tokens.itemsize == 0
