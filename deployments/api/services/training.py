"""The routes for trainers: weights, pauses, and rollouts of token ids.

Names and answers are those of vLLM's and SGLang's servers.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.api.body_fields import take_token_ids
from deployments.api.context import ApiContext
from deployments.api.fields.schema import TEXT, Body, Schema, one_of
from deployments.api.fields.training import (
    ABORT_REQUESTS,
    FINISH_UPDATE,
    FROM_DISK,
    INIT_TRANSFER,
    MEMORY_PARTS,
    PAUSE,
    PAUSE_GENERATION,
    ROLLOUT,
    START_UPDATE,
    THEIR_ROLLOUT,
    UPDATE_TENSORS,
    MemoryParts,
    Rollout,
    TheirRollout,
    TheirSampling,
    TokenSampling,
)
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import QueueFields, queue_place
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.json_body import JsonObject
from deployments.api.options import Training
from deployments.api.route import NAMES, QUEUES, READS, Operation, Route
from deployments.api.stream.logprobs import FLOOR, own_logprobs
from deployments.api.stream.merge import failed
from deployments.backend import Generation, GenerationRequest
from engine.batch import TokenLogprobs
from engine.errors import UpdateFailed, context_too_long
from engine.sampling_params import SamplingParams
from engine.scheduling.updates import MODES

GENERATE = "/inference/v1/generate"
# SGLang's words for the modes of a pause.
_THEIRS = {"abort": "abort", "retract": "keep", "in_place": "keep"}


def _training(context: ApiContext) -> Training:
    training = context.options.training
    if training is None:
        raise invalid("this server has no weights to change", code="weights_not_replaceable")
    return training


def _model(exchange: HttpExchange) -> str:
    """Return the model that the query names; "" for none."""
    return exchange.parameters().get("model", "")


async def pause(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas, as vLLM has it, but for fields in the body and unknown ones.

    An order that is not understood must not end requests. Raises ApiError, MantaError.
    """
    fields: JsonObject = {**exchange.parameters()}
    for name in ("clear_cache", "wait_for_inflight_requests"):
        if (value := fields.get(name)) is not None:
            fields[name] = value.lower() != "false"
    order = PAUSE.read(fields | await context.read(exchange, empty=True), [], strict=True)
    model = order.model or ""
    mode = "wait" if order.wait_for_inflight_requests else "abort"
    await _training(context).pause(model, mode if order.mode is None else order.mode)
    if order.clear_cache is not False:
        await _training(context).reset_prefix_cache(model)
    await exchange.answer_json({"status": "paused"})


async def resume(context: ApiContext, exchange: HttpExchange) -> None:
    """End the pause of all replicas."""
    await _training(context).resume(_model(exchange))
    await exchange.answer_json({"status": "resumed"})


async def abort_requests(context: ApiContext, exchange: HttpExchange) -> None:
    """End all running requests with what they have, or those that the body names."""
    body = await context.read_as(exchange, ABORT_REQUESTS, empty=True)
    if body.request_ids is not None:
        stop = context.options.stop
        if stop is None:
            raise invalid("this server cannot end single requests", "request_ids")
        ended = await asyncio.gather(
            *(stop(request_id, None, True) for request_id in {*body.request_ids})
        )
        known = sum(count > 0 for count in ended)
        await exchange.answer_json({"status": "aborted", "known_request_ids": known})
        return
    training, model = _training(context), _model(exchange)
    paused = (await training.state(model))["is_paused"]
    await training.pause(model, "abort")
    if not paused:
        await training.resume(model)
    await exchange.answer_json({"status": "aborted"})


async def is_paused(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer whether requests wait for the end of a pause."""
    state = await _training(context).state(_model(exchange))
    await exchange.answer_json({"is_paused": state["is_paused"]})


def _tags(exchange: HttpExchange) -> list[str]:
    """Return the query's tags, each in a field of its own or several with commas."""
    tags = exchange.every_parameter("tags")
    return [tag for field in tags for tag in field.split(",") if tag]


async def sleep(context: ApiContext, exchange: HttpExchange) -> None:
    """Free memory of all replicas' engines, as vLLM has it. Raises ApiError, MantaError."""
    if body := await context.read(exchange, empty=True):
        raise invalid("level, mode and tags go into the query", next(iter(body)), "unknown_field")
    query = exchange.parameters()
    level = query.get("level", "1")
    if not level.isdecimal():
        raise invalid(f"level is 0, 1 or 2, not {level!r}", "level")
    mode = query.get("mode", "abort")
    with _refusing("level"):
        await _training(context).sleep(_model(exchange), int(level), _tags(exchange), mode)
    await exchange.answer_json({"status": "asleep"})


async def wake_up(context: ApiContext, exchange: HttpExchange) -> None:
    """Take the engines' memory again, as vLLM has it."""
    with _refusing("tags"):
        await _training(context).wake(_model(exchange), _tags(exchange))
    await exchange.answer_json({"status": "awake"})


async def is_sleeping(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer whether a part of the engines' memory is free."""
    state = await _training(context).state(_model(exchange))
    await exchange.answer_json({"is_sleeping": state["is_sleeping"]})


async def release_memory(context: ApiContext, exchange: HttpExchange) -> None:
    """Free memory of all replicas' engines once no request runs, as SGLang has it."""
    body = await context.read_as(exchange, MEMORY_PARTS, empty=True)
    with _refusing("tags"):
        await _training(context).sleep(_model(exchange), 1, _their_tags(body), "wait")
    await exchange.answer_json({"status": "ok"})


async def resume_memory(context: ApiContext, exchange: HttpExchange) -> None:
    """Take the engines' memory again, as SGLang has it."""
    body = await context.read_as(exchange, MEMORY_PARTS, empty=True)
    with _refusing("tags"):
        await _training(context).wake(_model(exchange), _their_tags(body))
    await exchange.answer_json({"status": "ok"})


def _their_tags(body: MemoryParts) -> list[str]:
    """Return the tags of a body; memory of CUDA graphs, which SGLang knows too, always stays."""
    return [tag for tag in body.tags or () if tag != "cuda_graph"]


@contextlib.contextmanager
def _refusing(param: str | None) -> Iterator[None]:
    """Answer 400 or 409 where replicas refuse an order.

    param: the field of the order that a refusal is about; None: none.
    """
    try:
        yield
    except UpdateFailed as error:
        status = 409 if error.code == "update_in_progress" else 400
        own = error.param == "weight_version"
        raise ApiError(
            status, error.code, error.message, param=error.param if own else param
        ) from None


async def weight_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the weights' version, and that of each replica."""
    await exchange.answer_json(await _training(context).state(_model(exchange)))


async def server_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the settings that trainers look for, as vLLM names them.

    Adapters are no way to send weights, so there is no lora_config.
    """
    engine = await _training(context).engine(_model(exchange))
    config: JsonObject = {
        "model_config": {
            "model": engine.model,
            "dtype": f"torch.{engine.dtype}",
            "max_model_len": engine.max_model_len,
            "logprobs_mode": engine.logprobs_mode,
        },
        "parallel_config": {"data_parallel_size": engine.replicas},
        "lora_config": None,
        "weight_transfer_config": {"backend": "nccl"},
    }
    await exchange.answer_json({"vllm_config": config})


async def world_size(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the number of replicas, each of which is one receiver of weights."""
    replicas = (await _training(context).state(_model(exchange)))["replicas"]
    await exchange.answer_json({"world_size": len(replicas)})


async def reset_prefix_cache(context: ApiContext, exchange: HttpExchange) -> None:
    """Drop the cached prefixes of all replicas."""
    await _training(context).reset_prefix_cache(_model(exchange))
    await exchange.answer_json({"status": "ok", "success": True})


async def from_disk(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by a checkpoint, as SGLang has it."""
    body = await context.read_as(exchange, FROM_DISK)
    training = _training(context)
    with _refusing("model_path"):
        version = await training.update(
            _model(exchange), body.model_path, body.weight_version or ""
        )
    await exchange.answer_json({"success": True, "message": "ok", "weight_version": version})


async def init_transfer(context: ApiContext, exchange: HttpExchange) -> None:
    """Let all replicas join a trainer's group, as vLLM has it."""
    body = await context.read_as(exchange, INIT_TRANSFER)
    with _refusing("init_info"):
        await _training(context).init_transfer(_model(exchange), body.init_info)
    await exchange.answer_json({"message": "Weight transfer initialized"})


async def start_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Begin an update of several messages, as vLLM has it."""
    await context.read_as(exchange, START_UPDATE, empty=True)
    with _refusing(None):
        await _training(context).start_update(_model(exchange))
    await exchange.answer_json({"message": "Weight update started"})


async def update_weights(context: ApiContext, exchange: HttpExchange) -> None:
    """Take tensors from a trainer, as vLLM has it."""
    body = await context.read_as(exchange, UPDATE_TENSORS)
    with _refusing("update_info"):
        version = await _training(context).take_tensors(
            _model(exchange), body.update_info, body.weight_version or ""
        )
    answer: JsonObject = {"message": "Weights updated"}
    await exchange.answer_json(answer | ({"weight_version": version} if version else {}))


async def finish_update(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by what a trainer has sent, as vLLM has it."""
    body = await context.read_as(exchange, FINISH_UPDATE, empty=True)
    with _refusing(None):
        version = await _training(context).finish_update(
            _model(exchange), body.weight_version or ""
        )
    message = "Weight update finished"
    await exchange.answer_json({"message": message, "weight_version": version})


async def pause_generation(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas, as SGLang has it."""
    body = await context.read_as(exchange, PAUSE_GENERATION, empty=True)
    mode = body.mode or "abort"
    if mode not in _THEIRS:
        raise invalid(f"mode is one of {', '.join(_THEIRS)}", "mode")
    await _training(context).pause(_model(exchange), _THEIRS[mode])
    await exchange.answer_json({"status": "ok"})


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt
    finish: str | None = None


_SAME = {name: name for name in TokenSampling.__struct_fields__}


def _params(sampling: TokenSampling | TheirSampling, logprobs: int | None = None) -> SamplingParams:
    """Return the params of a rollout; `sampling`'s own logprobs override the argument."""
    return SamplingParams(**take_sampling(sampling, _SAME, logprobs=logprobs).values)


async def generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout: token ids in, token ids and log-probabilities out.

    Raises ApiError, MantaError.
    """
    context.count_request(exchange)
    body = await context.read_as(exchange, ROLLOUT)
    queue = QueueFields(priority=body.priority, cache_salt=body.cache_salt or "")
    params = _params(body.sampling_params)
    request, generation, choices = await _rollout(context, exchange, body, params, queue)
    await exchange.answer_json(_answer(request, generation, choices))


async def their_generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout as SGLang has it. Raises ApiError, MantaError."""
    context.count_request(exchange)
    body = await context.read_as(exchange, THEIR_ROLLOUT)
    params = _params(body.sampling_params or TheirSampling(), 0 if body.return_logprob else None)
    request, generation, choices = await _rollout(context, exchange, body, params, QueueFields())
    answers = [
        _their_choice(request, generation.versions(index), choice)
        for index, choice in enumerate(choices)
    ]
    await exchange.answer_json(answers[0] if len(answers) == 1 else answers)


def _their_choice(
    request: GenerationRequest, versions: list[tuple[str, int]], choice: _Choice
) -> JsonObject:
    meta: JsonObject = {
        "id": request.request_id,
        "finish_reason": {"type": choice.finish},
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": len(choice.token_ids),
        "weight_version": versions[-1][0] if versions else "",
    }
    if request.params.logprobs is not None:
        meta["output_token_logprobs"] = [
            [scored.logprob, scored.token_id, None] for scored in choice.logprobs
        ]
    return {"text": "", "output_ids": choice.token_ids, "meta_info": meta}


async def _rollout(
    context: ApiContext,
    exchange: HttpExchange,
    body: Rollout | TheirRollout,
    params: SamplingParams,
    queue: QueueFields,
) -> tuple[GenerationRequest, Generation, list[_Choice]]:
    """Run a rollout to its end. Raises ApiError, MantaError."""
    if body.stream:
        raise invalid("stream: answers of this route come whole", "stream", "not_supported")
    place = queue_place(exchange, queue, context.options)
    context.counter.in_flight += 1
    try:
        names = context.backend.models()
        name = body.model or next(iter(names), "")
        card = await context.admit(place.key, name, exchange.caller)
        ids = take_token_ids(body.token_ids, "token_ids", card.vocab_size)
        if params.stop:
            raise invalid(
                "sampling_params.stop needs text; use stop_token_ids", "sampling_params.stop"
            )
        if len(ids) + (params.max_tokens or 1) > card.max_model_len:
            raise context_too_long(
                card.max_model_len, len(ids), params.max_tokens, param="token_ids"
            )
        context.charge(exchange, [ids])
        seed = params.seed_for(ids, card.seed)
        request = GenerationRequest(
            request_id=body.request_id or exchange.request_id,
            model=card.id,
            token_ids=ids,
            params=params,
            seed=secrets.randbits(63) if seed is None else seed,
            cache_salt=place.cache_salt,
            adapter=None if card.parent is None else await context.pin(card.id, place.deadline),
            priority=place.priority,
            deadline=place.deadline,
            key=place.key,
            owner=exchange.caller.id,
            trace=exchange.trace,
        )
        generation = context.backend.generate(request)
        async with UntilDisconnect(exchange.receive, generation.abort):
            choices = await _collect(request, generation)
    finally:
        context.counter.in_flight -= 1
    return request, generation, choices


async def _collect(request: GenerationRequest, generation: Generation) -> list[_Choice]:
    choices = [_Choice() for _ in range(request.params.n)]
    while items := await generation.next():
        for index, delta in items:
            choice = choices[index]
            if delta.finish == "error":
                generation.abort()
                raise failed(delta)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            choice.finish = delta.finish or None
            choice.scores += delta.prompt_logprobs or ()
    return choices


def _answer(
    request: GenerationRequest, generation: Generation, choices: list[_Choice]
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
                "weight_versions": [
                    {"version": version, "num_tokens": count}
                    for version, count in generation.versions(index)
                ],
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


_OK = ("status",)
_MESSAGE = ("message",)


def _order(
    summary: str,
    answer: tuple[str, ...] | None = _OK,
    body: Body | None = None,
    statuses: tuple[int, ...] = (403, 400, 404, 503),
    **query: Schema,
) -> Operation:
    """Return an operation on all replicas of the model that the query names."""
    return Operation(summary, statuses, body, answer, query={"model": TEXT, **query})


_CHANGES = (*READS, *NAMES, 422, 503)
_FLUSH = _order("All cached prefixes dropped", (*_OK, "success"))
_RESUME = _order("The end of a pause")
_GENERATE = Operation(
    "Token ids and log-probabilities of a rollout",
    QUEUES,
    ROLLOUT,
    ("request_id", "choices", "prompt_logprobs"),
)
_INFO = ("weight_version", "is_paused", "is_sleeping", "weights_dropped", "replicas")
_LOADED = ("success", "message", "weight_version")
ROUTES = (
    Route(GENERATE, generate, post=_GENERATE),
    Route(
        "/generate",
        their_generate,
        post=Operation("The same in SGLang's words", QUEUES, THEIR_ROLLOUT, None),
    ),
    Route(
        "/pause",
        pause,
        post=_order(
            "All replicas paused",
            _OK,
            PAUSE,
            _CHANGES,
            mode=one_of(*MODES),
            clear_cache=TEXT,
        ),
    ),
    Route("/resume", resume, post=_RESUME),
    Route("/is_paused", is_paused, get=_order("Whether replicas are paused", ("is_paused",))),
    Route(
        "/abort_requests",
        abort_requests,
        post=_order("Requests ended with what they have", _OK, ABORT_REQUESTS, _CHANGES),
    ),
    Route(
        "/sleep",
        sleep,
        post=_order(
            "Memory of all replicas freed",
            level=one_of("0", "1", "2"),
            mode=one_of(*MODES),
            tags=TEXT,
        ),
    ),
    Route("/wake_up", wake_up, post=_order("The memory of all replicas taken again", tags=TEXT)),
    Route("/is_sleeping", is_sleeping, get=_order("Whether replicas sleep", ("is_sleeping",))),
    Route(
        "/release_memory_occupation",
        release_memory,
        post=_order("Memory freed, in SGLang's words", _OK, MEMORY_PARTS, _CHANGES),
    ),
    Route(
        "/resume_memory_occupation",
        resume_memory,
        post=_order("Memory taken again, in SGLang's words", _OK, MEMORY_PARTS, _CHANGES),
    ),
    Route("/reset_prefix_cache", reset_prefix_cache, post=_FLUSH),
    Route("/weight_info", weight_info, get=_order("The version of the weights", _INFO)),
    Route(
        "/server_info",
        server_info,
        get=_order("The engines' settings, in vLLM's words", ("vllm_config",), config_format=TEXT),
    ),
    Route(
        "/get_world_size",
        world_size,
        get=_order("How many receivers of weights there are", ("world_size",)),
    ),
    Route(
        "/init_weight_transfer_engine",
        init_transfer,
        post=_order("A trainer's group, joined", _MESSAGE, INIT_TRANSFER, (*_CHANGES, 409)),
    ),
    Route(
        "/start_weight_update",
        start_update,
        post=_order("An update of several messages", _MESSAGE, START_UPDATE, (*_CHANGES, 409)),
    ),
    Route(
        "/update_weights",
        update_weights,
        post=_order("Tensors of a trainer", None, UPDATE_TENSORS, (*_CHANGES, 409)),
    ),
    Route(
        "/finish_weight_update",
        finish_update,
        post=_order(
            "The weights that a trainer has sent, at all replicas",
            (*_MESSAGE, "weight_version"),
            FINISH_UPDATE,
            (*_CHANGES, 409),
        ),
    ),
    Route(
        "/update_weights_from_disk",
        from_disk,
        post=_order(
            "The weights of a checkpoint, at all replicas", _LOADED, FROM_DISK, (*_CHANGES, 409)
        ),
    ),
    Route(
        "/pause_generation",
        pause_generation,
        post=_order("All replicas paused, in SGLang's words", _OK, PAUSE_GENERATION, _CHANGES),
    ),
    Route("/continue_generation", resume, post=_RESUME),
    Route("/flush_cache", reset_prefix_cache, get=_FLUSH, post=_FLUSH),
)
# for admins
PATHS = frozenset(route.path for route in ROUTES if not route.path.endswith("/generate"))
