"""What a request says of itself beside its content: whose it is, and until when it is of use."""

import hashlib
import math
from typing import Any

from deployments.api.errors import invalid, wrong_type
from deployments.api.exchange import Exchange
from deployments.api.options import ApiOptions

DEADLINE = "deadline_seconds"
MAX_DEADLINE = 7 * 86400.0  # seconds

_DEADLINE_HEADER = b"x-deadline-seconds"
_MAX_KEY = 256  # bytes of a name that goes into the key


def key_of(exchange: Exchange, body: dict[str, Any], options: ApiOptions) -> str:
    """Who shares the service with whom, by `options.share_by`; "" for all that do not say. Legal
    once the API key has been checked."""
    if options.share_by == "api_key":
        given = exchange.values(b"authorization") if options.api_keys else []
    elif options.share_by == "user":
        user = body.get("user")
        given = [user.encode()[:_MAX_KEY]] if isinstance(user, str) else []
    else:
        given = exchange.values(options.share_by.encode())
    return hashlib.sha256(given[0]).hexdigest()[:32] if given else ""


def deadline_of(exchange: Exchange, body: dict[str, Any], options: ApiOptions) -> float | None:
    """When it must have ended, in monotonic seconds: the header or the field, the sooner of both,
    else the operator's default.

    Raises ApiError 400 invalid_type, invalid_value.
    """
    seconds = options.deadline_s
    value = body.get(DEADLINE)
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(DEADLINE, "a number")
        seconds = _checked(float(value), DEADLINE)
    headers = exchange.values(_DEADLINE_HEADER)
    if headers:
        name = _DEADLINE_HEADER.decode()
        try:
            given = _checked(float(headers[0][:32]), name)
        except ValueError:
            raise wrong_type(name, "a number") from None
        seconds = given if value is None or seconds is None else min(given, seconds)
    return None if seconds is None else exchange.began + seconds


def _checked(seconds: float, name: str) -> float:
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_DEADLINE):
        raise invalid(f"{name} must be above 0 and at most {MAX_DEADLINE:g}", name)
    return seconds
