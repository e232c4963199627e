"""QueueFields, QueuePlace: a request's user, priority, deadline and cache salt, and its place in
the queue."""

import hashlib
from dataclasses import dataclass
from typing import Any

from deployments.adapters.record_store import AdapterRecord
from deployments.api.body_fields import MAX_DEADLINE
from deployments.api.fields.generation import Queued
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.options import ApiOptions
from deployments.backend import GenerationRequest
from engine.sampling_params import SamplingParams

DEADLINE_HEADER = "x-deadline-seconds"
SESSION_HEADER = "x-session-id"
_MAX_KEY = 256  # maximum bytes of a user's name from which the tenant's key is computed


@dataclass(frozen=True, slots=True)
class QueueFields:
    """The fields of a request that decide its place in the queue.

    user: the name of the end user on whose behalf the caller asks
    deadline: seconds within which the answer must be complete
    priority: requests of smaller values run earlier
    cache_salt: the salt of the request's prefix-cache blocks, which requests with other salts
        cannot hit; "": none
    """

    user: str | None = None
    deadline: float | None = None
    priority: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The place of a request in the queue and in the prefix cache.

    key: the tenant, by `options.share_by`; "": none
    deadline: in monotonic seconds; None: the request has none
    priority: requests of smaller values run earlier
    cache_salt: the salt of its prefix-cache blocks: the request's own `cache_salt`, combined with
        the key's salt unless `options.share_prefixes` is set. Without salts, timing and usage would
        reveal the prompts of other keys
    """

    key: str
    deadline: float | None
    priority: int
    cache_salt: str


def engine_request(
    exchange: HttpExchange,
    place: QueuePlace,
    model: str,
    token_ids: list[int],
    params: SamplingParams,
    adapter: AdapterRecord | None = None,
) -> GenerationRequest:
    """Return the backend's request for token ids at a place in the queue, with seed 0.

    The request has no cache salt, so it shares prefix-cache blocks with all such requests.
    """
    return GenerationRequest(
        request_id=exchange.request_id,
        model=model,
        token_ids=token_ids,
        params=params,
        seed=0,
        adapter=adapter,
        priority=place.priority,
        deadline=place.deadline,
        key=place.key,
        owner=exchange.caller.id,
        trace=exchange.trace,
    )


def take_queue(fields: Queued, user: Any, cache_salt: str | None = None) -> QueueFields:
    """Return the QueueFields of a request's body.

    user: the name of the end user; values other than strings are ignored
    """
    user = user if isinstance(user, str) else None
    return QueueFields(user, fields.deadline_seconds, fields.priority, cache_salt or "")


def queue_place(exchange: HttpExchange, queue: QueueFields, options: ApiOptions) -> QueuePlace:
    """Return a request's place in the queue.

    Raises ApiError 400 invalid_type or invalid_value for the header `x-deadline-seconds`; 403
    permission_denied for a priority that the key may not use.
    """
    caller = exchange.caller
    if caller.tenant or options.share_by == "api_key":
        key = caller.tenant or caller.id
    else:
        if options.share_by == "user":
            names = [] if queue.user is None else [queue.user.encode()[:_MAX_KEY]]
        else:
            names = exchange.headers.get(options.share_by.encode(), [])
        key = hashlib.sha256(names[0].strip()).hexdigest()[:32] if names else ""
    seconds = options.deadline_s if queue.deadline is None else queue.deadline
    if headers := exchange.headers.get(DEADLINE_HEADER.encode()):
        seconds = _header_seconds(headers[0], None if queue.deadline is None else seconds)
    priority = queue.priority or 0
    if priority < caller.least_priority:
        raise ApiError(
            403,
            "permission_denied",
            f"this key may set priority to {caller.least_priority} or more; the operator grants "
            "less by `priority=` behind the key in http.api_keys_file",
            param="priority",
        )
    own = "" if options.share_prefixes else caller.id
    # The key's part comes first and has a fixed length, so no salt can equal another key's.
    salt = f"{own}/{queue.cache_salt}" if own else queue.cache_salt
    return QueuePlace(key, None if seconds is None else exchange.began + seconds, priority, salt)


def session_digest(caller: str, name: bytes) -> bytes:
    """Return a digest that identifies a session, from the caller's id and the session's name; b""
    for an empty name."""
    if not name.strip():
        return b""
    own = hashlib.sha256(caller.encode()).digest()
    return hashlib.sha256(own + name.strip()).digest()[:8]


def _header_seconds(header: bytes, most: float | None) -> float:
    """Return the seconds in the header `x-deadline-seconds`, at most `most`.

    most: the deadline in the request's body; None: the body has none

    Raises ApiError 400.
    """
    name = DEADLINE_HEADER
    try:
        seconds = float(header[:32])
    except ValueError:
        raise wrong_type(name, "a number") from None
    if not 0 < seconds <= MAX_DEADLINE:
        raise invalid(f"{name} must be above 0 and at most {MAX_DEADLINE:g}", name)
    return seconds if most is None else min(seconds, most)
