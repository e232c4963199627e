"""SGLang's routes for rollouts, weights, pauses and memory, which the trainers slime and miles
call.

SGLang's messages with tensors do not mark the last one. An update ends when all tensors of the
checkpoint have arrived. An update also ends by /continue_generation after a pause, and by
/end_weight_update after /begin_weight_update.
"""

from base64 import b64encode
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.generation.tenancy import QueueFields
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.route import NAMES, QUEUES, RouteTable
from deployments.api.services.server import ready
from deployments.api.trainers import fields, orders
from deployments.api.trainers.rollout import RolloutChoice, roll_out, rollout_params
from deployments.api.trainers.vllm import FLUSHED, reset_prefix_cache, server_info
from deployments.backend import GenerationRequest
from engine.errors import InvalidRequest

ROLLOUTS, ROUTES = RouteTable(reads=QUEUES), orders.order_table()
_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


@ROLLOUTS.post("/generate", "A rollout in SGLang's words", fields.THEIR_ROLLOUT, None)
async def generate(context: ApiContext, exchange: HttpExchange) -> object:
    context.count_request(exchange)
    body = await context.read_as(exchange, fields.THEIR_ROLLOUT)
    sampling = body.sampling_params or fields.TheirSampling()
    logprobs, routed = 0 if body.return_logprob else None, bool(body.return_routed_experts)
    params = rollout_params(sampling, logprobs, routed=routed)
    request, generation, choices = await roll_out(context, exchange, body, params, QueueFields())
    tokenizer, special = context.backend.tokenizer(request.model), sampling.skip_special_tokens
    size = sum(len(choice.token_ids) for choice in choices)

    def decoded() -> list[str]:
        skip, prompt = special is not False, request.token_ids
        return [
            tokenizer.decode(choice.token_ids, skip_special_tokens=skip, prompt=prompt)
            for choice in choices
        ]

    texts = await in_thread(decoded, size)
    answers = [
        {
            "text": text,
            "output_ids": choice.token_ids,
            "meta_info": _meta_info(request, generation.versions(index), choice),
        }
        for index, (choice, text) in enumerate(zip(choices, texts, strict=True))
    ]
    return answers[0] if len(answers) == 1 else answers


def _meta_info(
    request: GenerationRequest, versions: list[tuple[str, int]], choice: RolloutChoice
) -> JsonObject:
    meta: JsonObject = {
        "id": request.request_id,
        "finish_reason": _finish_reason(choice),
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": max(choice.cached, 0),
        "weight_version": versions[-1][0] if versions else "",
    }
    if request.params.logprobs is not None:
        meta["output_token_logprobs"] = [
            [scored.logprob, scored.token_id, None] for scored in choice.logprobs
        ]
    if choice.routed is not None:  # int32 [tokens, layers, experts per token], flattened
        ids = choice.routed.array().astype("<i4")
        meta["routed_experts"] = b64encode(ids.tobytes()).decode()
    return meta


def _finish_reason(choice: RolloutChoice) -> JsonObject:
    if choice.finish == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    if choice.finish == "stop":
        return {"type": "stop", "matched": choice.stop_token}
    return {"type": choice.finish, "message": "ended by a pause or an abort"}


ROLLOUTS.get(
    "/health_generate",
    "Whether a replica can take requests",
    ("status",),
    statuses=(503,),
    open=True,
)(ready)


@ROUTES.post(
    "/update_weights_from_disk",
    "The weights of a checkpoint, at all replicas",
    fields.FROM_DISK,
    ("success", "message", "weight_version"),
    statuses=orders.UPDATES,
)
async def from_disk(context: ApiContext, exchange: HttpExchange) -> object:
    body = await context.read_as(exchange, fields.FROM_DISK)
    with orders.refusing("model_path"):
        version = await orders.trained(context).update(
            orders.model_of(exchange), body.model_path, body.weight_version or ""
        )
    return {"success": True, "message": "ok", "weight_version": version}


for path in ("/weight_version", "/get_weight_version"):
    orders.add_state(ROUTES, path, "weight_version", "The version of the weights")
ROUTES.get("/get_server_info", "The engines' settings", None)(server_info)


@ROUTES.post("/pause_generation", "All replicas paused, in SGLang's words", fields.PAUSE_GENERATION)
async def pause_generation(context: ApiContext, exchange: HttpExchange) -> object:
    body = await context.read_as(exchange, fields.PAUSE_GENERATION, empty=True)
    mode = body.mode or "abort"
    if mode not in _MODES:
        raise invalid(f"mode is one of {', '.join(_MODES)}", "mode")
    await orders.trained(context).pause(orders.model_of(exchange), _MODES[mode])
    return {"status": "ok"}


@ROUTES.post("/abort_request", "Requests ended with what they have", fields.ABORT_REQUEST)
async def abort_request(context: ApiContext, exchange: HttpExchange) -> object:
    """Abort a request, or all requests, which are answered with their outputs so far."""
    body = await context.read_as(exchange, fields.ABORT_REQUEST)
    if body.abort_all:
        await orders.end_all(context, exchange)
    elif body.request_id:
        await orders.end_some(context, [body.request_id])
    else:
        raise invalid("rid names a request, or abort_all is true", "rid", "missing_field")
    return {"status": "ok"}


@ROUTES.get("/v1/loads", "Requests of each replica", ("loads",), statuses=NAMES, query={})
async def loads(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the numbers of running and waiting requests at each replica. Requests that wait
    in this router count for the first replica."""
    state = context.backend.state()
    rows: list[JsonObject] = []
    for place, stats in enumerate(state.replicas.values()):
        waiting = stats.waiting + (0 if place else state.queued)
        rows.append(
            {
                "dp_rank": place,
                "num_running_reqs": stats.running,
                "num_waiting_reqs": waiting,
                "num_total_reqs": stats.running + waiting,
            }
        )
    return {"loads": rows}


for add in (ROUTES.get, ROUTES.post):
    add("/flush_cache", "All cached prefixes dropped", answer=FLUSHED)(reset_prefix_cache)


@ROUTES.post("/release_memory_occupation", "Memory freed, in SGLang's words", fields.MEMORY_PARTS)
async def release_memory(context: ApiContext, exchange: HttpExchange) -> object:
    """Free memory of all replicas' engines once no request runs."""
    body = await context.read_as(exchange, fields.MEMORY_PARTS, empty=True)
    with orders.refusing("tags"):
        await orders.trained(context).sleep(orders.model_of(exchange), 1, _tags(body), "wait")
    return {"status": "ok"}


@ROUTES.post(
    "/resume_memory_occupation", "Memory taken again, in SGLang's words", fields.MEMORY_PARTS
)
async def resume_memory(context: ApiContext, exchange: HttpExchange) -> object:
    """Allocate again the memory that /release_memory_occupation freed, or the parts in the body's
    tags."""
    body = await context.read_as(exchange, fields.MEMORY_PARTS, empty=True)
    with orders.refusing("tags"):
        await orders.trained(context).wake(orders.model_of(exchange), _tags(body))
    return {"status": "ok"}


def _tags(body: fields.MemoryParts) -> list[str]:
    """Return the tags of a body without "cuda_graph", as the memory of CUDA graphs is never
    freed."""
    return [tag for tag in body.tags or () if tag != "cuda_graph"]


_DONE = ("success", "message")
_MODEL_INFO = (
    "The model and the version of its weights",
    ("model_path", "is_generation", "weight_version"),
)
_ONE_BROADCAST = 1 << 62  # buffer size in bytes that exceeds any message


@ROUTES.post(
    "/init_weights_update_group",
    "A trainer's process group, joined",
    fields.INIT_GROUP,
    _DONE,
    statuses=orders.UPDATES,
)
async def init_group(context: ApiContext, exchange: HttpExchange) -> object:
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
    """Update weights by tensors in memory that a trainer on the replicas' machine shares."""
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
    """End an update: replace the weights by its tensors, unless its last tensor has already done
    so."""
    with orders.refusing(None):
        version = await orders.trained(context).end_sent(orders.model_of(exchange))
    done = "the weights were replaced" if version else "no update of the weights goes on"
    return _succeed(done, version)


@ROUTES.post("/continue_generation", "The end of a pause")
async def continue_generation(context: ApiContext, exchange: HttpExchange) -> object:
    """End the pause of all replicas, after completing an unfinished update of weights."""
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
    """Refuse to return the values of a weight tensor. Raises ApiError 400 not_supported."""
    raise invalid(
        f"{exchange.path}: engines keep weights merged and packed, not by the checkpoint's names; "
        "/weight_info tells which version each replica has",
        code="not_supported",
    )


@ROUTES.get("/get_model_info", *_MODEL_INFO)
@ROUTES.get("/model_info", *_MODEL_INFO)
async def model_info(context: ApiContext, exchange: HttpExchange) -> object:
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
