"""OutputFormat: the syntax of tool calls of a model family. Dialect: a syntax of arguments that is
neither JSON nor tagged, such as Python's. Reasoning: the delimiters of reasoning."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Dialect:
    """A syntax of call arguments: KEY assign VALUE, joined by separator. Numbers are written as in
    JSON.

    quotes: the allowed quotes of strings; templates write the first
    raw: whether nothing is escaped within the first quote, so that a string cannot contain this
        quote
    words: (JSON's word, the dialect's word) for true, false and null outside lists and objects
    nested: whether lists and objects are also in the dialect, with unquoted keys; if false, they
        are JSON
    by_name: whether templates sort arguments by name
    """

    assign: str
    separator: str
    quotes: tuple[str, ...]
    raw: bool = False
    words: tuple[tuple[str, str], ...] = ()
    nested: bool = False
    by_name: bool = False

    def ordered(self, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        items = list(arguments.items())
        return sorted(items, key=lambda item: item[0].lower()) if self.by_name else items

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of arguments as a template writes them."""
        items = self.ordered(arguments)
        return self.separator.join(f"{key}{self.assign}{self.value(it)}" for key, it in items)

    def value(self, value: Any) -> str:
        quote = self.quotes[0]
        if isinstance(value, str):
            if self.raw:
                return f"{quote}{value}{quote}"
            inner = _inner(value).replace('\\"', '"')
            return f"{quote}{inner.replace(quote, chr(92) + quote)}{quote}"
        if self.nested and isinstance(value, dict):
            return f"{{{self.write(value)}}}"
        if self.nested and isinstance(value, list):
            return f"[{self.separator.join(map(self.value, value))}]"
        written = json.dumps(value, ensure_ascii=False)
        return dict(self.words).get(written, written)


PYTHON = Dialect(
    "=", ", ", ("'", '"'), words=(("true", "True"), ("false", "False"), ("null", "None"))
)
# Strings may also be in JSON's quotes, if their schema has more keywords than the type.
GEMMA = Dialect(":", ",", ('<|"|>', '"'), raw=True, nested=True, by_name=True)

_WORD = re.compile(r'[^\s,:\[\]{}()"<]+|<')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class DialectReader:
    """An incremental converter of a call's arguments from a dialect to JSON.

    end: the text after a call's last value
    """

    def __init__(self, dialect: Dialect, end: str) -> None:
        self._dialect = dialect
        self._end = end
        self._words = {its: word for word, its in dialect.words}
        self._quote = ""  # the quote of the open string; "" outside strings
        self._open = ""  # the open brackets

    def take_text(self, text: str, final: bool) -> tuple[str, str, Literal["", "next", "end"]]:
        """Convert a text; return the JSON, the text that is not converted yet, and what follows the
        converted value.

        "next": another value, after a comma; "end": the end of the call, which remains in the text;
        "": the value is incomplete.

        final: whether no more text follows
        """
        out: list[str] = []
        while text:
            if self._quote:
                unread = self._string(text, final, out)
                if unread == text:
                    break
                text = unread
                continue
            quotes = self._dialect.quotes
            if quote := next((candidate for candidate in quotes if text.startswith(candidate)), ""):
                out.append('"')
                self._quote, text = quote, text[len(quote) :]
                continue
            if not final and any(candidate.startswith(text) for candidate in quotes):
                break
            if not self._open:
                if text.startswith(self._end):
                    return "".join(out), text, "end"
                if not final and self._end.startswith(text):
                    break
                if text[0] == ",":
                    return "".join(out), text[1:], "next"
            unread = self._other(text, final, out)
            if unread == text:
                break
            text = unread
        return "".join(out), text, ""

    def _other(self, text: str, final: bool, out: list[str]) -> str:
        """Convert the next JSON token outside strings; return the text after it.

        Returns the whole text if the token may be incomplete.
        """
        char, unread = text[0], text[1:]
        if char in "[{(":
            self._open += char
            out.append("{" if char == "{" else "[")
        elif char in "]})":
            if self._open:
                out.append("}" if self._open[-1] == "{" else "]")
                self._open = self._open[:-1]
        elif char in ",:":
            out.append(f"{char} ")
        elif not char.isspace():
            match = _WORD.match(text)
            assert match is not None
            word, unread = match.group(), text[match.end() :]
            if not unread and not final:
                return text
            word = self._words.get(word, word)
            key = unread.startswith(":") and self._open.endswith("{")
            known = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
            out.append(word if known and not key else quoted(word))
        return unread

    def _string(self, text: str, final: bool, out: list[str]) -> str:
        """Convert the next characters of a string; return the text after them."""
        quote = self._quote
        if self._dialect.raw and quote == self._dialect.quotes[0]:
            at = text.find(quote)
            if at < 0:
                keep = 0 if final else overlap(text, quote)
                at = len(text) - keep
                out.append(_inner(text[:at]))
                return text[at:]
        else:
            places = [at for mark in (quote, "\\") if (at := text.find(mark)) >= 0]
            if not places:
                out.append(_inner(text))
                return ""
            at = min(places)
            if text[at] == "\\":
                size = {"u": 6, "x": 4}.get(text[at + 1 : at + 2], 2)
                escape = text[at : at + size]
                out.append(_inner(text[:at]))
                if len(escape) < size:
                    return "" if final else text[at:]
                out.append(_unescaped(escape))
                return text[at + size :]
        out.append(_inner(text[:at]) + '"')
        self._quote = ""
        return text[at + len(quote) :]


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def _unescaped(escape: str) -> str:
    """Convert an escape sequence of a Python or JSON string to JSON."""
    if escape[1] in 'nrtbf"\\/':
        return escape
    if escape[1] in "ux":
        try:
            code = int(escape[2:], 16)
        except ValueError:
            return _inner(escape)
        return f"\\u{code:04x}"
    return "'" if escape[1] == "'" else _inner(escape)


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _inner(text: str) -> str:
    return quoted(text)[1:-1]


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """A syntax with tags around each argument: key_open KEY key_close VALUE value_close.

    Strings are written verbatim, other values as JSON. Therefore a string cannot contain
    value_close.

    quoted: whether strings are also written as JSON
    """

    key_open: str
    key_close: str
    value_close: str
    quoted: bool = False

    def value(self, value: Any) -> str:
        """Return a value as a template writes it."""
        raw = isinstance(value, str) and not self.quoted
        return value if raw else json.dumps(value, ensure_ascii=False)


# The placeholder in formats for the index of a call among all calls of the conversation, from 0.
NUMBER = "\0"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The syntax in which a family of models writes the calls of one message.

    The calls of a message are: opening; for each call begin NAME middle ARGUMENTS end, joined by
    separator; closing.

    trigger: a prefix of opening + begin that marks a call, and that no other text may contain; "":
        a message whose text begins with `begin` has calls, and no other text.
    begin, middle: may contain NUMBER, which stands for the call's index in the conversation.
    tagged, dialect: how arguments are written; neither: as one JSON object.
    indented: templates print the JSON object on several lines, indented by this many columns; 0: on
        one line.
    parallel: whether a message can have several calls.
    short_ids: whether the template accepts only ids of nine letters and digits.
    named_ids: whether the template writes a call's id, functions.NAME:NUMBER, instead of its name.
    """

    name: str
    trigger: str
    begin: str
    middle: str
    end: str
    opening: str = ""
    separator: str = "\n"
    closing: str = ""
    tagged: TaggedArguments | None = None
    dialect: Dialect | None = None
    indented: int = 0
    parallel: bool = True
    short_ids: bool = False
    named_ids: bool = False

    def write(self, name: str, arguments: Mapping[str, Any], number: int = 0) -> str:
        """Return the text of one call, without opening, separator and closing. number: index of the
        call."""
        if self.dialect is not None:
            written = self.dialect.write(arguments)
        elif self.tagged is None:
            indent = 4 if self.indented and arguments else None
            written = json.dumps(arguments, ensure_ascii=False, indent=indent)
            written = written.replace("\n", "\n" + " " * self.indented)
        else:
            tags = self.tagged
            written = "".join(
                f"{tags.key_open}{key}{tags.key_close}{tags.value(value)}{tags.value_close}"
                for key, value in arguments.items()
            )
        begin, middle = (mark.replace(NUMBER, str(number)) for mark in (self.begin, self.middle))
        return f"{begin}{name}{middle}{written}{self.end}"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The delimiters `start` and `end` of a model's reasoning.

    channels: whether an answer is a list of messages with headers (harmony), in which one channel
        has the reasoning
    efforts: (API's reasoning effort, the model's own word) where these differ
    """

    start: str
    end: str
    channels: bool = False
    efforts: tuple[tuple[str, str], ...] = ()

    @property
    def known_by(self) -> str:
        """The text whose presence in a chat template shows that the model uses these delimiters.

        With channels it is `start`, because all messages have the same end.
        """
        return self.start if self.channels else self.end

    @property
    def marks(self) -> str:
        more = f"{MESSAGE_START}{MESSAGE}{''.join(MESSAGE_ENDS)}{CONSTRAIN}"
        return f"{self.start} {self.end} {more if self.channels else ''}"


# Delimiters around content, of models that mark both its beginning and its end.
WRAPPERS = (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>"))

# Control tokens of OpenAI's harmony format.
CHANNEL, MESSAGE, MESSAGE_START, CONSTRAIN = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"),
)
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


_NAME, _ARGUMENTS, _PARAMETERS = '{"name": "', '", "arguments": ', '", "parameters": '


def _xml(name: str, tag: str) -> OutputFormat:
    return OutputFormat(
        name,
        trigger=f"<{tag}>",
        begin=f"<{tag}>\n<function=",
        middle=">\n",
        end=f"</function>\n</{tag}>",
        tagged=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
    )


def _listed(name: str, opening: str, closing: str, **more: Any) -> OutputFormat:
    return OutputFormat(
        name,
        trigger=opening,
        opening=f"{opening}[",
        begin=_NAME,
        middle=_ARGUMENTS,
        end="}",
        separator=", ",
        closing=f"]{closing}",
        **more,
    )


# A model's format is the first one that its template contains, so formats contained in others come
# later.
FORMATS = (
    _xml("qwen3-coder", "tool_call"),
    _xml("seed-oss", "seed:tool_call"),
    *(
        OutputFormat(
            f"hermes{'' if line else '-compact'}{'-longcat' if 'longcat' in tag else ''}",
            trigger=f"<{tag}>",
            begin=f"<{tag}>{line}{_NAME}",
            middle=_ARGUMENTS,
            end=f"}}{line}</{tag}>",
        )
        for tag in ("tool_call", "longcat_tool_call")
        for line in ("\n", "")
    ),
    *(
        OutputFormat(
            name,
            trigger="<tool_call>",
            begin="<tool_call>",
            middle=line,
            end="</tool_call>",
            tagged=TaggedArguments(
                "<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}"
            ),
        )
        for name, line in (("glm-4.5", "\n"), ("glm-4.7", ""))
    ),
    OutputFormat(
        "minimax-m2",
        trigger="<minimax:tool_call>",
        opening="<minimax:tool_call>\n",
        begin='<invoke name="',
        middle='">\n',
        end="</invoke>",
        closing="\n</minimax:tool_call>",
        tagged=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    ),
    OutputFormat(
        "deepseek-v3",
        trigger="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    OutputFormat(
        "deepseek-v3.1",
        trigger="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        separator="",
        closing="<｜tool▁calls▁end｜>",
    ),
    OutputFormat(
        "mistral-v13",
        trigger="[TOOL_CALLS]",
        begin="[TOOL_CALLS]",
        middle="[ARGS]",
        end="",
        separator="",
        short_ids=True,
    ),
    _listed("mistral", "[TOOL_CALLS]", "", short_ids=True),
    _listed("mistral-spaced", "[TOOL_CALLS] ", "", short_ids=True),
    _listed("phi-4-mini", "<|tool_call|>", "<|/tool_call|>"),
    _listed("hunyuan", "<tool_calls>", "</tool_calls>"),
    OutputFormat(
        "lfm2",
        trigger="<|tool_call_start|>",
        opening="<|tool_call_start|>[",
        begin="",
        middle="(",
        end=")",
        separator=", ",
        closing="]<|tool_call_end|>",
        dialect=PYTHON,
    ),
    OutputFormat(
        "gemma4",
        trigger="<|tool_call>",
        begin="<|tool_call>call:",
        middle="{",
        end="}<tool_call|>",
        separator="",
        dialect=GEMMA,
    ),
    OutputFormat(
        "kimi-k2",
        trigger="<|tool_calls_section_begin|>",
        opening="<|tool_calls_section_begin|>",
        begin="<|tool_call_begin|>functions.",
        middle=f":{NUMBER}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        separator="",
        closing="<|tool_calls_section_end|>",
        named_ids=True,
    ),
    OutputFormat(
        "command-a",  # also of Command R7B
        trigger="<|START_ACTION|>",
        opening="<|START_ACTION|>[\n",
        begin=f'    {{"tool_call_id": "{NUMBER}", "tool_name": "',
        middle=_PARAMETERS,
        end="}",
        separator=",\n",
        closing="\n]<|END_ACTION|>",
    ),
    OutputFormat(
        "command-r",
        trigger="Action:\n```json\n[",
        opening="Action:\n```json\n[\n",
        begin='    {\n        "tool_name": "',
        middle='",\n        "parameters": ',
        end="\n    }",
        separator=",\n",
        closing="\n]```",
        indented=8,
    ),
    OutputFormat(
        "internlm2",
        trigger="<|action_start|>",
        begin="<|action_start|><|plugin|>\n" + _NAME,
        middle=_PARAMETERS,
        end="}<|action_end|>",
        parallel=False,
    ),
    OutputFormat(
        "llama3-json", trigger="", begin=_NAME, middle=_PARAMETERS, end="}", parallel=False
    ),
    # The form in which a template prints a call; models write calls as in `channel_parser` and
    # `output_grammar`.
    OutputFormat(
        "harmony",
        trigger=" to=functions.",
        begin=" to=functions.",
        middle="<|channel|>commentary json<|message|>",
        end="<|call|>",
        parallel=False,
    ),
)

REASONING = (
    Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        channels=True,
        efforts=(("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")),
    ),
    Reasoning("<think>", "</think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<|channel>thought\n", "<channel|>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
)
