"""RequestOutput, which a caller of the library gets back, with one CompletionOutput a choice."""

import enum
from dataclasses import dataclass, field

from engine.batch import TokenLogprobs


class RequestStatus(enum.StrEnum):
    """The status of a request. FINISHED and INTERRUPTED are final."""

    INIT = "init"  # no token yet
    CONTEXT_FINISHED = "context_finished"  # the prompt is computed, the first token is there
    GENERATING = "generating"
    FINISHED = "finished"  # an end token, a stop string or the length
    INTERRUPTED = "interrupted"  # stopped by the caller, or failed


@dataclass(slots=True)
class CompletionOutput:
    """A choice: whole in a result, only the new part in a stream.

    text: "" when the request was started with detokenize=False.
    token_ids: the tokens of the output, the end token included.
    finish_reason: None while it runs; "stop", "length", "abort" or "error".
    stop_reason: the stop string or the id from stop_token_ids that ended it.
    logprobs: one for each of token_ids, if asked for.
    error: with finish_reason "error": "code: message".
    vector: of the prompt, with `pooled`: float32 little-endian.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    vector: bytes | None = None


@dataclass(slots=True)
class RequestOutput:
    """The choices of a request: all of them in a result, those with a new part in a stream.

    prompt: the text if the caller gave text.
    num_cached_tokens: prompt tokens that came from the prefix cache; None while unknown.
    prompt_logprobs: None for the first token, then one for each; only if asked for, and in a
        stream only with the output they arrived with.
    finished: every choice has ended, and this output is the last.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
