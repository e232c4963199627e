"""CHAT and STOP: the bodies of liteqwen's routes."""

from collections.abc import Mapping

from deployments.api.bounds import ROLES
from deployments.api.fields.generation import CHAT as OPENAI_CHAT
from deployments.api.fields.generation import CHAT_MESSAGES
from deployments.api.fields.schema import (
    BOOLEAN,
    TEXT,
    TOKEN,
    Schema,
    either,
    integer,
    list_of,
    one_of,
    openai_body,
    record,
)
from deployments.api.http.exchange import MAX_REQUEST_ID

MAX_HISTORY = 500
KWARGS: Mapping[str, Schema] = {
    **{name: OPENAI_CHAT.taken[name] for name in ("temperature", "top_p", "top_k", "seed")},
    "repetition_penalty": OPENAI_CHAT.taken["repetition_penalty"],
    "topk": OPENAI_CHAT.taken["top_k"],
    "max_length": integer(1, 2**31 - 1),
    "max_new_tokens": integer(1, 2**31 - 1),
    "prefix_token_ids": list_of(TOKEN),
    "prefix_text": TEXT,
    "return_logits": BOOLEAN,
    "adapter_name": TEXT,
    "skip_lora": BOOLEAN,
}
_ROLE = one_of(*(role for role in ROLES if role != "tool"))
_ID: Schema = {"type": "string", "pattern": rf"^[A-Za-z0-9._:\-]{{1,{MAX_REQUEST_ID}}}$"}
CHAT = openai_body(
    {
        "query": TEXT,
        "role": _ROLE,
        "history": either(
            list_of(CHAT_MESSAGES["items"], 0, MAX_HISTORY),
            list_of(list_of(TEXT, 2, 2), 0, MAX_HISTORY),
        ),
        "request_id": _ID,
        "gen_kwargs": record({}, **KWARGS),
        "model": TEXT,
        **{name: OPENAI_CHAT.taken[name] for name in ("priority", "deadline_seconds")},
    },
    ("query",),
)
STOP = openai_body({"request_id": _ID}, ("request_id",))
