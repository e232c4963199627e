"""Body: the fields of one kind of request body, as JSON schemas (2020-12) by name; and functions
for building such schemas.

Conditions that depend on the model or on two fields (token ids of the vocabulary, min_tokens above
max_tokens) are in no schema; the code that reads the body checks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
TOKEN: Schema = {"type": "integer", "minimum": 0}
NOTHING: Schema = {"enum": [False, 0, "", [], {}]}  # values that mean the same as no field
NULL: Schema = {"type": "null"}
NEVER: Schema = {"not": {}}
_NEEDED = "x-needed"


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of one kind of request.

    Unknown fields are named in x-ignored-fields, unless `http.strict` refuses them.

    taken: the fields with an effect
    required: the fields that must be present and not null
    ignored: the fields known to have no effect, which are named in x-ignored-fields
    refused: refused field -> schema of its values that are accepted nevertheless
    known: the names of the fields whose values are checked
    """

    taken: Mapping[str, Schema]
    required: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, Schema] = field(default_factory=dict)
    known: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        looked = {name for name, schema in self.refused.items() if schema is not NEVER}
        object.__setattr__(self, "known", frozenset(looked | self.taken.keys()))

    def schema(self, *, strict: bool = False) -> Schema:
        """Return the JSON schema of the whole body. For optional fields it allows null, which means
        absent.

        strict: whether the schema forbids unknown fields.
        """
        properties = {
            name: schema if name in self.required else optional(schema)
            for name, schema in self.taken.items()
        }
        properties |= {name: {} for name in sorted(self.ignored)}
        for name, schema in self.refused.items():
            properties[name] = NULL if schema is NEVER else optional(schema)
        body: Schema = {"type": "object", "properties": properties}
        if self.required:
            body["required"] = list(self.required)
        if strict:
            body["additionalProperties"] = False
        return body


def optional(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
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
    """Return the schema of a number. above: whether the bound `low` is exclusive."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def text(most: int) -> Schema:
    """Return the schema of a text. most: maximum bytes in UTF-8, which also bounds the number of
    characters."""
    return {"type": "string", "maxLength": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def list_of(item: Schema, low: int = 0, high: int | None = None) -> Schema:
    array: Schema = {"type": "array", "items": item}
    if low:
        array["minItems"] = low
    if high is not None:
        array["maxItems"] = high
    return array


def needed(schema: Schema) -> Schema:
    """Mark a key's schema so that `record` requires the key, although the Struct has a default for
    it.

    The code that reads the value raises the error for a missing key.
    """
    return {**schema, _NEEDED: True}


def record(required: Mapping[str, Schema], **others: Schema) -> Schema:
    """Return the schema of an object. others: the schemas of keys that may be left out or null."""
    checked = [name for name, schema in others.items() if _NEEDED in schema]
    required = {**required, **{name: others.pop(name) for name in checked}}
    for name in checked:
        required[name] = {key: part for key, part in required[name].items() if key != _NEEDED}
    properties = {**required, **{name: optional(schema) for name, schema in others.items()}}
    object_schema: Schema = {"type": "object", "properties": properties}
    if required:
        object_schema["required"] = list(required)
    return object_schema
