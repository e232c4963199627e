"""The routes under /v1/responses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer, Naming, new_number
from deployments.api.agents.responses_request import ResponsesRequest, responses_request
from deployments.api.agents.responses_writer import ResponsesWriter
from deployments.api.agents.turn import Turn
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest, chat_call
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.backend import RecalledChoice
from engine.errors import MantaError

if TYPE_CHECKING:
    from deployments.api.app import Api

PATH = "/v1/responses"


class ResponsesTurn(Turn):
    def __init__(self, api: "Api", owner: str) -> None:
        super().__init__()
        self._api = api
        self._owner = owner
        self._request: ResponsesRequest | None = None
        self._writer: ResponsesWriter | None = None

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        store, options = self._api.responses, self._api.options
        past: list[dict[str, Any]] = []
        before = body.get("previous_response_id")
        if before is not None:
            if not isinstance(before, str):
                raise invalid(
                    "previous_response_id must be a string", "previous_response_id", "invalid_type"
                )
            found = store.get(before, self._owner, "previous_response_id")
            past = msgspec.json.decode(found.items) + msgspec.json.decode(found.response)["output"]
        self._request = responses_request(body, past, stores=store.on, strict=options.strict)
        self.ignored, self.names = self._request.ignored, self._request.names
        return self._request.chat

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        assert self._request is not None
        number, created = new_number(ids)
        self._writer = ResponsesWriter(self._request, call, Naming.of(call, number), created)
        return ItemAnswer(call, self._writer, ids=ids, past=past)

    def keep(self) -> None:
        """The answer, if it is to be kept and has come to its end."""
        writer, request = self._writer, self._request
        if writer is None or request is None or not request.store:
            return
        response = writer.whole()
        if response["status"] in ("completed", "incomplete"):
            self._api.responses.put(writer.id, self._owner, response, request.items)


async def create(api: "Api", exchange: HttpExchange) -> None:
    turn = ResponsesTurn(api, exchange.caller.id)
    await api.generate(exchange, chat=True, turn=turn)
    turn.keep()


async def count(api: "Api", exchange: HttpExchange) -> None:
    """Tokens of the prompt that a request would have."""
    body = await api.read(exchange)
    turn = ResponsesTurn(api, exchange.caller.id)
    chat = await in_thread(lambda: turn.chat(body), exchange.body_size)
    try:
        call = await chat_call(chat, exchange.body_size, api.backend, api.options, exchange.caller)
    except (ApiError, MantaError) as error:
        raise turn.error(error) from None
    told = {"object": "response.input_tokens", "input_tokens": len(call.prompts[0])}
    await exchange.answer(200, msgspec.json.encode(told))


async def one(api: "Api", exchange: HttpExchange) -> None:
    """GET and DELETE of one response; POST of its cancel; GET of its input_items."""
    id, _, rest = exchange.path[len(PATH) + 1 :].partition("/")
    found = api.responses.get(id, exchange.caller.id)
    if rest == "input_items":
        items = msgspec.json.decode(found.items)
        for i, item in enumerate(items):
            item.setdefault("id", f"item_{id.removeprefix('resp_')}{i:04x}")
        told = {
            "object": "list",
            "data": items[::-1],  # the newest first
            "first_id": items[-1]["id"] if items else None,
            "last_id": items[0]["id"] if items else None,
            "has_more": False,
        }
        await exchange.answer(200, msgspec.json.encode(told))
    elif rest == "cancel":
        raise invalid("this response has ended; only one in the background can be cancelled", "id")
    elif exchange.method == "DELETE":
        api.responses.remove(id, exchange.caller.id)
        told = {"id": id, "object": "response.deleted", "deleted": True}
        await exchange.answer(200, msgspec.json.encode(told))
    else:
        await exchange.answer(200, found.response)
