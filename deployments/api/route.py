"""Route and Operation: a served path, and what /openapi.json says of its methods."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.api.context import Handler
from deployments.api.fields.schema import TEXT, Body, Schema

# The statuses that an operation may end with, beside 200 and those of every operation.
# The operation reads a body.
READS = (400, 408, 413, 415)
# The operation names something.
NAMES = (403, 404)
# The operation is work for a replica.
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

# The keys of answers that several routes give.
LIST = ("object", "data")
DELETED = ("id", "object", "deleted")
PAGES: Mapping[str, Schema] = {"after": TEXT}


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a route.

    answer: keys that the JSON of a 200 always has; None: the answer is no object, or not always
    kinds: media types of the answer
    form: the schema of a multipart body, in the place of a JSON body
    texts: whether `error` of a failure is its message, with the other fields beside it
    """

    summary: str
    statuses: tuple[int, ...] = ()
    body: Body | None = None
    answer: tuple[str, ...] | None = ()
    kinds: tuple[str, ...] = (JSON,)
    query: Mapping[str, Schema] = field(default_factory=dict)
    form: Schema | None = None
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A served path, with an operation for each of its methods.

    path: the URL's path; {id} stands for one part without a slash, {name} for anything not empty
    open: whether the route needs no key
    operations: the operations by method
    """

    path: str
    handler: Handler
    get: Operation | None = None
    post: Operation | None = None
    delete: Operation | None = None
    open: bool = False
    operations: Mapping[str, Operation] = field(init=False)

    def __post_init__(self) -> None:
        named = {"GET": self.get, "HEAD": self.get, "POST": self.post, "DELETE": self.delete}
        served = {name: operation for name, operation in named.items() if operation is not None}
        object.__setattr__(self, "operations", served)
