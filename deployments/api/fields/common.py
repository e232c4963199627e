"""Queued: the fields that bodies of several routes share."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.bounds import MAX_DEADLINE
from deployments.api.caller import LEAST_PRIORITY
from deployments.api.fields.schema import TOKEN

UINT31 = 2**31 - 1
Side = Literal["left", "right"]  # the side of a text that is cut
# Ids are checked against the vocabulary where they are read.
TokenIds = Annotated[
    list[Any], Meta(extra_json_schema={"items": TOKEN}, extra={"expected": "a list of token ids"})
]
TokenCut = Annotated[int, Meta(ge=-1, le=UINT31, extra_json_schema={"not": {"const": 0}})]


class Queued(Struct, kw_only=True, gc=False):
    """The fields that every request for a model has."""

    model: str | None = None
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=UINT31)] | None = None
    deadline_seconds: Annotated[float, Meta(gt=0, le=MAX_DEADLINE)] | None = None


# llama.cpp's and Ollama's names -> the fields of SamplingParams that they set.
LLAMA_SAMPLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
