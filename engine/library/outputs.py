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

    INIT = "init"  # no token yet
    CONTEXT_FINISHED = "context_finished"  # the prompt is computed and the first token sampled
    GENERATING = "generating"
    FINISHED = "finished"  # ended by an end token, a stop string or the length
    INTERRUPTED = "interrupted"  # stopped by the caller, or failed


@dataclass(slots=True)
class CompletionOutput:
    """The output of one choice: all of it in a result, only the new part in a stream.

    text: "" when the request was started with detokenize=False.
    token_ids: the tokens of the output, the end token included.
    finish_reason: None while it runs; "stop", "length", "abort" or "error".
    stop_reason: the stop string or the id from stop_token_ids that ended it.
    logprobs: one for each of token_ids, if asked for.
    error: "code: message" with finish_reason "error".
    vector: the prompt's embedding, with `pooled`, as little-endian float32 bytes.
    routed_experts: [tokens of prompt and output - 1, layers, experts of a token], once it has
        ended; only if asked for. See `engine.messages.RoutedExperts`.
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
    """The output of a request: all its choices in a result, those with new output in a stream.

    prompt: the text if the caller gave text.
    num_cached_tokens: prompt tokens that came from the prefix cache; None while unknown.
    prompt_logprobs: None for the first prompt token, then one for each token; only if asked for. A
        stream has them only with the output with which they arrived.
    finished: whether every choice has ended, so that this output is the last.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
