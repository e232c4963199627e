"""GET /v1/live: the routers' present state, for admins, as it shows the requests of all keys.

It has the running batch, queues, replicas with their cost, the last routing choices, and requests
that moved.
"""

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import NAMES, Operation, Route

LIVE = "/v1/live"


async def live(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer the live view. Raises ApiError 404 if the page is off."""
    options = context.options
    if not options.page or options.live is None:
        message = "the live view is off; http.page in the configuration turns it on"
        raise ApiError(404, "not_found", message)
    names = {digest.hex()[:32]: rule.name for digest, rule in options.rules.items() if rule.name}
    view = {"object": "live", "key_names": names, "routers": await options.live()}
    await exchange.answer_json(view, headers=(("cache-control", "no-store"),))


ROUTE = Route(
    LIVE,
    live,
    get=Operation("What routers know now", NAMES, answer=("object", "key_names", "routers")),
)
