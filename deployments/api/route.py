"""RouteTable: paths with their handlers, and with descriptions for /openapi.json. page_of: returns
one page of a list in OpenAI's form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deployments.api.context import Handler
from deployments.api.fields.schema import TEXT, Body, Schema
from deployments.api.http.errors import invalid, shown
from deployments.api.http.json_body import JsonObject

Statuses = tuple[int, ...]
Keys = tuple[str, ...] | None  # keys of an answer's JSON object
H = TypeVar("H", bound=Handler)

# Error statuses of an operation that reads a body, besides those of every operation.
READS = (400, 408, 413, 415)
# Error statuses of an operation on a named resource, such as a model or a file.
NAMES = (403, 404)
# Error statuses of an operation that needs a replica.
QUEUES = (*READS, *NAMES, 409, 422, 429, 499, 503)

JSON, EVENTS, LINES, PLAIN, HTML, BYTES, ANY = (
    "application/json",
    "text/event-stream",
    "application/x-ndjson",
    "text/plain",
    "text/html",
    "application/octet-stream",
    "*/*",
)
STREAMS = (JSON, EVENTS)

# The keys of answers that several routes share.
LIST = ("object", "data")
DELETED = ("id", "object", "deleted")
PAGES: Mapping[str, Schema] = {"after": TEXT}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a route.

    statuses: HTTP statuses of its errors, besides those of every operation
    answer: keys that the JSON object of a 200 always has; None: the answer is not always an object
    kinds: media types of the answer
    query: {query field: schema}
    form: the schema of a multipart body, instead of a JSON body
    texts: whether `error` in an error answer is the message itself, beside the other fields
    """

    handler: Handler
    summary: str
    statuses: Statuses = ()
    body: Body | None = None
    answer: Keys = ()
    kinds: tuple[str, ...] = (JSON,)
    query: Mapping[str, Schema] = field(default_factory=dict)
    form: Schema | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A served path, with an operation for each of its methods.

    path: the URL's path; {id} matches one part without a slash, {name} any non-empty text
    open: whether the route needs no API key
    admin: whether the route needs an admin key
    """

    path: str
    open: bool = False
    admin: bool = False
    operations: dict[str, Operation] = field(default_factory=dict)


class RouteTable:
    """The routes of a module, in the order in which its handlers are added.

    statuses, reads: default statuses of operations without and with a body; reads None: as statuses
    answer: default of Operation.answer
    admin: default of Route.admin
    common: further fields that all operations share
    """

    def __init__(
        self,
        statuses: Statuses = (),
        reads: Statuses | None = None,
        *,
        answer: Keys = (),
        admin: bool = False,
        **common: Any,
    ) -> None:
        self._routes: dict[str, Route] = {}
        self._statuses, self._reads = statuses, statuses if reads is None else reads
        self._answer, self._admin, self._common = answer, admin, common

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def get(self, path: str, summary: str, answer: Keys = (), **more: Any) -> Callable[[H], H]:
        """Return a decorator that registers a handler for GET and HEAD of a path. more: see
        Operation, Route."""
        return self._adder(("GET", "HEAD"), path, summary, answer=answer, **more)

    def post(
        self,
        path: str,
        summary: str,
        body: Body | None = None,
        answer: Keys = (),
        kinds: tuple[str, ...] = (JSON,),
        **more: Any,
    ) -> Callable[[H], H]:
        """Return a decorator that registers a handler for POST of a path. more: see Operation,
        Route."""
        fields = {"body": body, "answer": answer, "kinds": kinds, **more}
        return self._adder(("POST",), path, summary, **fields)

    def delete(
        self, path: str, summary: str, answer: Keys = DELETED, **more: Any
    ) -> Callable[[H], H]:
        """Return a decorator that registers a handler for DELETE of a path. more: see Operation,
        Route."""
        return self._adder(("DELETE",), path, summary, answer=answer, **more)

    def _adder(
        self,
        methods: tuple[str, ...],
        path: str,
        summary: str,
        *,
        answer: Keys,
        body: Body | None = None,
        statuses: Statuses | None = None,
        open: bool = False,
        admin: bool | None = None,
        **more: Any,
    ) -> Callable[[H], H]:
        if statuses is None:
            statuses = self._statuses if body is None else self._reads
        fields = {**self._common, **more, "answer": self._answer if answer == () else answer}
        admin = self._admin if admin is None else admin

        def add(handler: H) -> H:
            route = self._routes.setdefault(path, Route(path, open, admin))
            operation = Operation(handler, summary, statuses, body, **fields)
            route.operations.update(dict.fromkeys(methods, operation))
            return handler

        return add


def page_of(
    items: Sequence[JsonObject], query: Mapping[str, str], usual: int, most: int, kind: str = ""
) -> JsonObject:
    """Return the page of a list that the query's `after` and `limit` select.

    items: objects with an id, in the order of the list
    usual, most: the default and the maximum of `limit`
    kind: the noun for an item in errors, with a trailing space; "": none

    Raises ApiError 400.
    """
    limit, after = query.get("limit", str(usual)), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be 1 to {most}", "limit")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"there is no {kind}{shown(after)}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
