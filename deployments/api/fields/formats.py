"""RESPONSE_FORMAT, STRUCTURED_OUTPUTS, STRUCTURAL_TAG: the schemas of fields that constrain the
output."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_TAGS, SCHEMA_NAME
from deployments.api.fields.body import Typed, expects, of_schema
from deployments.api.fields.chat import Text
from deployments.api.fields.schema import NULL, either, one_of, text
from deployments.api.http.errors import ApiError, invalid, shown
from deployments.api.http.json_body import JsonObject
from engine.errors import InvalidRequest
from engine.structured.grammar import MAX_BYTES, MAX_CHOICES


def _name_fault(value: Any) -> InvalidRequest:
    message = " must be 1 to 64 letters, digits, underscores or dashes"
    return InvalidRequest(message, code="missing_field" if value is None else None)


def _format_fault(_: Any) -> InvalidRequest:
    message = " is not supported; structures and triggers are"
    return InvalidRequest(message, code="not_supported")


_SIZE = Meta(max_length=MAX_BYTES, extra={"large": "grammar_too_large"})
JsonSchema = Annotated[
    JsonObject | bool | Annotated[str, _SIZE], Meta(extra={"expected": "a JSON schema"})
]
GrammarText = Annotated[str, Meta(pattern=r"\S"), _SIZE]
MaybeGrammar = Annotated[str, Meta(pattern=r"^$|\S"), _SIZE]
Choices = Annotated[
    list[Annotated[str, of_schema({"minLength": 1})]],
    Meta(min_length=1, max_length=MAX_CHOICES),
    expects("a list of strings", whole=True, sizes=f"takes 1 to {MAX_CHOICES} strings"),
]
_SchemaName = Annotated[
    str,
    Meta(
        pattern=rf"^{SCHEMA_NAME}\Z",
        extra_json_schema={"pattern": f"^{SCHEMA_NAME}$"},
        extra={"fault": _name_fault},
    ),
]


class TextFormat(Struct, tag="text", tag_field="type", gc=False):
    """The response format that allows any text."""


class ObjectFormat(Struct, tag="json_object", tag_field="type", gc=False):
    """The response format of a JSON object. schema: its schema, a field of some servers."""

    schema: JsonSchema | None = None


class NamedSchema(Struct, kw_only=True, gc=False):
    """A JSON schema with a name. strict: whether a schema with unenforceable keywords is
    refused."""

    name: _SchemaName
    schema: JsonSchema
    strict: bool | None = None


class SchemaFormat(Struct, tag="json_schema", tag_field="type", gc=False):
    """The response format of a JSON document that follows a schema."""

    json_schema: Annotated[NamedSchema, expects("an object")]


class FlatSchemaFormat(NamedSchema, tag="json_schema", tag_field="type"):
    """The form of SchemaFormat in the Responses API, without an inner object."""


class Structure(Struct, kw_only=True, gc=False):
    """A structure of a structural tag: `begin`, JSON that follows `schema`, and `end`."""

    begin: Annotated[Text, of_schema({"minLength": 1})]
    schema: JsonSchema | None = None
    end: str | None = None


_SOME = Meta(min_length=1, max_length=MAX_TAGS)
_SIZES = f"takes 1 to {MAX_TAGS} of them"


class StructuralTag(Struct, kw_only=True, gc=False):
    """A constraint on free text: each occurrence of a trigger must begin one of the structures."""

    format: Annotated[None, Meta(extra={"fault": _format_fault})] = None
    triggers: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        _SOME,
        expects("texts that are not empty", whole=True, sizes=_SIZES),
    ]
    structures: Annotated[list[Structure], _SOME, expects("a list", sizes=_SIZES)]


class TagFormat(StructuralTag, tag="structural_tag", tag_field="type"):
    """A structural tag as a response format."""


def _no_format(value: JsonObject, path: str) -> ApiError:
    return invalid(
        f"{path} of type {shown(value.get('type'))} is not supported; text, json_object, "
        "json_schema and structural_tag are",
        f"{path}.type",
        "not_supported",
    )


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | FlatSchemaFormat | TagFormat
_UNKNOWN = Meta(extra={"unknown": _no_format})
RESPONSE_FORMAT: Typed[ResponseFormat] = Typed(
    Annotated[TextFormat | ObjectFormat | SchemaFormat | TagFormat, _UNKNOWN]
)
FLAT_FORMAT: Typed[ResponseFormat] = Typed(
    Annotated[TextFormat | ObjectFormat | FlatSchemaFormat | TagFormat, _UNKNOWN]
)
STRUCTURAL_TAG: Typed[StructuralTag] = Typed(
    Annotated[StructuralTag, Meta(extra={"expected": "an object, or its text"})]
)


class StructuredOutputs(Struct, kw_only=True, gc=False):
    """vLLM's field `structured_outputs`, in which one of these fields is set."""

    json: JsonSchema | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: Annotated[Any, of_schema(one_of(True))] = None
    structural_tag: Annotated[Any, of_schema(either(STRUCTURAL_TAG.schema, text(MAX_BYTES)))] = None


# an object without any of the fields
_NOTHING = {
    "type": "object",
    "properties": dict.fromkeys(StructuredOutputs.__struct_fields__, NULL),
}
JSON_SCHEMA: Typed[JsonObject | bool | str] = Typed(JsonSchema)
STRUCTURED_OUTPUTS: Typed[StructuredOutputs] = Typed(
    Annotated[StructuredOutputs, of_schema({"not": _NOTHING})]
)
