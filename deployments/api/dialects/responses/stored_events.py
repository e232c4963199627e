"""The streams of stored answers of /v1/responses."""

from collections.abc import Iterator
from typing import Any

import msgspec

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
    """Yield the events of an answer that was not recorded, each text in one piece.

    They are the same in each call, so that a stream can go on behind any of them.
    """
    return [
        b"event: %b\ndata: %b\n\n"
        % (name.encode(), msgspec.json.encode({"type": name, "sequence_number": i, **fields}))
        for i, (name, fields) in enumerate(_told(response))
    ]


def _told(response: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    begun = {
        **response,
        **dict.fromkeys(("completed_at", "incomplete_details", "error", "usage")),
        "status": "in_progress",
        "output": [],
    }
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        value = next((name for name in ("arguments", "input", "content") if name in item), "")
        empty: Any = [] if value == "content" else ""
        opened = {**item, value: empty}
        if "status" in item:
            opened["status"] = "in_progress"
        yield "response.output_item.added", {"output_index": index, "item": opened}
        about = {"item_id": item["id"], "output_index": index}
        if value == "content":
            for place, part in enumerate(item["content"]):
                yield from _told_part({**about, "content_index": place}, part)
        elif value:
            kind = "function_call_arguments" if value == "arguments" else "custom_tool_call_input"
            if item[value]:
                yield f"response.{kind}.delta", {**about, "delta": item[value]}
            ending = {**about, "name": item["name"], value: item[value]}
            yield f"response.{kind}.done", ending
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _told_part(about: JsonObject, part: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    text, kind = part["text"], part["type"]
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    nothing = {**part, "text": "", **({"logprobs": []} if more else {})}
    yield "response.content_part.added", {**about, "part": nothing}
    if text:
        yield f"response.{kind}.delta", {**about, "delta": text, **more}
    yield f"response.{kind}.done", {**about, "text": text, **more}
    yield "response.content_part.done", {**about, "part": part}
