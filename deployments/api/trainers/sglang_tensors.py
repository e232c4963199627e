"""SGLang's routes by which a trainer sends tensors, as slime and miles call them.

SGLang's messages do not tell which is the last. An update ends with the last tensor of the
checkpoint; during a pause, and after /begin_weight_update, it may end with a route of its own.
"""

from typing import Any

from deployments.api.context import ApiContext
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.route import Route
from deployments.api.trainers.fields import (
    DESTROY_GROUP,
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    INIT_GROUP,
    FromDistributed,
    FromTensor,
)
from deployments.api.trainers.orders import (
    CHANGES,
    end_all,
    model_of,
    order_of,
    refusing,
    trained,
)
from deployments.api.trainers.vllm import RESUME
from engine.errors import InvalidRequest

_ONE_BROADCAST = 1 << 62  # bytes, more than any message has


async def init_group(context: ApiContext, exchange: HttpExchange) -> None:
    """Make all replicas join a trainer's process group."""
    body = await context.read_as(exchange, INIT_GROUP)
    info = {name: getattr(body, name) for name in body.__struct_fields__}
    try:
        with refusing("backend"):
            await trained(context).init_transfer(model_of(exchange), info)
    except InvalidRequest as error:
        own = error.param == "init_info"
        raise invalid(error.message, "world_size" if own else error.param, error.code) from None
    await _succeed(exchange, f"all replicas are in the group {body.group_name}")


async def destroy_group(context: ApiContext, exchange: HttpExchange) -> None:
    """Make all replicas leave a trainer's process group."""
    body = await context.read_as(exchange, DESTROY_GROUP, empty=True)
    with refusing("group_name"):
        await trained(context).init_transfer(model_of(exchange), {"group_name": body.group_name})
    await _succeed(exchange, f"no replica is in the group {body.group_name}")


async def from_distributed(context: ApiContext, exchange: HttpExchange) -> None:
    """Update weights by tensors that a trainer broadcasts in its process group."""
    body = await context.read_as(exchange, FROM_DISTRIBUTED)
    flat = body.load_format is not None
    info: dict[str, Any] = {
        "names": body.names,
        "dtype_names": [dtype.removeprefix("torch.") for dtype in body.dtypes],
        "shapes": body.shapes,
        "group_name": body.group_name,
        "packed": flat,
        "packed_buffer_size_bytes": _ONE_BROADCAST,
    }
    await _take_tensors(context, exchange, body, info, "names")


async def from_tensor(context: ApiContext, exchange: HttpExchange) -> None:
    """Update weights by tensors that a trainer on the replicas' machine shares."""
    body = await context.read_as(exchange, FROM_TENSOR)
    info = {
        "serialized_named_tensors": body.serialized_named_tensors,
        "load_format": body.load_format or "",
    }
    await _take_tensors(context, exchange, body, info, "serialized_named_tensors")


async def _take_tensors(
    context: ApiContext,
    exchange: HttpExchange,
    body: FromDistributed | FromTensor,
    info: dict[str, Any],
    param: str,
) -> None:
    if body.abort_all_requests:
        await end_all(context, exchange)
    with refusing(param):
        version = await trained(context).take_sent(
            model_of(exchange), info, body.weight_version or ""
        )
    waiting = "the old weights serve until all tensors of the checkpoint are there"
    await _succeed(exchange, "the weights were replaced" if version else waiting, version)


async def begin_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Begin an update of several messages."""
    with refusing(None):
        await trained(context).begin_sent(model_of(exchange))
    await _succeed(exchange, "an update of the weights has begun")


async def end_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by the tensors of an update, unless its last tensor has done so."""
    with refusing(None):
        version = await trained(context).end_sent(model_of(exchange))
    done = "the weights were replaced" if version else "no update of the weights goes on"
    await _succeed(exchange, done, version)


async def continue_generation(context: ApiContext, exchange: HttpExchange) -> None:
    """End the pause of all replicas, after their weights became the tensors of an open update."""
    with refusing(None):
        await trained(context).end_sent(model_of(exchange))
    await trained(context).resume(model_of(exchange))
    await exchange.answer_json({"status": "resumed"})


async def weights_by_name(context: ApiContext, exchange: HttpExchange) -> None:
    """Refuse to tell single weights. Raises ApiError 400 not_supported."""
    raise invalid(
        f"{exchange.path}: engines keep weights merged and packed, not by the checkpoint's names; "
        "/weight_info tells which version each replica has",
        code="not_supported",
    )


async def model_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the model's name and the version of its weights."""
    training, model = trained(context), model_of(exchange)
    engine, state = await training.engine(model), await training.state(model)
    answer: JsonObject = {
        "model_path": engine.model,
        "served_model_name": engine.model,
        "tokenizer_path": engine.model,
        "is_generation": True,
        "weight_version": state["weight_version"],
    }
    await exchange.answer_json(answer)


async def _succeed(exchange: HttpExchange, message: str, version: str = "") -> None:
    answer: JsonObject = {"success": True, "message": message}
    await exchange.answer_json(answer | ({"weight_version": version} if version else {}))


_DONE, _SENT = ("success", "message"), (*CHANGES, 409)
_READ_WEIGHTS = order_of("A weight by its name, which is refused", None, None, (403, 400))
_MODEL_INFO = order_of(
    "The model and the version of its weights", ("model_path", "is_generation", "weight_version")
)
ROUTES = (
    Route(
        "/init_weights_update_group",
        init_group,
        post=order_of("A trainer's process group, joined", _DONE, INIT_GROUP, _SENT),
    ),
    Route(
        "/destroy_weights_update_group",
        destroy_group,
        post=order_of("A trainer's process group, left", _DONE, DESTROY_GROUP, _SENT),
    ),
    Route(
        "/update_weights_from_distributed",
        from_distributed,
        post=order_of("Tensors that a trainer broadcasts", _DONE, FROM_DISTRIBUTED, _SENT),
    ),
    Route(
        "/update_weights_from_tensor",
        from_tensor,
        post=order_of("Tensors that a trainer shares", _DONE, FROM_TENSOR, _SENT),
    ),
    Route(
        "/begin_weight_update",
        begin_update,
        post=order_of("An update in SGLang's words", _DONE, None, _SENT),
    ),
    Route(
        "/end_weight_update",
        end_update,
        post=order_of("The weights that a trainer has sent", _DONE, None, _SENT),
    ),
    Route("/continue_generation", continue_generation, post=RESUME),
    Route("/get_weights_by_name", weights_by_name, get=_READ_WEIGHTS, post=_READ_WEIGHTS),
    *(Route(path, model_info, get=_MODEL_INFO) for path in ("/model_info", "/get_model_info")),
)
ADMIN_PATHS = frozenset(route.path for route in ROUTES)
