"""EMBEDDINGS, RERANK, SCORE and CLASSIFY: bodies of the routes that ask for vectors of texts."""

from collections.abc import Mapping

from deployments.api.fields.generation import QUEUED
from deployments.api.fields.schema import (
    BOOLEAN,
    FILLED,
    TEXT,
    TOKEN,
    Schema,
    either,
    integer,
    list_of,
    one_of,
    openai_body,
    record,
    text,
)

MAX_TEXTS = 2048  # OpenAI's
MAX_PROMPT_NAME = 256  # bytes
FORMATS = ("float", "base64")
UINT31 = 2**31 - 1

_COMMON: Mapping[str, Schema] = {
    **QUEUED,
    "model": TEXT,
    "truncate": BOOLEAN,
    "truncate_prompt_tokens": either(one_of(-1), integer(1, UINT31)),
    "add_special_tokens": BOOLEAN,
}
TEXTS: tuple[Schema, ...] = (
    FILLED,
    list_of(TOKEN, 1),
    list_of(FILLED, 1, MAX_TEXTS),
    list_of(list_of(TOKEN, 1), 1, MAX_TEXTS),
)
_INPUT: Mapping[str, Schema] = {
    "input": either(*TEXTS),
    "prompt_name": text(MAX_PROMPT_NAME),
}
_ONE = either(TEXT, record({"text": TEXT}))
_SOME = either(_ONE, list_of(_ONE, 1, MAX_TEXTS))

EMBEDDINGS = openai_body(
    {
        **_COMMON,
        **_INPUT,
        "encoding_format": one_of(*FORMATS),
        "dimensions": integer(1, UINT31),
    },
    ("input",),
)
RERANK = openai_body(
    {
        **_COMMON,
        "query": either(FILLED, record({"text": FILLED})),
        "documents": list_of(_ONE, 1, MAX_TEXTS),
        "top_n": integer(1, UINT31),
        "return_documents": BOOLEAN,
        "max_tokens_per_doc": integer(1, UINT31),
    },
    ("query", "documents"),
)
SCORE = openai_body({**_COMMON, "text_1": _SOME, "text_2": _SOME}, ("text_1", "text_2"))
CLASSIFY = openai_body({**_COMMON, **_INPUT}, ("input",))
