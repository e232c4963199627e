"""document: the OpenAPI 3.1 document of the API, from its routes and the fields of their bodies."""

from collections.abc import Iterable

from deployments.api.body_fields import MAX_DEADLINE
from deployments.api.fields.schema import TEXT, Body, Schema, number, one_of
from deployments.api.generation.tenancy import DEADLINE_HEADER, SESSION_HEADER
from deployments.api.http.json_body import JsonObject
from deployments.api.options import ApiOptions
from deployments.api.route import Operation, Route
from deployments.api.stream.event_ids import LAST, WANTED
from deployments.environment import installed_version

_MEANINGS = {
    200: "The answer",
    307: "To the page, for a browser",
    400: "The request is at fault; `param` names the field",
    401: "A key is needed",
    403: "The key may not do this",
    404: "There is no such thing, or it is another key's",
    408: "The body, or the answer, took too long",
    409: "What the request goes on from has changed",
    413: "Too large",
    414: "The URL is too long",
    415: "Not the content type or encoding that is taken",
    422: "An adapter cannot be used",
    429: "The key's limits are reached; see Retry-After",
    431: "Too many headers",
    499: "It was cancelled",
    500: "The server failed; the log has the request's id",
    503: "Try again after Retry-After seconds",
}
_EVERY = (400, 414, 431, 500)
_KEYED = (401, 403)
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ERROR_TEXT: Schema = {
    "type": "object",
    "properties": {"error": TEXT, "code": TEXT, "param": {"type": ["string", "null"]}},
    "required": ["error"],
}
_HEADERS: tuple[tuple[str, str, Schema], ...] = (
    (
        DEADLINE_HEADER,
        "Seconds until the answer must have ended",
        number(0, MAX_DEADLINE, above=True),
    ),
    (SESSION_HEADER, "A name: requests of one name go to one replica", TEXT),
    (WANTED.decode(), "1: events have ids, from which a cut stream goes on", one_of("1")),
    (LAST.decode(), "Of a stream that was cut: the last event's id", TEXT),
    ("x-return-timing", "1: usage tells where the time went", one_of("1")),
)


def document(routes: Iterable[Route], options: ApiOptions, root: str = "") -> JsonObject:
    """Return the OpenAPI document of the routes. root: prefix of every path."""
    keyed = bool(options.api_keys or options.admin_keys)
    openapi: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": installed_version()},
        "servers": [{"url": root or "/"}],
        "paths": {route.path: _path(route, options, keyed) for route in routes},
        "components": {"schemas": {"Error": _ERROR, "ErrorText": _ERROR_TEXT}},
    }
    if keyed:
        openapi["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        openapi["security"] = [{"bearer": []}, {"header": []}]
    return openapi


def _path(route: Route, options: ApiOptions, keyed: bool) -> JsonObject:
    item: JsonObject = {}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0]
        schema = {"type": "string", "minLength": 1}
        item["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    for method in route.operations:
        verb = method.lower()
        item[verb] = _operation(route, method, options, keyed and not route.open)
    return item


def _operation(route: Route, method: str, options: ApiOptions, keyed: bool) -> JsonObject:
    operation, bare = route.operations[method], method == "HEAD"
    statuses = {*_EVERY, *operation.statuses, *(_KEYED if keyed else ())}
    replies: JsonObject = {
        "200": {"description": _MEANINGS[200], **({} if bare else _answer(operation))}
    }
    name = "ErrorText" if operation.texts else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status in sorted(statuses):
        replies[str(status)] = {
            "description": _MEANINGS[status],
            **({} if bare or status < 400 else {"content": error}),
        }
    described: JsonObject = {"summary": operation.summary, "responses": replies}
    parameters = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if 429 in operation.statuses and operation.body is not None and 499 in operation.statuses:
        parameters += [
            {"name": name, "in": "header", "description": meaning, "schema": schema}
            for name, meaning, schema in _HEADERS
        ]
    if parameters:
        described["parameters"] = parameters
    if operation.form is not None:
        described["requestBody"] = _content("multipart/form-data", operation.form)
    elif operation.body is not None:
        described["requestBody"] = _content("application/json", _schema(operation.body, options))
    if route.open:
        described["security"] = []
    return described


def _schema(body: Body, options: ApiOptions) -> Schema:
    """Return the schema of a body, with the bounds that depend on the operator's options."""
    schema = body.schema(strict=options.strict)
    if "chat_template_kwargs" in schema["properties"]:
        names: dict[str, Schema] = {name: {} for name in sorted(options.template_kwargs)}
        schema["properties"]["chat_template_kwargs"] = {
            "type": ["object", "null"],
            "properties": names,
            "additionalProperties": False,
        }
    if "background" in schema["properties"] and not options.store_bytes:
        schema["properties"]["background"] = {"enum": [False, None]}
    return schema


def _content(kind: str, schema: Schema) -> JsonObject:
    return {"required": True, "content": {kind: {"schema": schema}}}


def _answer(operation: Operation) -> JsonObject:
    schema: Schema = {}
    if operation.answer is not None:
        schema = {"type": "object", "required": list(operation.answer)}
    return {
        "content": {
            kind: {"schema": schema} if kind == "application/json" else {}
            for kind in operation.kinds
        }
    }
