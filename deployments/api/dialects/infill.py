"""POST /infill: llama.cpp's request for what stands between two texts."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deployments.api.body_fields import check_names, take_bool, take_int
from deployments.api.context import ApiContext
from deployments.api.fields.common import QUEUED
from deployments.api.fields.infill import INFILL, MAX_FILES, SAME
from deployments.api.generate import DialectRequest, generate
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import TextRequest
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.http.exchange import HttpExchange
from deployments.api.output.step_parser import Event
from deployments.api.route import QUEUES, STREAMS, Operation, Route
from deployments.api.stream.event_ids import EventIds
from deployments.api.stream.item_answer import ItemAnswer, Usage, Wire
from deployments.backend import RecalledChoice
from engine.text.infill import Gap

PATH = "/infill"
_NAMES: Mapping[str, str] = {
    **{field: own for own, field in SAME.items()},
    "prompt": "input_prefix",
    "suffix": "input_suffix",
    "max_tokens": "n_predict",
}


class InfillRequest(DialectRequest):
    """A request that becomes a completion with a gap."""

    def __init__(self, context: ApiContext) -> None:
        self._options = context.options

    def read(self, body: Mapping[str, Any]) -> TextRequest:
        ignored = check_names(body, INFILL.known, strict=self._options.strict)
        prefix, suffix, prompt = (
            _text(body, name) for name in ("input_prefix", "input_suffix", "prompt")
        )
        gap = Gap(prefix, suffix, prompt, _files(body))
        fields = {field: body[own] for own, field in SAME.items() if body.get(own) is not None}
        if fields.get("seed") == -1:  # any
            del fields["seed"]
        most = take_int(body, "n_predict", -2, 2**31 - 1)
        return TextRequest(
            model=body.get("model"),
            sampling=take_sampling(
                {**fields, "n": 1},
                # Below 0: as far as the context reaches.
                max_tokens=None if most is None or most < 0 else most,
            ),
            queue=take_queue({name: body.get(name) for name in QUEUED}),
            stream=take_bool(body, "stream"),
            prompt_name="input_prefix",
            limit_name="n_predict",
            names=_NAMES,
            gaps=(gap,),
            ignored=tuple(ignored),
        )

    def answer(
        self, call: GenerationCall, ids: EventIds | None, past: Sequence[RecalledChoice | None]
    ) -> ItemAnswer:
        return _Answer(call, _Writer(call.card.id))


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong_type(name, "a string")
    return value or ""


def _files(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    value = body.get("input_extra")
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("input_extra", "a list")
    if len(value) > MAX_FILES:
        raise invalid(f"input_extra takes at most {MAX_FILES} files", "input_extra")
    files = []
    for i, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else None
        name = (item.get("filename") if isinstance(item, dict) else None) or "tmp"
        if not isinstance(text, str) or not isinstance(name, str):
            raise wrong_type(f"input_extra[{i}]", "an object with the strings text and filename")
        files.append((name, text))
    return files


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
    await generate(context, exchange, InfillRequest(context))


ROUTES = (
    Route(
        PATH,
        infill,
        post=Operation(
            "What stands between two texts", QUEUES, INFILL, ("content", "stop"), STREAMS
        ),
    ),
)
