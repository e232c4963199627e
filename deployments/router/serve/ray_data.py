"""DatasetRows: answers rows of Ray Data's Serve stage (`ServeDeploymentProcessorConfig`).

The requests of rows have the priority of batch work.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any

from deployments.api.body_fields import MAX_DEADLINE
from deployments.api.caller import Caller
from deployments.router.serve.handle_call import AsgiApp, post, wait_of
from engine.messages import BATCH_PRIORITY

# Fields that the stage adds to a row's `request_kwargs`, which the HTTP API does not know.
_OF_STAGE = ("request_id", "idx_in_batch")
_LONGEST_WAIT = 60.0  # maximum seconds between two tries
# Datasets use a separate tenant, so that other callers with handles do not queue behind them.
_CALLER = Caller(tenant="ray-data")


class DatasetRows:
    """The answers to rows of datasets at one router.

    Rows come in batches. In each iteration of the event loop at most one of them is checked and
    sent to a replica, so that other requests do not wait for a whole batch.
    """

    def __init__(self, app: AsgiApp) -> None:
        """Set up the object. app: the HTTP API, which answers the rows' requests."""
        self._app = app
        self._turn = asyncio.Lock()

    async def answer(self, path: str, request: Any, model: str) -> dict[str, Any]:
        """Return the JSON answer to a row's request; retry without a time limit while there is no
        room.

        path: the HTTP route that answers.
        request: the fields of the request's body, as a mapping or a pydantic model. Fields that
            Ray Data's stage adds (`_OF_STAGE`), and fields with the value None, are ignored.
        model: the default model of a request; "": several models are served.
        Raises ValueError for an error response; the stage then fails only this row.
        """
        fields = _fields(request)
        if fields.pop("stream", None):
            raise ValueError("stream: the answer to a row of a dataset comes whole")
        named = {"model": model} if model else {}
        body = {"priority": BATCH_PRIORITY, **named, **fields}
        payload = json.dumps(body, default=_plain).encode()
        id = f"row-{secrets.token_hex(12)}"
        while True:
            async with self._turn:
                await asyncio.sleep(0)
            status, headers, reply = await post(self._app, path, payload, _CALLER, id, MAX_DEADLINE)
            wait = wait_of(status, headers)
            if wait is None:
                break
            await asyncio.sleep(min(wait, _LONGEST_WAIT) * (1 + secrets.randbelow(256) / 1024))
        answer: dict[str, Any] = json.loads(reply)
        if status != 200:
            error = answer["error"]
            raise ValueError(f"{error['code']}: {error['message']}")
        return answer


def _fields(request: Any) -> dict[str, Any]:
    if hasattr(request, "model_dump"):
        request = request.model_dump(exclude_unset=True)
    if not isinstance(request, Mapping):
        raise ValueError("request_kwargs: the fields of a request, by name")
    # Arrow gives all rows of a block the same fields, with None where a row has no value.
    return {
        name: value
        for name, value in request.items()
        if value is not None and name not in _OF_STAGE
    }


def _plain(value: Any) -> Any:
    """Return a NumPy array or number as Python lists and numbers. Raises ValueError for others."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"request_kwargs: {type(value).__name__} has no form in JSON")
