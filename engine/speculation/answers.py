"""Answers: earlier answers that later requests of the same key draft from, bounded and aged."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from engine.speculation.suffixes import Suffixes

_AGE = 900.0  # seconds after which an answer is forgotten
_SHARE = 4  # a key has at most a fourth of all tokens, so one tenant cannot evict all others


class _Answers:
    """The answers of one key, in one list of tokens."""

    __slots__ = ("arrivals", "suffixes")

    def __init__(self) -> None:
        self.suffixes = Suffixes([])
        self.arrivals: deque[tuple[float, int]] = deque()  # (time, tokens), oldest first

    def forget(self, before: float, most: int) -> None:
        """Forget answers older than `before`, and the oldest beyond `most` tokens.

        The rest is indexed again, so it happens when half of the tokens can go.
        """
        tokens = self.suffixes.tokens
        old = sum(length for arrived, length in self.arrivals if arrived < before)
        over = len(tokens) - most // 2 if len(tokens) > most else 0
        gone, least = 0, max(old, over)
        if least == 0 or 2 * least < len(tokens):
            return
        while self.arrivals and gone < least:
            gone += self.arrivals.popleft()[1]
        self.suffixes = Suffixes(tokens[gone:])
        self.suffixes.index(len(tokens) - gone)


class Answers:
    """The tables of all keys, least recently used first.

    most_tokens: the most tokens of all tables together.
    clock: monotonic seconds.
    """

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_tokens = most_tokens
        self._clock = clock
        self._tables: OrderedDict[bytes, _Answers] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all tables."""
        return sum(len(table.suffixes.tokens) for table in self._tables.values())

    def find(self, key: bytes) -> Suffixes | None:
        """Return the answers of this key; None = there are none. Valid until the next `add`."""
        if (table := self._tables.get(key)) is None:
            return None
        if table.arrivals[-1][0] < self._clock() - _AGE:
            del self._tables[key]
            return None
        return table.suffixes

    def add(self, key: bytes, tokens: Sequence[int]) -> None:
        """Add an answer to the table of this key."""
        most = self._most_tokens // _SHARE
        tokens = tokens[: most // 4]
        if not tokens:  # no answer, or no room for any
            return
        now = self._clock()
        table = self._tables.setdefault(key, _Answers())
        self._tables.move_to_end(key)
        table.arrivals.append((now, len(tokens)))
        table.suffixes.tokens += tokens
        table.suffixes.index(len(table.suffixes.tokens))
        table.forget(now - _AGE, most)
        while self.num_tokens > self._most_tokens:
            self._tables.popitem(last=False)
