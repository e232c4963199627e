"""CHAT: the body of Ollama's /api/chat."""

from collections.abc import Mapping

from deployments.api.fields.generation import (
    QUEUED,
    SAMPLING,
    TOOLS,
    TOP_LOGPROBS,
)
from deployments.api.fields.schema import (
    BOOLEAN,
    NOTHING,
    OBJECT,
    TEXT,
    Body,
    Schema,
    either,
    integer,
    list_of,
    one_of,
    openai_body,
    record,
)
from deployments.api.generation.messages import MAX_MESSAGE_CALLS, MAX_MESSAGES

# options -> the field of a chat that says the same.
SAME: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}
THINK: Mapping[bool | str, str] = {
    True: "medium",
    False: "none",
    **{effort: effort for effort in ("low", "medium", "high", "max")},
}
ROLES = ("system", "user", "assistant", "tool")
# About how Ollama loads a model.
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
_BODY = openai_body(
    {
        "model": TEXT,
        "messages": list_of(_MESSAGE, 1, MAX_MESSAGES),
        "tools": TOOLS,
        "format": either(one_of("json", ""), OBJECT),
        "options": record(
            {},
            num_predict=integer(-2, 2**31 - 1),
            **{name: SAMPLING[same] for name, same in SAME.items()},
        ),
        "stream": BOOLEAN,
        "think": one_of(*THINK, ""),
        "logprobs": BOOLEAN,
        "top_logprobs": TOP_LOGPROBS,
        **QUEUED,
    },
    ("model", "messages"),
)
CHAT = Body(_BODY.taken, _BODY.required, _BODY.ignored | IGNORED, refused=_BODY.refused)
OPTIONS: Mapping[str, Schema] = _BODY.taken["options"]["properties"]
