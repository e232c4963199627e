"""rows: the fields of a body in words, for docs/http.md and for people who open /docs."""

import json
from collections.abc import Iterator
from typing import Any

from deployments.api.fields.schema import NEVER, NOTHING, OBJECT, Body, Schema

TAKEN, REQUIRED = "taken", "required"
IGNORED, SILENT, REFUSED = "ignored, and named", "ignored", "refused"


def rows(body: Body) -> Iterator[tuple[str, str, str]]:
    """Return (name, effect, values) of each field, those that have an effect first."""
    for name in sorted(body.taken, key=lambda name: (name not in body.required, name)):
        fate = REQUIRED if name in body.required else TAKEN
        yield name, fate, words(body.taken[name])
    for name in sorted(body.ignored):
        yield name, IGNORED, ""
    for name in sorted(body.silent):
        yield name, SILENT, ""
    for name, schema in body.refused.items():
        if schema is NEVER:
            yield name, REFUSED, ""
        elif schema == NOTHING:
            yield name, f"{REFUSED} unless empty", ""
        else:
            yield name, f"{REFUSED} unless null", ""


def words(schema: Schema) -> str:
    """Describe a schema in a few words. What is deep inside is left to the document."""
    if "anyOf" in schema:
        # Of several objects the document shows the properties by which they differ.
        objects = [form for form in schema["anyOf"] if form.get("type") == "object"]
        some = [OBJECT if form in objects and objects[1:] else form for form in schema["anyOf"]]
        return " or ".join(dict.fromkeys(map(words, some)))
    if schema == NOTHING:
        return "nothing"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema)}"
    if kind == "string":
        return _text(schema)
    if kind == "array":
        return _list(schema)
    if kind == "object":
        return _object(schema)
    return {"boolean": "true or false", "null": "null"}.get(str(kind), "anything")


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    begin = f" above {above:g}" if above is not None else f" {_plain(low)}"
    if high is None:
        return f"{begin} or more"
    return f"{begin}, to {_plain(high)}" if above is not None else f"{begin} to {_plain(high)}"


def _plain(value: Any) -> str:
    """Write a bound as a power of two where it is one: 9223372036854775807 is hard to read."""
    if isinstance(value, int) and abs(value) > 2**20:
        for power in (31, 63):
            for number, sign in ((2**power, ""), (-(2**power), "-")):
                if value == number:
                    return f"{sign}2^{power}"
                if value == number - 1:
                    return f"{sign}2^{power} - 1"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(schema: Schema) -> str:
    most, least = schema.get("maxLength"), schema.get("minLength")
    if most is not None:
        return f"text of {least or 0} to {most} bytes"
    return "text, not empty" if least else "text"


def _list(schema: Schema) -> str:
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    items = schema.get("items") or {}
    what = f" of {words(items)}" if items else ""
    if "anyOf" in items and "object" in what:
        what = " of objects"
    if high is not None:
        return f"list{what}, {low} to {high}"
    return f"list{what}, not empty" if low else f"list{what}"


def _object(schema: Schema) -> str:
    names = ", ".join(f"`{name}`" for name in schema.get("properties", ()))
    return f"object with {names}" if names else "object"
