"""/v1/models: what is served, listed, and, where there are several models, added, changed and taken
away while the others serve."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from deployments.api.auth import authenticate
from deployments.api.fields.others import MAX_MODEL_NAME
from deployments.api.generation.fields import take_str
from deployments.api.http.errors import PERMISSION, ApiError, invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.served_model import find_model
from deployments.backend import ModelCard
from engine.errors import ConfigError

if TYPE_CHECKING:
    from deployments.api.app import Api

PATH = "/v1/models"
VERSION_HEADER = b"anthropic-version"  # of Anthropic's clients, who know another list
_MOST_LISTED = 1000


class ModelChanges(Protocol):
    """The models of an endpoint of several: their status, and changes to them."""

    def status(self, model: str) -> str:
        """Return a model's status: ready, starting, or sleeping (the next request wakes it)."""
        ...

    async def trouble(self, model: str) -> dict[str, str]:
        """Return why a model does not start; {} if nothing is known to be wrong.

        `message` says why, and `status` is there where the status is failed.
        """
        ...

    async def put(self, name: str, section: Mapping[str, Any]) -> None:
        """Add a model, or change it. section: the keys of `models.NAME`. Raises ConfigError."""
        ...

    async def remove(self, name: str) -> None:
        """Take a model away. Raises MantaError (model_not_found)."""
        ...


def changes_models(method: str, path: str) -> bool:
    """Whether a request needs a key that may change what is served."""
    at = path == PATH or path.startswith(f"{PATH}/")
    return at and method not in ("GET", "HEAD")


async def models(api: "Api", exchange: HttpExchange) -> None:
    """Answer GET with all models; for POST add a model, or change it."""
    if exchange.method == "POST":
        await _put(api, exchange)
        return
    await api.backend.adapters.refresh()
    may_use = exchange.caller.may_use
    served = [card for card in api.backend.models().values() if may_use(card.id)]
    if exchange.values(VERSION_HEADER):
        await exchange.answer(200, msgspec.json.encode(_page(served, exchange.query)))
        return
    cards = [_shown(api, card) for card in served]
    await exchange.answer(200, msgspec.json.encode({"object": "list", "data": cards}))


async def one_model(api: "Api", exchange: HttpExchange) -> None:
    """Answer GET with one model; for DELETE take it away."""
    name = exchange.path[len(PATH) + 1 :]
    if exchange.method == "DELETE":
        await _changes(api).remove(name)
        gone = {"id": name, "object": "model", "deleted": True}
        await exchange.answer(200, msgspec.json.encode(gone))
        return
    card = await find_model(name, api.backend, exchange.caller)
    if exchange.values(VERSION_HEADER):
        await exchange.answer(200, msgspec.json.encode(_for_anthropic(card)))
        return
    shown = _shown(api, card)
    if shown.get("status") in ("starting", "sleeping") and _may_change(api, exchange):
        assert api.options.models is not None
        shown |= await api.options.models.trouble(card.id)
    await exchange.answer(200, msgspec.json.encode(shown))


async def _put(api: "Api", exchange: HttpExchange) -> None:
    changes = _changes(api)
    body = await api.read(exchange)
    name = take_str(body, "name", MAX_MODEL_NAME)
    if name is None:
        raise invalid("name is required", "name", "missing_field")
    # Unknown keys, too: the configuration refuses them, with the nearest right one.
    section = {key: value for key, value in body.items() if key != "name" and value is not None}
    try:
        await changes.put(name, section)
    except ConfigError as error:
        raise invalid(error.message, error.param) from None
    card = api.backend.models().get(name)
    told = {"id": name, "object": "model", "status": "starting"}
    await exchange.answer(200, msgspec.json.encode(_shown(api, card) if card is not None else told))


def _changes(api: "Api") -> ModelChanges:
    """Return the endpoint's ModelChanges. Raises ApiError 403 permission_denied."""
    if api.options.models is None:
        raise ApiError(
            403,
            "permission_denied",
            "this endpoint serves one model, out of a configuration without `models`",
            kind=PERMISSION,
        )
    if not api.options.admin_keys:
        raise ApiError(
            403,
            "permission_denied",
            "models are changed with a key of http.admin_keys_file only, and it is not set",
            kind=PERMISSION,
        )
    return api.options.models


def _may_change(api: "Api", exchange: HttpExchange) -> bool:
    """Whether the request has an admin's key.

    The key is looked for here, because that has not been done where users need no key.
    """
    try:
        authenticate(exchange, api.options, admin=True)
    except ApiError:
        return False
    return bool(api.options.admin_keys)


def _for_anthropic(card: ModelCard) -> dict[str, Any]:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": card.id, "display_name": card.id, "created_at": created}


def _page(served: list[ModelCard], query: bytes) -> dict[str, Any]:
    """Return the part of Anthropic's list that `limit`, `after_id` and `before_id` ask for.

    Raises ApiError 400.
    """
    asked = dict(parse_qsl(query.decode("latin-1")))
    limit = asked.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_LISTED):
        raise invalid(f"limit must be between 1 and {_MOST_LISTED}", "limit")
    names = [card.id for card in served]
    begin, end = 0, len(served)
    for field in ("after_id", "before_id"):
        if field not in asked:
            continue
        if asked[field] not in names:
            raise invalid(f"{field} is the id of no model", field)
        at = names.index(asked[field])
        begin, end = (at + 1, end) if field == "after_id" else (begin, at)
    count = int(limit)
    backwards = "before_id" in asked and "after_id" not in asked
    listed = served[begin:end][-count:] if backwards else served[begin:end][:count]
    return {
        "data": [_for_anthropic(card) for card in listed],
        "first_id": listed[0].id if listed else None,
        "last_id": listed[-1].id if listed else None,
        "has_more": end - begin > count,
    }


def _shown(api: "Api", card: ModelCard) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if card.parent is None and card.aliases:
        more["aliases"] = card.aliases
    if card.parent is None and api.options.models is not None:
        more["status"] = api.options.models.status(card.id)
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "manta",
        "root": card.root or card.id,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        **more,
    }
