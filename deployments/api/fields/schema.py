"""Body: the fields of one kind of request, as JSON schemas (2020-12) by name; and the few shapes
that they are made of.

What depends on the model or on two fields at once (a token id of the vocabulary, min_tokens above
max_tokens) is not in a schema; the check says it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.api.generation.fields import NOT_ALLOWED, WITHOUT_EFFECT

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
TOKEN: Schema = {"type": "integer", "minimum": 0}
NOTHING: Schema = {"enum": [False, 0, "", [], {}]}  # values that ask for nothing
# The same of another route's fields: an empty one is a field that is not known.
ELSEWHERE: Schema = {**NOTHING}
NULL: Schema = {"type": "null"}
NEVER: Schema = {"not": {}}


@dataclass(frozen=True, slots=True)
class Body:
    """taken: have an effect. ignored: are known to have none, and are named in x-ignored-fields, as
    unknown ones are unless `http.strict` refuses them. silent: have no effect, and are not named.
    refused: name -> what of it is taken all the same. required: without null."""

    taken: Mapping[str, Schema]
    required: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    refused: Mapping[str, Schema] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """What is looked into."""
        others = (NEVER, ELSEWHERE)
        looked = {name for name, one in self.refused.items() if not any(one is o for o in others)}
        return frozenset(looked | self.taken.keys())

    def schema(self, *, strict: bool = False) -> Schema:
        """Of the whole body. Null is what a field has that is left out."""
        properties = {
            name: one if name in self.required else optional(one)
            for name, one in self.taken.items()
        }
        properties |= {name: {} for name in sorted(self.ignored | self.silent)}
        for name, one in self.refused.items():
            if one is ELSEWHERE and strict:
                properties[name] = NEVER
            else:
                properties[name] = NULL if one is NEVER else optional(one)
        found: Schema = {"type": "object", "properties": properties}
        if self.required:
            found["required"] = list(self.required)
        if strict:
            found["additionalProperties"] = False
        return found


def openai_body(
    taken: Mapping[str, Schema],
    required: tuple[str, ...] = (),
    refused: Mapping[str, Schema] | None = None,
) -> Body:
    """With what OpenAI's clients send without effect, and what no request may set."""
    never = {**(refused or {}), **dict.fromkeys(sorted(NOT_ALLOWED - taken.keys()), NEVER)}
    return Body(taken, required, WITHOUT_EFFECT - taken.keys() - never.keys(), refused=never)


def optional(schema: Schema) -> Schema:
    """The same, or null."""
    kind = schema.get("type")
    if schema == {} or kind == "null":
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"]}
    return {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}


def integer(low: float, high: float) -> Schema:
    return {"type": "integer", "minimum": int(low), "maximum": int(high)}


def number(low: float, high: float, *, above: bool = False) -> Schema:
    """above: low itself is not one of them."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def text(most: int) -> Schema:
    """most: bytes of UTF-8, of which a character has at least one."""
    return {"type": "string", "maxLength": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def list_of(item: Schema, low: int = 0, high: int | None = None) -> Schema:
    found: Schema = {"type": "array", "items": item}
    if low:
        found["minItems"] = low
    if high is not None:
        found["maxItems"] = high
    return found


def record(required: Mapping[str, Schema], **others: Schema) -> Schema:
    """An object; others: of its keys that may be left out or null."""
    properties = {**required, **{name: optional(one) for name, one in others.items()}}
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = list(required)
    return found
