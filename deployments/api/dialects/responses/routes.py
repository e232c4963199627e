"""The routes under /v1/responses."""

from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.api.context import ApiContext
from deployments.api.dialects.responses.request import ResponsesRequest, SentItem, responses_request
from deployments.api.dialects.responses.writer import ResponsesWriter, events_of, take_after
from deployments.api.fields.responses import RESPONSES
from deployments.api.fields.schema import BOOLEAN, integer, one_of
from deployments.api.generate import DialectRequest, count_prompt, generate
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import ChatRequest
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.route import LIST, NAMES, PAGES, QUEUES, STREAMS, RouteTable, page_of
from deployments.api.stream.background import BackgroundRun, stream_run
from deployments.api.stream.item_answer import ItemAnswer, Naming, new_number
from deployments.api.stream.merge import EVENT_STREAM, STREAM_HEADERS
from deployments.api.stream.replay import Resumption
from deployments.api.stream.response_store import StoredResponse
from deployments.backend import Generation

PATH = "/v1/responses"
ROUTES = RouteTable((400, *NAMES), QUEUES)
_ONE = f"{PATH}/{{id}}"
_ANSWER = ("id", "object", "created_at", "status", "model", "output", "usage")


class ResponsesDialect(DialectRequest):
    """The dialect of /v1/responses: reads a request and writes its answer."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._request: ResponsesRequest | None = None
        self._writer: ResponsesWriter | None = None
        self._answer: ItemAnswer | None = None

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> ChatRequest:
        store = context.responses
        past: list[SentItem] = []
        before = body.get("previous_response_id")
        if before is not None:
            if not isinstance(before, str):
                raise invalid(
                    "previous_response_id must be a string", "previous_response_id", "invalid_type"
                )
            if context.background.get(before, self._owner) is not None:
                raise invalid(
                    "this response has not ended", "previous_response_id", "response_not_ended"
                )
            stored = store.get(before, self._owner, "previous_response_id")
            output = msgspec.json.decode(stored.response)["output"]
            past = msgspec.json.decode(stored.items) + output
        request = responses_request(body, past, ignored, stores=store.on, options=context.options)
        if request.background:
            context.background.check_room(store.max_bytes)
        self._request = request
        return request.chat

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        assert self._request is not None
        number, created = new_number(resumed.ids)
        self._writer = ResponsesWriter(self._request, call, Naming.of(call, number), created)
        self._answer = ItemAnswer(call, self._writer, resumed)
        return self._answer

    async def detach(
        self, context: ApiContext, exchange: HttpExchange, generation: Generation
    ) -> bool:
        request = self._request
        if request is None or not request.background:
            return False
        assert self._writer is not None and self._answer is not None
        run = BackgroundRun(self._owner, self._answer, self._writer, generation, request.items)

        def on_end() -> None:
            context.counter.in_flight -= 1
            if run.wanted:
                stored = (run.owner, run.response(), run.items, run.events)
                context.responses.put(run.writer.id, *stored)

        context.counter.in_flight += 1
        context.background.start(run, on_end)
        if request.stream:
            await stream_run(exchange, run, -1, context.options.keepalive_s)
        else:
            await exchange.answer_json(run.response())
        return True

    def keep(self, context: ApiContext) -> None:
        """Store the answer in the ResponseStore, if the request asks for it and the answer is
        complete."""
        writer, request = self._writer, self._request
        if writer is None or request is None or not request.store or request.background:
            return
        response = writer.whole()
        if response["status"] in ("completed", "incomplete"):
            context.responses.put(writer.id, self._owner, response, request.items)


@ROUTES.post(PATH, "A chat in items", RESPONSES, _ANSWER, STREAMS)
async def create(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a POST to /v1/responses, and store the answer if the request asks for it. Raises
    ApiError, MantaError.
    """
    dialect = ResponsesDialect(exchange.caller.id)
    await generate(context, exchange, lambda: dialect)
    dialect.keep(context)


@ROUTES.post(
    f"{PATH}/input_tokens", "Tokens of the prompt of a response", RESPONSES, ("input_tokens",)
)
async def count(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with the number of tokens of a request's prompt, without generating."""
    tokens = await count_prompt(context, exchange, ResponsesDialect(exchange.caller.id))
    return {"object": "response.input_tokens", "input_tokens": tokens}


def _kept(
    context: ApiContext, exchange: HttpExchange
) -> tuple[str, BackgroundRun | None, StoredResponse]:
    """Return the response id in the request's path, its background run (None after its end), and
    its stored or current response.

    Raises ApiError 404 response_not_found, 400 for a query of too many fields.
    """
    exchange.parameters()
    id, owner = exchange.path.split("/")[3], exchange.caller.id
    run = context.background.get(id, owner)
    if run is None:
        return id, None, context.responses.get(id, owner)
    response = msgspec.json.encode(run.response())
    return id, run, StoredResponse(owner, response, b"", 0.0, run.events)


@ROUTES.get(
    _ONE,
    "An answer that was kept, or is made in the background",
    _ANSWER,
    kinds=STREAMS,
    query={"stream": BOOLEAN, "starting_after": integer(0, 10**9 - 1)},
)
async def response(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with a stored or running response, or with a stream of its events."""
    query = exchange.parameters()
    _, run, stored = _kept(context, exchange)
    if query.get("stream") != "true" or exchange.method != "GET":
        await exchange.answer(200, stored.response)
        return
    after = take_after(query)
    if run is not None:
        await stream_run(exchange, run, after, context.options.keepalive_s)
    else:
        events = stored.events or events_of(msgspec.json.decode(stored.response))
        await exchange.start(EVENT_STREAM, STREAM_HEADERS)
        await exchange.write(b"".join(events[after + 1 :]), more=False)


@ROUTES.delete(_ONE, "Forget it", statuses=NAMES)
async def forget(context: ApiContext, exchange: HttpExchange) -> object:
    """Remove a stored response, and end its background run if there is one."""
    id, run, _ = _kept(context, exchange)
    if run is not None:
        run.wanted = False
        run.cancel()
    else:
        context.responses.remove(id, exchange.caller.id)
    return {"id": id, "object": "response.deleted", "deleted": True}


@ROUTES.post(f"{_ONE}/cancel", "End one in the background", answer=_ANSWER)
async def cancel(context: ApiContext, exchange: HttpExchange) -> object:
    """Cancel a background run, and answer with its response."""
    _, run, stored = _kept(context, exchange)
    if run is not None:
        run.cancel()
        return run.response()
    ended = msgspec.json.decode(stored.response)
    if not ended["background"]:
        message = "this response has ended; only one in the background can be cancelled"
        raise invalid(message, "id")
    return ended


@ROUTES.get(
    f"{_ONE}/input_items",
    "What it answered",
    (*LIST, "has_more"),
    query={**PAGES, "limit": integer(1, 100), "order": one_of("asc", "desc")},
)
async def input_items(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer with a page of the conversation before a response, by default the newest first."""
    query = exchange.parameters()
    id, run, stored = _kept(context, exchange)
    items = msgspec.json.decode(stored.items) if run is None else run.items
    listed, order = _told_items(id, items), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    return page_of(listed if order == "asc" else listed[::-1], query, 20, 100, "item ")


def _told_items(id: str, items: list[SentItem]) -> list[SentItem]:
    """Return a conversation's items in the format of OpenAI's list.

    Contents are lists of parts. Each item has a type, an id and, unless it is reasoning, a status.
    """
    listed = []
    for i, item in enumerate(items):
        kind = item.get("type") or "message"
        fields = {"type": kind, "id": f"item_{id.removeprefix('resp_')}{i:04x}"}
        fields |= {name: value for name, value in item.items() if value is not None}
        if kind == "reasoning":
            fields.setdefault("summary", [])
        else:
            fields.setdefault("status", "completed")
        if kind == "message" and isinstance(fields.get("content"), str):
            part: JsonObject = {"type": "input_text", "text": fields["content"]}
            if fields.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": [], "logprobs": []}
            fields["content"] = [part]
        listed.append(fields)
    return listed
