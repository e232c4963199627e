"""OllamaWriter, GenerateWriter: write answers of Ollama's /api/chat and /api/generate, as JSON
lines or whole."""

import json
import time
from datetime import UTC, datetime

import msgspec

from deployments.api.http.errors import ApiError
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.stream.item_answer import ItemWriter, Naming, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken


def error_object(error: ApiError) -> JsonObject:
    """Return an error in Ollama's format, with the additional fields code and param."""
    return {"error": error.message, "code": error.code, "param": error.param}


class OllamaWriter(ItemWriter):
    """The writer of answers to /api/chat. A tool call is written when it is complete; a truncated
    one never."""

    def __init__(self, model: str, naming: Naming) -> None:
        self.wire = Wire(lambda _, fields: msgspec.json.encode(fields) + b"\n")
        self._model, self._naming = model, naming
        self._began = time.monotonic_ns()
        self._first = 0  # time of the first token, in monotonic nanoseconds
        self._message: JsonObject = {"role": "assistant", "content": ""}
        self._logprobs: list[ScoredToken] = []
        self._name = ""  # function of the open call
        self._arguments: list[str] = []
        self._calls = 0
        self._end: JsonObject = {"done": False}

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None:
        self._first = self._first or time.monotonic_ns()
        kind, text = event
        if kind == "call":
            self._name, self._arguments = text, []
        elif kind == "arguments":
            self._arguments.append(text)
        elif kind == "end":
            arguments = json.loads("".join(self._arguments) or "{}")
            function = {"index": self._calls, "name": self._name, "arguments": arguments}
            call = {"id": self._naming.call(self._calls), "function": function}
            self._calls += 1
            self._message.setdefault("tool_calls", []).append(call)
            self._push({"content": "", "tool_calls": [call]})
        elif kind == "reasoning":
            self._message["thinking"] = self._message.get("thinking", "") + text
            self._push({"content": "", "thinking": text})
        else:
            self._message["content"] += text
            self._logprobs += logprobs
            self._push({"content": text}, logprobs)

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None:
        now = time.monotonic_ns()
        first = self._first or now
        self._end = {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": usage.output,
            "eval_duration": now - first,
        }
        self._push({"content": ""})

    def fail(self, error: ApiError) -> None:
        self.wire.push("", error_object(error))

    def whole(self) -> JsonObject:
        return self._line(self._message, self._logprobs)

    def _push(self, message: JsonObject, logprobs: list[ScoredToken] | None = None) -> None:
        self.wire.push("", self._line({"role": "assistant", **message}, logprobs))

    def _line(self, message: JsonObject, logprobs: list[ScoredToken] | None) -> JsonObject:
        line = {**_head(self._model), **self._said(message)}
        if logprobs:
            line["logprobs"] = logprobs
        return {**line, **self._end}

    @classmethod
    def loaded(cls, model: str) -> bytes:
        """Return the answer to a request that only asks to load the model."""
        empty = cls._said({"role": "assistant", "content": ""})
        return msgspec.json.encode({**_head(model), **empty, "done": True, "done_reason": "load"})

    @staticmethod
    def _said(message: JsonObject) -> JsonObject:
        return {"message": message}


class GenerateWriter(OllamaWriter):
    """The writer of answers to /api/generate, which have a text instead of a message."""

    @staticmethod
    def _said(message: JsonObject) -> JsonObject:
        fields = {"response": message["content"]}
        if "thinking" in message:
            fields["thinking"] = message["thinking"]
        return fields


def _head(model: str) -> JsonObject:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}
