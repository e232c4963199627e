"""RequestedGrammar: the constraint on the output that a request sets in one of its fields."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.api.body_fields import ALIASES, ConstraintKind, name_fields
from deployments.api.fields import formats
from deployments.api.fields.generation import Generation
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.json_body import JsonObject, parse_json
from engine.structured.grammar import MAX_BYTES, Grammar
from engine.structured.json_schema import enforceable


@dataclass(slots=True)
class RequestedGrammar:
    """A constraint on the output's structure, as set in a request.

    where: the path of the request's field, for errors
    value: a JSON schema (bool, object or text), the text of a pattern or grammar, the list of
        choices, or a StructuralTag
    strict: whether a schema with keywords that cannot be enforced is refused
    ignored: the names of options without effect
    """

    where: str
    kind: ConstraintKind
    value: Any
    strict: bool = False
    ignored: list[str] = field(default_factory=list)

    def grammar(self) -> tuple[Grammar, list[str]]:
        """Return the grammar for the engine, and JSON pointers to schema keywords that it does not
        enforce.

        Takes milliseconds for a large schema. Raises ApiError 400, InvalidRequest.
        """
        if self.kind == "json":
            schema = self.value
            if isinstance(schema, str):
                schema = _parsed(schema, self.where)
            enforced, left_out = enforceable(schema, strict=self.strict)
            return Grammar("json_schema", msgspec.json.encode(enforced).decode()), left_out
        if self.kind == "choice":
            return Grammar.choice(self.value), []
        if self.kind == "regex":
            return Grammar.regex(self.value), []
        # Only GBNF has rules with "::=".
        return Grammar("gbnf" if "::=" in self.value else "lark", self.value), []


def take_constraint(body: Generation) -> RequestedGrammar | None:
    """Return the constraint that a body in OpenAI's form sets; None: any text.

    Raises ApiError 400: invalid_type, invalid_value, missing_field, not_supported;
    conflicting_fields for several constraints.
    """
    constraints: list[RequestedGrammar | None] = []
    if body.response_format is not None:
        constraints.append(take_response_format(body.response_format))
    if body.structured_outputs is not None:
        constraints.append(take_structured_outputs(body.structured_outputs))
    for name, kind in ALIASES.items():
        value = getattr(body, name)
        # llama.cpp's clients send an empty text instead of no grammar.
        if value is not None and (name, value) != ("grammar", ""):
            constraints.append(RequestedGrammar(name, kind, value))
    return only_constraint(*constraints) if constraints else None


def only_constraint(*constraints: RequestedGrammar | None) -> RequestedGrammar | None:
    """Return the only constraint that is not None; None if all are None.

    Raises ApiError 400 conflicting_fields for several constraints.
    """
    present = [constraint for constraint in constraints if constraint is not None]
    if len(present) > 1:
        raise invalid(
            f"{present[0].where} and {present[1].where} exclude each other; give one of them",
            present[1].where,
            "conflicting_fields",
        )
    return present[0] if present else None


def take_response_format(
    value: Any, path: str = "response_format", *, flat: bool = False
) -> RequestedGrammar | None:
    """Return the constraint that a response format sets; None: any text. Raises ApiError 400.

    path: the format's path in the body
    flat: whether the fields of `json_schema` are beside `type` rather than in an inner object
    """
    if value is None:
        return None
    limit = (formats.FLAT_FORMAT if flat else formats.RESPONSE_FORMAT).read(value, path)
    if isinstance(limit, formats.TextFormat):
        return None
    if isinstance(limit, formats.ObjectFormat):
        if limit.schema is None:
            constraint = RequestedGrammar(path, "json", {"type": "object"})
        else:
            constraint = RequestedGrammar(f"{path}.schema", "json", limit.schema)
        constraint.ignored = _others(value, path, limit)
        return constraint
    if isinstance(limit, formats.TagFormat):
        return _structural_tag(limit, path)
    named: formats.NamedSchema = (
        limit.json_schema if isinstance(limit, formats.SchemaFormat) else limit
    )
    if not flat:
        path, value = f"{path}.json_schema", value["json_schema"]
    ignored = _others(value, path, named)
    return RequestedGrammar(f"{path}.schema", "json", named.schema, bool(named.strict), ignored)


def schema_constraint(schema: Any, where: str) -> RequestedGrammar:
    """Return the constraint that the output is a JSON document of a schema. Raises ApiError 400.

    where: the schema's path in the body
    """
    return RequestedGrammar(where, "json", formats.JSON_SCHEMA.read(schema, where))


def take_structured_outputs(value: Any) -> RequestedGrammar | None:
    """Return the constraint that vLLM's field `structured_outputs` sets. Raises ApiError 400."""
    if value is None:
        return None
    path = "structured_outputs"
    limits = formats.STRUCTURED_OUTPUTS.read(value, path)
    constraints = []
    for kind in ("json", "regex", "choice", "grammar"):
        if (limit := getattr(limits, kind)) is not None:
            constraints.append(RequestedGrammar(f"{path}.{kind}", kind, limit))
    if limits.json_object:
        constraints.append(RequestedGrammar(f"{path}.json_object", "json", {"type": "object"}))
    if (tag := limits.structural_tag) is not None:
        where = f"{path}.structural_tag"
        tag = _parsed(tag, where) if isinstance(tag, str) else tag
        constraints.append(_structural_tag(formats.STRUCTURAL_TAG.read(tag, where), where))
    if len(constraints) != 1:
        raise invalid(
            f"{path} takes one of json, json_object, regex, choice, grammar and structural_tag",
            path,
            "missing_field" if not constraints else "conflicting_fields",
        )
    constraints[0].ignored += _others(value, path, limits)
    return constraints[0]


def _structural_tag(tag: formats.StructuralTag, path: str) -> RequestedGrammar:
    for i, structure in enumerate(tag.structures):
        at = f"{path}.structures[{i}]"
        if not structure.begin.startswith(tuple(tag.triggers)):
            raise invalid(f"{at}.begin must begin with one of the triggers", f"{at}.begin")
        if len(structure.begin) + len(structure.end or "") > MAX_BYTES:
            raise invalid(f"{at} has more than {MAX_BYTES} bytes", at, "grammar_too_large")
    return RequestedGrammar(path, "tags", tag)


def _others(value: JsonObject, path: str, known: msgspec.Struct) -> list[str]:
    """Return the names of an object's keys that its Struct lacks, for x-ignored-fields."""
    names = ("type", *known.__struct_fields__)
    return name_fields(
        (name for name, option in value.items() if name not in names and option is not None),
        f"{path}.",
    )


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode("utf-8", "replace"))
    except ApiError as error:
        raise invalid(f"{where}: {error.message}", where, error.code) from None
