"""ApiError: an error answer, which always has this form:

    {"error": {"message": str, "type": str, "param": str | null, "code": str}}

Clients may test for `code`, which is stable. `message` is for people. It comes from our own
templates and never from another library's exception, which may contain paths, addresses and parts
of other users' input.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

import msgspec

from engine.errors import EngineDead, InvalidRequest, MantaError, Overloaded, RequestFailed
from engine.lora.tiers.store import RETRY_SECONDS

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
NOT_FOUND = "not_found_error"
# The type of all 408 errors, because LiteLLM treats any invalid_request_error as a 400.
TIMEOUT = "timeout_error"
RATE_LIMIT = "rate_limit_error"
OVERLOADED = "overloaded_error"
SERVER = "server_error"

Headers = tuple[tuple[str, str], ...]

# Headers that stop OpenAI's clients from retrying, as they do after each 408, 409 and 500. They are
# for errors that a retry cannot resolve: the engine fails on this request, the deadline has passed,
# the client does not read, or the adapter must be added again.
NO_RETRY: Headers = (("x-should-retry", "false"),)

# code of a backend's error -> HTTP status; for other codes the error's class determines it
_BACKEND_STATUS = {
    **dict.fromkeys(("model_not_found", "model_removed", "adapter_not_found"), 404),
    **dict.fromkeys(("adapter_invalid", "adapter_incompatible"), 422),
    **dict.fromkeys(("storage_full", "store_unavailable", "device_busy"), 503),
    **dict.fromkeys(("deadline_exceeded", "slow_reader"), 408),
    **dict.fromkeys(
        (
            *("invalid_adapter_path", "invalid_model_name", "adapters_disabled"),
            *("structured_not_supported", "invalid_grammar", "unsupported_schema"),
            *("unsatisfiable_schema", "grammar_too_complex", "grammar_too_large"),
            *("no_token_left", "embeddings_not_supported", "generation_not_supported"),
            "routed_experts_not_supported",
            *("images_not_supported", "image_too_large", "invalid_image", "image_not_shown"),
        ),
        400,
    ),
    "adapter_changed": 409,
    "adapter_path_not_allowed": 403,
    "rate_limit_exceeded": 429,
    "cancelled": 499,
}
_IN_VAIN = ("deadline_exceeded", "slow_reader", "adapter_changed")  # see NO_RETRY
# code -> seconds of Retry-After, for which replicas remember that they could not read an adapter
_BACKEND_SECONDS = dict.fromkeys(("storage_full", "store_unavailable"), RETRY_SECONDS)
_BACKEND_CLASSES = ((InvalidRequest, 400), (Overloaded, 503), (EngineDead, 503), (MantaError, 500))
# HTTP status -> error type; other statuses have invalid_request_error
_KINDS = {
    401: AUTHENTICATION,
    403: PERMISSION,
    404: NOT_FOUND,
    408: TIMEOUT,
    429: RATE_LIMIT,
    500: SERVER,
    503: OVERLOADED,
}


class ApiError(Exception):
    """An answer that is not 2xx.

    status: HTTP status. kind: OpenAI's error `type`; "": the default for the status.
    param: the field at fault, e.g. ``messages[0].role``.
    headers: extra response headers, e.g. ("allow", "GET, HEAD").
    retry_after: seconds of the header Retry-After; None: no such header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = "",
        headers: Headers = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind or _KINDS.get(status, INVALID)
        if retry_after is not None:
            headers = (("retry-after", str(max(1, math.ceil(retry_after)))), *headers)
        self.headers = headers

    def object(self) -> dict[str, Any]:
        """Return the error as the JSON object of OpenAI's API."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body(self) -> bytes:
        return msgspec.json.encode(self.object())


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return an error with status 400 for an invalid request. param: the field at fault."""
    return ApiError(400, code, message, param=param)


def wrong_type(param: str, expected: str) -> ApiError:
    return invalid(f"{param} must be {expected}", param, "invalid_type")


def internal() -> ApiError:
    """Return an error with status 500 for an unexpected failure, whose cause is only logged."""
    return ApiError(500, "internal_error", "the server failed to process this request")


def from_backend(error: ApiError | MantaError) -> ApiError:
    """Convert an error of the router or the engine, whose messages come from our own templates,
    into an ApiError."""
    if isinstance(error, ApiError):
        return error
    status = _BACKEND_STATUS.get(error.code) or next(
        status for cls, status in _BACKEND_CLASSES if isinstance(error, cls)
    )
    headers: Headers = ()
    seconds = None
    if status in (429, 503):
        seconds = _BACKEND_SECONDS.get(error.code, 1.0)
        if isinstance(error, Overloaded):
            seconds = error.retry_after
    elif isinstance(error, RequestFailed) or error.code in _IN_VAIN:
        headers = NO_RETRY
    return ApiError(
        status,
        error.code,
        error.message,
        param=error.param,
        kind=SERVER if isinstance(error, EngineDead) else "",
        headers=headers,
        retry_after=seconds,
    )


def shown(value: object) -> str:
    """Return a client's value in a form that is safe in a message: short, printable, quoted."""
    text = "".join(c if c.isprintable() else "?" for c in str(value)[:64])
    return f'"{text}{"..." if len(str(value)) > 64 else ""}"'


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return ', did you mean "x"?' with the most similar known name, or ''. cutoff: minimum
    similarity, 0 to 1."""
    # At most 512 names are compared: a search among thousands of adapters would delay all streams.
    match = get_close_matches(name[:128], islice(known, 512), n=1, cutoff=cutoff)
    return f', did you mean "{match[0]}"?' if match else ""
