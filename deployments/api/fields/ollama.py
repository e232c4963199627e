"""CHAT, GENERATE, EMBED and the others: bodies of Ollama's routes."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from deployments.api.bounds import MAX_MESSAGE_CALLS, MAX_MESSAGES
from deployments.api.fields.body import struct_body
from deployments.api.fields.common import UINT31, Queued
from deployments.api.fields.generation import Stop, TopLogprobs, of_schema, sampled
from deployments.api.fields.pooled import TEXTS, PoolingBody, PoolingOptions, Positive, TextInput
from deployments.api.fields.schema import (
    NOTHING,
    OBJECT,
    TEXT,
    either,
    list_of,
    one_of,
    record,
)
from deployments.api.fields.tools import TOOLS

THINK: Mapping[bool | str, str] = {
    True: "medium",
    False: "none",
    **{effort: effort for effort in ("low", "medium", "high", "max")},
}
ROLES = ("system", "user", "assistant", "tool")
# Fields about how Ollama loads a model.
IGNORED = frozenset({"keep_alive", "truncate", "shift"})

_CALL = record({"function": record({"name": TEXT}, arguments=OBJECT)}, id=TEXT)
_MESSAGE = record(
    {"role": one_of(*ROLES)},
    content=TEXT,
    thinking=TEXT,
    images=NOTHING,
    tool_calls=list_of(_CALL, 0, MAX_MESSAGE_CALLS),
    tool_name=TEXT,
    tool_call_id=TEXT,
)
# Fields of a generation that are refused.
REFUSED: Mapping[str, tuple[str, str]] = {
    "context": (
        "context: ids of earlier turns are not taken; send the conversation to /api/chat",
        "not_supported",
    ),
    "template": (
        "template: the model's own chat template is used, or none with raw",
        "not_supported",
    ),
    "images": ("images: the models served here take text only", "modality_not_supported"),
}


class Options(Struct, kw_only=True, gc=False):
    """The options of a model's answer. num_predict below 0: as far as the context reaches."""

    num_predict: Annotated[int, Meta(ge=-2, le=UINT31)] | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    stop: Stop = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    repeat_penalty: Annotated[float, sampled("repetition_penalty")] | None = None


class OllamaGeneration(Queued, kw_only=True):
    """The fields that the bodies of both generating routes share."""

    format: Annotated[Any, of_schema(either(one_of("json", ""), OBJECT))] = None
    options: Options | None = None
    stream: bool | None = None
    think: Annotated[Any, of_schema(one_of(*THINK, ""))] = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class OllamaChat(OllamaGeneration, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[Any, of_schema(list_of(_MESSAGE, 0, MAX_MESSAGES))] = None
    tools: Annotated[Any, of_schema(TOOLS)] = None


class OllamaGenerate(OllamaGeneration, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


CHAT = struct_body(OllamaChat, ignored=IGNORED)
GENERATE = struct_body(
    OllamaGenerate,
    ignored=IGNORED,
    refused=dict.fromkeys(REFUSED, NOTHING),
    rejected=REFUSED,
)


class Show(Struct, kw_only=True, gc=False):
    """The body of /api/show: a model by its name, or by that of older clients."""

    model: str | None = None
    name: str | None = None


class Pull(Show, kw_only=True):
    """The body of /api/pull."""

    stream: bool | None = None


SHOW = struct_body(
    Show, ignored=frozenset({"verbose", "system", "template", "options"}), openai=False
)
PULL = struct_body(Pull, ignored=frozenset({"insecure", "username", "password"}), openai=False)


class OllamaInput(TextInput):
    """A TextInput that may be empty."""

    SCHEMA = either(TEXT, one_of([]), *TEXTS[1:])
    EMPTY = True


class OllamaEmbed(PoolingBody, kw_only=True):
    """The body of /api/embed."""

    input: OllamaInput
    truncate: bool | None = None
    dimensions: Positive | None = None

    def pooling_options(self) -> PoolingOptions:
        """Long texts are cut unless the request says otherwise."""
        return PoolingOptions(truncate=self.truncate is not False)


class OllamaEmbeddings(PoolingBody, kw_only=True):
    """The body of /api/embeddings."""

    prompt: str

    def pooling_options(self) -> PoolingOptions:
        """Long texts are cut."""
        return PoolingOptions(truncate=True)


_OF_OLLAMA = frozenset({"keep_alive", "options"})
EMBED = struct_body(OllamaEmbed, ignored=_OF_OLLAMA)
EMBEDDINGS = struct_body(OllamaEmbeddings, ignored=_OF_OLLAMA)
