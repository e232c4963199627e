"""The streams of stored answers of /v1/responses."""

from deployments.api.dialects.responses.writer import ItemEvents
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.stream.keepalive import EVENT_STREAM, STREAM_HEADERS


async def stream_stored(exchange: HttpExchange, events: list[bytes], after: int) -> None:
    await exchange.start(EVENT_STREAM, STREAM_HEADERS)
    await exchange.write(b"".join(events[after + 1 :]), more=False)


def take_after(query: dict[str, str]) -> int:
    """Return a query's starting_after, the last event that the client has; -1 without one.

    Raises ApiError 400.
    """
    sequence_number = query.get("starting_after")
    if sequence_number is None:
        return -1
    if not sequence_number.isdecimal() or len(sequence_number) > 9:
        raise invalid("starting_after must be a sequence_number", "starting_after")
    return int(sequence_number)


def events_of(response: JsonObject) -> list[bytes]:
    """Return the events of an answer that was not recorded, each text in one event.

    They are the same in each call, so that a stream can go on after any of them.
    """
    events = ItemEvents()
    unknown = dict.fromkeys(("completed_at", "incomplete_details", "error", "usage"))
    begun = {**response, **unknown, "status": "in_progress", "output": []}
    events.push("response.created", response=begun)
    events.push("response.in_progress", response=begun)
    for item in response["output"]:
        _add_item(events, item)
    events.push(f"response.{response['status']}", response=response)
    return events.wire.take()


def _add_item(events: ItemEvents, item: JsonObject) -> None:
    opened, status = {**item}, item.get("status", "")
    if status:
        opened["status"] = "in_progress"
    if "content" in item:
        (part,) = item["content"]
        opened["content"] = []
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if more else {})}
        events.open_item(opened, empty)
        if part["text"]:
            events.add_text(part["text"], part["type"], **more)
        events.close_item(part["text"], part, status)
        return
    field = "arguments" if "arguments" in item else "input"
    opened[field] = ""
    events.open_item(opened)
    if item[field]:
        events.add_text(item[field])
    events.close_item(item[field], None, status)
