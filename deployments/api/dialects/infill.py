"""POST /infill: llama.cpp's request for the text between a prefix and a suffix."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.api.context import ApiContext
from deployments.api.fields.generation import LLAMA_SAMPLING
from deployments.api.fields.others import INFILL
from deployments.api.generate import DialectRequest, answers
from deployments.api.generation.call import GenerationCall
from deployments.api.generation.request import TextRequest
from deployments.api.generation.sampling import take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import ApiError
from deployments.api.http.json_body import JsonObject
from deployments.api.output.step_parser import Event
from deployments.api.route import QUEUES, STREAMS, RouteTable
from deployments.api.stream.item_answer import ItemAnswer, ItemWriter, Usage, Wire
from deployments.api.stream.logprobs import ScoredToken
from deployments.api.stream.replay import Resumption
from engine.text.infill import Gap

_NAMES: Mapping[str, str] = {
    **{field: own for own, field in LLAMA_SAMPLING.items()},
    "prompt": "input_prefix",
    "suffix": "input_suffix",
    "max_tokens": "n_predict",
}


class InfillRequest(DialectRequest):
    """The dialect of /infill: reads a request as a fill-in-the-middle completion."""

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> TextRequest:
        fields = INFILL.read(body, ignored, strict=context.options.strict)
        files = [(file.filename or "tmp", file.text) for file in fields.input_extra or ()]
        prefix, suffix = fields.input_prefix or "", fields.input_suffix or ""
        if fields.seed == -1:  # -1 means a random seed
            fields.seed = None
        most = fields.n_predict
        return TextRequest(
            model=fields.model,
            # A negative n_predict means that only the context limits the output.
            sampling=take_sampling(
                fields, LLAMA_SAMPLING, max_tokens=None if most is None or most < 0 else most
            ),
            queue=take_queue(fields, None),
            stream=bool(fields.stream),
            names=_NAMES,
            gaps=(Gap(prefix, suffix, fields.prompt or "", files),),
        )

    def answer(self, call: GenerationCall, resumed: Resumption) -> ItemAnswer:
        return ItemAnswer(call, _Writer(call.card.id))


class _Writer(ItemWriter):
    """The writer of an answer to /infill in llama.cpp's format, streamed or whole."""

    def __init__(self, model: str) -> None:
        self.wire = Wire(lambda _, fields: b"data: %b\n\n" % msgspec.json.encode(fields))
        self._model = model
        self._began = time.monotonic()
        self._first = 0.0
        self._text: list[str] = []
        self._end: JsonObject = {}

    def take_event(self, event: Event, logprobs: list[ScoredToken]) -> None:
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
        self.wire.push("", error.object())

    def whole(self) -> JsonObject:
        return {"index": 0, "content": "".join(self._text), "stop": True, **self._end}


ROUTES = RouteTable(reads=QUEUES)
ROUTES.post("/infill", "What stands between two texts", INFILL, ("content", "stop"), STREAMS)(
    answers(InfillRequest)
)
