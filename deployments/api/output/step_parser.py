"""StepParser: the base class of the incremental parsers of models' outputs."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from deployments.api.output.output_format import overlap

Kind = Literal["content", "reasoning", "call", "arguments", "end"]


class Event(NamedTuple):
    """A parsed fragment of an answer, by its kind.

    call: text is the function's name
    arguments: text is a fragment of the JSON of the call that began last
    end: text is empty; the call that began last has ended
    """

    kind: Kind
    text: str = ""


class StepParser:
    """The base class of incremental parsers, whose result does not depend on how the text is
    chunked.

    For each kind, the concatenated fragments are the same for any chunking. Parsing never fails:
    text that turns out not to be a call is content.

    A step is a method that consumes the beginning of `_text`, emits events and sets `_step`. It
    returns True if the next step may run at once, and False if it needs more text.

    first: the first step.
    """

    def __init__(self, first: Callable[[], bool]) -> None:
        self._text = ""  # text that is not parsed yet
        self._out: list[Event] = []
        self._final = False
        self._depth, self._quoted, self._escaped = 0, False, False
        self._step = first
        self.calls = 0  # number of complete calls
        self.opened = 0  # number of calls whose name has been parsed

    @property
    def reasons(self) -> bool:
        """Whether the next text belongs to reasoning, or ends it."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        self._text += text
        return self._run()

    def finish(self) -> list[Event]:
        """Return the events of the withheld text, after the last call of `feed`.

        A call with an incomplete name is dropped.
        """
        self._final = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._step():
            pass
        out, self._out = self._out, []
        merged: list[Event] = []
        for event in out:
            if merged and merged[-1].kind == event.kind and event.kind not in ("call", "end"):
                event = Event(event.kind, merged.pop().text + event.text)
            merged.append(event)
        return merged

    def _take_until(self, until: tuple[str, ...]) -> tuple[str, str]:
        """Consume the text up to and including the first delimiter in `until`; return (text,
        delimiter).

        If no delimiter has arrived, it is "", and an end of the text that may begin a delimiter is
        not consumed.
        """
        marks = [(at, mark) for mark in until if (at := self._text.find(mark)) >= 0]
        if marks:
            at, mark = min(marks)
            before, self._text = self._text[:at], self._text[at + len(mark) :]
            return before, mark
        keep = 0 if self._final else max((overlap(self._text, mark) for mark in until), default=0)
        cut = len(self._text) - keep
        before, self._text = self._text[:cut], self._text[cut:]
        return before, ""

    def _call(self, name: str) -> None:
        self.opened += 1
        self._out.append(Event("call", name))
        self._begin_json()

    def _begin_json(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def _in_string(self, char: str) -> bool:
        """Advance the string state by one character of JSON; return whether the character is part
        of a string."""
        if not self._quoted:
            self._quoted = char == '"'
            return self._quoted
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
        return True

    def _take_json(self, mark: str) -> tuple[str, bool]:
        """Consume JSON and the text `mark` after it; return the JSON, and whether `mark` was found.

        Strings in the JSON may contain `mark`.
        """
        text = self._text
        for at, char in enumerate(text):
            if not self._quoted and text.startswith(mark, at):
                self._text = text[at + len(mark) :]
                return text[:at], True
            if not self._quoted and not self._final and mark.startswith(text[at:]):
                self._text = text[at:]
                return text[:at], False
            self._in_string(char)
        self._text = ""
        return text, False

    def _take_object(self) -> bool:
        """Consume and emit one object, the arguments of a call; return whether it is complete.

        Strings in the object may contain brackets.
        """
        text = self._text
        for at, char in enumerate(text):
            if self._in_string(char):
                continue
            if char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._out.append(Event("arguments", text[: at + 1]))
                    self._text = text[at + 1 :]
                    return True
        if text:
            self._out.append(Event("arguments", text))
        self._text = ""
        return False
