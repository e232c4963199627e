"""INFILL: the body of llama.cpp's /infill."""

from typing import Annotated

from msgspec import Meta, Struct

from deployments.api.fields.body import struct_body
from deployments.api.fields.common import UINT31, Queued
from deployments.api.fields.generation import Stop, sampled

MAX_FILES = 256
_NO_ZERO = {"not": {"const": 0}}


class InfillFile(Struct, kw_only=True, gc=False):
    """A file that the gap's file goes with."""

    text: str
    filename: str | None = None


_File = Annotated[
    InfillFile,
    Meta(
        extra={
            "expected": "an object with the strings text and filename",
            "code": "invalid_type",
            "whole": True,
        }
    ),
]
_Files = Annotated[list[_File], Meta(max_length=MAX_FILES, extra={"items": "files"})]


class Infill(Queued, kw_only=True):
    """The body of /infill. n_predict below 0: as far as the context reaches."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    prompt: str | None = None
    input_extra: _Files | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=UINT31, extra_json_schema=_NO_ZERO)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    stop: Stop = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    repeat_penalty: Annotated[float, sampled("repetition_penalty")] | None = None


INFILL = struct_body(Infill)
