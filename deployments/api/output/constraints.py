"""RequestedGrammar: what a request limits its output to, read from the fields that say it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.api.body_fields import name_fields
from deployments.api.bounds import ALIASES, MAX_TAGS, SCHEMA_NAME, ConstraintKind
from deployments.api.http.errors import ApiError, invalid, shown, wrong_type
from deployments.api.http.json_body import parse_json
from engine.structured.grammar import MAX_BYTES, MAX_CHOICES, Grammar
from engine.structured.json_schema import enforceable


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A tag of an output: begin, JSON of the schema, end."""

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """A limit to text in which each of the triggers begins one of the tags."""

    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]


@dataclass(slots=True)
class RequestedGrammar:
    """A limit of the output, as a request asks for it.

    where: the request's field, for errors
    value: a schema (bool, object or its text), the text of a pattern or grammar, the list of
        choices, or StructuralTags
    strict: whether a schema is refused for what cannot be enforced
    ignored: the options without effect here
    """

    where: str
    kind: ConstraintKind
    value: Any
    strict: bool = False
    ignored: list[str] = field(default_factory=list)

    def grammar(self) -> tuple[Grammar, list[str]]:
        """Return the grammar for the engine, and JSON pointers of what it does not enforce.

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
        # Only GBNF defines its rules with "::=".
        return Grammar("gbnf" if "::=" in self.value else "lark", self.value), []


def take_constraint(body: msgspec.Struct) -> RequestedGrammar | None:
    """Return the output limit of a body in OpenAI's form, its contents unchecked; None: any text.

    Raises ApiError 400: invalid_type, invalid_value, missing_field, not_supported;
    conflicting_fields, if there are two.
    """
    constraints: list[RequestedGrammar | None] = []
    if (response_format := getattr(body, "response_format", None)) is not None:
        constraints.append(take_response_format(response_format))
    if (structured_outputs := getattr(body, "structured_outputs", None)) is not None:
        constraints.append(take_structured_outputs(structured_outputs))
    for name, kind in ALIASES.items():
        value = getattr(body, name, None)
        # llama.cpp's clients send an empty text where they have no grammar.
        if value is not None and not (name == "grammar" and value == ""):
            constraints.append(_checked(name, kind, value))
    return only_constraint(*constraints) if constraints else None


def only_constraint(*constraints: RequestedGrammar | None) -> RequestedGrammar | None:
    """Return the one constraint that is there; None: none is.

    Raises ApiError 400 conflicting_fields, if there are two.
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
    value: Any, path: str = "response_format", inner: str | None = None
) -> RequestedGrammar | None:
    """Return the output limit of a response format; None: any text. Raises ApiError 400.

    path: the client's name of the format
    inner: the client's name of the object with the schema; None: `json_schema` of the format
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # some servers take a schema beside it
        schema = value.get("schema")
        where = path if schema is None else f"{path}.schema"
        constraint = schema_constraint({"type": "object"} if schema is None else schema, where)
        constraint.ignored = _others(value, path, "type", "schema")
        return constraint
    if kind == "json_schema":
        if inner is None:
            return _json_schema(value.get("json_schema"), f"{path}.json_schema")
        return _json_schema(value, inner, "type")
    if kind == "structural_tag":
        return _structural_tag(value, path)
    raise invalid(
        f"{path} of type {shown(kind)} is not supported; text, json_object, json_schema "
        "and structural_tag are",
        f"{path}.type",
        "not_supported",
    )


def schema_constraint(schema: Any, where: str) -> RequestedGrammar:
    """Return the limit to documents of a JSON schema. Raises ApiError 400."""
    constraint = _checked(where, "json", schema)
    assert constraint is not None
    return constraint


def _json_schema(inner: Any, path: str, *beside: str) -> RequestedGrammar:
    """Return the limit of an object with a name and a schema. beside: other known keys."""
    if not isinstance(inner, dict):
        raise wrong_type(path, "an object")
    name = inner.get("name")
    if not isinstance(name, str) or not SCHEMA_NAME.fullmatch(name):
        what = "1 to 64 letters, digits, underscores or dashes"
        raise invalid(
            f"{path}.name must be {what}",
            f"{path}.name",
            "missing_field" if name is None else "invalid_value",
        )
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.strict", "true or false")
    if inner.get("schema") is None:
        raise invalid(f"{path}.schema is required", f"{path}.schema", "missing_field")
    constraint = schema_constraint(inner["schema"], f"{path}.schema")
    constraint.strict = bool(strict)
    constraint.ignored = _others(inner, path, "name", "strict", "schema", *beside)
    return constraint


def take_structured_outputs(value: Any) -> RequestedGrammar | None:
    """Return the output limit of vLLM's field `structured_outputs`. Raises ApiError 400."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("structured_outputs", "an object")
    kinds: tuple[ConstraintKind, ...] = ("json", "regex", "choice", "grammar")
    constraints = [_checked(f"structured_outputs.{kind}", kind, value.get(kind)) for kind in kinds]
    if value.get("json_object"):
        constraints.append(
            RequestedGrammar("structured_outputs.json_object", "json", {"type": "object"})
        )
    if value.get("structural_tag") is not None:
        constraints.append(
            _structural_tag(value["structural_tag"], "structured_outputs.structural_tag")
        )
    present = [constraint for constraint in constraints if constraint is not None]
    if len(present) != 1:
        raise invalid(
            "structured_outputs takes one of json, json_object, regex, choice, grammar and "
            "structural_tag",
            "structured_outputs",
            "missing_field" if not present else "conflicting_fields",
        )
    others = _others(value, "structured_outputs", *kinds, "json_object", "structural_tag")
    present[0].ignored += others
    return present[0]


def _structural_tag(value: Any, path: str) -> RequestedGrammar:
    if isinstance(value, str):
        value = _parsed(value, path)
    if not isinstance(value, dict):
        raise wrong_type(path, "an object, or its text")
    if value.get("format") is not None:
        raise invalid(
            f"{path}.format is not supported; structures and triggers are",
            f"{path}.format",
            "not_supported",
        )
    triggers = _filled(value.get("triggers"), f"{path}.triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise wrong_type(f"{path}.triggers", "texts that are not empty")
    tags = []
    for i, trigger in enumerate(_filled(value.get("structures"), f"{path}.structures")):
        at = f"{path}.structures[{i}]"
        if not isinstance(trigger, dict):
            raise wrong_type(at, "an object")
        begin, schema, end = trigger.get("begin"), trigger.get("schema"), trigger.get("end")
        schema = True if schema is None else schema
        end = "" if end is None else end
        if not isinstance(begin, str) or not isinstance(end, str):
            raise wrong_type(f"{at}.{'end' if isinstance(begin, str) else 'begin'}", "a string")
        if not begin.startswith(tuple(triggers)):
            raise invalid(f"{at}.begin must begin with one of the triggers", f"{at}.begin")
        if len(begin) + len(end) > MAX_BYTES:
            raise invalid(f"{at} has more than {MAX_BYTES} bytes", at, "grammar_too_large")
        _checked(f"{at}.schema", "json", schema)
        tags.append(StructuralTag(begin, schema, end))
    return RequestedGrammar(path, "tags", StructuralTags(tuple(tags), tuple(triggers)))


def _filled(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(path, "a list")
    if not 1 <= len(value) <= MAX_TAGS:
        raise invalid(f"{path} takes 1 to {MAX_TAGS} of them", path)
    return value


def _checked(where: str, kind: ConstraintKind, value: Any) -> RequestedGrammar | None:
    """Return the limit of a field after a check of types and sizes alone; None for no value."""
    if value is None:
        return None
    if kind == "json":
        if not isinstance(value, (dict, bool, str)):
            raise wrong_type(where, "a JSON schema")
    elif kind == "choice":
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise wrong_type(where, "a list of strings")
        if not 1 <= len(value) <= MAX_CHOICES:
            raise invalid(f"{where} takes 1 to {MAX_CHOICES} strings", where)
    elif not isinstance(value, str):
        raise wrong_type(where, "a string")
    elif not value.strip():
        raise invalid(f"{where} must not be empty", where)
    if isinstance(value, str) and len(value) > MAX_BYTES:
        raise invalid(f"{where} has more than {MAX_BYTES} bytes", where, "grammar_too_large")
    return RequestedGrammar(where, kind, value)


def _others(value: Mapping[str, Any], path: str, *known: str) -> list[str]:
    return name_fields(
        (name for name, option in value.items() if name not in known and option is not None),
        f"{path}.",
    )


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode("utf-8", "replace"))
    except ApiError as error:
        raise invalid(f"{where}: {error.message}", where, error.code) from None
