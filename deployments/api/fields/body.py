"""StructBody: a request's body as a msgspec Struct, from which validation, JSON schema and
documentation page are derived.

The Struct has the fields with their types and ranges. Conditions that no type can express (token
ids of the vocabulary, fields that exclude each other) are checked by the code that reads the body.
This module creates the error messages, from the type of the field at which msgspec's conversion
failed. `Meta(extra=...)` of a type may have these keys for error messages:

    expected   the end of "X must be ...", for a type that has no short name
    items      the noun for a list's items: "X takes 1 to 9 texts, got 10"
    whole      whether an error inside of the value names the whole value
    needed     whether an empty text counts as a missing field
    unknown    a function (object without a known tag, its path) -> the error
    always     whether `unknown` is also called for a value that is no object
    up         the number of levels above the value that an error names
    code       the error's code, where it is not invalid_type or invalid_value
    sizes      the error of a list of another length: "must have 1 to 9 items"
    large      the code of the error of a text with too many characters
    fault      a function that returns the InvalidRequest of the whole value, or None
"""

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args

import msgspec
from msgspec import Meta, inspect

from deployments.api.body_fields import NOT_ALLOWED, WITHOUT_EFFECT, check_names, name_fields
from deployments.api.fields.schema import NEVER, NOTHING, Body, Schema, either, one_of, record
from deployments.api.http.errors import ApiError, invalid, wrong_type

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")

_PLACE = re.compile(r" - at `(?:key in )?\$(.*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_NAMES: Mapping[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}


class Fault(ValueError):
    """The error of a value that a `Shape` does not accept.

    message: the error text that follows the path of the field
    place: the path inside the value, such as ``[3]``
    """

    def __init__(self, message: str, place: str = "", code: str = "invalid_type") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.code = code


class Shape:
    """A base class of field values that have several JSON forms.

    SCHEMA: the JSON schema of all these forms.
    """

    SCHEMA: ClassVar[Schema]

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse a JSON value. Raises Fault."""
        raise NotImplementedError

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema that a value of this class must have."""
        return cls.SCHEMA


class Known(Shape, Generic[V]):
    """An object whose field `type` selects its Struct; objects of unknown types are ignored.

    KINDS: type -> the Struct
    DEFAULT: the type of objects without the field `type`; "": such objects are ignored
    known: the object as its Struct; None: the value has an unknown type, or is no object
    sent: the object as sent by the client
    """

    KINDS: ClassVar[Mapping[str, type[msgspec.Struct]]]
    DEFAULT: ClassVar[str] = ""

    def __init__(self, known: V | None, sent: Any) -> None:
        self.known, self.sent = known, sent

    @classmethod
    def kind_of(cls, value: Any) -> type[msgspec.Struct] | None:
        """Return the Struct that a value's `type` selects; None: ignore the value. Raises Fault."""
        kind = value.get("type", cls.DEFAULT) if isinstance(value, dict) else None
        return cls.KINDS.get(kind) if isinstance(kind, str) else None

    @classmethod
    def parse(cls, value: Any) -> Self:
        kind: Any = cls.kind_of(value)
        if kind is None:
            return cls(None, value)
        try:
            return cls(msgspec.convert(value, kind, dec_hook=_parse), value)
        except msgspec.ValidationError as error:
            fault = _explained(error, kind, value)
            path = fault.param or ""
            message = fault.message.removeprefix(path).strip()
            raise Fault(message, path and f".{path}", fault.code) from None

    @classmethod
    def schema(cls) -> Schema:
        forms = []
        for struct in dict.fromkeys(cls.KINDS.values()):
            if _refused(fields_of(struct)[0]):
                continue
            kinds = [kind for kind, own in cls.KINDS.items() if own is struct]
            form = schema_of(struct, type=one_of(*kinds))
            if cls.DEFAULT in kinds:
                form["required"].remove("type")
            forms.append(form)
        return either(*forms, cls.others())

    @classmethod
    def others(cls) -> Schema:
        """Return the JSON schema of objects whose type is not in KINDS, which are ignored."""
        kinds: Schema = {"type": "object", "properties": {"type": one_of(*cls.KINDS)}}
        if not cls.DEFAULT:
            kinds["required"] = ["type"]
        return {"not": kinds}


class Typed(Generic[V]):
    """The parser of a type of values in bodies.

    schema: the type's JSON schema
    """

    def __init__(self, kind: Any, default: str = "") -> None:
        """Make the parser and the JSON schema of a type.

        kind: the type, in a form that msgspec accepts.
        default: the tag of objects without the field `type`.
        """
        self._box = msgspec.defstruct("Box", [("value", kind)])
        self._default = default
        self.schema: Schema = fields_of(self._box)[0]["value"]
        for form in self.schema.get("anyOf", ()) if default else ():
            if form["properties"]["type"] == {"enum": [default]}:
                form["required"].remove("type")

    def read(self, value: Any, path: str) -> V:
        """Convert a value to this type. path: the value's path in the body. Raises ApiError 400."""
        if self._default and isinstance(value, dict) and "type" not in value:
            value = {**value, "type": self._default}
        boxed = {"value": value}
        try:
            box: Any = msgspec.convert(boxed, self._box, dec_hook=_parse)
        except msgspec.ValidationError as error:
            raise _explained(error, self._box, boxed, path) from None
        read: V = box.value
        return read


def of_schema(schema: Schema) -> Meta:
    """Return the Meta of a field whose JSON schema is only documented; the code that reads the
    field checks it."""
    return Meta(extra_json_schema=schema)


def expects(expected: str, code: str = "invalid_type", **extra: Any) -> Meta:
    """Return the Meta of a value for which all errors have the same text and code.

    expected, extra: see the module's docstring
    """
    return Meta(extra={"expected": expected, "code": code, **extra})


def words(literal: Any, before: str = "", between: str = " or ", **extra: str) -> Meta:
    """Return the Meta of a Literal: errors and schemas list its values in their order.

    before, between: the texts before the first value and between two values, in errors
    """
    values = get_args(literal)
    expected = before + between.join(map(str, values))
    return Meta(examples=list(values), extra={"expected": expected, **extra})


def told_of(name: str, expected: str, code: str = "invalid_value") -> Meta:
    """Return the Meta of objects whose errors are reported at the object's field `name`.

    expected: what the field must be
    """

    def unknown(_: Any, path: str) -> ApiError:
        return invalid(f"{path}.{name} must be {expected}", f"{path}.{name}", code)

    return Meta(extra={"unknown": unknown, "always": True})


@dataclass(frozen=True, slots=True)
class StructBody(Body, Generic[T]):
    """The definition of a body: its Struct, the fields without effect, and the refused fields.

    rejected: field -> (message, code) of the error for a value other than those in `refused`
    generates: whether fields of other servers that limit an output are refused (LIMITS)
    """

    struct: type[T] = field(kw_only=True)
    rejected: Mapping[str, tuple[str, str]] = field(kw_only=True, default_factory=dict)
    generates: bool = field(kw_only=True, default=False)

    def read(self, body: Mapping[str, Any], ignored: list[str], *, strict: bool) -> T:
        """Validate a body and return it as the Struct; add the names of fields without effect to
        `ignored`.

        strict: whether unknown fields are refused. Raises ApiError 400.
        """
        ignored += check_names(
            body, self.known, strict=strict, generates=self.generates, unused=self.ignored
        )
        for name, (message, code) in self.rejected.items():
            value = body.get(name)
            if value is not None and value not in self.refused[name].get("enum", ()):
                raise invalid(message, name, code)
        try:
            read = msgspec.convert(body, self.struct, dec_hook=_parse)
        except msgspec.ValidationError as error:
            raise _explained(error, self.struct, body) from None
        for name, most in _byte_limits(self.struct):
            text = getattr(read, name)
            if isinstance(text, str) and len(text.encode()) > most:
                raise _too_long(name, most)
        for name, known in _inner_names(self.struct):
            if inner := body.get(name):
                others = (own for own in inner if own not in known and inner[own] is not None)
                ignored += name_fields(others, f"{name}.")
        return read


def struct_body(
    struct: type[T],
    *,
    rejected: Mapping[str, tuple[str, str]] | None = None,
    ignored: frozenset[str] = frozenset(),
    accepted: Mapping[str, Schema] | None = None,
    generates: bool = False,
    narrower: Mapping[str, Schema] | None = None,
    required: tuple[str, ...] = (),
    openai: bool = True,
) -> StructBody[T]:
    """Return the StructBody of a Struct, with the fields that are ignored or refused.

    rejected: see StructBody
    ignored: fields without effect, which are named in x-ignored-fields
    accepted: rejected field -> schema of its values that are accepted nevertheless; the default is
        NOTHING
    narrower: field -> keys of its JSON schema in addition to those derived from the Struct
    required: fields that a body must have although the Struct has defaults for them
    openai: whether the fields in WITHOUT_EFFECT and NOT_ALLOWED are included
    """
    taken, always = fields_of(struct)
    for name, schema in (narrower or {}).items():
        taken[name] = {**taken[name], **schema}
    rejected = rejected or {}
    refused: dict[str, Schema] = {**dict.fromkeys(rejected, NOTHING), **(accepted or {})}
    if openai:
        refused |= dict.fromkeys(sorted(NOT_ALLOWED - taken.keys()), NEVER)
        ignored |= WITHOUT_EFFECT - taken.keys() - refused.keys()
    fields = (taken, always + required, ignored, refused)
    return StructBody(*fields, struct=struct, rejected=rejected, generates=generates)


def fields_of(struct: type[msgspec.Struct]) -> tuple[dict[str, Schema], tuple[str, ...]]:
    """Return the JSON schemas of a Struct's fields, without null, and the names of required
    fields."""
    _, components = msgspec.json.schema_components(
        (struct,), schema_hook=methodcaller("schema"), ref_template="{name}"
    )
    own = components[struct.__name__]
    return _properties(own, components), tuple(own["required"])


def schema_of(struct: type[msgspec.Struct], **needed: Schema) -> Schema:
    """Return the JSON schema of a Struct's objects. needed: further fields, which are required."""
    fields, required = fields_of(struct)
    needed |= {name: fields.pop(name) for name in required}
    return record(needed, **fields)


def _properties(struct: Schema, components: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schemas of a Struct's fields without null and without a default."""
    fields = {}
    for name, schema in struct["properties"].items():
        own = _inlined({key: part for key, part in schema.items() if key != "default"}, components)
        fields[name] = _without_null(own)
    return fields


def _inlined(schema: Any, components: Mapping[str, Schema]) -> Any:
    """Return a schema with each reference to an inner Struct replaced by the Struct's schema."""
    if isinstance(schema, list):
        return [_inlined(part, components) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") in components:
        struct = components[schema["$ref"]]
        fields = _properties(struct, components)
        needed = {name: fields.pop(name) for name in struct["required"]}
        beside = {key: part for key, part in schema.items() if key != "$ref"}
        return {**record(needed, **fields), **beside}
    if "enum" in schema and "examples" in schema:
        return {"enum": schema["examples"]}  # in their declared order
    parts = {key: part for key, part in schema.items() if key != "discriminator"}
    if forms := schema.get("anyOf"):
        structs = [components.get(form.get("$ref", ""), {}) for form in forms]
        offered = [not _refused(struct.get("properties", {})) for struct in structs]
        parts["anyOf"] = list(itertools.compress(forms, offered))
    return {key: _inlined(part, components) for key, part in parts.items()}


def _refused(fields: Mapping[str, Schema]) -> bool:
    """Whether a Struct has a field that accepts no value, so that each of its objects is refused.

    fields: {name: JSON schema} of the Struct's fields
    """
    return any(schema.get("not") == {} for schema in fields.values())


def _without_null(schema: Schema) -> Schema:
    if "anyOf" not in schema:
        return schema
    others = [part for part in schema["anyOf"] if part != {"type": "null"}]
    other_keys = {key: part for key, part in schema.items() if key != "anyOf"}
    return {**others[0], **other_keys} if len(others) == 1 else {**other_keys, "anyOf": others}


def _parse(shape: type[Any], value: Any) -> Any:
    return shape.parse(value)


def _explained(
    error: msgspec.ValidationError, struct: type[msgspec.Struct], body: Any, root: str = ""
) -> ApiError:
    """Return the ApiError, with this API's message, for an error of msgspec.

    root: the path in the body of the struct's only field; "": the struct is the whole body
    """
    text = str(error)
    match = _PLACE.search(text)
    place = match[1] if match else ""
    shape: inspect.Type = _type_of(struct)
    value, path = body, ""
    for name, index in _STEP.findall(place):
        shape, extra = _plain(shape, value)
        if "fault" in extra or "whole" in extra or isinstance(shape, inspect.UnionType):
            break
        if name:
            value = value.get(name) if isinstance(value, dict) else None
            path = root if not path and root else f"{path}.{name}" if path else name
            shape = _inside(shape, name)
        else:
            value = value[int(index)] if isinstance(value, list) else None
            path += f"[{index}]"
            shape = shape.item_type if isinstance(shape, inspect.ListType) else inspect.AnyType()
    else:
        shape, extra = _plain(shape, value)
        missing = None if isinstance(shape, inspect.UnionType) else _MISSING.match(text)
        if "whole" not in extra and missing:
            shape, extra = _plain(_inside(shape, missing[1]), None)
            value, path = None, f"{path}.{missing[1]}" if path else missing[1]
    if "unknown" in extra and (isinstance(value, dict) or "always" in extra):
        unknown: ApiError = extra["unknown"](value, path)
        return unknown
    for _ in range(extra.get("up", 0)):
        path = path.rpartition(".")[0]
    if (value is None and not path.endswith("]")) or ("needed" in extra and value == ""):
        if {"expected", "code"} <= extra.keys() or ("fault" in extra and extra["fault"](value)):
            return _refusal(shape, value, path, extra)
        return invalid(f"{path} is required", path, "missing_field")
    if isinstance(fault := error.__cause__, Fault):
        path += fault.place
        return invalid(f"{path} {fault.message}", path, fault.code)
    return _refusal(shape, value, path, extra)


def _inside(shape: inspect.Type, name: str) -> inspect.Type:
    if isinstance(shape, inspect.StructType):
        return next(field.type for field in shape.fields if field.encode_name == name)
    return shape.value_type if isinstance(shape, inspect.DictType) else inspect.AnyType()


def _plain(shape: inspect.Type, value: Any) -> tuple[inspect.Type, dict[str, Any]]:
    """Return a type without its annotations, and the merged `extra` of the annotations.

    A union is replaced by the alternative that fits the value, if there is one.
    """
    extra: dict[str, Any] = {}
    while True:
        if isinstance(shape, inspect.Metadata):
            extra |= shape.extra or {}
            shape = shape.type
        elif isinstance(shape, inspect.UnionType):
            forms = [form for form in shape.types if not isinstance(form, inspect.NoneType)]
            fitting = [form for form in forms if _has_form(form, value)]
            if len(forms) > 1 and not fitting:
                names = [_NAMES.get(type(_plain(form, value)[0]), "") for form in forms]
                return shape, {"expected": " or ".join(dict.fromkeys(names)), **extra}
            shape = (fitting or forms)[0]
        else:
            return shape, extra


def _has_form(shape: inspect.Type, value: Any) -> bool:
    while isinstance(shape, inspect.Metadata):
        shape = shape.type
    if isinstance(shape, inspect.LiteralType):
        return type(value) in map(type, shape.values)
    if isinstance(shape, inspect.IntType):
        return type(value) is int
    if isinstance(shape, inspect.FloatType):
        return type(value) in (int, float)
    if isinstance(shape, inspect.UnionType):
        return any(_has_form(form, value) for form in shape.types)
    if isinstance(shape, inspect.StructType) and shape.tag_field is not None:
        return isinstance(value, dict) and value.get(shape.tag_field) == shape.tag
    kinds: Mapping[type[inspect.Type], type] = {
        inspect.BoolType: bool,
        inspect.StrType: str,
        inspect.ListType: list,
        inspect.DictType: dict,
        inspect.StructType: dict,
    }
    return isinstance(value, kinds.get(type(shape), object))


def _refusal(shape: Any, value: Any, path: str, extra: dict[str, Any]) -> ApiError:
    if "fault" in extra and (error := extra["fault"](value)) is not None:
        return invalid(error.message.replace(error.param or "", path, 1), path, error.code)
    fits = _has_form(shape, value)
    if fits and "sizes" in extra and not (shape.min_length or 0) <= len(value) <= shape.max_length:
        return invalid(f"{path} {extra['sizes']}", path)
    if fits and "large" in extra and len(value) > shape.max_length:
        return invalid(f"{path} has more than {shape.max_length} bytes", path, extra["large"])
    code = extra.get("code") or ("invalid_value" if fits else "invalid_type")
    if "expected" in extra:
        return invalid(f"{path} must be {extra['expected']}", path, code)
    if not fits:
        return wrong_type(path, _NAMES.get(type(shape), "of another type"))
    if isinstance(shape, inspect.IntType):
        return invalid(f"{path} must be between {shape.ge} and {shape.le}", path)
    if isinstance(shape, inspect.FloatType):
        low = (
            f"above {shape.gt:g} and at most"
            if shape.gt is not None
            else f"between {shape.ge:g} and"
        )
        return invalid(f"{path} must be {low} {shape.le:g}", path)
    if isinstance(shape, inspect.ListType):
        what = extra.get("items", "items")
        if shape.min_length is None:
            return invalid(f"{path} takes at most {shape.max_length} {what}", path)
        takes = f"{shape.min_length} to {shape.max_length} {what}"
        return invalid(f"{path} takes {takes}, got {len(value)}", path)
    if isinstance(shape, inspect.StrType) and shape.max_length and len(value) > shape.max_length:
        return _too_long(path, shape.max_length)
    return invalid(f"{path} must not be empty", path)


def _too_long(path: str, most: int) -> ApiError:
    return invalid(f"{path} must have at most {most} bytes", path)


@functools.cache
def _type_of(struct: type[msgspec.Struct]) -> inspect.StructType:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info


@functools.cache
def _byte_limits(struct: type[msgspec.Struct]) -> tuple[tuple[str, int], ...]:
    """Return pairs (field, maximum bytes) of the texts of limited length.

    msgspec limits only the number of characters. Fields with `large` (grammars) are left out, as
    their limit is in characters.
    """
    shapes = [(field.name, *_plain(field.type, "")) for field in _type_of(struct).fields]
    return tuple(
        (name, shape.max_length)
        for name, shape, extra in shapes
        if isinstance(shape, inspect.StrType) and shape.max_length and "large" not in extra
    )


@functools.cache
def _inner_names(struct: type[msgspec.Struct]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return pairs (field, names of its Struct's fields) for the fields whose type is a Struct.

    Left out are fields of several types, and Structs with a special error for unknown objects.
    """
    shapes = [(field.name, *_plain(field.type, {})) for field in _type_of(struct).fields]
    return tuple(
        (name, frozenset(field.encode_name for field in shape.fields))
        for name, shape, extra in shapes
        if isinstance(shape, inspect.StructType) and "unknown" not in extra
    )
