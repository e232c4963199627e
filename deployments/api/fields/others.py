"""The bodies of the routes for infilling, tokenising, adapters, batches and files, and of
liteqwen's routes."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_BATCH_METADATA, MAX_BATCH_WINDOW, ROLES, BatchEndpoint
from deployments.api.fields.body import Typed, expects, of_schema, struct_body, words
from deployments.api.fields.chat import MESSAGE, Messages
from deployments.api.fields.generation import (
    UINT31,
    Queued,
    ReasoningEffort,
    Stop,
    TokenIds,
    sampled,
)
from deployments.api.fields.schema import (
    FILLED,
    OBJECT,
    TEXT,
    Body,
    Schema,
    either,
    integer,
    list_of,
    one_of,
    text,
)
from deployments.api.fields.tools import TOOLS
from deployments.api.http.exchange import MAX_REQUEST_ID
from engine.errors import InvalidRequest

MAX_MODEL_NAME = 128  # bytes
# The limit is in bytes; whether the name is valid is checked later.
MAX_ADAPTER_NAME = 256
MAX_ADAPTER_PATH = 4096


class Tokenize(Struct, kw_only=True, gc=False):
    """The body of /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[Any, of_schema(TOOLS)] = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Struct, kw_only=True, gc=False):
    """The body of /detokenize."""

    tokens: TokenIds
    model: str | None = None
    skip_special_tokens: bool | None = None


TOKENIZE = struct_body(Tokenize)
DETOKENIZE = struct_body(Detokenize)
_AdapterName = Annotated[str, Meta(max_length=MAX_ADAPTER_NAME)]
_AdapterPath = Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_PATH)]
_LoraName = Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_NAME, extra={"needed": True})]
_LoraPath = Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_PATH, extra={"needed": True})]


class Adapter(Struct, kw_only=True, gc=False):
    """The body of POST /v1/adapters."""

    name: _AdapterName
    path: _AdapterPath | None = None
    model: _AdapterName | None = None


class LoadLora(Struct, kw_only=True, gc=False):
    """The body of /v1/load_lora_adapter."""

    lora_name: _LoraName
    lora_path: _LoraPath
    base_model_name: _AdapterName | None = None
    load_inplace: bool | None = None


class UnloadLora(Struct, kw_only=True, gc=False):
    """The body of /v1/unload_lora_adapter."""

    lora_name: _LoraName


ADAPTER = struct_body(Adapter)
LOAD_LORA = struct_body(LoadLora)
UNLOAD_LORA = struct_body(UnloadLora)
# The body of POST /v1/models: a section `models.NAME`, which the configuration checks in full.
MODEL = Body(
    {
        "name": text(MAX_MODEL_NAME),
        "model": FILLED,
        "revision": TEXT,
        "chat_template": TEXT,
        "aliases": list_of(TEXT, 0, 64),
        "replicas": integer(0, 4096),
        **dict.fromkeys(("engine", "pools", "adapters", "scaling", "limits"), OBJECT),
    },
    ("name",),
)


def _needed_text(value: Any) -> InvalidRequest | None:
    if isinstance(value, str):
        return None
    code = "missing_field" if value is None else "invalid_type"
    return InvalidRequest(" must be a string", code=code)


_NEEDED = Meta(extra={"fault": _needed_text})
WINDOW = "hours or days, such as 24h or 7d, 30d at most"
_EXPIRES = f'{{"anchor": "created_at", "seconds": 3600 to {MAX_BATCH_WINDOW}}}'
_METADATA = f"up to {MAX_BATCH_METADATA} strings by name"


class ExpiresAfter(Struct, gc=False):
    """The time after which a batch's output files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=MAX_BATCH_WINDOW)]


_ExpiresAfter = Annotated[ExpiresAfter, expects(_EXPIRES, "invalid_value", whole=True)]
EXPIRES_AFTER: Typed[ExpiresAfter] = Typed(_ExpiresAfter)


class Batch(Struct, kw_only=True, gc=False):
    """The body of POST /v1/batches. completion_window: `services/batches.py` checks its length."""

    input_file_id: Annotated[str, _NEEDED]
    endpoint: Annotated[BatchEndpoint, _NEEDED, words(BatchEndpoint, "one of ", ", ")]
    completion_window: Annotated[str, _NEEDED, of_schema({"pattern": r"^\d{1,3}[hd]$"})]
    output_expires_after: _ExpiresAfter | None = None
    metadata: (
        Annotated[
            dict[str, Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_BATCH_METADATA),
            expects(_METADATA, "invalid_value", whole=True),
        ]
        | None
    ) = None


BATCH = struct_body(Batch, openai=False)
# The fields of an upload to /v1/files, as multipart/form-data.
FILE: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": one_of("batch"),
        "expires_after[anchor]": one_of("created_at"),
        "expires_after[seconds]": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "required": ["file", "purpose"],
}


MAX_FILES = 256
_NO_ZERO = {"not": {"const": 0}}


class InfillFile(Struct, kw_only=True, gc=False):
    """Another file of the project, shown to the model before the file with the gap."""

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
    """The body of /infill. n_predict: maximum output tokens; negative: the context's limit."""

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


MAX_HISTORY = 500
_ID = {"pattern": rf"^[A-Za-z0-9._:\-]{{1,{MAX_REQUEST_ID}}}$"}
_RequestId = Annotated[str, Meta(max_length=MAX_REQUEST_ID, extra_json_schema=_ID)]
_Count = Annotated[int, Meta(ge=1, le=UINT31)]


class GenKwargs(Struct, kw_only=True, gc=False):
    """The field `gen_kwargs`: options of the generation."""

    temperature: Annotated[float, sampled("temperature")] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    topk: Annotated[int, sampled("top_k", ge=-1)] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    repetition_penalty: Annotated[float, sampled("repetition_penalty")] | None = None
    max_length: _Count | None = None
    max_new_tokens: _Count | None = None
    prefix_token_ids: TokenIds | None = None
    prefix_text: str | None = None
    return_logits: bool | None = None
    adapter_name: Annotated[str, Meta(max_length=1024)] | None = None
    skip_lora: bool | None = None


class LiteqwenChat(Queued, kw_only=True):
    """The body of /chat and /stream_chat_post."""

    query: Annotated[str, expects("a string")]
    role: Annotated[Any, of_schema(one_of(*(role for role in ROLES if role != "tool")))] = None
    history: Annotated[
        Any,
        of_schema(
            either(
                list_of(MESSAGE.schema, 0, MAX_HISTORY),
                list_of(list_of(TEXT, 2, 2), 0, MAX_HISTORY),
            )
        ),
    ] = None
    request_id: _RequestId | None = None
    gen_kwargs: GenKwargs | None = None


class LiteqwenStop(Struct, kw_only=True, gc=False):
    """The body of /stop_generate."""

    request_id: _RequestId


LITEQWEN_CHAT = struct_body(LiteqwenChat)
LITEQWEN_STOP = struct_body(LiteqwenStop)
