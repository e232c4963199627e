"""Dialect: arguments of a call that are neither JSON nor tagged, such as Python's; DialectReader:
such a value to JSON, piece by piece."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Dialect:
    """The syntax of arguments: KEY assign VALUE, again after each separator. Numbers are JSON's.

    quotes: the quotes that strings may stand in; templates write the first
    raw: whether nothing is escaped in the first quote, so that a string cannot hold it
    words: JSON's -> the dialect's, of true, false and null that are no part of a list or an object
    nested: whether lists and objects are in the dialect too, with keys that have no quotes; else
        they are JSON
    by_name: whether templates sort arguments by their names
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
        """Write arguments as a template does."""
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
# Strings may stand in JSON's quotes, too, if their schema has more than the type.
GEMMA = Dialect(":", ",", ('<|"|>', '"'), raw=True, nested=True, by_name=True)

_WORD = re.compile(r'[^\s,:\[\]{}()"<]+|<')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class DialectReader:
    """A reader of a call's arguments in a dialect, which makes JSON of them.

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
        value.

        "next" is another value after the comma. "end" is the end of the call, which is left in the
        text. "" means that the value is not complete.
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
    """Return how many characters at the end of text may begin mark."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


def _unescaped(escape: str) -> str:
    """Return an escape of Python's or JSON's as JSON has it."""
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
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _inner(text: str) -> str:
    return quoted(text)[1:-1]
