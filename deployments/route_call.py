"""RouteCall: a call of an HTTP route by a typed client, over a Serve handle."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from engine.errors import InvalidRequest, UpdateFailed

T = TypeVar("T")
Answer = dict[str, Any]


class UpdateRefused(UpdateFailed, InvalidRequest):
    """The error of an update that the router or a replica refused; the old weights serve on."""


@dataclass(frozen=True, slots=True)
class RouteCall(Generic[T]):
    """A call of an HTTP route, and how its answer is read.

    path: the route.
    read: returns the call's result, given the JSON of the route's answer.
    body: the JSON body; None: the call has no body.
    query: (name, value) of the query's fields, besides the model.
    names_model: whether the query names the client's model, as the body does not.
    method: the HTTP method; "": POST, or GET without a body.
    repeats: whether the call is repeated at another router when its router is lost.
    updates: whether the call is part of an update of weights, whose refusal is an UpdateRefused.
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

        model: name of the client's model; "": there are several.
        """
        named = [("model", model)] if model and self.names_model else []
        body = None if self.body is None else dict(self.body)
        method = (self.method,) if self.method else ()
        return self.path, urlencode([*named, *self.query]), body, *method
