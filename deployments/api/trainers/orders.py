"""Functions that the routes for trainers share: route tables, errors, and aborting requests."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from deployments.api.context import ApiContext
from deployments.api.fields.schema import TEXT
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.options import Training
from deployments.api.route import NAMES, READS, RouteTable
from engine.errors import UpdateFailed

OK = ("status",)
MODEL = {"model": TEXT}
ORDERS = (403, 400, 404, 503)
CHANGES = (*READS, *NAMES, 422, 503)
UPDATES = (*CHANGES, 409)


def order_table() -> RouteTable:
    """Return a RouteTable for routes that give orders to all replicas of the model in the query."""
    return RouteTable(ORDERS, CHANGES, answer=OK, admin=True, query=MODEL)


def add_state(table: RouteTable, path: str, name: str, summary: str) -> None:
    """Add a route that answers with the field `name` of `Training.state`."""

    @table.get(path, summary, (name,))
    async def answer_state(context: ApiContext, exchange: HttpExchange) -> object:
        return {name: (await trained(context).state(model_of(exchange)))[name]}


def trained(context: ApiContext) -> Training:
    training = context.options.training
    if training is None:
        raise invalid("this server has no weights to change", code="weights_not_replaceable")
    return training


def model_of(exchange: HttpExchange) -> str:
    """Return the model's name in the query; "": none."""
    return exchange.parameters().get("model", "")


@contextlib.contextmanager
def refusing(param: str | None) -> Iterator[None]:
    """A context manager that converts UpdateFailed, by which replicas refuse an order, into
    ApiError 400 or 409.

    param: the request field to name in the error; None: none.
    """
    try:
        yield
    except UpdateFailed as error:
        status = 409 if error.code == "update_in_progress" else 400
        own = error.param == "weight_version"
        raise ApiError(
            status, error.code, error.message, param=error.param if own else param
        ) from None


async def end_some(context: ApiContext, request_ids: Sequence[str]) -> int:
    """Abort requests, which are answered with their outputs so far; return the number of known ids.

    Raises ApiError.
    """
    stop = context.options.stop
    if stop is None:
        raise invalid("this server cannot end single requests", "request_ids")
    ended = await asyncio.gather(*(stop(request_id, None, True) for request_id in {*request_ids}))
    return sum(count > 0 for count in ended)


async def end_all(context: ApiContext, exchange: HttpExchange) -> None:
    """Abort all running requests, which are answered with their outputs so far. Raises ApiError,
    MantaError.
    """
    training, model = trained(context), model_of(exchange)
    paused = (await training.state(model))["is_paused"]
    await training.pause(model, "abort")
    if not paused:
        await training.resume(model)
