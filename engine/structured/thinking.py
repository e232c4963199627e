"""ThinkingBudget, ThinkingCount: a limit on a request's thinking tokens, and their count."""

from collections.abc import Callable

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The limit on a request's thinking tokens.

    tokens: number of thinking tokens before the end tag is forced; the tags themselves do not
        count.
    end: token ids of the end tag, such as </think>.
    ends: texts that end thinking, including the end tag.
    start: the text of the tag that begins thinking; "" if the prompt ends inside thinking.
    """

    tokens: int
    end: tuple[int, ...]
    ends: tuple[str, ...]
    start: str = ""


class ThinkingCount:
    """The count of an output's thinking tokens, which depends only on the output's ids.

    text_of: returns the bytes of a token; for a special token its name.
    """

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
        self._at = 0  # number of tokens of the forced end tag so far
        # whether thinking is in progress; None = it may still begin
        self.inside: bool | None = None if self._start else True

    def accept_token(self, token: int) -> None:
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
        """The token that must come next if the grammar allows it; None = any.

        A grammar does not allow the end tag inside an incomplete character.
        """
        if self.inside and self._used >= self._budget.tokens:
            return self._budget.end[self._at]
        return None
