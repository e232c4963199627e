"""Body: the fields of one kind of request, as JSON schemas (2020-12) by name; and the few schemas
of which these are made.

Conditions on the model or on two fields at once (a token id of the vocabulary, min_tokens above
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
NOTHING: Schema = {"enum": [False, 0, "", [], {}]}  # values that ask for nothing
NULL: Schema = {"type": "null"}
NEVER: Schema = {"not": {}}
_NEEDED = "x-needed"


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of one kind of request.

    Unknown fields are named in x-ignored-fields, unless `http.strict` refuses them.

    taken: the fields with an effect
    required: the fields that must be there, and not null
    ignored: the fields known to have no effect, which are named in x-ignored-fields
    refused: refused field -> schema of the values that are accepted all the same
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
        """Return the JSON schema of the whole body. null stands for a field that is left out.

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
    """Return the schema, changed to allow null too."""
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
    """Return the schema of a number. above: whether low itself is excluded."""
    return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}


def text(most: int) -> Schema:
    """Return the schema of a text. most: maximum bytes of UTF-8, and so a bound of characters."""
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
    """Return the schema of a key that `record` requires, though the Struct has a default for it.

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
