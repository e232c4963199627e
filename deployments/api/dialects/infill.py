"""POST /infill: llama.cpp's request for what stands between two texts."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.api.body_fields import check_names, take_bool, take_int
from deployments.api.context import ApiContext
from deployments.api.fields.infill import INFILL, MAX_FILES, SAME
from deployments.api.generate import DialectRequest, generate
from deployments.api.generation.openai_request import OpenAIRequest
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.output.step_parser import Event
from deployments.api.renaming import Renaming
from deployments.api.route import QUEUES, STREAMS, Operation, Route
from deployments.api.stream.event_ids import EventIds
from deployments.api.stream.item_answer import ItemAnswer, Usage, Wire
from deployments.backend import RecalledChoice
from engine.text.infill import Gap

PATH = "/infill"


class InfillRequest(DialectRequest):
    """A request that becomes a completion with a gap."""

    def __init__(self, context: ApiContext) -> None:
        super().__init__()
        self._context = context
        self.is_chat = False

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.ignored += check_names(body, INFILL.known, strict=self._context.options.strict)
        names = Renaming()
        names.add("prompt", "input_prefix")
        names.add("suffix", "input_suffix")
        names.add("max_tokens", "n_predict")
        texts = {name: _text(body, name) for name in ("input_prefix", "input_suffix", "prompt")}
        self.gap = Gap(texts["input_prefix"], texts["input_suffix"], texts["prompt"], _files(body))
        made: dict[str, Any] = {"prompt": "", "n": 1, "stream": take_bool(body, "stream")}
        for own, name in SAME.items():
            if body.get(own) is not None:
                made[name] = body[own]
                names.add(name, own)
        if made.get("seed") == -1:  # any
            del made["seed"]
        most = take_int(body, "n_predict", -2, 2**31 - 1)
        if most is not None and most >= 0:  # below: as far as the context reaches
            made["max_tokens"] = most
        self.names = names  # from now on: errors so far name fields of this body
        return made

    def answer(
        self, call: OpenAIRequest, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        return _Answer(call, _Writer(call.card.id))


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "a string")
    return value or ""


def _files(body: dict[str, Any]) -> list[tuple[str, str]]:
    value = body.get("input_extra")
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("input_extra", "a list")
    if len(value) > MAX_FILES:
        raise invalid(f"input_extra takes at most {MAX_FILES} files", "input_extra")
    found = []
    for i, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else None
        name = (item.get("filename") if isinstance(item, dict) else None) or "tmp"
        if not isinstance(text, str) or not isinstance(name, str):
            raise wrong_type(f"input_extra[{i}]", "an object with the strings text and filename")
        found.append((name, text))
    return found


class _Writer:
    """Pieces and the whole in llama.cpp's words."""

    def __init__(self, model: str) -> None:
        self.wire = Wire()
        self._model = model
        self._began = time.monotonic()
        self._first = 0.0
        self._text: list[str] = []
        self._end: dict[str, Any] = {}

    def open(self, usage: Usage) -> None:
        return

    def take(self, event: Event, logprobs: list[dict[str, Any]]) -> None:
        self._first = self._first or time.monotonic()
        self._text.append(event.text)
        self.wire.push("", {"index": 0, "content": event.text, "stop": False})

    def end(self, reason: str, stop: str | int | None, usage: Usage) -> None:
        now = time.monotonic()
        prompt, output = (self._first or now) - self._began, now - (self._first or now)
        word = stop if isinstance(stop, str) else ""
        self._end = {
            "model": self._model,
            "tokens_predicted": usage.output,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "truncated": False,
            "stop_type": "limit" if reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "timings": {
                "prompt_n": usage.prompt,
                "prompt_ms": 1000 * prompt,
                "predicted_n": usage.output,
                "predicted_ms": 1000 * output,
            },
        }
        self.wire.push("", {"index": 0, "content": "", "stop": True, **self._end})

    def fail(self, error: ApiError) -> None:
        self.wire.push("", msgspec.json.decode(error.body()))

    def whole(self) -> dict[str, Any]:
        return {"index": 0, "content": "".join(self._text), "stop": True, **self._end}


class _Answer(ItemAnswer):
    """Events without names or ids."""

    def _lines(self) -> bytes:
        new = self.writer.wire.new
        lines = b"".join(b"data: %b\n\n" % msgspec.json.encode(fields) for _, fields in new)
        new.clear()
        return lines


async def infill(context: ApiContext, exchange: HttpExchange) -> None:
    """Raises ApiError, MantaError."""
    await generate(context, exchange, chat=False, request=InfillRequest(context))


ROUTES = (
    Route(
        PATH,
        infill,
        post=Operation(
            "What stands between two texts", QUEUES, INFILL, ("content", "stop"), STREAMS
        ),
    ),
)
