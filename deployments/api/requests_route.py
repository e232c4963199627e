"""GET /v1/requests/{id}: what became of a request, whichever router had it."""

import hashlib

import msgspec

from deployments.api.errors import NOT_FOUND, ApiError
from deployments.api.exchange import Exchange, request_id
from deployments.api.options import ApiOptions

REQUESTS = "/v1/requests/"


def owner_of(exchange: Exchange, options: ApiOptions) -> str | None:
    """Whose requests this one may ask about: those that came with the same API key. "" where no key
    is asked for; None, everyone's, for an admin key. Legal once the key has been checked."""
    if not options.api_keys:
        return ""
    _, _, key = exchange.values(b"authorization")[0].partition(b" ")
    digest = hashlib.sha256(key.strip())
    return None if digest.digest() in options.admin_keys else digest.hexdigest()[:32]


async def explain_request(exchange: Exchange, options: ApiOptions) -> None:
    """Answer. Raises ApiError 404: never accepted here, forgotten, or another key's."""
    id = exchange.path[len(REQUESTS) :]
    found = []
    # One that we could have given out.
    if options.explain is not None and request_id([id.encode("utf-8", "replace")]) == id:
        found = await options.explain(id, owner_of(exchange, options))
    if not found:
        raise ApiError(
            404,
            "request_not_found",
            "no request of this id and key was accepted lately",
            kind=NOT_FOUND,
        )
    body = {"id": id, "object": "request", "parts": found}
    await exchange.answer(200, msgspec.json.encode(body))
