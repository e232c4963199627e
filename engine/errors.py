"""Every error that a user of the engine can meet, with a stable code and the field it is about."""


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


class ConfigError(MantaError, ValueError):
    """A configuration cannot be used. Raised before any model is loaded."""

    code = "invalid_config"


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
        (somebody sent SIGKILL or SIGTERM: no request of its can be the cause).
    """

    code = "engine_dead"


class RequestFailed(MantaError):
    """One request failed inside the engine while the others went on."""

    code = "engine_error"


class RequestReleased(MantaError):
    """A handle was used after ``release``."""

    code = "request_released"


class Overloaded(MantaError):
    """Not now: too much is waiting, or nothing can take it. HTTP answers 503 with Retry-After.

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
