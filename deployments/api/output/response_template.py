"""declared_output: reads a model's output formats from its checkpoint's `response_template`.

`response_template` is a key that transformers defines (`tokenizer_config.json`, version 1). For
each field of a message it has the texts or regular expressions that open and close the field, and
the parser of the text in between. Our grammars must generate what a regular expression only
matches. Therefore only expressions of texts, optional white space and named groups are supported.
Examples rendered by the chat template show which white space a model writes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.http.json_body import JsonObject
from deployments.api.output.output_format import Dialect, OutputFormat, Reasoning, TaggedArguments

_REASONING = ("reasoning_content", "thinking", "reasoning")
_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_SPACE = re.compile(r"(?:\\s|\\n|\\t|\n| )[*+?]\??")
_GROUP = re.compile(r"\(\?P<(\w+)>")
_CONTROLS = {"n": "\n", "t": "\t"}
_WHOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class _Unusable(Exception):
    """The error for a declaration from which no grammar can be built; its message names the key."""


@dataclass(frozen=True, slots=True)
class _Space:
    """Optional white space in a regular expression; rendered examples show how much a model writes.

    fallback: the white space to use if no rendered example matches
    """

    fallback: str = ""


@dataclass(frozen=True, slots=True)
class _Other(_Space):
    """Arbitrary text in a regular expression, which the declaration skips."""


@dataclass(frozen=True, slots=True)
class _Captured:
    name: str


_Part = str | _Space | _Captured


@dataclass(frozen=True, slots=True)
class DeclaredOutput:
    """The output formats that a response_template declares.

    A format is None, and wrapper is (), if the declaration has no usable one.

    problems: messages about the parts of the declaration that cannot be used
    """

    calls: OutputFormat | None = None
    reasoning: Reasoning | None = None
    wrapper: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def declared_output(
    template: Any, name: str, key: str, value: str, examples: Sequence[str], ends: Iterable[str]
) -> DeclaredOutput:
    """Return the output formats that a response_template declares.

    name, key, value: the function name, and the key and value of its only argument, in the examples
    examples: chats with such a call, rendered by the chat template
    ends: the texts of the tokens that end a turn
    """
    problems: list[str] = []
    try:
        fields = _fields(template)
    except _Unusable as error:
        return DeclaredOutput(problems=(f"response_template: {error}",))

    def read_field(field: str, make: Any, *more: Any) -> Any:
        if field not in fields:
            return None
        try:
            return make(fields[field], *more)
        except _Unusable as error:
            problems.append(f"response_template.fields.{field}{error}")
        except (AttributeError, LookupError, TypeError):
            problems.append(f"response_template.fields.{field}: a value in it is of another type")
        return None

    calls = read_field("tool_calls", _calls, (name, key, value), examples, tuple(ends))
    thoughts = next((known for known in _REASONING if known in fields), "")
    reasoning = read_field(thoughts, _reasoning)
    wrapper = read_field("content", _wrapper)
    return DeclaredOutput(calls, reasoning, wrapper or (), tuple(problems))


def _fields(template: Any) -> dict[str, JsonObject]:
    if not isinstance(template, dict):
        raise _Unusable("it is no object")
    if template.get("version", 1) != 1:
        raise _Unusable(f"version {template['version']!r} is not known here, 1 is")
    if unknown := sorted(template.keys() - _KEYS):
        raise _Unusable(f"{', '.join(unknown)}: unknown keys")
    fields = template.get("fields")
    if not isinstance(fields, dict) or not all(
        isinstance(field, dict) for field in fields.values()
    ):
        raise _Unusable("fields must be an object of objects")
    return fields


def _reasoning(field: JsonObject) -> Reasoning:
    start, end = (_text(_mark(field, name), f".{name}").strip() for name in ("open", "close"))
    if not start or not end:
        raise _Unusable(": reasoning without a mark at its beginning and its end")
    return Reasoning(start, end)


def _wrapper(field: JsonObject) -> tuple[str, ...] | None:
    if not _mark(field, "open"):
        return None  # no wrapper: content is the text that belongs to no other field
    begin, end = (_text(_mark(field, name), f".{name}").strip() for name in ("open", "close"))
    return (begin, end) if end else None


def _calls(
    field: JsonObject, probe: tuple[str, str, str], examples: Sequence[str], ends: tuple[str, ...]
) -> OutputFormat:
    opened, closed = _mark(field, "open"), _mark(field, "close")
    if not opened or not closed:
        raise _Unusable(": calls without a mark at their beginning and their end")
    last = closed[-1]
    if isinstance(last, str):
        end = next((mark for mark in ends if mark and last.endswith(mark)), "")
        closed[-1] = last[: len(last) - len(end)]
    kind = field.get("content", "text")
    inner = field.get("content_args") or {}
    per_call, repeats = bool(field.get("transform_each")), bool(field.get("repeats"))
    named, keys = _transform(field.get("transform"), per_call)
    head, tail = _split(opened, "name") if named else (opened, [])
    if any(isinstance(part, _Captured) for part in (*head, *tail, *closed)):
        raise _Unusable(".transform: it uses more than a name")
    more: JsonObject = {"parallel": repeats or per_call}
    name, key, value = probe
    arguments = f'{{"{key}": "{value}"}}'
    if kind == "json" and not named:
        if inner:
            raise _Unusable(f".content_args: {', '.join(inner)} where the name is in the JSON")
        before, between = f'{{"{keys[0]}": "', f'", "{keys[1]}": '
        call: list[list[_Part]] = [[name], [between], [arguments]]
        if per_call:
            lead, trailing = [*head, _Space(), "[", _Space()], [_Space(), "]", _Space(), *closed]
            opening, *_, closing = _shown(examples, lead, [before], *call, ["}"], trailing)
            marks = {"opening": opening, "separator": ", ", "closing": closing}
            return _made(begin=before, middle=between, end="}", **marks, **more)
        lead, trailing = [*head, _Space(), before], ["}", _Space(), *closed]
        first, *_, last = _shown(examples, lead, *call, trailing)
        return _made(begin=first, middle=between, end=last, **more)
    if not named:
        raise _Unusable(f".content: {kind} where the name is not in `open_pattern`")
    if kind == "json":
        dialect = _dialect(inner)
        written = arguments if dialect is None else dialect.write({key: value})
        brackets = ([], []) if dialect is None else (["{"], ["}"])
        lead, trailing = [*tail, _Space(), *brackets[0]], [*brackets[1], _Space(), *closed]
        first, _, then, _, last = _shown(examples, head, [name], lead, [written], trailing)
        return _made(begin=first, middle=then, end=last, dialect=dialect, **more)
    if kind == "xml-inline":
        return _tagged(inner, head, tail, closed, probe, examples, more)
    raise _Unusable(f".content: {kind} has no grammar here; json and xml-inline have")


def _tagged(
    inner: JsonObject,
    head: list[_Part],
    tail: list[_Part],
    closed: list[_Part],
    probe: tuple[str, str, str],
    examples: Sequence[str],
    more: JsonObject,
) -> OutputFormat:
    where = ".content_args.tag_pattern"
    key_open, after_key = _split(_parts(inner.get("tag_pattern"), where), "key", where)
    key_close, value_close = _split(after_key, "value", where)
    if not key_open or not key_close or not value_close:
        raise _Unusable(f"{where}: it needs a text before, between and behind its two groups")
    reader = inner.get("value_parser") or {"name": "text"}
    known = reader.get("name", "text") if isinstance(reader, dict) else None
    options = (reader.get("args") or {}) if isinstance(reader, dict) else {}
    if known not in ("text", "json") or options.keys() - {"allow_non_json", "strip"}:
        raise _Unusable(".content_args.value_parser: only text and json have a grammar here")
    quoted = known == "json" and not options.get("allow_non_json")
    name, key, value = probe
    shown = f'"{value}"' if quoted else value
    call: list[list[_Part]] = [head, [name], [*tail, _Space()]]
    argument: list[list[_Part]] = [key_open, [key], key_close, [shown], [*value_close, _Space()]]
    joined = _shown(examples, *call, *argument, [_Other()], closed)
    begin, _, middle, opens, _, closes, _, ended, other, last = joined
    tags = TaggedArguments(opens, closes, ended, quoted)
    return _made(begin=begin, middle=middle, end=other + last, tagged=tags, **more)


def _made(**marks: Any) -> OutputFormat:
    """Return the OutputFormat with these fields; its trigger is the first word of opening and
    begin."""
    begin = marks.get("opening", "") + marks["begin"]
    word = re.match(r"\s*\S+", begin)
    if word is None:
        raise _Unusable(".open: a call that begins with no mark cannot be told from text")
    return OutputFormat("response_template", trigger=word.group(), **marks)


def _transform(transform: Any, each: bool) -> tuple[bool, tuple[str, str]]:
    """Return (whether the opening expression contains the call's name, (JSON key of the name, JSON
    key of the arguments)).

    Both keys are "" if the expression contains the name.

    each: whether the declaration transforms each call separately.
    """
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}" and not each:
        return False, ("name", "arguments")
    if isinstance(function, dict):
        matches = [_WHOLE.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
        if all(matches):
            name, arguments = (match.group(1) for match in matches if match is not None)
            if not each and (name, arguments) == ("name", "content"):
                return True, ("", "")
            prefix = "" if each else "content."
            keys = (name.removeprefix(prefix), arguments.removeprefix(prefix))
            inside = name.startswith(prefix) and arguments.startswith(prefix)
            if inside and not any("." in key for key in keys):
                return False, keys
    raise _Unusable(".transform: it says not plainly where a call's name and arguments are")


def _dialect(options: JsonObject) -> Dialect | None:
    """Return the Dialect that the options of a JSON parser declare; None for plain JSON. Raises
    _Unusable."""
    if not options.keys() - {"allow_non_json"}:
        return None
    pairs = options.get("string_delims") or []
    same = [pair[0] for pair in pairs if len(pair) == 2 and pair[0] == pair[1]]
    known = options.keys() <= {"unquoted_keys", "string_delims", "allow_non_json"}
    if not known or not options.get("unquoted_keys") or len(same) != 1 or len(pairs) != 1:
        raise _Unusable(".content_args: of JSON's variants one has a grammar here, unquoted_keys")
    return Dialect(":", ",", (same[0], '"'), raw=True, nested=True)


# --- marks and expressions ---


def _mark(field: JsonObject, name: str) -> list[_Part]:
    """Return a field's parsed delimiter; [] if it has none. name: "open" or "close".

    Of a list of texts the first one is used.
    """
    text = field.get(name)
    if isinstance(text, list) and text:
        text = text[0]
    if isinstance(text, str):
        return [text]
    pattern = f"{name}_pattern"
    return _parts(field[pattern], f".{pattern}") if pattern in field else []


def _text(parts: list[_Part], where: str) -> str:
    """Return a delimiter's text without optional white space. Raises _Unusable for groups."""
    if any(isinstance(part, _Captured) for part in parts):
        raise _Unusable(f"{where}_pattern: groups are for calls")
    return "".join(part for part in parts if isinstance(part, str))


def _split(
    parts: list[_Part], group: str, where: str = ".open_pattern"
) -> tuple[list[_Part], list[_Part]]:
    if _Captured(group) not in parts:
        raise _Unusable(f"{where}: it has no group `{group}`")
    at = parts.index(_Captured(group))
    return parts[:at], parts[at + 1 :]


def _parts(pattern: Any, where: str) -> list[_Part]:
    """Parse a regular expression into literal texts, optional white space and named groups.

    Raises _Unusable for any other construct.
    """
    if not isinstance(pattern, str):
        raise _Unusable(f"{where}: it must be a text")
    parts: list[_Part] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if (space := _SPACE.match(pattern, at)) is not None:
            parts.append(_Space(" " if "+" in space.group() else ""))
            at = space.end()
            continue
        if (group := _GROUP.match(pattern, at)) is not None:
            parts.append(_Captured(group.group(1)))
            at = _behind_group(pattern, at)
            continue
        if char == "\\" and at + 1 < len(pattern):
            char = pattern[at + 1]
            if char.isalnum() and char not in _CONTROLS:
                raise _Unusable(f"{where}: \\{char} is no text")
            char = _CONTROLS.get(char, char)
            at += 1
        elif char in ".^$*+?[]()|{}":
            raise _Unusable(f"{where}: {pattern[at : at + 12]!r} may be many texts")
        at += 1
        if pattern[at : at + 1] in ("*", "+", "?", "{"):
            raise _Unusable(f"{where}: {pattern[at - 1 : at + 12]!r} may be many texts")
        if parts and isinstance(parts[-1], str):
            parts[-1] += char
        else:
            parts.append(char)
    return parts


def _behind_group(pattern: str, at: int) -> int:
    depth, inside = 0, False  # depth of open brackets; whether inside a set of characters
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _shown(examples: Sequence[str], *groups: Sequence[_Part]) -> list[str]:
    """Return the text of each group of parts, from the first example that matches all groups.

    If no example matches, each white-space part gets its fallback.
    """
    parts = [part for group in groups for part in group]
    whole = "".join(
        f"({re.escape(part) if isinstance(part, str) else _expression(part)})" for part in parts
    )
    matches = filter(None, (re.search(whole, example, re.DOTALL) for example in examples))
    if (match := next(matches, None)) is not None:
        texts = iter(match.groups())
    else:
        texts = iter([p if isinstance(p, str) else getattr(p, "fallback", "") for p in parts])
    return ["".join(next(texts) for _ in group) for group in groups]


def _expression(part: _Part) -> str:
    return ".*?" if isinstance(part, _Other) else r"\s*"
