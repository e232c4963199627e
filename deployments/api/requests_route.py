"""GET /v1/requests/{id}: what became of a request, whichever router had it."""

import msgspec

from deployments.api.http.errors import NOT_FOUND, ApiError
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.options import ApiOptions

REQUESTS = "/v1/requests/"


async def explain_request(exchange: HttpExchange, options: ApiOptions) -> None:
    """Answer. Raises ApiError 404: never accepted here, forgotten, or another key's."""
    id = exchange.path[len(REQUESTS) :]
    found = []
    # One that we could have given out.
    if options.explain is not None and request_id([id.encode("utf-8", "replace")]) == id:
        # An admin key may ask about all requests, any other key about its own.
        caller = exchange.caller
        found = await options.explain(id, None if caller.admin else caller.id)
    if not found:
        raise ApiError(
            404,
            "request_not_found",
            "no request of this id and key was accepted lately",
            kind=NOT_FOUND,
        )
    body = {"id": id, "object": "request", "parts": found}
    await exchange.answer(200, msgspec.json.encode(body))
