"""Grammar: the grammar of a request's output, as data in the request."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest
from engine.structured.json_schema import enforceable

MAX_BYTES = 256 * 1024  # maximum bytes of a grammar's text
MAX_CHOICES = 4096


class Grammar(msgspec.Struct, frozen=True):
    """A grammar that the output has to satisfy.

    kind: the language of `text`.
     json_schema   a JSON Schema that `enforceable` has returned (use the constructor below)
     regex         of the whole output, in the syntax of Rust's regex crate, without look-around
     choice        a JSON list of strings, one of which is the output
     lark          llguidance's Lark; the rule to begin with is `start`
     gbnf          llama.cpp's GBNF; the rule to begin with is `root`

    Only the text's size is checked here. Compilation shows whether the grammar can be enforced.
    Raises InvalidRequest (grammar_too_large).
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "gbnf"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text.encode("utf-8", "replace")) > MAX_BYTES:
            raise InvalidRequest(
                f"the grammar has more than {MAX_BYTES} bytes",
                param="structured",
                code="grammar_too_large",
            )

    @classmethod
    def json_schema(cls, schema: Any, *, strict: bool = True) -> "Grammar":
        """Return the grammar of JSON documents that are valid for a schema (an object, or its
        text).

        strict: whether to refuse schemas with keywords that cannot be enforced. Otherwise these
            keywords are ignored; `enforceable` lists them.
        Raises UnsupportedSchema, InvalidRequest.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                message = f"the schema is not JSON: {error}"
                raise InvalidRequest(message, param="structured") from None
        enforced, _ = enforceable(schema, strict=strict)
        return cls("json_schema", msgspec.json.encode(enforced).decode())

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """Return the grammar that matches exactly one of the given texts. Raises InvalidRequest."""
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            raise InvalidRequest(
                f"choice takes 1 to {MAX_CHOICES} texts, none of them empty", param="structured"
            )
        return cls("choice", msgspec.json.encode(list(choices)).decode())

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        return cls("gbnf", text)
