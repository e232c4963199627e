"""OutputParser: parses a model's text incrementally into content, reasoning and tool calls."""

from collections.abc import Callable, Mapping
from typing import Literal

from deployments.api.output.output_format import (
    NUMBER,
    DialectReader,
    OutputFormat,
    Reasoning,
    overlap,
    quoted,
)
from deployments.api.output.step_parser import Event, Kind, StepParser

Thinking = Literal["open", "may", "no"]


class OutputParser(StepParser):
    """An incremental parser of one choice's text.

    format: the format of calls; None: no tool may be called
    raw: function name -> names of its string arguments that tagged formats write verbatim; others
        are JSON
    thinking: "open": the prompt ends inside reasoning; "may": reasoning may follow; "no": no
        reasoning
    wrapper: the delimiters before and after content, which are removed
    limited: whether the request constrains the content. If so, calls come first or not at all, and
        delimiters inside content are part of it
    """

    def __init__(
        self,
        format: OutputFormat | None,
        raw: Mapping[str, frozenset[str]],
        reasoning: Reasoning | None,
        thinking: Thinking,
        wrapper: tuple[str, ...] = (),
        limited: bool = False,
    ) -> None:
        self._format = format
        self._wrapper = wrapper
        self._limited = limited
        self._raw = raw
        self._reasoning = reasoning
        # white space at the end of the text so far, not emitted yet; dropped if reasoning ends or a
        # call begins
        self._spaces = ""
        # Whether text was emitted, so that white space is kept. At an answer's beginning it is also
        # kept, as the prompt may end inside a sentence.
        self._said = not wrapper and (reasoning is None or thinking != "open")
        self._name = ""
        tags = None if format is None else format.tagged
        self._value_close = "" if tags is None else tags.value_close
        self._first = True  # whether the call's next argument is its first
        self._reader: DialectReader | None = None  # reader of the current argument
        begin = {"open": self._reason, "may": self._may_reason, "no": self._begin}
        super().__init__(begin[thinking if reasoning is not None else "no"])

    @property
    def reasons(self) -> bool:
        return self._step == self._reason

    def finish(self) -> list[Event]:
        events = super().finish()
        if self._step == self._content and self._spaces and self._said:
            content = events.pop().text if events and events[-1].kind == "content" else ""
            events.append(Event("content", content + self._spaces))
        return events

    def _show(self, kind: Kind, text: str) -> None:
        """Emit text of a kind, without trailing white space and, at its beginning, without leading
        white space."""
        text = self._spaces + text
        body = text.rstrip()
        self._spaces = text[len(body) :]
        if not self._said:
            body = body.lstrip()
        if body:
            self._said = True
            self._out.append(Event(kind, body))
        elif not self._said:
            self._spaces = ""

    def _may_reason(self) -> bool:
        assert self._reasoning is not None
        start, text = self._reasoning.start, self._text.lstrip()
        if text.startswith(start):
            self._text = text[len(start) :]
            self._said = False
            self._step = self._reason
        elif start.startswith(text) and not self._final:
            return False
        else:
            self._step = self._begin
        return True

    def _reason(self) -> bool:
        assert self._reasoning is not None
        trigger = self._format.trigger if self._format is not None else ""
        marks = (self._reasoning.end, trigger) if trigger else (self._reasoning.end,)
        before, mark = self._take_until(marks)
        self._show("reasoning", before)
        if not mark:
            return False
        self._said, self._spaces = False, ""
        if mark == self._reasoning.end:
            self._step = self._begin
        else:
            self._text = mark + self._text
            self._step = self._content
        return True

    def _begin(self) -> bool:
        """Set the step that parses the text after the reasoning.

        Returns False while the text may still begin a call.
        """
        if self._limited:
            return self._begin_limited()
        if self._format is None or self._format.trigger:
            self._step = self._content
            return True
        text = self._text.lstrip()
        if text.startswith(self._format.begin):
            self._text = text[len(self._format.begin) :]
            self._step = self._named
        elif self._format.begin.startswith(text) and not self._final:
            return False
        else:
            self._step = self._rest
        return True

    def _begin_limited(self) -> bool:
        trigger = self._format.trigger or self._format.begin if self._format is not None else ""
        text = self._text.lstrip()
        if not self._final and any(mark.startswith(text) for mark in (trigger, *self._wrapper[:1])):
            return False
        self._text = text
        if trigger and text.startswith(trigger):
            self._step = self._opening
        else:
            if self._wrapper:
                self._text = text.removeprefix(self._wrapper[0])
            self._step = self._limited_content
        return True

    def _limited_content(self) -> bool:
        end = self._wrapper[1] if self._wrapper else ""
        text = self._text
        keep = len(end) if end and text.endswith(end) else overlap(text, end)
        shown, self._text = text[: len(text) - keep], text[len(text) - keep :]
        if self._final:
            shown, self._text = shown + self._text.removesuffix(end), ""
        if shown:
            self._said = True
            self._out.append(Event("content", shown))
        return False

    def _content(self) -> bool:
        trigger = self._format.trigger if self._format is not None else ""
        marks = (trigger, *self._wrapper) if trigger else self._wrapper
        if not marks:
            self._step = self._rest
            return True
        before, mark = self._take_until(marks)
        self._show("content", before)
        if mark and mark == trigger:
            self._text = mark + self._text
            self._step = self._opening
        return bool(mark)

    def _rest(self) -> bool:
        """Emit all remaining text as content, as no call can follow. Returns False, as all text is
        parsed."""
        text, self._text, self._spaces = self._spaces + self._text, "", ""
        if not self._said:
            text = text.lstrip()
        if text:
            self._said = True
            self._out.append(Event("content", text))
        return False

    def _opening(self) -> bool:
        assert self._format is not None
        return self._literal(self._format.opening + self._format.begin, self._named)

    def _literal(self, mark: str, then: Callable[[], bool]) -> bool:
        size = _matched(mark, self._text)
        if size >= 0:
            self._text = self._text[size:]
            self._step = then
            return True
        if size == _MAYBE:
            if self._final:
                self._text = ""
            return False
        self._step = self._rest
        return True

    def _named(self) -> bool:
        """Parse a call's function name, emit the event that begins the call, and set the next step.

        Returns False if the end of the name has not arrived yet.
        """
        assert self._format is not None
        middle, size = self._format.middle, 0
        if middle:
            at, size = _found(middle, self._text)
        else:
            # The first argument, or the end of the call, follows the name directly.
            tags = self._format.tagged
            ends = [self._format.end] + ([tags.key_open] if tags is not None else [])
            places = [at for mark in ends if (at := self._text.find(mark)) >= 0]
            at = min(places, default=-1)
        if at < 0:
            if self._final:
                self._text = ""
            return False
        self._name, self._text = self._text[:at], self._text[at + size :]
        self._said, self._spaces = False, ""
        self._call(self._name)
        self._first = True
        self._step = self._json if self._format.tagged is None else self._next_argument
        if self._format.dialect is not None:
            self._step = self._next_written
        return True

    def _json(self) -> bool:
        complete = self._take_object()
        if complete:
            self._step = self._ending
        return complete

    def _next_argument(self) -> bool:
        assert self._format is not None and self._format.tagged is not None
        opens, end = self._format.tagged.key_open, self._format.end
        text = self._text
        if text.startswith(end):
            self._out.append(Event("arguments", "{}" if self._first else "}"))
            self._step = self._ending
            return True
        if text.startswith(opens):
            close = self._format.tagged.key_close
            at = text.find(close, len(opens))
            if at < 0:
                return False
            key = text[len(opens) : at]
            self._text = text[at + len(close) :]
            self._key(key)
            self._step = self._other_value
            if key in self._raw.get(self._name, ()):
                self._out.append(Event("arguments", '"'))
                self._step = self._raw_value
            return True
        if opens.startswith(text) or end.startswith(text):
            return False
        self._out.append(Event("arguments", "{}" if self._first else "}"))
        self._step = self._rest
        return True

    def _key(self, key: str) -> None:
        self._out.append(Event("arguments", f"{'{' if self._first else ', '}{quoted(key)}: "))
        self._first = False

    def _next_written(self) -> bool:
        """Parse the key of an argument in a dialect, or the end of the call, and emit its event.

        Returns False if neither has arrived yet.
        """
        assert self._format is not None and self._format.dialect is not None
        end, assign = self._format.end, self._format.dialect.assign
        self._text = self._text.lstrip()
        if self._text.startswith(end):
            self._out.append(Event("arguments", "{}" if self._first else "}"))
            self._step = self._ending
            return True
        at = self._text.find(assign)
        if at < 0 or end.startswith(self._text):
            return False
        self._key(self._text[:at].strip())
        self._text = self._text[at + len(assign) :]
        self._reader = DialectReader(self._format.dialect, end)
        self._step = self._written_value
        return True

    def _written_value(self) -> bool:
        assert self._reader is not None
        piece, self._text, behind = self._reader.take_text(self._text, self._final)
        if piece:
            self._out.append(Event("arguments", piece))
        if behind:
            self._step = self._next_written
        return bool(behind)

    def _raw_value(self) -> bool:
        before, mark = self._take_until((self._value_close,))
        if before or mark:
            self._out.append(Event("arguments", quoted(before)[1:-1] + ('"' if mark else "")))
        if mark:
            self._step = self._next_argument
        return bool(mark)

    def _other_value(self) -> bool:
        """Set the step that parses a JSON value, whose strings may contain the text value_close.

        Returns False if there is no text yet.
        """
        if self._text:
            self._begin_json()
            self._step = self._json_value if self._text[0] in '"[{' else self._bare_value
        return bool(self._text)

    def _bare_value(self) -> bool:
        before, mark = self._take_until((self._value_close,))
        return self._other_piece(before, bool(mark))

    def _json_value(self) -> bool:
        return self._other_piece(*self._take_json(self._value_close))

    def _other_piece(self, piece: str, closed: bool) -> bool:
        if piece:
            self._out.append(Event("arguments", piece))
        if closed:
            self._step = self._next_argument
        return closed

    def _ending(self) -> bool:
        assert self._format is not None
        return self._literal(self._format.end, self._ended)

    def _ended(self) -> bool:
        self.calls += 1
        self._out.append(Event("end"))
        self._step = self._after
        return True

    def _after(self) -> bool:
        """Set the step that parses the text after a call: another call, the closing of all calls,
        or content.

        Returns False if the text so far is ambiguous.
        """
        assert self._format is not None
        again = _matched(self._format.separator + self._format.begin, self._text)
        closing = self._format.closing
        if self._format.parallel and again >= 0:
            self._text = self._text[again:]
            self._step = self._named
        elif closing and self._text.startswith(closing):
            self._text = self._text[len(closing) :]
            self._step = self._rest
        elif again == _MAYBE or (closing and closing.startswith(self._text)):
            if self._final:
                self._text = ""
            return False
        else:
            self._step = self._rest
        return True


_NO, _MAYBE = -2, -1


def _matched(mark: str, text: str) -> int:
    """Return the length of `mark` if `text` begins with it, else _NO or _MAYBE.

    _NO: `text` does not begin with `mark`. _MAYBE: all of `text` is a beginning of `mark`.
    mark: may contain NUMBER, which stands for any decimal number.
    """
    at = 0
    for i, part in enumerate(mark.split(NUMBER)):
        if i:
            begin = at
            while at < len(text) and text[at] in "0123456789":
                at += 1
            if at == len(text):
                return _MAYBE
            if at == begin:
                return _NO
        if not text.startswith(part, at):
            return _MAYBE if part.startswith(text[at:]) else _NO
        at += len(part)
    return at


def _found(mark: str, text: str) -> tuple[int, int]:
    """Return (position, length) of the first complete `mark` in `text`; (-1, 0) if there is
    none."""
    first = mark.partition(NUMBER)[0]
    at = text.find(first)
    while at >= 0:
        size = _matched(mark, text[at:])
        if size >= 0:
            return at, size
        at = text.find(first, at + 1) if size == _NO else -1
    return -1, 0
