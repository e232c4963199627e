"""RequestOutput and CompletionOutput: the results of a request and of each of its choices."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.batch import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RequestStatus(enum.StrEnum):
    """The status of a request. FINISHED and INTERRUPTED are final."""

    INIT = "init"  # no token is sampled yet
    CONTEXT_FINISHED = "context_finished"  # the prompt is computed and the first token sampled
    GENERATING = "generating"
    FINISHED = "finished"  # ended by an end token, a stop string or the length
    INTERRUPTED = "interrupted"  # stopped by the caller, or failed


@dataclass(slots=True)
class CompletionOutput:
    """The output of one choice: the whole output in a result, only the new part in a stream.

    text: "" when the request was started with detokenize=False.
    token_ids: the tokens of the output, the end token included.
    finish_reason: None while the choice runs; "stop", "length", "abort" or "error".
    stop_reason: the stop string, or the id from stop_token_ids, that ended the choice.
    logprobs: one for each of token_ids, if requested.
    error: "code: message" with finish_reason "error".
    vector: the prompt's embedding as little-endian float32 bytes, if `SamplingParams.pooled` is
        set.
    routed_experts: [tokens of prompt and output - 1, layers, experts of a token], once the choice
        has ended; only if requested. See `engine.messages.RoutedExperts`.
    versions: (version of the weights, number of tokens) of each part of token_ids, in order.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    vector: bytes | None = None
    versions: list[tuple[str, int]] = field(default_factory=list)
    routed_experts: "NDArray[np.integer] | None" = None


@dataclass(slots=True)
class RequestOutput:
    """The output of a request: all choices in a result, only those with new output in a stream.

    prompt: the prompt's text; None if the caller passed token ids.
    num_cached_tokens: number of prompt tokens found in the prefix cache; None while unknown.
    prompt_logprobs: None for the first prompt token, then one for each token; only if requested. In
        a stream only one output has them.
    finished: whether every choice has ended, so that this output is the last.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
