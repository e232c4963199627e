"""A parser of a YAML subset that keeps line numbers: mappings, lists and plain values.

The parser builds values from events with an explicit stack, so that depth, size and repetition are
bounded, and the file cannot name a type whose objects are constructed. Anchors and aliases, tags,
second documents and duplicate keys are refused.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

# Maximum bytes of a file; the pure Python parser takes half a second for this size.
MAX_BYTES = 2**16
_MAX_DEPTH = 16

Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class YamlProblem(Exception):
    """An error: a fault of the YAML file.

    line: line number from 1; 0: unknown.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


@dataclass(slots=True)
class YamlDocument:
    """A parsed YAML file.

    data: the content as dict, list, str, int, float, bool and None.
    lines: line of each key or list item, by key path.
    """

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Return the line of a key path, or of its nearest ancestor that is in the file; 0 if none
        is."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


def parse(text: str) -> YamlDocument:
    """Parse a YAML text. Raises YamlProblem at the first fault."""
    if len(text) > MAX_BYTES:
        raise YamlProblem(0, f"more than {MAX_BYTES // 1024} KiB")
    result = YamlDocument()
    stack: list[_OpenNode] = []
    documents = 0
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise YamlProblem(line, "a second document; one file is one configuration")
            elif isinstance(event, AliasEvent):
                raise YamlProblem(line, f"alias *{event.anchor}; aliases are not supported")
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                stack.pop()
            elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent):
                if event.tag is not None:
                    raise YamlProblem(line, f"tag {str(event.tag)[:80]}; tags are not supported")
                if event.anchor is not None:
                    raise YamlProblem(line, f"anchor &{event.anchor}; anchors are not supported")
                if isinstance(event, ScalarEvent):
                    _add(result, stack, _value(event, line), line, key=str(event.value))
                    continue
                value: Any = {} if isinstance(event, MappingStartEvent) else []
                path = _add(result, stack, value, line)
                stack.append(_OpenNode(value, path))
                if len(stack) > _MAX_DEPTH:
                    raise YamlProblem(line, f"nested more than {_MAX_DEPTH} deep")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlProblem(mark.line + 1 if mark else 0, _plain(error.problem)) from None
    except YAMLError as error:
        raise YamlProblem(0, _plain(str(error).splitlines()[0])) from None
    return result


@dataclass(slots=True)
class _OpenNode:
    """A mapping or list whose end the parser has not reached.

    path: its key path. key: the mapping's key whose value comes next; None: a key comes next.
    """

    value: Any
    path: Path
    key: str | None = None


def _add(
    result: YamlDocument, stack: list[_OpenNode], value: Any, line: int, key: str | None = None
) -> Path:
    """Add a value to the innermost open mapping or list, or use it as the mapping's next key;
    return the key path.

    stack: the open mappings and lists, the innermost last.
    key: the value as a mapping key; None: it cannot be a key.
    """
    if not stack:
        result.data = value
        return ()
    top = stack[-1]
    if isinstance(top.value, list):
        path: Path = (*top.path, len(top.value))
        result.lines[path] = line
        top.value.append(value)
        return path
    if top.key is None:
        if key is None:
            raise YamlProblem(line, "a key must be a plain word")
        if key in top.value:
            raise YamlProblem(
                line, f"{key!r} a second time; first in line {result.lines[(*top.path, key)]}"
            )
        top.key = key
        path = (*top.path, key)
        result.lines[path] = line
        top.value[key] = None
        return path
    path = (*top.path, top.key)
    top.value[top.key] = value
    top.key = None
    return path


def _value(event: ScalarEvent, line: int) -> str | int | float | bool | None:
    text = str(event.value)
    if event.style is not None:
        return text
    return plain_value(text, line)


def plain_value(text: str, line: int = 0) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar by the core schema of YAML 1.2.

    Raises YamlProblem for a number that is too long or not finite.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 20:
            raise YamlProblem(line, "a number of more than 20 digits")
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text.replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise YamlProblem(line, f"{text} is not a finite number")
        return number
    return text


def _plain(problem: str | None) -> str:
    text = problem or "not YAML"
    if "\\t" in text:
        return "a tab; YAML is indented with spaces"
    return text
