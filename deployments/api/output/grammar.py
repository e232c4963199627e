"""output_grammar: builds one Lark grammar for a model's whole output: reasoning, text and tool
calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.http.json_body import JsonObject
from deployments.api.output.output_format import (
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    MESSAGE_ENDS,
    MESSAGE_START,
    NUMBER,
    Dialect,
    OutputFormat,
    Reasoning,
    quoted,
)
from deployments.api.output.parser import Thinking
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer

# JSON with the separators of json.dumps, on which most models were trained.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_UNICODE = {"json_allow_general_unicode_escapes": True}
_JSON = "%json"
_ANY = r"ANY: /(.|\n)*/"
_SPACES = r"[\s\x1c-\x1f]*"  # the white-space characters that str.strip removes
_WORD = re.compile(r"[A-Za-z_][\w-]*")  # a key that needs no quotes in a nested object
_PLAIN = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    schema: the JSON schema of the arguments object, with enforceable keywords only
    grammar: the Lark grammar of a custom tool's only argument; "": none
    """

    name: str
    schema: JsonObject
    grammar: str = ""

    def raw(self, format: OutputFormat | None) -> frozenset[str]:
        """Return the names of the string arguments that a tagged format writes without quotes."""
        tags = None if format is None else format.tagged
        if tags is None or tags.quoted:
            return frozenset()
        properties = self.schema.get("properties")
        return frozenset(
            name
            for name, schema in (properties if isinstance(properties, dict) else {}).items()
            if isinstance(schema, dict)
            and schema.get("type") == "string"
            and schema.keys() <= _PLAIN
            and not any(tags.value_close in value for value in _choices(schema) or ())
        )


def _choices(schema: JsonObject) -> list[str] | None:
    if "const" in schema:
        return [schema["const"]] if isinstance(schema["const"], str) else []
    values = schema.get("enum")
    return None if values is None else [value for value in values if isinstance(value, str)]


def output_grammar(
    tokenizer: Tokenizer,
    *,
    format: OutputFormat | None = None,
    functions: Sequence[Function] = (),
    required: bool = False,
    parallel: bool = True,
    reasoning: Reasoning | None = None,
    thinking: Thinking = "no",
    once: bool = False,
    content: str = "",
    wrapper: tuple[str, ...] = (),
) -> str:
    """Return the grammar of outputs in which each call is complete and its arguments match their
    schema.

    format: the format of calls; without functions, calls are not allowed
    required: whether there must be a call, without text before it
    parallel: whether several calls are allowed
    thinking: "may": reasoning may come first; "open": the prompt has begun it; "no": no reasoning
    once: whether at most one part of reasoning is allowed, at the beginning
    content: the constraint on the text, as the right side of a Lark rule; "": any text
    wrapper: the optional delimiters before and after the text; (): none
    """
    builder = _Builder(tokenizer)
    if reasoning is not None and reasoning.channels:
        return builder.build_channels(reasoning, functions, required, once, content)
    options = (reasoning, thinking, content, wrapper)
    return builder.build(format, functions, required, parallel, *options)


def tags_grammar(
    tokenizer: Tokenizer, tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str]
) -> str:
    """Return the Lark grammar of text in which each occurrence of a trigger must begin one of the
    tags.

    tags: (begin text, JSON schema of the content, end text) of each tag; the begin text begins with
        a trigger, and the schema has enforceable keywords only
    """
    return _Builder(tokenizer).build_tags(tags, triggers)


class _Builder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        marks = {tokenizer.token_text(i): i for i in sorted(tokenizer.mark_ids)}
        marks.pop("", None)
        self._marks = marks
        hidden = tokenizer.special_ids.union(tokenizer.eos_token_ids)
        self._shown = {i for i in marks.values() if i not in hidden}
        longest_first = sorted(marks, key=lambda text: -len(text))
        self._cuts = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._terminals: dict[tuple[Any, ...], str] = {}  # arguments of `_without` -> its name

    def build(
        self,
        format: OutputFormat | None,
        functions: Sequence[Function],
        required: bool,
        parallel: bool,
        reasoning: Reasoning | None,
        thinking: Thinking,
        content: str,
        wrapper: tuple[str, ...],
    ) -> str:
        self._rules = [_ANY, "SPACE: /\\n{0,2}/"]
        trigger = format.trigger if format is not None else ""
        if functions:
            assert format is not None
            self._calls(format, functions, parallel)

        def body(name: str, starts: tuple[str, ...] = ()) -> None:
            """Add a rule with this name for the output after reasoning, which must not begin with
            any of `starts`."""
            parts = []
            if functions and not trigger:
                starts += ("{",)
            marks = (trigger, *(wrapper if wrapper and self._cuts.search(wrapper[0]) else ()))
            if functions and (required or content or not trigger):
                parts.append("SPACE calls" if trigger else "calls")
            elif functions:
                before = self._until(f"{name}_to_call", trigger, marks[1:], starts)
                parts.append(f"{before} calls_rest")
            if not required:
                text = self._free(marks, starts)
                if content:
                    # The parser would treat these texts, at the ends of content, as calls or
                    # wrappers.
                    begins = (*starts, *filter(None, (trigger if functions else "",)), *wrapper[:1])
                    text = self._limited(name, content, begins, wrapper[1:])
                # Unconstrained content may contain the wrapper anyway, unless its delimiters are
                # control tokens.
                if wrapper and (content or self._cuts.search(wrapper[0])):
                    begin, end = map(self.literal, wrapper)
                    text = f"({begin})? ({text}) ({end})?"
                parts.append(text)
            self._rules.append(f"{name}: {' | '.join(parts)}")

        if reasoning is None or thinking == "no":
            body("start")
            return "\n".join(self._rules) + "\n"
        body("body")
        others = (trigger,) if functions else ()
        thoughts = f"{self._until('thoughts', reasoning.end, others)} SPACE body"
        if functions and trigger:
            thoughts += (
                f" | {self._until('thoughts_to_call', trigger, (reasoning.end,))} calls_rest"
            )
        if thinking == "open":
            self._rules.append(f"start: {thoughts}")
        else:
            # Without reasoning, the text must not begin with reasoning's start, as it would be
            # parsed as reasoning.
            body("at_once", (reasoning.start,))
            self._rules.append(f"start: {self.literal(reasoning.start)} ({thoughts}) | at_once")
        return "\n".join(self._rules) + "\n"

    def _limited(
        self, name: str, content: str, starts: tuple[str, ...], ends: tuple[str, ...]
    ) -> str:
        """Return the grammar expression for content with forbidden beginnings and ends.

        JSON content is returned unchanged, as it never has such a beginning or end.

        name: name for the new terminal
        starts, ends: the texts that the content must not begin or end with
        """
        if content.startswith(_JSON) or not (starts or ends):
            return content
        self._rules.append(f"{name.upper()}: {_without((), starts, ends, '', f'({content})')}")
        return name.upper()

    def build_tags(self, tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str]) -> str:
        self._rules = [_ANY]
        behind: dict[str, list[str]] = {}
        for i, (begin, schema, end) in enumerate(tags):
            trigger = min((mark for mark in triggers if begin.startswith(mark)), key=len)
            for match in self._cuts.finditer(begin):
                if match.start() < len(trigger) < match.end():
                    # A trigger that ends inside a control token is extended to the token's end.
                    trigger = begin[: match.end()]
            tail = begin[len(trigger) :]
            parts = [self._spelled(tail)] if tail else []
            parts += [_json(schema, _FREE), *([self._spelled(end)] if end else [])]
            self._rules.append(f"tag_{i}: {' '.join(parts)}")
            behind.setdefault(trigger, []).append(f"tag_{i}")
        marks = tuple(dict.fromkeys((*triggers, *behind)))
        alternatives = []
        for i, (trigger, names) in enumerate(behind.items()):
            others = tuple(mark for mark in marks if mark != trigger)
            before = self._until(f"until_{i}", trigger, others)
            alternatives.append(f"{before} ({' | '.join(names)})")
        self._rules.append(f"start: ({' | '.join(alternatives)})* {self._free(marks)}")
        return "\n".join(self._rules) + "\n"

    def build_channels(
        self,
        reasoning: Reasoning,
        functions: Sequence[Function],
        required: bool,
        once: bool,
        content: str,
    ) -> str:
        """Return the Lark grammar of a turn in harmony channels; the prompt has its first
        <|start|>assistant.

        required: whether there must be a call.
        once: whether at most one part of reasoning is allowed.
        content: the right side of the rule for the final text; "": any text.
        """
        again, comment = self.literal(f"{MESSAGE_START}assistant"), f"{CHANNEL}commentary"
        message = self.literal(MESSAGE)
        ends = (*MESSAGE_ENDS, MESSAGE_START)
        self._rules = [_ANY]
        self._rules += [
            f'json: (" " {self.literal(CONSTRAIN)}? "json")?',
            f"thoughts: {self.literal(reasoning.start)} "
            f"{self._until('thoughts_text', reasoning.end, ends)} {again}",
            f"comment: {self.literal(comment + MESSAGE)} "
            f"{self._until('comment_text', reasoning.end, ends)} {again}",
            f"final: {self.literal(f'{CHANNEL}final')} "
            + (f"json {message} ({content})" if content else f"{message} {self._free(ends)}"),
        ]
        before = "thoughts?" if once else "thoughts*"
        if not (content or required):
            before = "thoughts? comment*" if once else "(thoughts | comment)*"
        body = ["call"] if functions else []
        body += [] if required else ["final"]
        for i, function in enumerate(functions):
            named = f" to=functions.{function.name}"
            heads = f"{self.literal(comment + named)} | {self.literal(named + comment)}"
            arguments = _json(function.schema, _COMPACT)
            self._rules.append(f"call_{i}: ({heads}) json {message} {arguments}")
        if functions:
            self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        return "\n".join([f"start: {before} ({' | '.join(body)})", *self._rules]) + "\n"

    def literal(self, text: str) -> str:
        """Return the grammar expression for a text of a format, with control tokens as tokens and
        NUMBER as digits."""
        return " /[0-9]{1,6}/ ".join(map(self._spelled, text.split(NUMBER)))

    def _spelled(self, text: str) -> str:
        parts, at = [], 0
        for match in self._cuts.finditer(text):
            if match.start() > at:
                parts.append(quoted(text[at : match.start()]))
            parts.append(_tokens({self._marks[match.group()]}))
            at = match.end()
        if at < len(text) or not parts:
            parts.append(quoted(text[at:]))
        return " ".join(parts)

    def _free(
        self,
        marks: tuple[str, ...],
        starts: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
        tail: str = "",
    ) -> str:
        """Return the grammar expression for text without any of `marks`; other control tokens are
        allowed.

        marks, starts, ends, tail: see `_without`
        """
        head = self._up_to_shown(marks, starts)
        if not head:
            return self._terminal(marks, starts, ends, tail)
        last = self._terminal(marks, (), ends, tail)
        return f"({self._terminal(marks, starts, ends, tail)} | {head} {last})"

    def _until(
        self, name: str, mark: str, others: tuple[str, ...] = (), starts: tuple[str, ...] = ()
    ) -> str:
        """Return the grammar expression for text up to and including the first occurrence of
        `mark`.

        name: name for the new rule
        others: further texts that must not occur
        starts: see `_without`
        """
        if match := self._cuts.search(mark):
            # The text ends where the control token in `mark` begins. If a beginning of `mark`
            # equals an end of it, an earlier occurrence could overlap with this one, which `ends`
            # excludes.
            tail = mark[: match.start()]
            sizes = range(1, len(mark))
            ends = tuple(mark[:-size] + tail for size in sizes if mark.endswith(mark[:size]))
            text = self._free((mark, *others), starts, ends, tail)
            return f"{text} {self.literal(mark[len(tail) :])}"
        suffix = f"[suffix={quoted(mark)}]: "
        self._rules.append(f"{name}{suffix}{_without(others, starts)}")
        head = self._up_to_shown((mark, *others), starts)
        if not head:
            return name
        self._rules.append(f"{name}_last{suffix}{_without(others)}")
        return f"({name} | {head} {name}_last)"

    def _up_to_shown(self, marks: tuple[str, ...], starts: tuple[str, ...]) -> str:
        """Return the grammar expression for free text that ends with a visible (not special)
        control token; "" if the model has no such token."""
        shown = self._shown - self._tokens_in(*marks)
        first = shown - self._tokens_in(*starts)
        if not first:
            return ""
        again = f"({self._terminal(marks)} {_tokens(shown)})*"
        return f"{self._terminal(marks, starts)} {_tokens(first)} {again}"

    def _tokens_in(self, *texts: str) -> set[int]:
        return {self._marks[cut] for text in texts for cut in self._cuts.findall(text)}

    def _terminal(
        self,
        marks: tuple[str, ...],
        starts: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
        tail: str = "",
    ) -> str:
        """Return the name of the terminal for the text that `_without` describes; its rule is added
        once."""
        key = tuple(dict.fromkeys(filter(None, marks))), starts, ends, tail
        if not any(key):
            return "ANY"
        if key not in self._terminals:
            self._terminals[key] = f"TEXT_{len(self._terminals)}"
            self._rules.append(f"{self._terminals[key]}: {_without(*key)}")
        return self._terminals[key]

    def _calls(self, format: OutputFormat, functions: Sequence[Function], parallel: bool) -> None:
        head = format.opening + format.begin
        again = f"({self.literal(format.separator + format.begin)} call)*"
        more = [again] if parallel and format.parallel else []
        more += [self.literal(format.closing)] if format.closing else []
        self._rules.append(f"calls: {self.literal(head)} call_and_more")
        tail = head[len(format.trigger) :]
        self._rules.append(f"calls_rest: {self.literal(tail) + ' ' if tail else ''}call_and_more")
        self._rules.append(f"call_and_more: {' '.join(['call', *more])}")
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            parts = [self.literal(function.name + format.middle)]
            if format.dialect is not None:
                parts += self._written(format.dialect, f"arguments_{i}", function.schema)
            elif format.tagged is None:
                parts.append(_json(function.schema, _FREE if format.indented else _COMPACT))
            else:
                parts += self._tagged(i, format, function)
            if format.end:
                parts.append(self.literal(format.end))
            self._rules.append(f"call_{i}: {' '.join(parts)}")

    def _tagged(self, index: int, format: OutputFormat, function: Function) -> list[str]:
        tags = format.tagged
        assert tags is not None
        schema, raw = function.schema, function.raw(format)
        required = schema.get("required") or []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for place, (name, inner) in enumerate((schema.get("properties") or {}).items()):
            _check_name(name, name, tags.key_close)
            rule = f"argument_{index}_{place}"
            close = self.literal(tags.value_close)
            if name not in raw:
                inner = {**shared, **inner} if isinstance(inner, dict) and shared else inner
                value = f"{_json(inner, _COMPACT)} {close}"
            elif function.grammar:
                value = f"%lark {{\n{function.grammar}\n}} {close}"
            elif (choices := _choices(inner)) is not None:
                value = f"({' | '.join(map(quoted, choices))}) {close}"
            else:
                value = self._until(f"{rule}_value", tags.value_close)
            key = " ".join(
                (self.literal(tags.key_open), quoted(name), self.literal(tags.key_close))
            )
            self._rules.append(f"{rule}: {key} {value}")
            parts.append(rule if name in required else f"{rule}?")
        return parts

    def _written(self, dialect: Dialect, rule: str, schema: JsonObject) -> list[str]:
        """Return the grammar expressions for a call's arguments, or an object's properties, in a
        dialect.

        rule: prefix of the names of new rules
        """
        required = schema.get("required") or []
        shared: JsonObject = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        items = dialect.ordered(schema.get("properties") or {})
        between = self.literal(dialect.separator)
        parts = []
        for place, (name, inner) in enumerate(items):
            _check_name(name, name.strip(), dialect.assign)
            value = self._value(dialect, f"{rule}_{place}", inner, shared)
            self._rules.append(f"{rule}_{place}: {quoted(name + dialect.assign)} {value}")
            parts.append(f"{rule}_{place}")
        # For each argument, add a rule for the arguments that may follow; it refers to the next
        # one's rule.
        for place in range(len(items) - 1, 0, -1):
            again = f"{between} {parts[place]}"
            again = again if items[place][0] in required else f"({again})?"
            next_rule = f" {rule}_behind_{place}" if place + 1 < len(items) else ""
            self._rules.append(f"{rule}_behind_{place - 1}: {again}{next_rule}")
        forms = []
        for place, (name, _) in enumerate(items):
            behind = f" {rule}_behind_{place}" if place + 1 < len(items) else ""
            forms.append(parts[place] + behind)
            if name in required:
                break
        else:
            return [f"({' | '.join(forms)})?"] if forms else []
        return [f"({' | '.join(forms)})"]

    def _value(self, dialect: Dialect, rule: str, schema: Any, shared: JsonObject) -> str:
        """Return the grammar expression for a schema's values: in the dialect if it can write them,
        else in JSON.

        rule: prefix of the names of new rules
        shared: the definitions ("$defs", "definitions") to which the schema may refer
        """
        if not isinstance(schema, dict):
            return _json(schema, _COMPACT)
        kind, keys = schema.get("type"), schema.keys()
        several = schema.get("anyOf") if keys <= _PLAIN | {"anyOf"} else None
        if isinstance(kind, list) and keys <= _PLAIN | {"anyOf"} - {"enum", "const"}:
            several = [{**schema, "type": form} for form in kind]
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if (
            choices is not None
            and keys <= _PLAIN
            and not any(isinstance(choice, dict | list) for choice in choices)
        ):
            return f"({' | '.join(self._constant(dialect, form) for form in choices)})"
        if several and choices is None:
            rules = [
                self._value(dialect, f"{rule}_{place}", form, shared)
                for place, form in enumerate(several)
            ]
            return f"({' | '.join(rules)})"
        if kind == "string" and dialect.raw and keys <= _PLAIN:
            quote = dialect.quotes[0]
            return f"{self.literal(quote)} {self._until(f'{rule}_text', quote)}"
        if kind == "boolean" and keys <= _PLAIN:
            return f"({quoted(dialect.value(True))} | {quoted(dialect.value(False))})"
        if kind == "null" and keys <= _PLAIN:
            return quoted(dialect.value(None))
        if dialect.nested and kind == "array" and keys <= _PLAIN | {"items"} and "items" in keys:
            item = self._value(dialect, f"{rule}_item", schema["items"], shared)
            self._rules.append(f"{rule}_item: {item}")
            again = f"({self.literal(dialect.separator)} {rule}_item)*"
            return f'"[" ({rule}_item {again})? "]"'
        properties = schema.get("properties")
        known = _PLAIN | {"properties", "required", "additionalProperties"}
        named = isinstance(properties, dict) and all(map(_WORD.fullmatch, properties))
        if dialect.nested and kind == "object" and keys <= known and properties and named:
            inner = self._written(dialect, f"{rule}_in", {**shared, **schema})
            return " ".join(['"{"', *inner, '"}"'])
        return _json({**shared, **schema}, _COMPACT)

    def _constant(self, dialect: Dialect, value: Any) -> str:
        """Return the grammar expression for a constant argument in the syntax of the dialect.

        Strings in Python calls are in double quotes, like strings in JSON's grammar.
        """
        if not isinstance(value, str):
            return quoted(dialect.value(value))
        quote = dialect.quotes[0]
        if not dialect.raw or quote in value:
            return quoted(quoted(value))
        return " ".join((self.literal(quote), quoted(value), self.literal(quote)))


def _check_name(name: str, read: str, end: str) -> None:
    """Raise InvalidRequest for an argument whose name would be parsed incorrectly.

    read: the name as the parser of calls would read it
    end: the format's text after the name
    """
    if name != read or not name or end in name + end[:-1]:
        raise InvalidRequest(
            f"this model's form of calls cannot have a property named {json.dumps(name)}",
            code="not_supported",
        )


def _without(
    marks: Sequence[str],
    starts: Sequence[str] = (),
    ends: Sequence[str] = (),
    tail: str = "",
    of: str = "ANY",
) -> str:
    """Return the right side of a Lark terminal that matches text without any text of `marks`.

    The text begins with none of `starts` and ends with none of `ends`, but with `tail`.
    of: a terminal or expression that the text must also match
    """
    parts = [of]
    if held := "|".join(_escaped(mark) for mark in marks if mark):
        parts.append(f"~/(.|\\n)*({held})(.|\\n)*/")
    if begun := "|".join(map(_escaped, starts)):
        parts.append(f"~/{_SPACES}({begun})(.|\\n)*/")
    if ended := "|".join(map(_escaped, ends)):
        parts.append(f"~/(.|\\n)*({ended})/")
    if tail:
        parts.append(f"/(.|\\n)*{_escaped(tail)}/")
    return " & ".join(parts)


def _escaped(text: str) -> str:
    """Return a text escaped for a regular expression in Lark."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _tokens(ids: set[int]) -> str:
    """Return the grammar expression for one token whose id is in `ids`; "" without ids."""
    ranges: list[list[int]] = []
    for i in sorted(ids):
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    spans = (str(low) if low == high else f"{low}-{high}" for low, high in ranges)
    return f"<[{','.join(spans)}]>" if ranges else ""


def json_content(schema: Any) -> str:
    """Return the right side of a Lark rule that matches JSON documents of a schema."""
    return _json(schema, _FREE)


def _json(schema: Any, options: JsonObject) -> str:
    if schema is True or schema is False:
        schema = {} if schema else {"enum": []}
    guided = {**schema, "x-guidance": {**options, **_UNICODE}}
    return f"{_JSON} {json.dumps(guided, ensure_ascii=False)}"
