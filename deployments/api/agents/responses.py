"""The routes under /v1/responses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from deployments.api.agents.answer import ItemAnswer, Naming, new_number
from deployments.api.agents.background import (
    BackgroundRun,
    events_of,
    stream_kept,
    stream_run,
    take_after,
)
from deployments.api.agents.responses_request import ResponsesRequest, responses_request
from deployments.api.agents.responses_writer import ResponsesWriter
from deployments.api.agents.store import StoredResponse
from deployments.api.agents.turn import Turn
from deployments.api.generation.answer.event_ids import EventIds
from deployments.api.generation.openai_request import OpenAIRequest, chat_call
from deployments.api.http.errors import ApiError, invalid, shown
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.off_loop import in_thread
from deployments.backend import Generation, RecalledChoice
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
            if self._api.background.get(before, self._owner) is not None:
                raise invalid(
                    "this response has not ended", "previous_response_id", "response_not_ended"
                )
            found = store.get(before, self._owner, "previous_response_id")
            past = msgspec.json.decode(found.items) + msgspec.json.decode(found.response)["output"]
        self._request = responses_request(body, past, stores=store.on, strict=options.strict)
        self.ignored, self.names = self._request.ignored, self._request.names
        if self._request.background:
            self._api.background.check_room(store.max_bytes)
        return self._request.chat

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        assert self._request is not None
        number, created = new_number(ids)
        self._writer = ResponsesWriter(self._request, call, Naming.of(call, number), created)
        return ItemAnswer(call, self._writer, ids=ids, past=past)

    async def detach(
        self, exchange: HttpExchange, answer: ItemAnswer, generation: Generation
    ) -> bool:
        request = self._request
        if request is None or not request.background:
            return False
        run = BackgroundRun(self._owner, answer, generation, request.items)
        self._api.background.start(run, self._api)
        if request.stream:
            await stream_run(exchange, run, -1, self._api.options.keepalive_s)
        else:
            await exchange.answer(200, msgspec.json.encode(run.response()))
        return True

    def keep(self) -> None:
        """The answer, if it is to be kept and has come to its end."""
        writer, request = self._writer, self._request
        if writer is None or request is None or not request.store or request.background:
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
    query, owner = exchange.parameters(), exchange.caller.id
    run = api.background.get(id, owner)
    if run is not None:
        found = StoredResponse(owner, msgspec.json.encode(run.response()), b"", 0.0, run.events)
        items = run.items
    else:
        found = api.responses.get(id, owner)
        items = msgspec.json.decode(found.items)
    if rest == "input_items":
        await exchange.answer(200, msgspec.json.encode(_page(query, _told_items(id, items))))
    elif rest == "cancel":
        if run is not None:
            run.cancel()
            found.response = msgspec.json.encode(run.response())
        elif not msgspec.json.decode(found.response)["background"]:
            raise invalid(
                "this response has ended; only one in the background can be cancelled", "id"
            )
        await exchange.answer(200, found.response)
    elif exchange.method == "DELETE":
        if run is not None:
            run.wanted = False
            run.cancel()
        else:
            api.responses.remove(id, owner)
        told = {"id": id, "object": "response.deleted", "deleted": True}
        await exchange.answer(200, msgspec.json.encode(told))
    elif query.get("stream") == "true" and exchange.method == "GET":
        after = take_after(query)
        if run is not None:
            await stream_run(exchange, run, after, api.options.keepalive_s)
        else:
            events = found.events or events_of(msgspec.json.decode(found.response))
            await stream_kept(exchange, events, after)
    else:
        await exchange.answer(200, found.response)


def _told_items(id: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation before an answer, in the form of OpenAI's list: contents are parts, and each
    item has a type, an id and, but for thoughts, a status."""
    told = []
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        one = {"type": kind, "id": f"item_{id.removeprefix('resp_')}{i:04x}"}
        one |= {name: value for name, value in item.items() if value is not None}
        if kind == "reasoning":
            one.setdefault("summary", [])
        else:
            one.setdefault("status", "completed")
        if kind == "message" and isinstance(one.get("content"), str):
            part: dict[str, Any] = {"type": "input_text", "text": one["content"]}
            if one.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": [], "logprobs": []}
            one["content"] = [part]
        told.append(one)
    return told


def _page(query: dict[str, str], items: list[dict[str, Any]]) -> dict[str, Any]:
    """Items, the newest first, as `order`, `after` and `limit` of the query say. Raises ApiError
    400."""
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit) <= 100:
        raise invalid("limit must be 1 to 100", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"there is no item {shown(after)}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
