"""find_model: finds the served model that a request means, by its name, an alias, or as the only
model."""

import functools
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from deployments.api.caller import ANYONE, Caller
from deployments.api.http.errors import INVALID, ApiError, did_you_mean, invalid, shown, wrong_type
from deployments.backend import Backend, ModelCard

MAX_MODEL_NAME = 256
MAX_NAMED = 4  # maximum number of models that an error lists

_MODEL_NAME = re.compile(r"[A-Za-z0-9._:/@+=-]+")
_WILD = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]")  # a wildcard in a pattern


async def find_model(name: Any, backend: Backend, caller: Caller = ANYONE) -> ModelCard:
    """Return the card of a model or adapter. An adapter has two names, "name" and "model:name", and
    a model may have aliases. name: the name in the request; None or "": the only served model.

    Raises ApiError 400 missing_field, invalid_type, invalid_model_name; 404 model_not_found; 403
    model_not_found: the caller's key may not use the model.
    """
    if name is not None and not isinstance(name, str):
        raise wrong_type("model", "a string")
    if (card := known_model(name, backend)) is not None:
        return allowed(card, caller)
    if not name:
        names = [base.id for base in _bases(backend) if caller.may_use(base.id)]
        message = f"model is required where several are served; {_served(names)}"
        raise invalid(message, "model", "missing_field")
    # Some backends use names as paths, so names that could leave a folder are refused here.
    dots = any(not part.strip(".") for part in re.split("[/:]", name) if part)
    if dots or len(name) > MAX_MODEL_NAME or not _MODEL_NAME.fullmatch(name):
        raise invalid("model is not a valid model name", "model", "invalid_model_name")
    # Another router may have added the model or adapter a moment ago.
    await backend.adapters.refresh()
    if (card := known_model(name, backend)) is not None:
        return allowed(card, caller)
    models = [name for name in backend.models() if caller.may_use(name)]
    raise ApiError(
        404,
        "model_not_found",
        f"the model {shown(name)} does not exist{did_you_mean(name, models)}; {_served(models)}",
        param="model",
    )


def allowed(card: ModelCard, caller: Caller) -> ModelCard:
    """Check that the caller may use a model, and return the card unchanged. Raises ApiError 403
    model_not_found, with OpenAI's message."""
    if caller.may_use(card.id):
        return card
    message = f'Key "{caller.name}" does not have access to model {shown(card.id)}'
    raise ApiError(403, "model_not_found", message, param="model", kind=INVALID)


def _served(names: Collection[str]) -> str:
    """Return a text that lists a few served names, for error messages."""
    first = ", ".join(f'"{name}"' for name in islice(names, MAX_NAMED))
    more = len(names) - MAX_NAMED
    return f"served: {first}" + (f" and {more} more, see /v1/models" if more > 0 else "")


def _bases(backend: Backend) -> list[ModelCard]:
    """Return the cards of the base models, without adapters."""
    return [card for card in backend.models().values() if card.parent is None]


def known_model(name: Any, backend: Backend) -> ModelCard | None:
    """Return the card of the model that a request names; None if this router does not know the
    name.

    A served model's name takes precedence over an adapter's, and an adapter's over an alias. Of
    several aliases that match, the most specific one counts, whichever model it belongs to.

    name: the name in the request; None or "": the only served model
    """
    if name is not None and not isinstance(name, str):
        return None
    if not name:
        bases = _bases(backend)
        return bases[0] if len(bases) == 1 else None
    models = backend.models()
    if (card := models.get(name)) is not None:
        return card
    model, _, alias = name.rpartition(":")
    card = models.get(alias)
    if card is not None and card.parent == model:
        return card
    matching = [
        (specificity(alias), card)
        for card in _bases(backend)
        for alias in card.aliases
        if alias == name or fnmatchcase(name, alias)
    ]
    return max(matching, key=lambda one: one[0])[1] if matching else None


@functools.lru_cache(maxsize=4096)
def specificity(alias: str) -> tuple[bool, int, int, str]:
    """Return the sort key of an alias: of several aliases that match a name, the one with the
    largest key is used.

    Names without wildcards have the largest keys, then patterns with the most literal characters,
    then those with the fewest `*`. Ties are decided by the text, so the order of models has no
    effect.
    """
    wild = _WILD.findall(alias)
    own = len(_WILD.sub("", alias))
    return not wild, own, -sum(mark.startswith("*") for mark in wild), alias


def same_pattern(alias: str) -> str:
    """Return the pattern's normal form, in which `**` is `*`."""
    return re.sub(r"\*+", "*", alias)
