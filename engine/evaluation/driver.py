"""run: runs requests through an engine core in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch import TokenLogprobs
from engine.images.image import Image
from engine.messages import EngineRequest, RoutedExperts
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore


@dataclass
class Output:
    """The result of one prompt.

    cached: prompt tokens that came from the prefix cache.
    error: the error's message; "" = no error.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""
    cached: int = 0
    error: str = ""
    routed: RoutedExperts | None = None


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    adapters: Sequence[str] = (),
    images: Sequence[Sequence[Image]] = (),
    together: bool = True,
    seed: int = 1,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Output]:
    """Run all prompts, together or one after another; return their outputs in order.

    The function asserts that all KV blocks are free afterwards.

    prompts: token ids of each prompt.
    params: the sampling parameters of each prompt, or one object for all prompts.
    adapters, images: the adapter and the images of each prompt; () = none.
    progress: a function that is called after each step with the number of tokens generated so far.
    """
    prompt_params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    outputs = [Output() for _ in prompts]
    requests = [
        EngineRequest(i, list(prompt), len(prompt), p, seed, adapter=adapter, images=[*seen])
        for i, (prompt, p, adapter, seen) in enumerate(
            zip(
                prompts,
                prompt_params,
                adapters or [""] * len(prompts),
                images or [()] * len(prompts),
                strict=True,
            )
        )
    ]
    for wave in [requests] if together else [[request] for request in requests]:
        for request in wave:
            core.add_request(request)
        # without work a request may still wait for its adapter to load
        while core.has_work() or core.scheduler.requests:
            if not core.has_work():
                continue
            for delta in core.step():
                output = outputs[delta.id]
                output.token_ids += delta.token_ids
                output.logprobs += delta.logprobs or []
                output.finish = delta.finish or output.finish
                output.error = delta.error or output.error
                output.routed = delta.routed or output.routed
                output.cached = max(output.cached, delta.cached)
            progress(sum(len(output.token_ids) for output in outputs))
    core.check_integrity()
    assert core.stats().free_blocks == core.stats().total_blocks
    return outputs
