"""page: the routes and their fields as HTML that runs no script and loads nothing; its
Content-Security-Policy allows neither."""

import base64
import hashlib
from collections.abc import Iterable
from html import escape

import msgspec

from deployments.api.fields.words import rows
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
    """Return HTML with the text in backquotes as code."""
    parts = text.split("`")
    return "".join(
        f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(parts)
    )
