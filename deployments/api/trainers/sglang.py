"""The routes of SGLang for rollouts, weights, pauses and memory, which slime and miles call."""

from base64 import b64encode
from collections.abc import Sequence

from deployments.api.context import ApiContext
from deployments.api.generation.tenancy import QueueFields
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.http.off_loop import in_thread
from deployments.api.route import NAMES, QUEUES, Operation, Route
from deployments.api.services.server import ready
from deployments.api.trainers.fields import (
    ABORT_REQUEST,
    FROM_DISK,
    MEMORY_PARTS,
    PAUSE_GENERATION,
    THEIR_ROLLOUT,
    MemoryParts,
    TheirSampling,
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
from deployments.api.trainers.vllm import FLUSH, reset_prefix_cache, server_info
from deployments.backend import GenerationRequest
from engine.text.tokenizer import Tokenizer

GENERATE = "/generate"
_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


async def generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout. Raises ApiError, MantaError."""
    context.count_request(exchange)
    body = await context.read_as(exchange, THEIR_ROLLOUT)
    sampling = body.sampling_params or TheirSampling()
    logprobs, routed = 0 if body.return_logprob else None, bool(body.return_routed_experts)
    params = rollout_params(sampling, logprobs, routed=routed)
    request, generation, choices = await roll_out(context, exchange, body, params, QueueFields())
    tokenizer, special = context.backend.tokenizer(request.model), sampling.skip_special_tokens
    size = sum(len(choice.token_ids) for choice in choices)
    texts = await in_thread(lambda: _texts(tokenizer, request, choices, special is not False), size)
    answers = [
        {
            "text": text,
            "output_ids": choice.token_ids,
            "meta_info": _meta_info(request, generation.versions(index), choice),
        }
        for index, (choice, text) in enumerate(zip(choices, texts, strict=True))
    ]
    await exchange.answer_json(answers[0] if len(answers) == 1 else answers)


def _texts(
    tokenizer: Tokenizer,
    request: GenerationRequest,
    choices: Sequence[RolloutChoice],
    skip_special: bool,
) -> list[str]:
    return [
        tokenizer.decode(
            choice.token_ids, skip_special_tokens=skip_special, prompt=request.token_ids
        )
        for choice in choices
    ]


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
    if choice.routed is not None:  # [tokens, layers, experts of a token] int32, one after the other
        ids = choice.routed.array().astype("<i4")
        meta["routed_experts"] = b64encode(ids.tobytes()).decode()
    return meta


def _finish_reason(choice: RolloutChoice) -> JsonObject:
    if choice.finish == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    if choice.finish == "stop":
        return {"type": "stop", "matched": choice.stop_token}
    return {"type": choice.finish, "message": "ended by a pause or an abort"}


async def from_disk(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by a checkpoint."""
    body = await context.read_as(exchange, FROM_DISK)
    with refusing("model_path"):
        version = await trained(context).update(
            model_of(exchange), body.model_path, body.weight_version or ""
        )
    await exchange.answer_json({"success": True, "message": "ok", "weight_version": version})


async def pause_generation(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas."""
    body = await context.read_as(exchange, PAUSE_GENERATION, empty=True)
    mode = body.mode or "abort"
    if mode not in _MODES:
        raise invalid(f"mode is one of {', '.join(_MODES)}", "mode")
    await trained(context).pause(model_of(exchange), _MODES[mode])
    await exchange.answer_json({"status": "ok"})


async def abort_request(context: ApiContext, exchange: HttpExchange) -> None:
    """End a request, or all requests; their answers are the outputs so far."""
    body = await context.read_as(exchange, ABORT_REQUEST)
    if body.abort_all:
        await end_all(context, exchange)
    elif body.request_id:
        await end_some(context, [body.request_id])
    else:
        raise invalid("rid names a request, or abort_all is true", "rid", "missing_field")
    await exchange.answer_json({"status": "ok"})


async def loads(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the numbers of requests at each replica; the first has those that wait here."""
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
    await exchange.answer_json({"loads": rows})


async def release_memory(context: ApiContext, exchange: HttpExchange) -> None:
    """Free memory of all replicas' engines once no request runs."""
    body = await context.read_as(exchange, MEMORY_PARTS, empty=True)
    with refusing("tags"):
        await trained(context).sleep(model_of(exchange), 1, _tags(body), "wait")
    await exchange.answer_json({"status": "ok"})


async def resume_memory(context: ApiContext, exchange: HttpExchange) -> None:
    """Allocate again what a release of the engines' memory freed, or the parts that are named."""
    body = await context.read_as(exchange, MEMORY_PARTS, empty=True)
    with refusing("tags"):
        await trained(context).wake(model_of(exchange), _tags(body))
    await exchange.answer_json({"status": "ok"})


def _tags(body: MemoryParts) -> list[str]:
    """Return the tags of a body; memory of CUDA graphs, which SGLang knows too, always stays."""
    return [tag for tag in body.tags or () if tag != "cuda_graph"]


ROUTES = (
    Route(
        GENERATE,
        generate,
        post=Operation("A rollout in SGLang's words", QUEUES, THEIR_ROLLOUT, None),
    ),
    Route(
        "/health_generate",
        ready,
        get=Operation("Whether a replica can take requests", (503,), answer=("status",)),
        open=True,
    ),
    Route(
        "/update_weights_from_disk",
        from_disk,
        post=order_of(
            "The weights of a checkpoint, at all replicas",
            ("success", "message", "weight_version"),
            FROM_DISK,
            (*CHANGES, 409),
        ),
    ),
    *(
        state_of(path, "weight_version", "The version of the weights")
        for path in ("/weight_version", "/get_weight_version")
    ),
    Route("/get_server_info", server_info, get=order_of("The engines' settings", None)),
    Route(
        "/pause_generation",
        pause_generation,
        post=order_of("All replicas paused, in SGLang's words", OK, PAUSE_GENERATION, CHANGES),
    ),
    Route(
        "/abort_request",
        abort_request,
        post=order_of("Requests ended with what they have", OK, ABORT_REQUEST, CHANGES),
    ),
    Route("/v1/loads", loads, get=Operation("Requests of each replica", NAMES, answer=("loads",))),
    Route("/flush_cache", reset_prefix_cache, get=FLUSH, post=FLUSH),
    Route(
        "/release_memory_occupation",
        release_memory,
        post=order_of("Memory freed, in SGLang's words", OK, MEMORY_PARTS, CHANGES),
    ),
    Route(
        "/resume_memory_occupation",
        resume_memory,
        post=order_of("Memory taken again, in SGLang's words", OK, MEMORY_PARTS, CHANGES),
    ),
)
ADMIN_PATHS = frozenset(route.path for route in ROUTES if route.path != GENERATE and not route.open)
