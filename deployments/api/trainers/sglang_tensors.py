"""SGLang's routes by which a trainer sends tensors, as slime and miles call them.

SGLang's messages do not tell which is the last. An update ends with the last tensor of the
checkpoint; during a pause, and after /begin_weight_update, it may end with a route of its own.
"""

from typing import Any

from deployments.api.context import ApiContext
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.trainers import fields, orders
from engine.errors import InvalidRequest

ROUTES = orders.order_table()
_DONE = ("success", "message")
_MODEL_INFO = (
    "The model and the version of its weights",
    ("model_path", "is_generation", "weight_version"),
)
_ONE_BROADCAST = 1 << 62  # bytes, more than any message has


@ROUTES.post(
    "/init_weights_update_group",
    "A trainer's process group, joined",
    fields.INIT_GROUP,
    _DONE,
    statuses=orders.UPDATES,
)
async def init_group(context: ApiContext, exchange: HttpExchange) -> object:
    """Make all replicas join a trainer's process group."""
    body = await context.read_as(exchange, fields.INIT_GROUP)
    info = {name: getattr(body, name) for name in body.__struct_fields__}
    try:
        with orders.refusing("backend"):
            await orders.trained(context).init_transfer(orders.model_of(exchange), info)
    except InvalidRequest as error:
        own = error.param == "init_info"
        raise invalid(error.message, "world_size" if own else error.param, error.code) from None
    return _succeed(f"all replicas are in the group {body.group_name}")


@ROUTES.post(
    "/destroy_weights_update_group",
    "A trainer's process group, left",
    fields.DESTROY_GROUP,
    _DONE,
    statuses=orders.UPDATES,
)
async def destroy_group(context: ApiContext, exchange: HttpExchange) -> object:
    """Make all replicas leave a trainer's process group."""
    body = await context.read_as(exchange, fields.DESTROY_GROUP, empty=True)
    with orders.refusing("group_name"):
        await orders.trained(context).init_transfer(
            orders.model_of(exchange), {"group_name": body.group_name}
        )
    return _succeed(f"no replica is in the group {body.group_name}")


@ROUTES.post(
    "/update_weights_from_distributed",
    "Tensors that a trainer broadcasts",
    fields.FROM_DISTRIBUTED,
    _DONE,
    statuses=orders.UPDATES,
)
async def from_distributed(context: ApiContext, exchange: HttpExchange) -> object:
    """Update weights by tensors that a trainer broadcasts in its process group."""
    body = await context.read_as(exchange, fields.FROM_DISTRIBUTED)
    flat = body.load_format is not None
    info: dict[str, Any] = {
        "names": body.names,
        "dtype_names": [dtype.removeprefix("torch.") for dtype in body.dtypes],
        "shapes": body.shapes,
        "group_name": body.group_name,
        "packed": flat,
        "packed_buffer_size_bytes": _ONE_BROADCAST,
    }
    return await _take_tensors(context, exchange, body, info, "names")


@ROUTES.post(
    "/update_weights_from_tensor",
    "Tensors that a trainer shares",
    fields.FROM_TENSOR,
    _DONE,
    statuses=orders.UPDATES,
)
async def from_tensor(context: ApiContext, exchange: HttpExchange) -> object:
    """Update weights by tensors that a trainer on the replicas' machine shares."""
    body = await context.read_as(exchange, fields.FROM_TENSOR)
    info = {
        "serialized_named_tensors": body.serialized_named_tensors,
        "load_format": body.load_format or "",
    }
    return await _take_tensors(context, exchange, body, info, "serialized_named_tensors")


async def _take_tensors(
    context: ApiContext,
    exchange: HttpExchange,
    body: fields.FromDistributed | fields.FromTensor,
    info: dict[str, Any],
    param: str,
) -> object:
    if body.abort_all_requests:
        await orders.end_all(context, exchange)
    with orders.refusing(param):
        version = await orders.trained(context).take_sent(
            orders.model_of(exchange), info, body.weight_version or ""
        )
    waiting = "the old weights serve until all tensors of the checkpoint are there"
    return _succeed("the weights were replaced" if version else waiting, version)


@ROUTES.post(
    "/begin_weight_update", "An update in SGLang's words", answer=_DONE, statuses=orders.UPDATES
)
async def begin_update(context: ApiContext, exchange: HttpExchange) -> object:
    """Begin an update of several messages."""
    with orders.refusing(None):
        await orders.trained(context).begin_sent(orders.model_of(exchange))
    return _succeed("an update of the weights has begun")


@ROUTES.post(
    "/end_weight_update",
    "The weights that a trainer has sent",
    answer=_DONE,
    statuses=orders.UPDATES,
)
async def end_update(context: ApiContext, exchange: HttpExchange) -> object:
    """Replace the weights by the tensors of an update, unless its last tensor has done so."""
    with orders.refusing(None):
        version = await orders.trained(context).end_sent(orders.model_of(exchange))
    done = "the weights were replaced" if version else "no update of the weights goes on"
    return _succeed(done, version)


@ROUTES.post("/continue_generation", "The end of a pause")
async def continue_generation(context: ApiContext, exchange: HttpExchange) -> object:
    """End the pause of all replicas, after their weights became the tensors of an open update."""
    with orders.refusing(None):
        await orders.trained(context).end_sent(orders.model_of(exchange))
    await orders.trained(context).resume(orders.model_of(exchange))
    return {"status": "resumed"}


@ROUTES.post(
    "/get_weights_by_name",
    "A weight by its name, which is refused",
    answer=None,
    statuses=(403, 400),
)
@ROUTES.get(
    "/get_weights_by_name", "A weight by its name, which is refused", None, statuses=(403, 400)
)
async def weights_by_name(context: ApiContext, exchange: HttpExchange) -> None:
    """Refuse to tell single weights. Raises ApiError 400 not_supported."""
    raise invalid(
        f"{exchange.path}: engines keep weights merged and packed, not by the checkpoint's names; "
        "/weight_info tells which version each replica has",
        code="not_supported",
    )


@ROUTES.get("/get_model_info", *_MODEL_INFO)
@ROUTES.get("/model_info", *_MODEL_INFO)
async def model_info(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the model's name and the version of its weights."""
    training, model = orders.trained(context), orders.model_of(exchange)
    engine, state = await training.engine(model), await training.state(model)
    return {
        "model_path": engine.model,
        "served_model_name": engine.model,
        "tokenizer_path": engine.model,
        "is_generation": True,
        "weight_version": state["weight_version"],
    }


def _succeed(message: str, version: str = "") -> JsonObject:
    answer: JsonObject = {"success": True, "message": message}
    return answer | ({"weight_version": version} if version else {})
