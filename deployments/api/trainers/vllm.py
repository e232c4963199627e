"""vLLM's routes for trainers (weights, pauses, sleep, rollouts), and the further routes that
SkyRL's RemoteInferenceClient calls (docs/rl.md)."""

from deployments.api.context import ApiContext
from deployments.api.fields.others import LOAD_LORA
from deployments.api.fields.schema import TEXT, one_of
from deployments.api.generation.tenancy import QueueFields
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.route import NAMES, PLAIN, QUEUES, READS, RouteTable
from deployments.api.services.adapters import put_lora
from deployments.api.stream.logprobs import FLOOR, own_logprobs
from deployments.api.stream.merge import routed_experts, weight_versions
from deployments.api.trainers import fields, orders
from deployments.api.trainers.rollout import RolloutChoice, roll_out, rollout_params
from deployments.backend import Generation, GenerationRequest
from engine.batch import TokenLogprobs
from engine.scheduling.orders.updates import MODES

_MESSAGE = ("message",)
FLUSHED = ("status", "success")
_INFO = ("weight_version", "is_paused", "is_sleeping", "weights_dropped", "replicas")
# Summary, body and answer keys of rollout routes.
ROLL_OUT = (
    "Token ids and log-probabilities of a rollout",
    fields.ROLLOUT,
    ("request_id", "choices", "prompt_logprobs"),
)
ROLLOUTS, ROUTES = RouteTable(reads=QUEUES), orders.order_table()
_MODE = one_of(*MODES)


@ROUTES.post(
    "/pause",
    "All replicas paused",
    fields.PAUSE,
    query={**orders.MODEL, "mode": _MODE, "clear_cache": TEXT},
)
async def pause(context: ApiContext, exchange: HttpExchange) -> object:
    """Pause all replicas. The fields of vLLM's /pause may be in the query or in the body.

    Unknown fields are refused, because a misunderstood order might end requests. Raises ApiError,
    MantaError.
    """
    query: JsonObject = {**exchange.parameters()}
    for name in ("clear_cache", "wait_for_inflight_requests"):
        if (value := query.get(name)) is not None:
            query[name] = value.lower() != "false"
    order = fields.PAUSE.read(query | await context.read(exchange, empty=True), [], strict=True)
    model = order.model or ""
    mode = "wait" if order.wait_for_inflight_requests else "abort"
    await orders.trained(context).pause(model, mode if order.mode is None else order.mode)
    if order.clear_cache is not False:
        await orders.trained(context).reset_prefix_cache(model)
    return {"status": "paused"}


@ROUTES.post("/resume", "The end of a pause")
async def resume(context: ApiContext, exchange: HttpExchange) -> object:
    await orders.trained(context).resume(orders.model_of(exchange))
    return {"status": "resumed"}


orders.add_state(ROUTES, "/is_paused", "is_paused", "Whether replicas are paused")


@ROUTES.post("/abort_requests", "Requests ended with what they have", fields.ABORT_REQUESTS)
async def abort_requests(context: ApiContext, exchange: HttpExchange) -> object:
    """Abort all running requests, or those in the body, which are answered with their outputs so
    far.
    """
    body = await context.read_as(exchange, fields.ABORT_REQUESTS, empty=True)
    if body.request_ids is not None:
        known = await orders.end_some(context, body.request_ids)
        return {"status": "aborted", "known_request_ids": known}
    await orders.end_all(context, exchange)
    return {"status": "aborted"}


def _tags(exchange: HttpExchange) -> list[str]:
    """Return the tags in the query, whose field may be repeated and may contain several tags
    separated by commas."""
    tags = exchange.every_parameter("tags")
    return [tag for field in tags for tag in field.split(",") if tag]


@ROUTES.post(
    "/sleep",
    "Memory of all replicas freed",
    query={**orders.MODEL, "level": one_of("0", "1", "2"), "mode": _MODE, "tags": TEXT},
)
async def sleep(context: ApiContext, exchange: HttpExchange) -> object:
    """Free memory of all replicas' engines. The query has the parameters of vLLM's /sleep.

    Raises ApiError, MantaError.
    """
    if body := await context.read(exchange, empty=True):
        raise invalid("level, mode and tags go into the query", next(iter(body)), "unknown_field")
    query = exchange.parameters()
    level = query.get("level", "1")
    if not level.isdecimal():
        raise invalid(f"level is 0, 1 or 2, not {level!r}", "level")
    mode = query.get("mode", "abort")
    with orders.refusing("level"):
        await orders.trained(context).sleep(
            orders.model_of(exchange), int(level), _tags(exchange), mode
        )
    return {"status": "asleep"}


@ROUTES.post(
    "/wake_up", "The memory of all replicas taken again", query={**orders.MODEL, "tags": TEXT}
)
async def wake_up(context: ApiContext, exchange: HttpExchange) -> object:
    """Allocate again the memory that `sleep` freed, or the parts in the query's tags."""
    with orders.refusing("tags"):
        await orders.trained(context).wake(orders.model_of(exchange), _tags(exchange))
    return {"status": "awake"}


orders.add_state(ROUTES, "/is_sleeping", "is_sleeping", "Whether replicas sleep")


@ROUTES.post("/reset_prefix_cache", "All cached prefixes dropped", answer=FLUSHED)
async def reset_prefix_cache(context: ApiContext, exchange: HttpExchange) -> object:
    await orders.trained(context).reset_prefix_cache(orders.model_of(exchange))
    return {"status": "ok", "success": True}


@ROUTES.get("/weight_info", "The version of the weights", _INFO)
async def weight_info(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the weights version of the model and of each replica."""
    return await orders.trained(context).state(orders.model_of(exchange))


@ROUTES.get(
    "/server_info",
    "The engines' settings, in vLLM's words",
    ("vllm_config",),
    query={**orders.MODEL, "config_format": TEXT},
)
async def server_info(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the settings that trainers read, under the names of vLLM and SGLang.

    lora_config is null, because trainers cannot send weights as adapters. To SGLang's trainers all
    replicas together appear as one engine with data-parallel attention. Its tp_size counts the
    ranks of all replicas, as slime uses tp_size x pp_size as the number of GPUs.
    """
    training, model = orders.trained(context), orders.model_of(exchange)
    engine, state = await training.engine(model), await training.state(model)
    config: JsonObject = {
        "model_config": {
            "model": engine.model,
            "dtype": f"torch.{engine.dtype}",
            "max_model_len": engine.max_model_len,
            "logprobs_mode": engine.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": engine.tensor_parallel,
            "pipeline_parallel_size": engine.pipeline_parallel,
            "data_parallel_size": engine.replicas,
        },
        "lora_config": None,
        "weight_transfer_config": {"backend": "nccl"},
    }
    return {
        "vllm_config": config,
        "model_path": engine.model,
        "served_model_name": engine.model,
        "dtype": engine.dtype,
        "context_length": engine.max_model_len,
        "tp_size": engine.tensor_parallel * engine.replicas,
        "pp_size": engine.pipeline_parallel,
        "dp_size": engine.replicas,
        "ep_size": 1,
        "enable_dp_attention": engine.replicas > 1,
        "nnodes": 1,
        "node_rank": 0,
        "disaggregation_mode": "null",
        "weight_version": state["weight_version"],
    }


@ROUTES.get("/get_world_size", "How many receivers of weights there are", ("world_size",))
async def world_size(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the number of replicas, each of which receives weights once."""
    replicas = (await orders.trained(context).state(orders.model_of(exchange)))["replicas"]
    return {"world_size": len(replicas)}


@ROUTES.post(
    "/init_weight_transfer_engine",
    "A trainer's group, joined",
    fields.INIT_TRANSFER,
    _MESSAGE,
    statuses=orders.UPDATES,
)
async def init_transfer(context: ApiContext, exchange: HttpExchange) -> object:
    """Make all replicas join the trainer's process group at the address in `init_info`."""
    body = await context.read_as(exchange, fields.INIT_TRANSFER)
    with orders.refusing("init_info"):
        await orders.trained(context).init_transfer(orders.model_of(exchange), body.init_info)
    return {"message": "Weight transfer initialized"}


@ROUTES.post(
    "/start_weight_update",
    "An update of several messages",
    fields.START_UPDATE,
    _MESSAGE,
    statuses=orders.UPDATES,
)
async def start_update(context: ApiContext, exchange: HttpExchange) -> object:
    await context.read_as(exchange, fields.START_UPDATE, empty=True)
    with orders.refusing(None):
        await orders.trained(context).start_update(orders.model_of(exchange))
    return {"message": "Weight update started"}


@ROUTES.post(
    "/update_weights", "Tensors of a trainer", fields.UPDATE_TENSORS, None, statuses=orders.UPDATES
)
async def update_weights(context: ApiContext, exchange: HttpExchange) -> object:
    """Update weights by a trainer's tensors, which are a part of a started update or a whole
    update."""
    body = await context.read_as(exchange, fields.UPDATE_TENSORS)
    with orders.refusing("update_info"):
        version = await orders.trained(context).take_tensors(
            orders.model_of(exchange), body.update_info, body.weight_version or ""
        )
    return {"message": "Weights updated", **({"weight_version": version} if version else {})}


@ROUTES.post(
    "/finish_weight_update",
    "The weights that a trainer has sent, at all replicas",
    fields.FINISH_UPDATE,
    (*_MESSAGE, "weight_version"),
    statuses=orders.UPDATES,
)
async def finish_update(context: ApiContext, exchange: HttpExchange) -> object:
    """Replace the weights by the tensors that a trainer has sent since the update began."""
    body = await context.read_as(exchange, fields.FINISH_UPDATE, empty=True)
    with orders.refusing(None):
        version = await orders.trained(context).finish_update(
            orders.model_of(exchange), body.weight_version or ""
        )
    return {"message": "Weight update finished", "weight_version": version}


@ROLLOUTS.post("/inference/v1/generate", *ROLL_OUT)
async def generate(context: ApiContext, exchange: HttpExchange, *, routed: bool = False) -> object:
    """Answer a rollout: token ids in, token ids and log-probabilities out.

    routed: whether chosen experts are returned even if the body does not request them.
    Raises ApiError, MantaError.
    """
    context.count_request(exchange)
    body = await context.read_as(exchange, fields.ROLLOUT)
    queue = QueueFields(priority=body.priority, cache_salt=body.cache_salt or "")
    routed = routed or bool(body.return_routed_experts)
    params = rollout_params(body.sampling_params, routed=routed)
    request, generation, choices = await roll_out(context, exchange, body, params, queue)
    return _answer(request, generation, choices)


def _answer(
    request: GenerationRequest, generation: Generation, choices: list[RolloutChoice]
) -> JsonObject:
    scored_prompt = request.params.prompt_logprobs is not None
    return {
        "request_id": request.request_id,
        "choices": [
            {
                "index": index,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish,
                "logprobs": None
                if request.params.logprobs is None
                else {"content": [_shown(scored) for scored in choice.logprobs]},
                "token_logprobs": None
                if request.params.logprobs is None
                else own_logprobs(choice.logprobs),
                "weight_versions": weight_versions(generation, index, len(choice.token_ids)),
                "routed_experts": routed_experts(choice.routed),
            }
            for index, choice in enumerate(choices)
        ],
        "prompt_logprobs": [
            None if scored is None else _by_id(scored) for scored in choices[0].scores
        ]
        if scored_prompt
        else None,
    }


def _shown(scored: TokenLogprobs) -> JsonObject:
    """Return a token's log-probability and alternatives as JSON, with tokens named by ids."""
    return {
        "token": f"token_id:{scored.token_id}",
        "logprob": scored.logprob,
        "top_logprobs": [
            {"token": f"token_id:{token}", "logprob": max(logprob, FLOOR)}
            for token, logprob in zip(scored.top_ids, scored.top_logprobs, strict=True)
        ],
    }


def _by_id(scored: TokenLogprobs) -> JsonObject:
    best = enumerate(zip(scored.top_ids, scored.top_logprobs, strict=True), 1)
    ranked = {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in best}
    return {str(scored.token_id): {"logprob": scored.logprob, "rank": scored.rank}, **ranked}


SKYRL_ROLLOUTS, SKYRL_ROUTES = RouteTable(reads=QUEUES), orders.order_table()
_START, _FINISH = "skyrl_start_weight_update", "skyrl_finish_weight_update"
_TAKE = ("update_weights_nccl", "update_weights_ipc")


@SKYRL_ROLLOUTS.post("/skyrl/v1/generate", *ROLL_OUT)
async def skyrl_generate(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer a rollout request as `generate` does, always with the experts chosen per token."""
    return await generate(context, exchange, routed=True)


@SKYRL_ROUTES.post(
    "/collective_rpc",
    "An update of weights by SkyRL",
    fields.COLLECTIVE_RPC,
    statuses=orders.UPDATES,
)
async def collective_rpc(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer the call by which SkyRL's trainer updates weights in vLLM's workers; refuse other
    calls."""
    body = await context.read_as(exchange, fields.COLLECTIVE_RPC)
    weights, model, arguments = (
        orders.trained(context),
        orders.model_of(exchange),
        body.kwargs or {},
    )
    with orders.refusing("kwargs" if body.method in _TAKE else None):
        if body.method == _START:
            await weights.start_update(model)
        elif body.method == _FINISH:
            await weights.finish_update(model, "")
        elif body.method in _TAKE:
            info = arguments.get("update_info")
            if not isinstance(info, dict):
                raise invalid("kwargs.update_info is an object", "kwargs.update_info")
            await weights.take_tensors(model, info, "")
        else:
            methods = ", ".join((_START, *_TAKE, _FINISH))
            raise invalid(f"method is one of {methods}", "method", "not_supported")
    return {"status": "ok"}


@SKYRL_ROUTES.post(
    "/skyrl/v1/load_lora_adapter",
    "An adapter added or read again",
    LOAD_LORA,
    None,
    (PLAIN,),
    statuses=(*READS, *NAMES),
    query={},
)
async def load_lora(context: ApiContext, exchange: HttpExchange) -> None:
    """Add an adapter, or read its files again if it exists."""
    await put_lora(context, exchange, await context.read_as(exchange, LOAD_LORA), again=True)


@SKYRL_ROUTES.post(
    "/finish_session",
    "The end of a trajectory",
    statuses=(),
    admin=False,
    query={"session_id": TEXT},
)
async def finish_session(context: ApiContext, exchange: HttpExchange) -> object:
    """Acknowledge the end of a trajectory, for which replicas keep no state."""
    return {"status": "ok"}
