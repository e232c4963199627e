"""EMBEDDINGS, RERANK, SCORE, CLASSIFY and others: bodies of the routes that ask for vectors of
texts."""

from collections.abc import Mapping

from deployments.api.fields.generation import CHAT_MESSAGES, QUEUED, TEMPLATE, TRUNCATION
from deployments.api.fields.schema import (
    BOOLEAN,
    FILLED,
    NOTHING,
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
BYTES, BYTES_ONLY = "bytes", "bytes_only"
FORMATS = ("float", "base64", BYTES, BYTES_ONLY)
DTYPES = ("float32", "float16", "bfloat16")
ENDIANNESS = ("native", "little", "big")
DIRECTIONS = ("Left", "Right")  # the same in TEI's words
MAX_PARTS = 1024  # of one text
TASKS = ("embed", "classify")
# Names of one field: whether a sigmoid, a softmax or a division by the length ends the numbers.
ACTIVATION = ("use_activation", "activation", "softmax", "normalize")
UINT31 = 2**31 - 1

_COMMON: Mapping[str, Schema] = {
    **QUEUED,
    "model": TEXT,
    "truncate": BOOLEAN,
    **TRUNCATION,
    "add_special_tokens": BOOLEAN,
    "use_activation": BOOLEAN,
}
_ACTIVATED = dict.fromkeys(("activation", "softmax"), BOOLEAN)
TEXTS: tuple[Schema, ...] = (
    FILLED,
    list_of(TOKEN, 1),
    list_of(FILLED, 1, MAX_TEXTS),
    list_of(list_of(TOKEN, 1), 1, MAX_TEXTS),
)
_INPUT: Mapping[str, Schema] = {
    "input": either(*TEXTS),
    "prompt_name": text(MAX_PROMPT_NAME),
    "messages": CHAT_MESSAGES,
    **TEMPLATE,
}
_WRITTEN: Mapping[str, Schema] = {
    "encoding_format": one_of(*FORMATS),
    "embed_dtype": one_of(*DTYPES),
    "endianness": one_of(*ENDIANNESS),
    "dimensions": integer(1, UINT31),
}
_PARTS = list_of(record({"type": one_of("text"), "text": TEXT}), 1, MAX_PARTS)
_ONE = either(TEXT, record({"text": TEXT}), record({"content": either(TEXT, _PARTS)}))
_SOME = either(_ONE, list_of(_ONE, 1, MAX_TEXTS))
_RERANKED: Mapping[str, Schema] = {
    **_COMMON,
    **_ACTIVATED,
    "query": either(FILLED, record({"text": FILLED})),
    "documents": list_of(_ONE, 1, MAX_TEXTS),
    "top_n": integer(1, UINT31),
    "return_documents": BOOLEAN,
    "max_tokens_per_doc": integer(1, UINT31),
}
_TEI: Mapping[str, Schema] = {"raw_scores": BOOLEAN, "truncation_direction": one_of(*DIRECTIONS)}

EMBEDDINGS = openai_body({**_COMMON, **_INPUT, **_WRITTEN, "normalize": BOOLEAN})
POOLING = openai_body(
    {
        **_COMMON,
        **_INPUT,
        **_WRITTEN,
        **_ACTIVATED,
        "normalize": BOOLEAN,
        "task": one_of(*TASKS),
    }
)
RERANK = openai_body(_RERANKED, ("query", "documents"))
# Of /rerank alone: `texts` in the place of `documents`.
RERANK_TEXTS = openai_body(
    {**_RERANKED, **_TEI, "texts": list_of(_ONE, 1, MAX_TEXTS), "return_text": BOOLEAN}, ("query",)
)
# Names of the two sides of a score.
FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "items", "data_2")
SCORE = openai_body(
    {**_COMMON, **_ACTIVATED, **dict.fromkeys((*FIRST, *SECOND), _SOME)},
    refused={"label_token_ids": NOTHING},
)
CLASSIFY = openai_body({**_COMMON, **_ACTIVATED, **_INPUT})

COHERE_TYPES = ("float", "base64", "binary", "ubinary")
COHERE_CUTS = ("NONE", "START", "END")
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
COHERE_EMBED = openai_body(
    {
        **QUEUED,
        "model": TEXT,
        "texts": list_of(FILLED, 1, MAX_TEXTS),
        "inputs": list_of(record({"content": either(TEXT, _PARTS)}), 1, MAX_TEXTS),
        "input_type": one_of(*INPUT_TYPES),
        "embedding_types": list_of(one_of(*COHERE_TYPES), 1),
        "output_dimension": integer(1, UINT31),
        "max_tokens": integer(1, UINT31),
        "truncate": one_of(*COHERE_CUTS),
    },
    refused={"images": NOTHING},
)
_TEI_INPUT: Mapping[str, Schema] = {**_COMMON, **_TEI}
TEI_EMBED = openai_body(
    {
        **_TEI_INPUT,
        "inputs": either(*TEXTS),
        "normalize": BOOLEAN,
        "prompt_name": text(MAX_PROMPT_NAME),
        "dimensions": integer(1, UINT31),
    },
    ("inputs",),
)
_PAIR = list_of(TEXT, 1, 2)  # one text, or two
TEI_PREDICT = openai_body(
    {
        **_TEI_INPUT,
        "inputs": either(FILLED, _PAIR, list_of(_PAIR, 1, MAX_TEXTS)),
    },
    ("inputs",),
)
