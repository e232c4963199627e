"""Answers: stores answers for a limited time, as drafts for later requests with the same key."""

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable

from engine.speculation.suffixes import Suffixes, stands_in

_AGE = 900.0  # seconds after which an answer is forgotten
_PIECE = 1_024  # maximum tokens indexed in one call, which takes under 0.4 ms
_SEEN = 16_384  # number of a table's newest tokens in which `contain` searches
_SHARE = 4  # a key has at most a fourth of all tokens, so one tenant cannot evict all others


class _Answers:
    """The earlier answers of one key, in one indexed array of tokens.

    A new answer waits as a list, and `read_newest` copies it into the array when drafts are
    computed. Copying takes 0.1 us for each token that is not in the processor's caches, so answers
    are not copied while no request drafts.
    """

    __slots__ = ("arrivals", "num_waiting", "suffixes", "waiting")

    def __init__(self) -> None:
        self.suffixes: Suffixes[array[int]] = Suffixes(array("i"))
        # (time, number of tokens) of the answers in the array, oldest first
        self.arrivals: deque[tuple[float, int]] = deque()
        # (time, tokens, begin and end of the answer in the tokens) of waiting answers, oldest first
        self.waiting: deque[tuple[float, list[int], int, int]] = deque()
        self.num_waiting = 0  # number of tokens of the waiting answers

    def read_newest(self, before: float, most: int) -> None:
        """Append the newest waiting answer to the array, unless it is older than `before`.

        before, most: see `forget`, which is called at the end.
        """
        if self.waiting:
            arrived, tokens, begin, end = self.waiting.pop()
            self.num_waiting -= end - begin
            if arrived >= before:
                self.suffixes.tokens.extend(tokens[begin:end])
                self.arrivals.append((arrived, end - begin))
        self.forget(before, most)

    def forget(self, before: float, most: int) -> None:
        """Forget answers older than `before`, and the oldest beyond `most` tokens.

        As the remaining tokens must be indexed again, answers in the array are dropped only once
        they have at least half of its tokens.

        before: monotonic seconds.
        """
        while self.num_waiting > most or (self.waiting and self.waiting[0][0] < before):
            _, _, begin, end = self.waiting.popleft()
            self.num_waiting -= end - begin
        tokens = self.suffixes.tokens
        old = sum(length for arrived, length in self.arrivals if arrived < before)
        over = len(tokens) - most // 2 if len(tokens) > most else 0
        gone, least = 0, max(old, over)
        if least == 0 or 2 * least < len(tokens):
            return
        while self.arrivals and gone < least:
            gone += self.arrivals.popleft()[1]
        self.suffixes = Suffixes(tokens[gone:])


class Answers:
    """The tables of all keys' answers, least recently used first.

    most_tokens: the maximum number of tokens of all tables together.
    clock: returns monotonic seconds.
    """

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_tokens = most_tokens
        self._clock = clock
        self._tables: OrderedDict[bytes, _Answers] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the answers of all keys, waiting ones included."""
        return sum(len(t.suffixes.tokens) + t.num_waiting for t in self._tables.values())

    def find(self, key: bytes) -> "Suffixes[array[int]] | None":
        """Return the index of a key's answers, valid until the next call; None = there are none.

        This reads and indexes new answers, at most _PIECE tokens a call.
        """
        if (table := self._read(key)) is None:
            return None
        suffixes = table.suffixes
        if suffixes.num_indexed < len(suffixes.tokens):
            suffixes.index(min(len(suffixes.tokens), suffixes.num_indexed + _PIECE))
        return suffixes

    def contain(self, key: bytes, tokens: bytes) -> bool:
        """Whether the key's newest answers contain a sequence of tokens.

        tokens: the sequence, as bytes of int32 ids.
        """
        table = self._read(key)
        return table is not None and stands_in(table.suffixes.tokens[-_SEEN:], tokens)

    def add(self, key: bytes, tokens: list[int], begin: int = 0) -> None:
        """Add an answer, tokens[begin:], to the table of a key; the list must not change
        afterwards."""
        most = self._most_tokens // _SHARE
        end = min(len(tokens), begin + most // 4)
        if begin >= end:  # no answer, or no room for any
            return
        table = self._tables.setdefault(key, _Answers())
        self._tables.move_to_end(key)
        table.waiting.append((self._clock(), tokens, begin, end))
        table.num_waiting += end - begin
        if table.num_waiting > most:
            table.forget(self._clock() - _AGE, most)
        while self.num_tokens > self._most_tokens:
            self._tables.popitem(last=False)

    def _read(self, key: bytes) -> _Answers | None:
        """Read one more waiting answer into the key's table; return it, or None if it is empty."""
        if (table := self._tables.get(key)) is None:
            return None
        table.read_newest(self._clock() - _AGE, self._most_tokens // _SHARE)
        newest = table.arrivals[-1][0] if table.arrivals else 0.0
        if newest < self._clock() - _AGE and not table.waiting:
            del self._tables[key]
            return None
        return table
