"""The errors that the engine raises for users, each with a stable code and the field at fault."""

import traceback

_FRAMES = 12  # frames of a traceback that are logged, the innermost ones
_TRACE_CHARS = 6000


class MantaError(Exception):
    """The base class of the errors that Manta raises on purpose.

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
    """The error of a request that cannot be carried out; nothing was run. HTTP answers 400."""

    code = "invalid_value"


def no_vectors() -> InvalidRequest:
    """Return the error for an embedding request to a model that computes no embeddings."""
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
    images: int = 0,
) -> InvalidRequest:
    """Return the error of a request that does not fit into the context, in OpenAI's words.

    Callers recognise these words: LiteLLM falls back to a model with a larger context, and others
    read the numbers.

    limit: the model's context length in tokens.
    prompt: number of tokens of the prompt.
    output: number of requested output tokens.
    where: the name of the prompt in the message.
    at_least: whether the prompt may have more tokens than were counted.
    virtual: number of virtual tokens of the request's adapter, which shorten the context.
    images: number of image tokens in the prompt.
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
    if images:
        detail += f" Images are {images} of these tokens."
    if virtual:
        detail += f" The adapter's {virtual} virtual tokens are taken off the context."
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, {detail}",
        param=param,
        code="context_length_exceeded",
    )


class ConfigError(MantaError, ValueError):
    """The error of an invalid configuration, raised before any model is loaded."""

    code = "invalid_config"


class TensorError(ConfigError):
    """The error of an invalid tensor; the loader adds the file's name.

    tensor: the tensor's name in the checkpoint.
    """

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(f"tensor {tensor}: {message}", param="model")
        self.tensor = tensor


class AdapterError(MantaError):
    """The error of an adapter that cannot be used; the model and other adapters are unaffected.

    code: adapter_not_found (no such name, or no such folder), adapter_invalid (its files are
        invalid or unsupported), adapter_incompatible (made for another model, or larger than
        the slots), adapter_changed (its files have changed since it was added: add it again),
        storage_full (no room for a copy from an object store), store_unavailable (the object store
        does not answer), invalid_model_name, or adapters_disabled (max_loras is 0).
    """

    code = "adapter_invalid"


class UpdateFailed(MantaError):
    """The error of a failed weight update; the engine keeps serving with the old weights.

    code: invalid_config (a name, shape, dtype or number is wrong, or the folder cannot be read),
        folder_not_found, update_in_progress, or weights_not_replaceable.
    """

    code = "invalid_config"


class EngineDead(MantaError):
    """The error after the engine process has ended; requests in flight did not finish.

    code: engine_dead (it failed by itself), engine_stalled (it does not answer), or engine_killed
        (SIGKILL or SIGTERM from outside, so that none of its requests can be the cause).
    """

    code = "engine_dead"


class RequestFailed(MantaError):
    """The error of one request that failed inside the engine while others went on."""

    code = "engine_error"


class RequestReleased(MantaError):
    """The error of a handle that is used after ``release``."""

    code = "request_released"


class Overloaded(MantaError):
    """The error of a request that the server cannot take now. HTTP answers 503 with Retry-After.

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
    """Return the traceback for a log, at most 6,000 characters: its beginning and its end.

    A recursion that has gone too deep has thousands of lines, and an exception's message may repeat
    a whole request.
    """
    text = "".join(traceback.format_exception(error, limit=-_FRAMES)).rstrip()
    half = _TRACE_CHARS // 2
    cut = len(text) - 2 * half
    return text if cut <= 0 else f"{text[:half]}\n[... {cut} characters ...]\n{text[-half:]}"
