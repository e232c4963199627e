"""MessagesWriter: the answer to a request to /v1/messages, as blocks and as events."""

import json
from typing import Any

from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import ApiError
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.stream.item_answer import Naming, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken

# HTTP status -> Anthropic's error `type`; other statuses have api_error
_KINDS = {
    **dict.fromkeys((400, 405, 409, 415, 422), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: ApiError) -> JsonObject:
    """Return an error in Anthropic's format, with the additional fields code and param."""
    message = error.message
    if error.code == "context_length_exceeded" and error.param != "max_tokens":
        # Anthropic's clients compact the conversation if an error message begins with this text.
        message = f"prompt is too long: {message}"
    kind = _KINDS.get(error.status, "api_error")
    details = {"type": kind, "message": message, "code": error.code, "param": error.param}
    return {"type": "error", "error": details}


class MessagesWriter:
    """The writer of an answer to /v1/messages. One block is open at a time."""

    def __init__(self, call: GenerationCall, naming: Naming) -> None:
        self.wire = Wire()
        self._naming = naming
        self._blocks: list[JsonObject] = []
        self._open = ""  # the `Event.kind` of the open block; "": no block is open
        self._arguments: list[str] = []  # fragments of the open call's JSON
        self._cut = False  # whether the last block is a truncated tool call
        self._calls = 0
        self._message: JsonObject = {
            "id": naming.item("msg", 0),
            "type": "message",
            "role": "assistant",
            "model": call.card.id,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def whole(self) -> JsonObject:
        """Return the answer so far, without a truncated tool call, because clients would run it."""
        blocks = self._blocks[:-1] if self._cut else self._blocks
        return {**self._message, "content": blocks}

    def open(self, usage: Usage) -> None:
        counts = _usage(Usage(usage.prompt, 0, 0, 0))
        message = {**self._message, "content": [], "usage": counts}
        self._push("message_start", message=message)

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None:
        kind, text = event
        if kind == "end":
            self._close()
        elif kind == "call":
            self._close()
            id = self._naming.call(self._calls, "toolu_")
            self._calls += 1
            self._begin(kind, {"type": "tool_use", "id": id, "name": text, "input": {}})
        elif kind == "arguments":
            self._arguments.append(text)
            self._delta({"type": "input_json_delta", "partial_json": text})
        else:
            if self._open != kind:
                self._close()
                if kind == "content":
                    self._begin(kind, {"type": "text", "text": ""})
                else:
                    self._begin(kind, {"type": "thinking", "thinking": "", "signature": ""})
            name = "text" if kind == "content" else "thinking"
            self._blocks[-1][name] += text
            self._delta({"type": f"{name}_delta", name: text})

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None:
        self._cut = self._open == "call"
        self._close()
        ending: JsonObject = {"stop_reason": "end_turn", "stop_sequence": None}
        if reason == "length":
            ending["stop_reason"] = "max_tokens"
        elif isinstance(stop, str):
            ending = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif self._calls and not self._cut:
            ending["stop_reason"] = "tool_use"
        self._message |= {**ending, "usage": _usage(usage)}
        self._push("message_delta", delta=ending, usage=_usage(usage))
        self._push("message_stop")

    def fail(self, error: ApiError) -> None:
        self.wire.push("error", error_object(error))

    def _push(self, event: str, **fields: Any) -> None:
        self.wire.push(event, {"type": event, **fields})

    def _begin(self, kind: str, block: JsonObject) -> None:
        self._open, self._arguments = kind, []
        self._blocks.append(block)
        index = len(self._blocks) - 1
        # The block is copied, because the event is encoded later and must show the block without
        # content.
        self._push("content_block_start", index=index, content_block={**block})

    def _delta(self, delta: JsonObject) -> None:
        self._push("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        kind, self._open = self._open, ""
        if not kind:
            return
        if kind == "call" and not self._cut:
            self._blocks[-1]["input"] = json.loads("".join(self._arguments) or "{}")
        self._push("content_block_stop", index=len(self._blocks) - 1)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
    }
