"""The routes of vLLM's server for trainers: weights, pauses, sleep, and rollouts."""

from deployments.api.context import ApiContext
from deployments.api.fields.schema import TEXT, one_of
from deployments.api.generation.tenancy import QueueFields
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.route import QUEUES, Operation, Route
from deployments.api.stream.logprobs import FLOOR, own_logprobs
from deployments.api.stream.merge import routed_experts, weight_versions
from deployments.api.trainers.fields import (
    ABORT_REQUESTS,
    FINISH_UPDATE,
    INIT_TRANSFER,
    PAUSE,
    ROLLOUT,
    START_UPDATE,
    UPDATE_TENSORS,
)
from deployments.api.trainers.orders import (
    CHANGES,
    OK,
    end_all,
    end_some,
    model_of,
    order_of,
    refusing,
    state_of,
    trained,
)
from deployments.api.trainers.rollout import RolloutChoice, roll_out, rollout_params
from deployments.backend import Generation, GenerationRequest
from engine.batch import TokenLogprobs
from engine.scheduling.orders.updates import MODES

GENERATE = "/inference/v1/generate"


async def pause(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas by vLLM's fields, which may be in the body too.

    An unknown field is refused, because an order that is not understood must not end requests.
    Raises ApiError, MantaError.
    """
    fields: JsonObject = {**exchange.parameters()}
    for name in ("clear_cache", "wait_for_inflight_requests"):
        if (value := fields.get(name)) is not None:
            fields[name] = value.lower() != "false"
    order = PAUSE.read(fields | await context.read(exchange, empty=True), [], strict=True)
    model = order.model or ""
    mode = "wait" if order.wait_for_inflight_requests else "abort"
    await trained(context).pause(model, mode if order.mode is None else order.mode)
    if order.clear_cache is not False:
        await trained(context).reset_prefix_cache(model)
    await exchange.answer_json({"status": "paused"})


async def resume(context: ApiContext, exchange: HttpExchange) -> None:
    """End the pause of all replicas."""
    await trained(context).resume(model_of(exchange))
    await exchange.answer_json({"status": "resumed"})


async def abort_requests(context: ApiContext, exchange: HttpExchange) -> None:
    """End all running requests, or those that the body names; their answers are the outputs so
    far.
    """
    body = await context.read_as(exchange, ABORT_REQUESTS, empty=True)
    if body.request_ids is not None:
        known = await end_some(context, body.request_ids)
        await exchange.answer_json({"status": "aborted", "known_request_ids": known})
        return
    await end_all(context, exchange)
    await exchange.answer_json({"status": "aborted"})


def _tags(exchange: HttpExchange) -> list[str]:
    """Return the query's tags, each in a field of its own or several with commas."""
    tags = exchange.every_parameter("tags")
    return [tag for field in tags for tag in field.split(",") if tag]


async def sleep(context: ApiContext, exchange: HttpExchange) -> None:
    """Free memory of all replicas' engines, by vLLM's parameters in the query.

    Raises ApiError, MantaError.
    """
    if body := await context.read(exchange, empty=True):
        raise invalid("level, mode and tags go into the query", next(iter(body)), "unknown_field")
    query = exchange.parameters()
    level = query.get("level", "1")
    if not level.isdecimal():
        raise invalid(f"level is 0, 1 or 2, not {level!r}", "level")
    mode = query.get("mode", "abort")
    with refusing("level"):
        await trained(context).sleep(model_of(exchange), int(level), _tags(exchange), mode)
    await exchange.answer_json({"status": "asleep"})


async def wake_up(context: ApiContext, exchange: HttpExchange) -> None:
    """Allocate again the memory that `sleep` freed, or that of the tags in the query."""
    with refusing("tags"):
        await trained(context).wake(model_of(exchange), _tags(exchange))
    await exchange.answer_json({"status": "awake"})


async def weight_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the weights' version, and that of each replica."""
    await exchange.answer_json(await trained(context).state(model_of(exchange)))


async def server_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the settings that trainers look for, as vLLM and SGLang name them.

    Adapters are no way to send weights, so there is no lora_config. For SGLang's trainers the
    fleet is one engine with data-parallel attention, whose tp_size counts the ranks of all
    replicas: slime takes tp_size x pp_size for its GPUs.
    """
    training, model = trained(context), model_of(exchange)
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
    answer: JsonObject = {
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
    await exchange.answer_json(answer)


async def world_size(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the number of replicas, each of which is one receiver of weights."""
    replicas = (await trained(context).state(model_of(exchange)))["replicas"]
    await exchange.answer_json({"world_size": len(replicas)})


async def reset_prefix_cache(context: ApiContext, exchange: HttpExchange) -> None:
    """Drop the cached prefixes of all replicas."""
    await trained(context).reset_prefix_cache(model_of(exchange))
    await exchange.answer_json({"status": "ok", "success": True})


async def init_transfer(context: ApiContext, exchange: HttpExchange) -> None:
    """Make all replicas join the trainer's process group at the address in `init_info`."""
    body = await context.read_as(exchange, INIT_TRANSFER)
    with refusing("init_info"):
        await trained(context).init_transfer(model_of(exchange), body.init_info)
    await exchange.answer_json({"message": "Weight transfer initialized"})


async def start_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Begin an update of the weights, whose tensors come in several messages."""
    await context.read_as(exchange, START_UPDATE, empty=True)
    with refusing(None):
        await trained(context).start_update(model_of(exchange))
    await exchange.answer_json({"message": "Weight update started"})


async def update_weights(context: ApiContext, exchange: HttpExchange) -> None:
    """Update weights by a trainer's tensors: a part of a started update, or a whole one."""
    body = await context.read_as(exchange, UPDATE_TENSORS)
    with refusing("update_info"):
        version = await trained(context).take_tensors(
            model_of(exchange), body.update_info, body.weight_version or ""
        )
    answer: JsonObject = {"message": "Weights updated"}
    await exchange.answer_json(answer | ({"weight_version": version} if version else {}))


async def finish_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by the tensors that a trainer has sent since the update began."""
    body = await context.read_as(exchange, FINISH_UPDATE, empty=True)
    with refusing(None):
        version = await trained(context).finish_update(
            model_of(exchange), body.weight_version or ""
        )
    message = "Weight update finished"
    await exchange.answer_json({"message": message, "weight_version": version})


async def generate(context: ApiContext, exchange: HttpExchange, *, routed: bool = False) -> None:
    """Answer a rollout: token ids in, token ids and log-probabilities out.

    routed: whether the route itself asks for the experts of tokens.
    Raises ApiError, MantaError.
    """
    context.count_request(exchange)
    body = await context.read_as(exchange, ROLLOUT)
    queue = QueueFields(priority=body.priority, cache_salt=body.cache_salt or "")
    routed = routed or bool(body.return_routed_experts)
    params = rollout_params(body.sampling_params, routed=routed)
    request, generation, choices = await roll_out(context, exchange, body, params, queue)
    await exchange.answer_json(_answer(request, generation, choices))


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
    """Return a token's log-probability, with tokens named by their ids."""
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


_MESSAGE = ("message",)
FLUSH = order_of("All cached prefixes dropped", (*OK, "success"))
RESUME = order_of("The end of a pause")
ROLL_OUT = Operation(
    "Token ids and log-probabilities of a rollout",
    QUEUES,
    ROLLOUT,
    ("request_id", "choices", "prompt_logprobs"),
)
_INFO = ("weight_version", "is_paused", "is_sleeping", "weights_dropped", "replicas")
ROUTES = (
    Route(GENERATE, generate, post=ROLL_OUT),
    Route(
        "/pause",
        pause,
        post=order_of(
            "All replicas paused", OK, PAUSE, CHANGES, mode=one_of(*MODES), clear_cache=TEXT
        ),
    ),
    Route("/resume", resume, post=RESUME),
    state_of("/is_paused", "is_paused", "Whether replicas are paused"),
    Route(
        "/abort_requests",
        abort_requests,
        post=order_of("Requests ended with what they have", OK, ABORT_REQUESTS, CHANGES),
    ),
    Route(
        "/sleep",
        sleep,
        post=order_of(
            "Memory of all replicas freed",
            level=one_of("0", "1", "2"),
            mode=one_of(*MODES),
            tags=TEXT,
        ),
    ),
    Route("/wake_up", wake_up, post=order_of("The memory of all replicas taken again", tags=TEXT)),
    state_of("/is_sleeping", "is_sleeping", "Whether replicas sleep"),
    Route("/reset_prefix_cache", reset_prefix_cache, post=FLUSH),
    Route("/weight_info", weight_info, get=order_of("The version of the weights", _INFO)),
    Route(
        "/server_info",
        server_info,
        get=order_of(
            "The engines' settings, in vLLM's words", ("vllm_config",), config_format=TEXT
        ),
    ),
    Route(
        "/get_world_size",
        world_size,
        get=order_of("How many receivers of weights there are", ("world_size",)),
    ),
    Route(
        "/init_weight_transfer_engine",
        init_transfer,
        post=order_of("A trainer's group, joined", _MESSAGE, INIT_TRANSFER, (*CHANGES, 409)),
    ),
    Route(
        "/start_weight_update",
        start_update,
        post=order_of("An update of several messages", _MESSAGE, START_UPDATE, (*CHANGES, 409)),
    ),
    Route(
        "/update_weights",
        update_weights,
        post=order_of("Tensors of a trainer", None, UPDATE_TENSORS, (*CHANGES, 409)),
    ),
    Route(
        "/finish_weight_update",
        finish_update,
        post=order_of(
            "The weights that a trainer has sent, at all replicas",
            (*_MESSAGE, "weight_version"),
            FINISH_UPDATE,
            (*CHANGES, 409),
        ),
    ),
)
ADMIN_PATHS = frozenset(route.path for route in ROUTES if route.path != GENERATE)
