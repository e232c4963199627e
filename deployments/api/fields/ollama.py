"""CHAT, GENERATE, EMBED and the others: bodies of Ollama's routes."""

from collections.abc import Mapping

from msgspec import Struct

from deployments.api.bounds import MAX_MESSAGE_CALLS, MAX_MESSAGES
from deployments.api.fields.body import struct_body
from deployments.api.fields.generation import (
    CHAT as OPENAI_CHAT,
)
from deployments.api.fields.generation import (
    TOOLS,
)
from deployments.api.fields.pooled import TEXTS, PoolingBody, PoolingOptions, Positive, TextInput
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
_OPTIONS: Schema = record(
    {},
    num_predict=integer(-2, 2**31 - 1),
    **{name: OPENAI_CHAT.taken[same] for name, same in SAME.items()},
)
OPTIONS: Mapping[str, Schema] = _OPTIONS["properties"]
_ANSWERED: Mapping[str, Schema] = {
    "model": TEXT,
    "format": either(one_of("json", ""), OBJECT),
    "options": _OPTIONS,
    "stream": BOOLEAN,
    "think": one_of(*THINK, ""),
    "logprobs": BOOLEAN,
    **{name: OPENAI_CHAT.taken[name] for name in ("top_logprobs", "priority", "deadline_seconds")},
}


def _body(
    taken: Mapping[str, Schema],
    ignored: frozenset[str],
    *refused: str,
    required: tuple[str, ...] = (),
) -> Body:
    made = openai_body(taken, required, dict.fromkeys(refused, NOTHING))
    return Body(made.taken, made.required, made.ignored | ignored, refused=made.refused)


CHAT = _body({**_ANSWERED, "messages": list_of(_MESSAGE, 0, MAX_MESSAGES), "tools": TOOLS}, IGNORED)
# What a generation cannot be asked for here.
REFUSED: Mapping[str, str] = {
    "context": "ids of earlier turns are not taken; send the conversation to /api/chat",
    "template": "the model's own chat template is used, or none with raw",
    "images": "the models served here take text only",
}
GENERATE = _body(
    {**_ANSWERED, "prompt": TEXT, "suffix": TEXT, "system": TEXT, "raw": BOOLEAN},
    IGNORED,
    *REFUSED,
)


class Show(Struct, kw_only=True):
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
