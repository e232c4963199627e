"""ChannelParser: an incremental parser of OpenAI's harmony format, in which messages are in
channels.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The first message's <|start|>assistant is the end of the prompt. In a message to a function, the
function's name may also precede the channel.
"""

import re

from deployments.api.output.output_format import MESSAGE, MESSAGE_ENDS, MESSAGE_START
from deployments.api.output.step_parser import Event, Kind, StepParser

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
# Maximum characters of a header; a longer text is not a header.
_MAX_HEADER = 256
_HEADERS = ("<|channel|>", "to=", MESSAGE)


class ChannelParser(StepParser):
    """A parser of answers in channels (OpenAI's harmony format).

    Messages in the channel `analysis` are reasoning. So are messages whose recipient is neither the
    user nor, if calls are allowed, a function. Other messages are content. Messages of one kind are
    separated by a line break.

    calls: whether calls are allowed
    limited: whether all text after the header of the channel `final` is content, including control
        tokens
    """

    def __init__(self, *, calls: bool, limited: bool = False) -> None:
        self._callable = calls
        self._limited = limited
        self._headers: tuple[str, ...] = _HEADERS
        self._kind: Kind = "content"  # kind of the present message
        self._begun: set[Kind] = set()  # kinds of earlier messages
        self._due = ""  # separator to emit before the next text
        super().__init__(self._header)

    @property
    def reasons(self) -> bool:
        return self._step == self._body and self._kind == "reasoning"

    def _header(self) -> bool:
        text = self._text.lstrip()
        if any(text.startswith(opening) for opening in self._headers):
            at = self._text.find(MESSAGE, 0, _MAX_HEADER)
            if at >= 0:
                header, self._text = self._text[:at], self._text[at + len(MESSAGE) :]
                return self._begin(header)
            may = len(self._text) < _MAX_HEADER
        else:
            may = any(opening.startswith(text) for opening in self._headers)
        if not may:
            return self._begin("")
        if self._final:
            self._text = ""
        return False

    def _begin(self, header: str) -> bool:
        channel, addressed = _CHANNEL.search(header), _RECIPIENT.search(header)
        recipient = addressed[1] if addressed is not None else "assistant"
        name = recipient.removeprefix(_FUNCTIONS)
        self._step = self._body
        if self._callable and name != recipient:
            self._call(name)
            self._step = self._arguments
            return True
        thought = channel is not None and channel[1] == "analysis"
        self._kind = "reasoning" if thought or recipient not in ("assistant", "user") else "content"
        self._due = "\n" if self._kind in self._begun else ""
        if self._limited and channel is not None and channel[1] == "final":
            self._step = self._last
        return True

    def _last(self) -> bool:
        if self._text:
            self._out.append(Event(self._kind, self._due + self._text))
            self._text = self._due = ""
        return False

    def _body(self) -> bool:
        text, mark = self._take_until((*MESSAGE_ENDS, MESSAGE_START))
        if text:
            self._begun.add(self._kind)
            self._out.append(Event(self._kind, self._due + text))
            self._due = ""
        return self._ended(mark)

    def _arguments(self) -> bool:
        complete = self._take_object()
        if complete:
            self.calls += 1
            self._out.append(Event("end"))
            self._step = self._behind
        return complete

    def _behind(self) -> bool:
        """Drop the text between a call and the end of its message; return whether the end was
        found."""
        _, mark = self._take_until((*MESSAGE_ENDS, MESSAGE_START))
        return self._ended(mark)

    def _ended(self, mark: str) -> bool:
        if mark == MESSAGE_START:
            self._text = mark + self._text
        if mark:
            self._step = self._between
        return bool(mark)

    def _between(self) -> bool:
        text = self._text
        if text.startswith(MESSAGE_START):
            self._text = text[len(MESSAGE_START) :]
            self._headers = ("assistant", *_HEADERS)
        elif MESSAGE_START.startswith(text):
            if self._final:
                self._text = ""
            return False
        else:
            self._headers = _HEADERS
        self._step = self._header
        return True
