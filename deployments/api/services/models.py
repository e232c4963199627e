"""/v1/models: list the served models and, on an endpoint of several models, add, change and remove
them."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl

from deployments.api.auth import authenticate
from deployments.api.context import ApiContext
from deployments.api.fields.others import MAX_MODEL_NAME, MODEL
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.options import ModelChanges
from deployments.api.route import LIST, NAMES, READS, RouteTable
from deployments.api.served_model import find_model
from deployments.api.services.server import unready
from deployments.backend import ModelCard
from engine.errors import ConfigError
from engine.images.processor import clips_of

PATH = "/v1/models"
ROUTES = RouteTable((503, *NAMES), (*READS, *NAMES, 503))
_ONE = f"{PATH}/{{name}}"
# header of Anthropic's clients, which expect another format of the list
VERSION_HEADER = b"anthropic-version"
_MOST_LISTED = 1000


@ROUTES.get(PATH, "What is served", LIST, statuses=(503,))
async def models(context: ApiContext, exchange: HttpExchange) -> object:
    """List the models. Raises ApiError 503 while the only model of the endpoint starts or drains.

    Clients wait for this answer, and send requests then. With several models each has a status.
    """
    backend = context.backend
    if context.options.models is None and (backend.starting() or backend.state().draining):
        raise unready(context)
    await context.backend.adapters.refresh()
    may_use = exchange.caller.may_use
    served = [card for card in context.backend.models().values() if may_use(card.id)]
    if VERSION_HEADER in exchange.headers:
        return _page(served, exchange.query)
    return {"object": "list", "data": [_shown(context, card) for card in served]}


@ROUTES.post(PATH, "A model, added or changed", MODEL, ("id", "status"))
async def put(context: ApiContext, exchange: HttpExchange) -> object:
    changes = _changes(context)
    body = await context.read(exchange)
    if (name := body.get("name")) is None:
        raise invalid("name is required", "name", "missing_field")
    if not isinstance(name, str):
        raise wrong_type("name", "a string")
    if len(name.encode()) > MAX_MODEL_NAME:
        raise invalid(f"name must have at most {MAX_MODEL_NAME} bytes", "name")
    # Unknown keys are passed on, too: the configuration's error names the nearest valid key.
    section = {key: value for key, value in body.items() if key != "name" and value is not None}
    try:
        await changes.put_model(name, section)
    except ConfigError as error:
        raise invalid(error.message, error.param) from None
    card = context.backend.models().get(name)
    answer = {"id": name, "object": "model", "status": "starting"}
    return _shown(context, card) if card is not None else answer


@ROUTES.get(_ONE, "A model", ("id", "object", "owned_by", "max_model_len"))
async def one_model(context: ApiContext, exchange: HttpExchange) -> object:
    name = exchange.path[len(PATH) + 1 :]
    card = await find_model(name, context.backend, exchange.caller)
    if VERSION_HEADER in exchange.headers:
        return _for_anthropic(card)
    shown = _shown(context, card)
    if shown.get("status") in ("starting", "sleeping") and _may_change(context, exchange):
        assert context.options.models is not None
        shown |= await context.options.models.trouble(card.id)
    return shown


@ROUTES.delete(_ONE, "Take it away", statuses=(400, 503, *NAMES))
async def remove(context: ApiContext, exchange: HttpExchange) -> object:
    name = exchange.path[len(PATH) + 1 :]
    await _changes(context).remove(name)
    return {"id": name, "object": "model", "deleted": True}


def _changes(context: ApiContext) -> ModelChanges:
    """Return the interface for changing models. Raises ApiError 403 permission_denied if there is
    none."""
    if context.options.models is None:
        raise ApiError(
            403,
            "permission_denied",
            "this endpoint serves one model, out of a configuration without `models`",
        )
    if not context.options.admin_keys:
        raise ApiError(
            403,
            "permission_denied",
            "models are changed with a key of http.admin_keys_file only, and it is not set",
        )
    return context.options.models


def _may_change(context: ApiContext, exchange: HttpExchange) -> bool:
    """Whether the request has an admin key.

    The key is checked here, because the route itself is open.
    """
    try:
        authenticate(exchange, context.options, admin=True)
    except ApiError:
        return False
    return bool(context.options.admin_keys)


def _for_anthropic(card: ModelCard) -> JsonObject:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": card.id, "display_name": card.id, "created_at": created}


def _page(served: list[ModelCard], query: bytes) -> JsonObject:
    """Return the page of Anthropic's list that `limit`, `after_id` and `before_id` in the query
    select.

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


def _shown(context: ApiContext, card: ModelCard) -> JsonObject:
    more: JsonObject = {}
    if card.parent is None and card.aliases:
        more["aliases"] = card.aliases
    if card.parent is None and context.options.models is not None:
        more["status"] = context.options.models.status(card.id)
    if card.images is not None:
        clips = [] if clips_of(card.images) is None else ["video"]
        more["input_modalities"] = ["text", "image", *clips]
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
