"""EngineOptions: the type of the engine's options in the configuration, with their checks."""

import typing
from collections.abc import Iterable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model
from pydantic_core import PydanticCustomError

from deployments.config.endpoint import SECTION
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.typecheck import words

_OWNED_BY_TOP = ("model", "revision", "log_level")  # fields of EngineConfig that the top level sets
# field with several types -> description of them in errors
_SEVERAL = {"speculation": "auto, off or a mapping such as {method: lookup, tokens: 7}"}


@cache
def engine_model() -> type[BaseModel]:
    """Return a pydantic model with the fields of EngineConfig, so that their errors have the same
    form as those of other settings."""
    hints = typing.get_type_hints(EngineConfig)
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(EngineConfig):
        if field.name not in _OWNED_BY_TOP:
            kind = hints[field.name]
            # YAML has lists but no tuples.
            lists = typing.get_origin(kind) is tuple
            fields[field.name] = (kind, Field(field.default, strict=False if lists else None))
    return create_model("EngineOptions", __config__=SECTION, **fields)


def _engine_options(value: dict[str, Any]) -> dict[str, Any]:
    errors: list[Any] = []
    try:
        engine_model().model_validate(value)
        EngineConfig(model="", **{**value, "graph_sizes": tuple(value.get("graph_sizes", ()))})
    except ValidationError as error:
        errors = list(_one_of_a_union(error.errors()))
    except ConfigError as error:
        loc = (error.param,) if error.param else ()
        errors = [{"loc": loc, "msg": error.message, "type": "engine"}]
    if errors:
        raise PydanticCustomError("nested", "engine options", {"errors": errors})
    return value


def _one_of_a_union(errors: Iterable[Any]) -> Iterator[Any]:
    """Yield pydantic's errors of engine options, with a single error for a field of a union type.

    pydantic lists an error for each type of the union.
    """
    hints = typing.get_type_hints(EngineConfig)
    unions: set[str] = set()
    for error in errors:
        name = error["loc"][0]
        options = [kind for kind in typing.get_args(hints.get(name)) if kind is not NoneType]
        if typing.get_origin(hints.get(name)) is not UnionType or len(options) < 2:
            yield error
        elif name not in unions:
            unions.add(name)
            what = _SEVERAL.get(name) or words(hints[name])
            yield {"loc": (name,), "msg": f"must be {what}", "type": "union"}


def flatten(errors: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield pydantic's errors one by one; errors inside an error of type "nested" get the outer
    location before their own."""
    for error in errors:
        if error["type"] != "nested":
            yield {**error}
            continue
        for inner in flatten(error["ctx"]["errors"]):
            yield {**inner, "loc": (*error["loc"], *inner["loc"])}


EngineOptions = Annotated[dict[str, Any], AfterValidator(_engine_options)]
