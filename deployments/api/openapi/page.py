"""page: the HTML page of /docs, which runs no script and loads nothing (its Content-Security-Policy
allows neither). rows: descriptions of a body's fields."""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

import msgspec

from deployments.api.fields.schema import NEVER, NOTHING, OBJECT, Body, Schema
from deployments.api.http.errors import Headers
from deployments.api.route import Operation, Route

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
code { font-family: ui-monospace, monospace }
table { border-collapse: collapse; margin: .5rem 0 1rem; width: 100% }
td { vertical-align: top; padding: .2rem .6rem; border-bottom: 1px solid #8884 }
b { display: inline-block; width: 4.5rem }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } a { color: #8bf } }
"""
_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Headers = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
)


def page(routes: Iterable[Route], *, strict: bool, root: str = "") -> bytes:
    """Return the page as HTML.

    root: prefix of every path. strict: whether unknown fields are refused.
    """
    text = "".join(_route(route) for route in routes)
    address = escape(f"{root}/openapi.json", quote=True)
    unknown = "refused" if strict else "ignored, and named in <code>x-ignored-fields</code>"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Manta</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><h1>Manta</h1>"
        f'<p>For machines: <a href="{address}">openapi.json</a>. A field that is not listed is '
        f"{unknown}.</p>{text}</html>"
    ).encode()


def _route(route: Route) -> str:
    return "".join(
        _operation(method, route.path, operation)
        for method, operation in route.operations.items()
        if method != "HEAD"
    )


def _operation(method: str, path: str, operation: Operation) -> str:
    title = f"<b>{method}</b><code>{escape(path)}</code> {escape(operation.summary)}"
    fields = [(name, "", _json(schema)) for name, schema in operation.query.items()]
    if operation.body is not None:
        fields += rows(operation.body)
    if operation.form is not None:
        required = operation.form["required"]
        fields += [
            (name, "required" if name in required else "taken", _json(schema))
            for name, schema in operation.form["properties"].items()
        ]
    if not fields:
        return f"<p>{title}</p>"
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(fate)}<td>{_code(value)}"
        for name, fate, value in fields
    )
    return f"<details><summary>{title}</summary><table>{cells}</table></details>"


def _json(schema: object) -> str:
    return f"`{msgspec.json.encode(schema).decode()}`"


def _code(text: str) -> str:
    """Return a text as HTML, with parts in backquotes as code."""
    parts = text.split("`")
    return "".join(
        f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(parts)
    )


TAKEN, REQUIRED = "taken", "required"
IGNORED, REFUSED = "ignored, and named", "refused"


def rows(body: Body) -> Iterator[tuple[str, str, str]]:
    """Yield (name, effect, description of allowed values) of each field; fields with an effect come
    first."""
    for name in sorted(body.taken, key=lambda name: (name not in body.required, name)):
        fate = REQUIRED if name in body.required else TAKEN
        yield name, fate, words(body.taken[name])
    for name in sorted(body.ignored):
        yield name, IGNORED, ""
    for name, schema in body.refused.items():
        if schema is NEVER:
            yield name, REFUSED, ""
        elif schema == NOTHING:
            yield name, f"{REFUSED} unless empty", ""
        else:
            yield name, f"{REFUSED} unless null", ""


def words(schema: Schema) -> str:
    """Return a short description of a schema; deeply nested parts are only in openapi.json."""
    if "anyOf" in schema:
        # All objects are described as "object"; openapi.json has their properties.
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
    """Format a bound, as a power of two if possible, because 9223372036854775807 is hard to
    read."""
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
