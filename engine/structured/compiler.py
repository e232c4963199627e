"""Compiler: compiles each grammar once into a matcher for one vocabulary, within limits."""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any
from weakref import WeakSet

import llguidance as llg

from engine.errors import InvalidRequest
from engine.structured.gbnf import to_lark
from engine.structured.grammar import Grammar
from engine.structured.json_schema import UnsupportedSchema, places
from engine.structured.marks import hide_marks

CACHED = 128  # maximum number of cached grammars
LEXERS = 32  # maximum number of lexers of one grammar
# maximum number of lexers of all grammars; each takes 0.2 to 1 MB, or more for large grammars
MOST_LEXERS = 512
_QUICK = 0.05  # seconds; a grammar that takes longer to compile has a single lexer

# Limits for each step, at which a request with an expensive grammar fails. llguidance uses some
# 14,000 units of fuel in a millisecond.
_LIMITS = llg.LLParserLimits(
    step_lexer_fuel=150_000,
    initial_lexer_fuel=1_000_000,
    step_max_items=50_000,
    max_items_in_row=8_000,  # an optional property of an object takes four items
    max_grammar_size=500_000,
    max_lexer_states=50_000,  # states of 1 to 2 kB each
    verbose_errors=False,  # verbose errors would quote the output
)
_JSON_OPTIONS: Any = {
    # Models may write spaces endlessly; this limit suffices for indented text.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "json_allow_general_unicode_escapes": True,
}
# words in llguidance's errors about limits
_TOO_MUCH = ("fuel", "too large", "too many", "too complex", "limit", "max is")
_NOTHING = "NoExtension"  # llguidance's error for a grammar that no output satisfies
_SHOWN = 300  # maximum characters of the compiler's message that an error quotes
_KEYWORDS = (  # keywords that errors may be about, the most likely first
    *("oneOf", "minProperties", "maxProperties", "patternProperties", "multipleOf", "pattern"),
    *("format", "$ref", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "additionalProperties", "required", "enum"),
    *("const", "type", "items", "prefixItems", "properties", "allOf", "anyOf"),
)
# keyword -> words in errors about it that do not name the keyword
_SIGNS: dict[str, tuple[str, ...]] = {
    "min/maxProperties": ("minProperties", "maxProperties"),
    "look": ("pattern", "patternProperties"),
    "regex": ("pattern", "patternProperties"),
    "Pointer": ("$ref",),
    "Resource": ("$ref",),
}
# Classes of tokens whose part of a mask is precomputed, because lexemes often allow the whole
# class: spaces, and string characters by number. They are llguidance's defaults and two further
# classes, for strings near their maxLength, whose masks took a seventh longer without these.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{many}' for many in ("{1,3}", "{1,6}", "{1,10}", "{1,30}", "+")),
]
# Strings, patterns, comments and names of tokens in Lark.
_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^\s<>\[\]"/][^\s<>]*>|</[^\s<>]+>'
)
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_TRIES = 16  # maximum number of compilations in the search for the keyword at fault


class Vocabulary:
    """The tokens of a model in llguidance's form.

    num_tokens: the width of the logits.
    end_ids: end tokens of an answer, allowed where the grammar is satisfied.
    """

    def __init__(
        self,
        tokens: Any,
        num_tokens: int,
        end_ids: Sequence[int],
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """Create a vocabulary from llguidance's tokens.

        marks: id -> real name of the control tokens that `tokens` has under secret names (see
            `hide_marks`); None = this is an outline.
        """
        self.tokens = tokens  # llguidance's tokenizer
        self.num_tokens = num_tokens
        self.end_ids = frozenset(end_ids)
        self._is_outline = marks is None
        self._marks = dict(marks or {})
        self._ids = {name: i for i, name in self._marks.items()}

    def text_of(self, token: int) -> bytes:
        """Return the text of one token; for a control token its name in the tokenizer."""
        if token in self._marks:
            return self._marks[token].encode()
        text: bytes = self.tokens.decode_bytes([token])
        return text

    def spells(self, text: str) -> bool:
        """Whether tokens spell the characters of a grammar's source unchanged.

        They do not in Llama 2's vocabulary, for example, which writes a space as "▁".
        """
        if self._is_outline:  # an outline has a token for each byte
            return True
        text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
        data = text.encode("utf-8", "replace")
        spelt: bytes = self.tokens.decode_bytes(self.tokens.tokenize_bytes(data))
        return spelt == data

    def numbered(self, lark: str) -> str:
        """Return a Lark grammar with the names of control tokens replaced by their ids."""

        def number(match: re.Match[str]) -> str:
            id = self._ids.get(match.group())
            return match.group() if id is None else f"<[{id}]>"

        return _LARK_PARTS.sub(number, lark) if self._ids else lark

    @classmethod
    def load(
        cls,
        folder: str | Path,
        num_tokens: int,
        end_ids: Sequence[int],
        declared: Iterable[str] = (),
    ) -> "Vocabulary":
        """Read the vocabulary of a checkpoint, holding the GIL.

        This takes 0.4 s for 49,000 tokens, and 55 MB of memory for 131,000.

        declared: control tokens that tokenizer.json has as ordinary tokens.
        Raises InvalidRequest (structured_not_supported) without a tokenizer.json, or for a kind of
        tokenizer whose tokens are not bytes.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise _not_supported("this model has no tokenizer.json")
        try:
            text, marks = hide_marks(path.read_bytes(), end_ids, declared)
            # llguidance needs an end token, and would otherwise take token 0.
            ends = sorted({i for i in end_ids if i < num_tokens}) or [*marks][:1] or None
            tokens = llg.LLTokenizer(text, n_vocab=num_tokens, eos_token=ends, slices=_SLICES)
        except (ValueError, KeyError, TypeError) as error:
            raise _not_supported(f"its tokenizer cannot be read: {_words(error)}") from None
        return cls(tokens, num_tokens, end_ids, marks)

    @classmethod
    def outline(
        cls, special: Mapping[int, str], num_tokens: int, end_ids: Sequence[int]
    ) -> "Vocabulary":
        """Create a small vocabulary (10 MB) with which to test whether a grammar compiles.

        Its tokens are single bytes, and the special tokens with their names and ids. Masks for it
        are not usable.
        """
        outline: Any = _Outline(special, num_tokens, end_ids)
        return cls(llg.LLTokenizer(outline), num_tokens, end_ids)


class _Outline:
    """A small tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Mapping[int, str], num_tokens: int, end_ids: Sequence[int]) -> None:
        self.tokens = [b""] * num_tokens
        self.special_token_ids = sorted(i for i in special if i < num_tokens)
        for i in self.special_token_ids:
            self.tokens[i] = special[i].encode()
        free = (i for i in range(num_tokens) if i not in special)
        self._ids = dict(zip(range(256), free, strict=False))
        for byte, i in self._ids.items():
            self.tokens[i] = bytes((byte,))
        ends = [i for i in end_ids if i < num_tokens]
        self.eos_token_id = ends[0] if ends else None

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[byte] for byte in data]


def _not_supported(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"structured output is not possible with this model: {why}",
        param="structured",
        code="structured_not_supported",
    )


class Use:
    """One request's lease of a lexer, which ends when this object is deleted.

    number: the lexer's number.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Lexer:
    """A lexer, which all copies of one matcher share; its states are computed on first use."""

    def __init__(self) -> None:
        self.matcher: Future[Any] = Future()
        self.uses: WeakSet[Use] = WeakSet()


class _Known:
    """A compiled grammar with its lexers.

    Requests that share a lexer wait for each other's masks, so each request gets a separate lexer,
    up to `LEXERS`. Lexers are created only when needed, as each computes its states again.
    """

    def __init__(self) -> None:
        self.lexers = [_Lexer()]
        self.seconds = 0.0  # seconds of the first compilation


class Compiler:
    """A cache of compiled grammars. Thread-safe.

    A cached grammar is compiled again only for a further lexer; a failure is cached too.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, _Known] = OrderedDict()

    def compile(self, grammar: Grammar) -> Any:
        """Return a grammar's matcher in its initial state, which the caller must copy before use.

        The call blocks for milliseconds with most schemas and for seconds with the worst, without
        the GIL.

        Raises InvalidRequest: invalid_grammar, unsatisfiable_schema, grammar_too_complex;
        UnsupportedSchema.
        """
        return _result(self._compiled(grammar).lexers[0].matcher)

    def matcher(self, grammar: Grammar) -> tuple[Any, Use]:
        """Return a new matcher in its initial state for one request, and the request's lease of a
        lexer.

        The request must keep the lease as long as the matcher. The call blocks and raises as
        `compile` does.
        """
        known = self._compiled(grammar)
        first = _result(known.lexers[0].matcher)
        with self._lock:
            lexer = min(known.lexers, key=lambda one: len(one.uses))
            more = LEXERS if known.seconds < _QUICK else 1
            mine = bool(lexer.uses) and len(known.lexers) < more
            if mine:
                lexer = _Lexer()
                known.lexers.append(lexer)
                self._trim()
            use = Use(id(lexer))
            lexer.uses.add(use)
        if mine:
            matcher, error = self._try(grammar.kind, grammar.text)
            lexer.matcher.set_result(first if error else matcher)
        own = lexer.matcher.result().deep_copy()
        # computes the mask of the request's first step, which the matcher keeps
        own.compute_bitmask()
        if own.is_error():  # the lexer has reached its limit of states
            matcher, error = self._try(grammar.kind, grammar.text)
            if not error:
                anew: Future[Any] = Future()
                anew.set_result(matcher)
                lexer.matcher = anew
                own = matcher.deep_copy()
        return own, use

    def _compiled(self, grammar: Grammar) -> _Known:
        """Return the cached grammar, compiling its first matcher if necessary."""
        with self._lock:
            known = self._known.get(grammar)
            mine = known is None
            if known is None:
                known = self._known[grammar] = _Known()
                self._trim()
            else:
                self._known.move_to_end(grammar)
        future = known.lexers[0].matcher
        if mine:
            began = time.perf_counter()
            try:
                matcher = self._compile(grammar)
                known.seconds = time.perf_counter() - began
                future.set_result(matcher)
            except InvalidRequest as refusal:
                future.set_exception(refusal)
            except BaseException as failure:
                future.set_exception(failure)
                with self._lock:
                    self._known.pop(grammar, None)
        future.exception()  # blocks until the grammar is compiled
        return known

    def _trim(self) -> None:
        """Drop the least recently used grammars, but not the newest; the caller holds the lock."""
        lexers = sum(len(known.lexers) for known in self._known.values())
        while len(self._known) > CACHED or (lexers > MOST_LEXERS and len(self._known) > 1):
            _, gone = self._known.popitem(last=False)
            lexers -= len(gone.lexers)

    def _compile(self, grammar: Grammar) -> Any:
        matcher, error = self._try(grammar.kind, grammar.text)
        if not error:
            return matcher
        raise self._explained(grammar, error)

    def _try(self, kind: str, text: str) -> tuple[Any, str]:
        """Compile a grammar; return (matcher, error), where error is "" on success."""
        try:
            return self._tried(kind, text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            return None, _words(error) or type(error).__name__

    def _tried(self, kind: str, text: str) -> tuple[Any, str]:
        if kind == "json_schema":
            native = llg.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
        elif kind == "choice":
            native = llg.LLMatcher.grammar_from_lark(_lark_of(json.loads(text)))
        elif kind == "lark":
            native = llg.LLMatcher.grammar_from_lark(self.vocabulary.numbered(text))
        elif kind == "gbnf":
            native = llg.LLMatcher.grammar_from_lark(to_lark(text))
        else:
            native = llg.LLMatcher.grammar_from_regex(text)
        if not self.vocabulary.spells(text):
            native = _unforced(native)
        matcher = llg.LLMatcher(self.vocabulary.tokens, native, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # Some grammars are too large for their first step, and some allow no token at all.
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            for begin in '{"':
                probe.try_consume_tokens(self.vocabulary.tokens.tokenize_str(begin))
            if probe.is_error():
                matcher = probe
        return matcher, _words(matcher.get_error()) if matcher.is_error() else ""

    def _explained(self, grammar: Grammar, error: str) -> InvalidRequest:
        if is_too_much(error):
            return InvalidRequest(
                f"the grammar is too complex: {error}",
                param="structured",
                code="grammar_too_complex",
            )
        if grammar.kind != "json_schema":
            what = "regular expression" if grammar.kind == "regex" else "grammar"
            message = f"the {what} cannot be used: {error}"
            if _NOTHING in error:
                message = f"no text satisfies the {what}"
            return InvalidRequest(message, param="structured", code="invalid_grammar")
        if "nsatisfiable" in error or _NOTHING in error:
            why = "" if _NOTHING in error else f": {error}"
            return UnsupportedSchema(
                f"no document satisfies the schema{why}", code="unsatisfiable_schema"
            )
        pointer = self._at_fault(json.loads(grammar.text), error)
        where = f", at {pointer}" if pointer else ""
        return UnsupportedSchema(f"the schema cannot be enforced{where}: {error}", pointer)

    def _at_fault(self, schema: dict[str, Any], error: str) -> str:
        """Return the JSON pointer of the keyword that an error is about; "" if unknown."""
        meant = [name for sign, names in _SIGNS.items() if sign in error for name in names]
        for keyword in dict.fromkeys([*meant, *(k for k in _KEYWORDS if k in error)]):
            holders = list(places(schema, keyword))
            for pointer, holder in holders[:_TRIES]:
                if len(holders) == 1:
                    return pointer
                value = holder.pop(keyword)
                _, now = self._try("json_schema", json.dumps(schema))
                holder[keyword] = value
                if now != error:
                    return pointer
            if keyword == "pattern":  # with several patterns, each is compiled alone
                for pointer, holder in holders:
                    alone = {"type": "string", keyword: holder[keyword]}
                    if self._try("json_schema", json.dumps(alone))[1]:
                        return pointer
        return ""


def _result(found: Future[Any]) -> Any:
    error = found.exception()
    # copied, as several threads must not raise the same object
    if isinstance(error, InvalidRequest):
        raise copy(error).with_traceback(None)
    return found.result()


def is_too_much(error: str) -> bool:
    """Whether a matcher's error is about one of its limits."""
    return any(sign in error for sign in _TOO_MUCH)


def _unforced(native: str) -> str:
    """Return a grammar with forced tokens switched off.

    native: the grammar as JSON in llguidance's form, or as Lark text.
    """
    option = '%llguidance {"no_forcing": true}\n'
    if not native.startswith("{"):
        return option + native
    content = json.loads(native)
    (grammar,) = content["grammars"]
    whole = {"name": "unforced", "lark_grammar": f"{option}start: @{grammar['name']}"}
    return json.dumps({**content, "grammars": [whole, grammar]})


def _lark_of(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _words(error: object) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(error).replace("<non-verbose/>", ""))
    return " ".join(text.split())[:_SHOWN]
