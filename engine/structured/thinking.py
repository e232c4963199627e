"""ThinkingBudget: how long a request may think; ThinkingCount: how long it has thought."""

from collections.abc import Callable

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The most tokens of thoughts before the end mark is forced. tokens: without the marks.

    end: ids of the end mark. ends: texts of what else ends thoughts, and of the end mark. start:
    text of the mark that thoughts begin with; "" if the prompt has left off inside them.
    """

    tokens: int
    end: tuple[int, ...]
    ends: tuple[str, ...]
    start: str = ""


class ThinkingCount:
    """A function of the output's ids alone. text_of: bytes of one token, with the names of special
    ones."""

    __slots__ = (
        "_at",
        "_budget",
        "_ends",
        "_keep",
        "_start",
        "_tail",
        "_text_of",
        "_used",
        "inside",
    )

    def __init__(self, budget: ThinkingBudget, text_of: Callable[[int], bytes]) -> None:
        self._budget = budget
        self._text_of = text_of
        self._ends = [text.encode() for text in budget.ends if text]
        self._keep = max(map(len, self._ends), default=1) - 1
        self._start = budget.start.encode()
        self._tail = b""
        self._used = 0
        self._at = 0  # tokens of the end mark that have come, once it is forced
        self.inside: bool | None = None if self._start else True  # None: it may begin

    def take(self, token: int) -> None:
        if self.inside is False:
            return
        text = self._text_of(token)
        if self.inside is None:
            self._tail += text
            if self._tail.startswith(self._start):
                self.inside, self._tail = True, b""
            elif not self._start.startswith(self._tail):
                self.inside = False
            return
        forced = self.forced
        self._used += 1
        self._at = self._at + 1 if token == forced else 0
        seen = self._tail + text
        if self._at == len(self._budget.end) or any(end in seen for end in self._ends):
            self.inside = False
        self._tail = seen[max(0, len(seen) - self._keep) :]

    @property
    def forced(self) -> int | None:
        """The token that has to come, where the grammar allows it: not within a character."""
        if self.inside and self._used >= self._budget.tokens:
            return self._budget.end[self._at]
        return None
