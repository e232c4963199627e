"""ResponsesWriter: writes the answer to a request to /v1/responses, as a whole or as events.
events_of: the events of a stored answer."""

import time
from typing import Any

from deployments.api.dialects.responses.request import ResponsesRequest
from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import ApiError, invalid
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.stream.item_answer import Naming, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken

_STATUS = {"length": "incomplete"}  # finish_reason -> the response's status; others: completed


# type of a call's item -> (the field with its input, the name of this field in event types)
_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


class ItemEvents:
    """The events for the items of an answer: reasoning, messages and calls.

    items: the items so far; the last one may be incomplete
    """

    def __init__(self) -> None:
        self.wire = Wire()
        self.items: list[JsonObject] = []

    def push(self, event: str, **fields: Any) -> None:
        self.wire.push(event, {"type": event, "sequence_number": self.wire.count, **fields})

    def _about(self, event: str, **fields: Any) -> None:
        """Add an event that refers to the last item."""
        id, index = self.items[-1]["id"], len(self.items) - 1
        self.push(event, item_id=id, output_index=index, **fields)

    def open_item(self, item: JsonObject, part: JsonObject | None = None) -> None:
        """Begin a new item without text.

        part: the empty content part to which text is added; None: the item is a call, and text is
            added to its input.
        """
        self.items.append(item)
        # The item is copied, because the event is encoded later and must show the item without its
        # text.
        index = len(self.items) - 1
        self.push("response.output_item.added", output_index=index, item={**item})
        if part is not None:
            self._about("response.content_part.added", content_index=0, part=part)

    def add_text(self, text: str, part: str = "", **more: Any) -> None:
        """Add text to the open item.

        part: the type of the content part that gets the text; "": the item is a call, whose input
            gets it.
        """
        if part:
            self._about(f"response.{part}.delta", content_index=0, delta=text, **more)
        else:
            _, name = _CALLS[self.items[-1]["type"]]
            self._about(f"response.{name}.delta", delta=text)

    def close_item(self, text: str, part: JsonObject | None, status: str) -> None:
        """End the open item.

        text: the item's whole text.
        part: the item's content part with that text; None: the item is a call with that input.
        """
        item = self.items[-1]
        if part is None:
            field, name = _CALLS[item["type"]]
            item[field] = text
            self._about(f"response.{name}.done", name=item["name"], **{field: text})
        else:
            item["content"] = [part]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._about(f"response.{part['type']}.done", content_index=0, text=text, **more)
            self._about("response.content_part.done", content_index=0, part=part)
        if "status" in item:
            item["status"] = status
        self.push("response.output_item.done", output_index=len(self.items) - 1, item=item)


class ResponsesWriter:
    """The writer of an answer in the Responses API's format: its events, and the whole response.

    One output item is open at a time: reasoning, a message, or a call.
    """

    def __init__(
        self, request: ResponsesRequest, call: GenerationCall, naming: Naming, created: int
    ) -> None:
        self._events = ItemEvents()
        self._push, self.wire = self._events.push, self._events.wire
        self._items = self._events.items
        self._request = request
        self._naming = naming
        self._open = ""  # the Event.kind of the open item; "": none is open
        self._calls = 0
        self._text: list[str] = []  # text pieces of the open item
        self._logprobs: list[ScoredToken] = []
        self._response: JsonObject = {
            "id": naming.item("resp", 0),
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "model": call.card.id,
            "output": self._items,
            **request.echo,
            "temperature": call.common.params.temperature,
            "top_p": call.common.params.top_p,
            "usage": None,
        }

    @property
    def id(self) -> str:
        id: str = self._response["id"]
        return id

    def whole(self) -> JsonObject:
        return self._response

    def open(self, usage: Usage) -> None:
        if self._request.background:
            self._response["status"] = "queued"
        self._push("response.created", response={**self._response, "output": []})
        if self._request.background:
            self._push("response.queued", response={**self._response, "output": []})
        else:
            self._progress()

    def _progress(self) -> None:
        self._response["status"] = "in_progress"
        self._push("response.in_progress", response={**self._response, "output": []})

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None:
        if self._response["status"] == "queued":
            self._progress()
        kind, text = event
        if kind == "end":
            self._close("completed")
        elif kind == "call":
            self._close("completed")
            self._begin_call(text)
        elif kind == "arguments":
            self._text.append(text)
            self._events.add_text(text)
        else:
            if self._open != kind:
                self._close("completed")
                self._begin(kind)
            self._text.append(text)
            if kind == "content":
                self._logprobs += logprobs
                self._events.add_text(text, "output_text", logprobs=logprobs)
            else:
                self._events.add_text(text, "reasoning_text")

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None:
        if self._response["status"] == "queued":
            self._progress()
        status = _STATUS.get(reason, "completed")
        self._close(status)
        if not self._items:
            self._begin("content")
            self._close(status)
        self._response["status"] = status
        self._response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.output,
        }
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        self._push(f"response.{status}", response=self._response)

    def fail(self, error: ApiError) -> None:
        self._close("incomplete")
        self._response["status"] = "failed"
        self._response["error"] = {"code": error.code, "message": error.message}
        self._push("response.failed", response=self._response)

    def cancel(self) -> None:
        self._close("incomplete")
        self._response["status"] = "cancelled"
        self._push("response.cancelled", response=self._response)

    # --- items ---

    def _add(self, kind: str, prefix: str, fields: JsonObject, part: JsonObject | None) -> None:
        self._open, self._text, self._logprobs = kind, [], []
        item = {"id": self._naming.item(prefix, len(self._items)), **fields}
        self._events.open_item(item, part)

    def _begin(self, kind: str) -> None:
        item: JsonObject = {"type": "reasoning", "summary": [], "content": []}
        if kind == "content":
            item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._add(kind, "msg" if kind == "content" else "rs", item, _part(kind, "", []))

    def _begin_call(self, name: str) -> None:
        space, own = self._request.places.get(name, ("", name))
        call_id = self._naming.call(self._calls)
        self._calls += 1
        item: JsonObject = {"status": "in_progress", "call_id": call_id, "name": own}
        if space:
            item["namespace"] = space
        if name in self._request.custom:
            item = {"type": "custom_tool_call", **item, "input": ""}
            self._add("call", "ctc", item, None)
        else:
            item = {"type": "function_call", **item, "arguments": ""}
            self._add("call", "fc", item, None)

    def _close(self, status: str) -> None:
        """End the open item, if there is one."""
        kind, self._open = self._open, ""
        if kind:
            text = "".join(self._text)
            part = None if kind == "call" else _part(kind, text, self._logprobs)
            self._events.close_item(text, part, status)


def _part(kind: str, text: str, logprobs: list[ScoredToken]) -> JsonObject:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def take_after(query: dict[str, str]) -> int:
    """Return a query's `starting_after`, the number of the last event that the client has; -1
    without one.

    Raises ApiError 400.
    """
    sequence_number = query.get("starting_after")
    if sequence_number is None:
        return -1
    if not sequence_number.isdecimal() or len(sequence_number) > 9:
        raise invalid("starting_after must be a sequence_number", "starting_after")
    return int(sequence_number)


def events_of(response: JsonObject) -> list[bytes]:
    """Return events for a stored answer whose original events were not stored, each text in one
    event.

    Each call returns the same events, so that a stream can be resumed after any of them.
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
