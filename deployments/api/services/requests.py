"""GET /v1/requests/{id}: the fate of a request, whichever router had it."""

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange, request_id
from deployments.api.route import NAMES, Operation, Route

_PREFIX = "/v1/requests/"


async def explain_request(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with what routers know of a request.

    Raises ApiError 404: the request was never accepted here, is forgotten, or is another key's.
    """
    id = exchange.path[len(_PREFIX) :]
    explain, prompts = context.options.explain, []
    # Accept only an id that Manta could have issued.
    if explain is not None and request_id([id.encode("utf-8", "replace")]) == id:
        # An admin key may ask about all requests, any other key about its own.
        caller = exchange.caller
        prompts = await explain(id, None if caller.admin else caller.id)
    if not prompts:
        raise ApiError(
            404,
            "request_not_found",
            "no request of this id and key was accepted lately",
        )
    body = {"id": id, "object": "request", "parts": prompts}
    await exchange.answer_json(body)


ROUTE = Route(
    f"{_PREFIX}{{id}}",
    explain_request,
    get=Operation("What became of a request", NAMES, answer=("id", "object", "parts")),
)
