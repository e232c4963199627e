"""Checks of values against annotations, and names of the annotated types for messages.

They check structs that are constructed directly, as msgspec checks types only when it decodes.
"""

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_ONE = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_MANY = {int: "integers", float: "numbers", str: "strings"}
_LISTS = (tuple, Sequence)
# `Literal[...] | None` has the first of these origins, `X | Y` of classes the second
_UNIONS = (Union, UnionType)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has an annotated type.

    A list also counts as a tuple, and a whole number as a float. True and False do not count as
    numbers.
    """
    if kind is int or kind is float:
        numbers = int if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is None:
        return isinstance(value, kind)
    if origin in _UNIONS:
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in _LISTS:
        return isinstance(value, (list, tuple)) and all(fits(item, inner[0]) for item in value)
    assert origin is dict, kind
    return isinstance(value, dict) and all(
        fits(key, inner[0]) and fits(item, inner[1]) for key, item in value.items()
    )


def without_none(kind: Any) -> Any:
    """Return X for an annotation `X | None`; other annotations are returned unchanged."""
    if get_origin(kind) in _UNIONS:
        members = [member for member in get_args(kind) if member is not NoneType]
        if len(members) == 1:
            return members[0]
    return kind


def words(kind: Any) -> str:
    """Return the type in words for a message, such as "an integer", without None."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is None:
        return _ONE.get(kind) or f"a {kind.__name__}"
    if origin in _UNIONS:
        return " or ".join(words(option) for option in inner if option is not NoneType)
    if origin is Literal:
        *others, last = map(repr, inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in _LISTS:
        return f"a list of {_MANY.get(inner[0]) or words(inner[0]).replace('a list', 'lists', 1)}"
    return f"a mapping from {_MANY[inner[0]]} to {_MANY.get(inner[1], 'values')}"
