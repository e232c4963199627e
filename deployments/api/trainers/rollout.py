"""roll_out: runs a trainer's rollout to its end, with token ids as input and output."""

import secrets
from dataclasses import dataclass, field, replace

from deployments.api.body_fields import take_token_ids
from deployments.api.context import ApiContext
from deployments.api.generation.sampling import check_length, limited, take_sampling
from deployments.api.generation.tenancy import QueueFields, engine_request, queue_place
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange, UntilDisconnect
from deployments.api.stream.merge import failed
from deployments.api.trainers.fields import Rollout, TheirRollout, TheirSampling, TokenSampling
from deployments.backend import Generation, GenerationRequest
from engine.batch import TokenLogprobs
from engine.errors import context_too_long
from engine.messages import RoutedExperts
from engine.sampling_params import SamplingParams


@dataclass(slots=True)
class RolloutChoice:
    """The output of one choice so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt tokens
    routed: RoutedExperts | None = None
    finish: str | None = None
    stop_token: int | None = None  # the stop token that ended the choice
    cached: int = -1  # number of prompt tokens from the prefix cache; -1: unknown


_SAME = {name: name for name in TokenSampling.__struct_fields__}


def rollout_params(
    sampling: TokenSampling | TheirSampling, logprobs: int | None = None, *, routed: bool = False
) -> SamplingParams:
    """Return the SamplingParams of a rollout.

    logprobs: number of alternatives per token if `sampling` has no such field; None: no
        log-probabilities.
    routed: whether the experts chosen for tokens are returned.
    """
    values = take_sampling(sampling, _SAME, logprobs=logprobs).values
    return SamplingParams(**values, return_routed_experts=routed)


async def roll_out(
    context: ApiContext,
    exchange: HttpExchange,
    body: Rollout | TheirRollout,
    params: SamplingParams,
    queue: QueueFields,
) -> tuple[GenerationRequest, Generation, list[RolloutChoice]]:
    """Run a rollout to its end; return the request, its generation and the choices.

    Raises ApiError, MantaError.
    """
    if body.stream:
        raise invalid("stream: answers of this route come whole", "stream", "not_supported")
    place = queue_place(exchange, queue, context.options)
    context.counter.in_flight += 1
    try:
        names = context.backend.models()
        name = body.model or next(iter(names), "")
        card = await context.admit(place, name, exchange.caller)
        ids = take_token_ids(body.token_ids, "token_ids", card.vocab_size)
        if params.stop:
            raise invalid(
                "sampling_params.stop needs text; use stop_token_ids", "sampling_params.stop"
            )
        most, theirs = context.options.max_tokens, isinstance(body, TheirRollout)
        name = "sampling_params.max_new_tokens" if theirs else "sampling_params.max_tokens"
        check_length(params.max_tokens, most, name)
        if len(ids) + (params.max_tokens or 1) > card.max_model_len:
            raise context_too_long(
                card.max_model_len, len(ids), params.max_tokens, param="token_ids"
            )
        params = limited(params, most, card.max_model_len - len(ids))
        context.charge(exchange, [ids])
        seed = params.seed_for(ids, card.seed)
        adapter = None if card.parent is None else await context.pin(card.id, place.deadline)
        request = replace(
            engine_request(exchange, place, card.id, ids, params, adapter),
            request_id=body.request_id or exchange.request_id,
            seed=secrets.randbits(63) if seed is None else seed,
            cache_salt=place.cache_salt,
            verbatim=True,
        )
        generation = context.backend.generate(request)
        async with UntilDisconnect(exchange.receive, generation.abort):
            choices = await _collect(request, generation)
    finally:
        context.counter.in_flight -= 1
    return request, generation, choices


async def _collect(request: GenerationRequest, generation: Generation) -> list[RolloutChoice]:
    choices = [RolloutChoice() for _ in range(request.params.n)]
    while items := await generation.next():
        for index, delta in items:
            choice = choices[index]
            if delta.finish == "error":
                generation.abort()
                raise failed(delta)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            choice.finish, choice.stop_token = delta.finish or None, delta.stop_token
            choice.cached = max(choice.cached, delta.cached)
            choice.scores += delta.prompt_logprobs or ()
            choice.routed = delta.routed or choice.routed
    return choices
