"""QueueFields: a request's fields beside its content: its owner, its priority and its deadline."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.api.bounds import MAX_DEADLINE
from deployments.api.fields.common import Queued
from deployments.api.http.errors import PERMISSION, ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.options import ApiOptions

DEADLINE_HEADER = "x-deadline-seconds"
_MAX_KEY = 256  # bytes of a name that goes into the key


@dataclass(frozen=True, slots=True)
class QueueFields:
    """The fields of a request that decide its place in the queue, and its owner.

    user: the name of the caller's user
    deadline: seconds until the answer must have ended
    priority: smaller runs earlier
    cache_salt: the name of the prefix cache's part for this request; "" for the common one
    """

    user: str | None = None
    deadline: float | None = None
    priority: int | None = None
    cache_salt: str = ""


def take_queue(fields: Queued, user: str | None, cache_salt: str | None = None) -> QueueFields:
    """Return how a request is queued."""
    return QueueFields(user, fields.deadline_seconds, fields.priority, cache_salt or "")


def take_user(body: Mapping[str, Any]) -> str | None:
    """Return the name of the caller's user; a value of another type names none."""
    user = body.get("user")
    return user if isinstance(user, str) else None


def key_of(exchange: HttpExchange, user: str | None, options: ApiOptions) -> str:
    """Return the tenant of a request, by `options.share_by`; "" for requests that name none."""
    if exchange.caller.tenant:
        return exchange.caller.tenant
    if options.share_by == "api_key":
        return exchange.caller.id
    if options.share_by == "user":
        names = [] if user is None else [user.encode()[:_MAX_KEY]]
    else:
        names = exchange.headers.get(options.share_by.encode(), [])
    return hashlib.sha256(names[0].strip()).hexdigest()[:32] if names else ""


def salt_of(exchange: HttpExchange, salt: str, options: ApiOptions) -> str:
    """Return the root of a request's prefix-cache blocks.

    The root is the key's own unless `options.share_prefixes`, with `cache_salt` under it. What is
    cached tells by its time, and by usage, what others have asked.
    """
    own = "" if options.share_prefixes else exchange.caller.id
    # The key's part comes first and has one length: no salt reaches another key's blocks.
    return f"{own}/{salt}" if own else salt


def allowed_priority(exchange: HttpExchange, priority: int | None) -> int:
    """Return the priority of a request that names this one.

    Raises ApiError 403 permission_denied.
    """
    priority = priority or 0
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


def deadline_after(
    exchange: HttpExchange, asked: float | None, options: ApiOptions
) -> float | None:
    """Return the deadline of a request in monotonic seconds; None: it has none.

    asked: the seconds that the body names; the header `x-deadline-seconds` may name less

    Raises ApiError 400 invalid_type, invalid_value.
    """
    seconds = options.deadline_s if asked is None else asked
    headers = exchange.headers.get(DEADLINE_HEADER.encode(), [])
    if headers:
        name = DEADLINE_HEADER
        try:
            header_seconds = _checked(float(headers[0][:32]), name)
        except ValueError:
            raise wrong_type(name, "a number") from None
        seconds = (
            header_seconds if asked is None or seconds is None else min(header_seconds, seconds)
        )
    return None if seconds is None else exchange.began + seconds


def _checked(seconds: float, name: str) -> float:
    if not 0 < seconds <= MAX_DEADLINE:  # an integer may be too large for a float
        raise invalid(f"{name} must be above 0 and at most {MAX_DEADLINE:g}", name)
    return seconds
