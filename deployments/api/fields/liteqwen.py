"""CHAT and STOP: the bodies of liteqwen's routes."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from deployments.api.bounds import ROLES
from deployments.api.fields.body import expects, struct_body
from deployments.api.fields.chat import MESSAGE
from deployments.api.fields.common import UINT31, Queued, TokenIds
from deployments.api.fields.generation import of_schema, sampled
from deployments.api.fields.schema import TEXT, either, list_of, one_of
from deployments.api.http.exchange import MAX_REQUEST_ID

MAX_HISTORY = 500
_ID = {"pattern": rf"^[A-Za-z0-9._:\-]{{1,{MAX_REQUEST_ID}}}$"}
_RequestId = Annotated[str, Meta(max_length=MAX_REQUEST_ID, extra_json_schema=_ID)]
_Count = Annotated[int, Meta(ge=1, le=UINT31)]


class GenKwargs(Struct, kw_only=True, gc=False):
    """The options of generating the answer."""

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


class Stop(Struct, kw_only=True, gc=False):
    """The body of /stop_generate."""

    request_id: _RequestId


CHAT = struct_body(LiteqwenChat)
STOP = struct_body(Stop)
