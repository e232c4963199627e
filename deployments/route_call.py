"""RouteCall: a typed client's call of an HTTP route over a Serve handle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from engine.errors import InvalidRequest, UpdateFailed

T = TypeVar("T")
Answer = dict[str, Any]


class UpdateRefused(UpdateFailed, InvalidRequest):
    """The error for an update that the router or a replica refused; the old weights remain in
    use."""


@dataclass(frozen=True, slots=True)
class RouteCall(Generic[T]):
    """A call of an HTTP route, with the function that parses its answer.

    path: the route.
    read: returns the call's result; its argument is the JSON of the route's answer.
    body: the JSON body; None: the call has no body.
    query: (name, value) for each query field, besides the model.
    names_model: whether the client's model is named in the query, because the body does not name
        it.
    method: the HTTP method; "": POST, or GET without a body.
    repeats: whether the call is repeated at another router if its router is lost.
    updates: whether the call is part of a weight update, so that a refusal raises UpdateRefused.
    """

    path: str
    read: Callable[[Answer], T]
    body: Mapping[str, Any] | None
    query: Sequence[tuple[str, str]] = ()
    names_model: bool = True
    method: str = ""
    repeats: bool = False
    updates: bool = False

    def arguments(self, model: str) -> tuple[Any, ...]:
        """Return the arguments of the router's method `control`.

        model: name of the application's only model; "": it has several, and the call's own fields
            name one.
        """
        named = [("model", model)] if model and self.names_model else []
        body = None if self.body is None else dict(self.body)
        method = (self.method,) if self.method else ()
        return self.path, urlencode([*named, *self.query]), body, *method
