"""ResponsesWriter: the answer to a request to /v1/responses, as items and as events."""

import time
from typing import Any

from deployments.api.dialects.responses.request import ResponsesRequest
from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import ApiError
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.stream.item_answer import Naming, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken

_STATUS = {"length": "incomplete"}  # the response's status by finish_reason; others: completed


class ResponsesWriter:
    """One item is open at a time: reasoning, a message, or a call."""

    def __init__(
        self, request: ResponsesRequest, call: GenerationCall, naming: Naming, created: int
    ) -> None:
        self.wire = Wire()
        self._request = request
        self._naming = naming
        self._items: list[JsonObject] = []
        self._open = ""  # kind of the last item while it is open: of an Event
        self._calls = 0
        self._text: list[str] = []  # of the open item
        self._logprobs: list[ScoredToken] = []
        self._custom = False  # the open call
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
            self._argue(text)
        else:
            if self._open != kind:
                self._close("completed")
                self._begin(kind)
            self._text.append(text)
            more: JsonObject = {}
            if kind == "content":
                self._logprobs += logprobs
                more["logprobs"] = logprobs
            part = "output_text" if kind == "content" else "reasoning_text"
            self._about(f"response.{part}.delta", content_index=0, delta=text, **more)

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

    def _push(self, event: str, **fields: Any) -> None:
        self.wire.push(event, {"type": event, "sequence_number": self.wire.count, **fields})

    def _about(self, event: str, **fields: Any) -> None:
        """An event about the last item."""
        item = self._items[-1]
        self._push(event, item_id=item["id"], output_index=len(self._items) - 1, **fields)

    def _add(self, prefix: str, item: JsonObject) -> None:
        item = {"id": self._naming.item(prefix, len(self._items)), **item}
        self._items.append(item)
        self._text, self._logprobs = [], []
        index = len(self._items) - 1
        # A copy, because it is sent before the item is complete.
        self._push("response.output_item.added", output_index=index, item={**item})

    def _begin(self, kind: str) -> None:
        self._open = kind
        if kind == "content":
            item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
            self._add("msg", item)
        else:
            self._add("rs", {"type": "reasoning", "summary": [], "content": []})
        self._about("response.content_part.added", content_index=0, part=self._part(kind))

    def _part(self, kind: str) -> JsonObject:
        text = "".join(self._text)
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": self._logprobs}

    def _begin_call(self, name: str) -> None:
        self._open = "call"
        space, own = self._request.places.get(name, ("", name))
        call_id = self._naming.call(self._calls)
        self._calls += 1
        item: JsonObject = {"status": "in_progress", "call_id": call_id, "name": own}
        if space:
            item["namespace"] = space
        self._custom = name in self._request.custom
        if self._custom:
            self._add("ctc", {"type": "custom_tool_call", **item, "input": ""})
        else:
            self._add("fc", {"type": "function_call", **item, "arguments": ""})

    def _argue(self, text: str) -> None:
        self._text.append(text)
        self._about(f"response.{self._told}.delta", delta=text)

    @property
    def _told(self) -> str:
        return "custom_tool_call_input" if self._custom else "function_call_arguments"

    def _close(self, status: str) -> None:
        """The open item, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return
        item, text = self._items[-1], "".join(self._text)
        if kind == "call":
            value = "input" if self._custom else "arguments"
            item[value] = text
            self._about(f"response.{self._told}.done", name=item["name"], **{value: text})
        else:
            part = self._part(kind)
            item["content"] = [part]
            more = {"logprobs": self._logprobs} if kind == "content" else {}
            name = "output_text" if kind == "content" else "reasoning_text"
            self._about(f"response.{name}.done", content_index=0, text=text, **more)
            self._about("response.content_part.done", content_index=0, part=part)
        if "status" in item:
            item["status"] = status
        index = len(self._items) - 1
        self._push("response.output_item.done", output_index=index, item=item)
