"""Errors that a user of the engine can meet, each with a stable code and the field at fault."""

import traceback

_FRAMES = 12  # of a traceback, nearest to where it was raised
_TRACE_CHARS = 6000


class MantaError(Exception):
    """Base of all errors raised on purpose.

    code: stable machine-readable word, e.g. ``context_length_exceeded``.
    param: the request field or configuration key at fault, e.g. ``messages[0].role``; None if
        there is none.
    """

    code = "engine_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(MantaError, ValueError):
    """The caller asked for something that cannot be done; nothing was run. HTTP answers 400."""

    code = "invalid_value"


def no_vectors() -> InvalidRequest:
    """Return the error for an embedding request to a model that makes no embeddings."""
    return InvalidRequest(
        "this model makes no embeddings: its folder has no modules.json, in which "
        "sentence-transformers says how texts are pooled",
        param="model",
        code="embeddings_not_supported",
    )


def context_too_long(
    limit: int,
    prompt: int,
    output: int | None = None,
    *,
    param: str = "prompt",
    where: str = "prompt",
    at_least: bool = False,
    virtual: int = 0,
) -> InvalidRequest:
    """The error of a request that does not fit: `prompt` tokens, and `output` that were asked for,
    in a context of `limit`.

    OpenAI's words, because callers recognise it by them: LiteLLM falls back to a model with a
    larger context, others read the numbers. where: what they call the prompt. at_least: it has
    so many tokens or more, which were not all counted. virtual: tokens that the request's adapter
    has taken off the context.
    """
    if output and prompt < limit:
        detail = (
            f"you requested {prompt + output} tokens ({prompt} in the {where}, {output} in the "
        )
        detail += f"completion). Please reduce the length of the {where} or completion."
    else:
        detail = f"your {where} resulted in {'at least ' if at_least else ''}{prompt} tokens"
        detail += ", which leaves none for the completion" if prompt == limit else ""
        detail += f". Please reduce the length of the {where}."
    if virtual:
        detail += f" The adapter's {virtual} virtual tokens are taken off the context."
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, {detail}",
        param=param,
        code="context_length_exceeded",
    )


class ConfigError(MantaError, ValueError):
    """A configuration cannot be used. Raised before any model is loaded."""

    code = "invalid_config"


class TensorError(ConfigError):
    """A tensor of a checkpoint cannot be used; the loader adds the name of the file.

    tensor: the tensor's name in the model's record.
    """

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(f"tensor {tensor}: {message}", param="model")
        self.tensor = tensor


class AdapterError(MantaError):
    """An adapter cannot be had; the model and the other adapters are unaffected.

    code: adapter_not_found (no such name, or no such folder), adapter_invalid (its files are broken
        or ask for what is not supported), adapter_incompatible (made for another model, or larger
        than the slots), adapter_changed (its files are not those that were added: add it again),
        storage_full (no room for a copy from an object store), store_unavailable (that store does
        not answer), invalid_model_name, or adapters_disabled (max_loras is 0).
    """

    code = "adapter_invalid"


class EngineDead(MantaError):
    """The engine process is gone; requests in flight did not finish there.

    code: engine_dead (it failed by itself), engine_stalled (it does not answer), or engine_killed
        (SIGKILL or SIGTERM from outside: no request of its can be the cause).
    """

    code = "engine_dead"


class RequestFailed(MantaError):
    """One request failed inside the engine while the others went on."""

    code = "engine_error"


class RequestReleased(MantaError):
    """A handle was used after ``release``."""

    code = "request_released"


class Overloaded(MantaError):
    """The server cannot take the request now. HTTP answers 503 with Retry-After.

    retry_after: seconds after which another try may succeed.
    """

    code = "overloaded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


def short_traceback(error: BaseException) -> str:
    """The traceback for a log: at most 6,000 characters, from both ends. A recursion that has gone
    too deep has thousands of lines, and an exception's own text may repeat a whole request."""
    text = "".join(traceback.format_exception(error, limit=-_FRAMES)).rstrip()
    half = _TRACE_CHARS // 2
    cut = len(text) - 2 * half
    return text if cut <= 0 else f"{text[:half]}\n[... {cut} characters ...]\n{text[-half:]}"
