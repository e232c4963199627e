"""The routes for trainers: weights, pauses, and rollouts of token ids.

Names and answers are those of vLLM's and SGLang's servers.
"""

import secrets
from dataclasses import dataclass, field

import msgspec

from deployments.api.body_fields import take_token_ids
from deployments.api.context import ApiContext
from deployments.api.fields.schema import TEXT, one_of
from deployments.api.fields.training import (
    FROM_DISK,
    PAUSE_GENERATION,
    ROLLOUT,
    THEIR_ROLLOUT,
    Rollout,
    TheirSampling,
    TokenSampling,
)
from deployments.api.generation.tenancy import QueueFields, queue_place
from deployments.api.http.errors import INVALID, ApiError, invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.http.json_body import JsonObject
from deployments.api.options import Training
from deployments.api.route import NAMES, QUEUES, READS, Operation, Route
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


async def _say(exchange: HttpExchange, answer: JsonObject, status: int = 200) -> None:
    await exchange.answer(status, msgspec.json.encode(answer))


async def pause(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas, as vLLM has it. Raises ApiError, MantaError."""
    await _training(context).pause(_model(exchange), exchange.parameters().get("mode", "abort"))
    if exchange.parameters().get("clear_cache", "true").lower() != "false":
        await _training(context).reset_prefix_cache(_model(exchange))
    await _say(exchange, {"status": "paused"})


async def resume(context: ApiContext, exchange: HttpExchange) -> None:
    """End the pause of all replicas."""
    await _training(context).resume(_model(exchange))
    await _say(exchange, {"status": "resumed"})


async def abort_requests(context: ApiContext, exchange: HttpExchange) -> None:
    """End all running requests with what they have."""
    training, model = _training(context), _model(exchange)
    paused = training.state(model)["is_paused"]
    await training.pause(model, "abort")
    if not paused:
        await training.resume(model)
    await _say(exchange, {"status": "aborted"})


async def is_paused(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer whether requests wait for the end of a pause."""
    state = _training(context).state(_model(exchange))
    await _say(exchange, {"is_paused": state["is_paused"]})


async def weight_info(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the weights' version, and that of each replica."""
    await _say(exchange, _training(context).state(_model(exchange)))


async def world_size(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the number of replicas, each of which is one receiver of weights."""
    replicas = _training(context).state(_model(exchange))["replicas"]
    await _say(exchange, {"world_size": len(replicas)})


async def reset_prefix_cache(context: ApiContext, exchange: HttpExchange) -> None:
    """Drop the cached prefixes of all replicas."""
    await _training(context).reset_prefix_cache(_model(exchange))
    await _say(exchange, {"status": "ok"})


async def from_disk(context: ApiContext, exchange: HttpExchange) -> None:
    """Replace the weights by a checkpoint, as SGLang has it."""
    body = await context.read_as(exchange, FROM_DISK)
    training = _training(context)
    try:
        version = await training.update(
            _model(exchange), body.model_path, body.weight_version or ""
        )
    except UpdateFailed as error:
        status = 409 if error.code == "update_in_progress" else 400
        param = error.param if error.param == "weight_version" else "model_path"
        raise ApiError(status, error.code, error.message, param=param, kind=INVALID) from None
    await _say(exchange, {"success": True, "message": "ok", "weight_version": version})


async def pause_generation(context: ApiContext, exchange: HttpExchange) -> None:
    """Pause all replicas, as SGLang has it."""
    body = await context.read_as(exchange, PAUSE_GENERATION)
    mode = body.mode or "abort"
    if mode not in _THEIRS:
        raise invalid(f"mode is one of {', '.join(_THEIRS)}", "mode")
    await _training(context).pause(_model(exchange), _THEIRS[mode])
    await _say(exchange, {"status": "ok"})


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt
    finish: str | None = None


def _params(sampling: TokenSampling) -> SamplingParams:
    values = {
        name: value
        for name in sampling.__struct_fields__
        if (value := getattr(sampling, name)) is not None
    }
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return SamplingParams(**values)


async def generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout: token ids in, token ids and log-probabilities out.

    Raises ApiError, MantaError.
    """
    context.count_request(exchange)
    body = await context.read_as(exchange, ROLLOUT)
    request, generation, choices = await _rollout(context, exchange, body)
    await _say(exchange, _answer(request, generation, choices))


async def their_generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout as SGLang has it. Raises ApiError, MantaError."""
    context.count_request(exchange)
    theirs = await context.read_as(exchange, THEIR_ROLLOUT)
    sampling = (theirs.sampling_params or TheirSampling()).as_ours()
    if theirs.return_logprob:
        sampling.logprobs = 0
    body = Rollout(
        token_ids=theirs.input_ids,
        sampling_params=sampling,
        model=theirs.model,
        request_id=theirs.rid,
        stream=theirs.stream,
    )
    request, generation, choices = await _rollout(context, exchange, body)
    answers = [
        _their_choice(request, generation.versions(index), choice)
        for index, choice in enumerate(choices)
    ]
    await exchange.answer(200, msgspec.json.encode(answers[0] if len(answers) == 1 else answers))


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
    context: ApiContext, exchange: HttpExchange, body: Rollout
) -> tuple[GenerationRequest, Generation, list[_Choice]]:
    """Run a rollout to its end. Raises ApiError, MantaError."""
    if body.stream:
        raise invalid("stream: answers of this route come whole", "stream", "not_supported")
    fields = QueueFields(priority=body.priority, cache_salt=body.cache_salt or "")
    place = queue_place(exchange, fields, context.options)
    context.counter.in_flight += 1
    try:
        names = context.backend.models()
        name = body.model or next(iter(names), "")
        card = await context.admit(place.key, name, exchange.caller)
        ids = take_token_ids(body.token_ids, "token_ids", card.vocab_size)
        params = _params(body.sampling_params)
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
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(scored.top_ids, scored.top_logprobs, strict=True)
        ],
    }


def _by_id(scored: TokenLogprobs) -> JsonObject:
    return {str(scored.token_id): {"logprob": scored.logprob, "rank": scored.rank}}


_QUERY = {"model": TEXT}
_STATUSES = (403, 400, 404, 503)
_OK = ("status",)
ROUTES = (
    Route(
        GENERATE,
        generate,
        post=Operation(
            "Token ids and log-probabilities of a rollout",
            QUEUES,
            ROLLOUT,
            ("request_id", "choices", "prompt_logprobs"),
        ),
    ),
    Route(
        "/generate",
        their_generate,
        post=Operation("The same in SGLang's words", QUEUES, THEIR_ROLLOUT, None),
    ),
    Route(
        "/pause",
        pause,
        post=Operation(
            "All replicas paused",
            _STATUSES,
            answer=_OK,
            query={**_QUERY, "mode": one_of(*MODES), "clear_cache": TEXT},
        ),
    ),
    Route(
        "/resume", resume, post=Operation("The end of a pause", _STATUSES, answer=_OK, query=_QUERY)
    ),
    Route(
        "/is_paused",
        is_paused,
        get=Operation(
            "Whether replicas are paused", _STATUSES, answer=("is_paused",), query=_QUERY
        ),
    ),
    Route(
        "/abort_requests",
        abort_requests,
        post=Operation(
            "All requests ended with what they have", _STATUSES, answer=_OK, query=_QUERY
        ),
    ),
    Route(
        "/reset_prefix_cache",
        reset_prefix_cache,
        post=Operation("All cached prefixes dropped", _STATUSES, answer=_OK, query=_QUERY),
    ),
    Route(
        "/weight_info",
        weight_info,
        get=Operation(
            "The version of the weights",
            _STATUSES,
            answer=("weight_version", "is_paused", "replicas"),
            query=_QUERY,
        ),
    ),
    Route(
        "/get_world_size",
        world_size,
        get=Operation(
            "How many receivers of weights there are",
            _STATUSES,
            answer=("world_size",),
            query=_QUERY,
        ),
    ),
    Route(
        "/update_weights_from_disk",
        from_disk,
        post=Operation(
            "The weights of a checkpoint, at all replicas",
            (*READS, *NAMES, 409, 422, 503),
            FROM_DISK,
            ("success", "message", "weight_version"),
            query=_QUERY,
        ),
    ),
    Route(
        "/pause_generation",
        pause_generation,
        post=Operation(
            "All replicas paused, in SGLang's words",
            (*READS, *NAMES, 422, 503),
            PAUSE_GENERATION,
            _OK,
            query=_QUERY,
        ),
    ),
    Route(
        "/continue_generation",
        resume,
        post=Operation("The end of a pause", _STATUSES, answer=_OK, query=_QUERY),
    ),
    Route(
        "/flush_cache",
        reset_prefix_cache,
        get=Operation("All cached prefixes dropped", _STATUSES, answer=_OK, query=_QUERY),
        post=Operation("All cached prefixes dropped", _STATUSES, answer=_OK, query=_QUERY),
    ),
)
# for admins
PATHS = frozenset(route.path for route in ROUTES if not route.path.endswith("/generate"))
