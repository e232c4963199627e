"""What a request says of itself beside its content: whose it is, how urgent, and until when it is
of use."""

import hashlib
from typing import Any

from deployments.api.body_fields import take_int, take_str
from deployments.api.bounds import DEADLINE, MAX_DEADLINE, MAX_SALT_BYTES
from deployments.api.caller import LEAST_PRIORITY
from deployments.api.http.errors import PERMISSION, ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.options import ApiOptions

DEADLINE_HEADER = "x-deadline-seconds"
_MAX_KEY = 256  # bytes of a name that goes into the key


def key_of(exchange: HttpExchange, body: dict[str, Any], options: ApiOptions) -> str:
    """The tenant of a request, by `options.share_by`; "" for requests that name none."""
    if exchange.caller.tenant:
        return exchange.caller.tenant
    if options.share_by == "api_key":
        return exchange.caller.id
    if options.share_by == "user":
        user = body.get("user")
        given = [user.encode()[:_MAX_KEY]] if isinstance(user, str) else []
    else:
        given = exchange.values(options.share_by.encode())
    return hashlib.sha256(given[0].strip()).hexdigest()[:32] if given else ""


def salt_of(exchange: HttpExchange, body: dict[str, Any], options: ApiOptions) -> str:
    """The root of its prefix-cache blocks: the key's own unless `options.share_prefixes`, with
    `cache_salt` under it. What is cached tells by its time, and by usage, what others have asked.

    Raises ApiError 400 invalid_type, invalid_value.
    """
    salt = take_str(body, "cache_salt", MAX_SALT_BYTES)
    if salt == "":
        raise invalid("cache_salt must not be empty", "cache_salt")
    own = "" if options.share_prefixes else exchange.caller.id
    # The key's part comes first and has one length: no salt reaches another key's blocks.
    return f"{own}/{salt or ''}" if own else salt or ""


def priority_of(exchange: HttpExchange, body: dict[str, Any]) -> int:
    """Smaller runs earlier; 0 is the usual.

    Raises ApiError 400 invalid_type, invalid_value; 403 permission_denied: its key has no right to
    be so urgent.
    """
    priority = take_int(body, "priority", LEAST_PRIORITY, 2**31 - 1) or 0
    least = exchange.caller.least_priority
    if priority < least:
        raise ApiError(
            403,
            "permission_denied",
            f"this key may set priority to {least} or more; the operator grants less by "
            "`priority=` behind the key in http.api_keys_file",
            param="priority",
            kind=PERMISSION,
        )
    return priority


def deadline_of(exchange: HttpExchange, body: dict[str, Any], options: ApiOptions) -> float | None:
    """When it must have ended, in monotonic seconds: the header or the field, the sooner of both,
    else the operator's default.

    Raises ApiError 400 invalid_type, invalid_value.
    """
    seconds = options.deadline_s
    value = body.get(DEADLINE)
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(DEADLINE, "a number")
        seconds = _checked(value, DEADLINE)
    headers = exchange.values(DEADLINE_HEADER.encode())
    if headers:
        name = DEADLINE_HEADER
        try:
            given = _checked(float(headers[0][:32]), name)
        except ValueError:
            raise wrong_type(name, "a number") from None
        seconds = given if value is None or seconds is None else min(given, seconds)
    return None if seconds is None else exchange.began + seconds


def _checked(seconds: float, name: str) -> float:
    if not 0 < seconds <= MAX_DEADLINE:  # an integer may be too large for a float
        raise invalid(f"{name} must be above 0 and at most {MAX_DEADLINE:g}", name)
    return seconds
