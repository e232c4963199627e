"""enforceable: rewrites a JSON Schema so that it can be enforced token by token.

llguidance enforces all keywords of a schema that it compiles, and refuses schemas with other
keywords. Of the refused keywords, some have no effect and are dropped, some can be rewritten, and
the others are listed by JSON pointers (RFC 6901).
"""

from collections.abc import Iterator
from typing import Any

from engine.errors import InvalidRequest

MAX_NODES = 20_000  # maximum number of schemas inside a schema
MAX_DEPTH = 64
_MOST_BRANCHES = 64  # maximum branches of a oneOf, which are compared in pairs

# Enforced formats, and further formats of JSON Schema. By the specification all other formats are
# annotations.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_OTHER_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES = ("additionalProperties", "additionalItems")
# Keywords that are not enforced -> values that have no effect.
_UNENFORCED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "uniqueItems": (False,),
    "contains": (),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentSchemas": ({},),
    "dependentRequired": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_BESIDE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}

# The largest float below 2**63: llguidance stores bounds as floats, and integers in 64 bits.
_LARGEST = 2**63 - 1024


class UnsupportedSchema(InvalidRequest):
    """The error of a schema that cannot be enforced.

    pointer: the JSON pointer of the keyword at fault; "" = the whole schema.
    """

    code = "unsupported_schema"

    def __init__(self, message: str, pointer: str = "", *, code: str | None = None) -> None:
        super().__init__(message, param="structured", code=code)
        self.pointer = pointer


def enforceable(schema: Any, *, strict: bool) -> tuple[dict[str, Any], list[str]]:
    """Return an equivalent schema for llguidance, and pointers of keywords that are not enforced.

    A `oneOf` whose branches exclude each other becomes `anyOf`. A list under `items` becomes
    `prefixItems`. Integers without bounds get those of 64 bits, as a model might write digits
    endlessly.

    Literals (`const`, `enum`, `default`, `examples`) are not inspected.

    strict: whether to raise UnsupportedSchema for the first keyword that restricts documents and
        cannot be enforced. A `format` that the specification does not define restricts nothing and
        is only listed.
    """
    walk = _Walk(schema, strict)
    return walk.root, walk.left_out


class _Walk:
    def __init__(self, schema: Any, strict: bool) -> None:
        self.left_out: list[str] = []
        self._strict = strict
        self._nodes = 0
        self._document = schema
        self._old = isinstance(schema, dict) and _is_old(schema.get("$schema"))
        root = self._schema(schema, "", 0)
        if root is False:
            raise UnsupportedSchema("the schema false allows nothing", code="unsatisfiable_schema")
        self.root: dict[str, Any] = {} if root is True else root

    def _schema(self, schema: Any, at: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedSchema(
                f"{at or 'the schema'} must be an object", at, code="invalid_type"
            )
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            most = f"{MAX_NODES} schemas inside each other or {MAX_DEPTH} levels"
            raise UnsupportedSchema(f"the schema has more than {most}", code="grammar_too_large")
        reduced: dict[str, Any] = {}
        for name, value in schema.items():
            here = f"{at}/{_escaped(name)}"
            if name == "x-guidance":  # options of llguidance, which clients must not set
                continue
            if name in _MAPS and isinstance(value, dict):
                value = {
                    key: self._schema(inner, f"{here}/{_escaped(key)}", depth + 1)
                    for key, inner in value.items()
                }
            elif name in _LISTS and isinstance(value, list):
                value = [self._schema(v, f"{here}/{i}", depth + 1) for i, v in enumerate(value)]
            elif name in _ONES:
                value = self._schema(value, here, depth + 1)
            elif name == "items":
                if isinstance(value, list):
                    value = [self._schema(v, f"{here}/{i}", depth + 1) for i, v in enumerate(value)]
                else:
                    value = self._schema(value, here, depth + 1)
            elif name in _UNENFORCED:
                if value not in _UNENFORCED[name] and not self._idle(name, schema):
                    self._leave_out(name, here)
                continue
            elif name in _BESIDE:
                continue  # handled together with `if` and `contains`
            elif name == "format" and isinstance(value, str) and value not in FORMATS:
                if value in _OTHER_FORMATS:
                    self._leave_out(f'format "{value}"', here)
                else:
                    self.left_out.append(here)
                continue
            reduced[name] = value
        self._reword(reduced)
        return reduced

    @staticmethod
    def _idle(name: str, schema: dict[str, Any]) -> bool:
        return name == "if" and "then" not in schema and "else" not in schema

    def _leave_out(self, what: str, at: str) -> None:
        if self._strict:
            raise UnsupportedSchema(f"{what} cannot be enforced, at {at}", at)
        self.left_out.append(at)

    def _reword(self, schema: dict[str, Any]) -> None:
        """Rewrite a schema's keywords, in place, to forms that llguidance supports."""
        items = schema.get("items")
        if isinstance(items, list) and not self._old:
            del schema["items"]
            schema.setdefault("prefixItems", items)
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")
        branches = schema.get("oneOf")
        if isinstance(branches, list) and "anyOf" not in schema and self._disjoint(branches):
            schema["anyOf"] = schema.pop("oneOf")
        if schema.get("type") == "integer" and not {"enum", "const"} & schema.keys():
            low = [schema.get(name, 0) for name in ("minimum", "exclusiveMinimum")]
            high = [schema.get(name, 0) for name in ("maximum", "exclusiveMaximum")]
            if all(isinstance(v, (int, float)) and abs(v) < _LARGEST for v in (*low, *high)):
                if not {"minimum", "exclusiveMinimum"} & schema.keys():
                    schema["minimum"] = -_LARGEST
                if not {"maximum", "exclusiveMaximum"} & schema.keys():
                    schema["maximum"] = _LARGEST

    # ---- oneOf ---------------------------------------------------------------------------------

    def _disjoint(self, branches: list[Any]) -> bool:
        """Whether the branches provably exclude each other: no document is valid for two of
        them."""
        if len(branches) > _MOST_BRANCHES:
            return False
        seen = [self._resolved(branch) for branch in branches]
        return all(_exclude(a, b) for i, a in enumerate(seen) for b in seen[i + 1 :])

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Follow the `$ref`s of a schema within this document; return {} for an unknown target."""
        for _ in range(8):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = _lookup(self._document, reference)
        return {}


def _is_old(draft: Any) -> bool:
    """Whether the schema's draft allows a list under `items`."""
    return isinstance(draft, str) and "json-schema.org" in draft and "2020-12" not in draft


def _exclude(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether provably no value is valid for both schemas."""
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a is None or kinds_b is None:
        return False
    common = kinds_a & kinds_b
    if not common:
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(_same(x, y) for x in values_a for y in values_b)
    if common != {"object"}:
        return False
    tags = {*_required(a), *_required(b)}
    properties_a, properties_b = a.get("properties"), b.get("properties")
    if not isinstance(properties_a, dict) or not isinstance(properties_b, dict):
        return False
    # If one schema requires a property, a document valid for both has a value that is valid for
    # both of the property's schemas.
    for tag in tags:
        tag_a, tag_b = properties_a.get(tag), properties_b.get(tag)
        if isinstance(tag_a, dict) and isinstance(tag_b, dict) and _exclude(tag_a, tag_b):
            return True
    return False


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return (
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    )


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= 256 else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """Return the types that a schema's documents may have; None = unknown. Integers are numbers."""
    kind = schema.get("type")
    if isinstance(kind, str):
        kind = [kind]
    if isinstance(kind, list) and all(isinstance(name, str) for name in kind):
        return {"number" if name == "integer" else name for name in kind}
    values = _values(schema)
    return None if values is None else {_kind(value) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _same(a: Any, b: Any) -> bool:
    return _kind(a) == _kind(b) and a == b


def _lookup(document: Any, reference: str) -> Any:
    """Return the target of a reference such as "#/$defs/a"; None if it is invalid or remote."""
    if not reference.startswith("#") or "%" in reference:
        return None
    node = document
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def places(schema: Any, keyword: str, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (JSON pointer, the object with the keyword) for each use of a keyword, even in data.

    at: the pointer of `schema` itself.
    """
    if isinstance(schema, dict):
        if keyword in schema:
            yield f"{at}/{_escaped(keyword)}", schema
        for name, value in schema.items():
            yield from places(value, keyword, f"{at}/{_escaped(name)}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from places(value, keyword, f"{at}/{i}")


def without(schema: dict[str, Any], pointer: str) -> tuple[dict[str, Any], Any]:
    """Remove the keyword at a pointer from the schema, in place.

    Returns the schema and the keyword's value. A removed `oneOf` becomes an `anyOf`.
    """
    path, _, name = pointer.rpartition("/")
    holder = _lookup(schema, f"#{path}")
    value = holder.pop(name)
    if name == "oneOf" and "anyOf" not in holder:
        holder["anyOf"] = value
    return schema, value
