"""INFILL: the body of llama.cpp's /infill."""

from collections.abc import Mapping

from deployments.api.fields.generation import CHAT
from deployments.api.fields.schema import (
    BOOLEAN,
    TEXT,
    either,
    integer,
    list_of,
    one_of,
    openai_body,
    record,
)

MAX_FILES = 256
_QUEUED = ("priority", "deadline_seconds")
# Fields -> those of a completion that say the same.
SAME: Mapping[str, str] = {
    **{name: name for name in ("model", "temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", *_QUEUED)},
    "repeat_penalty": "repetition_penalty",
}
INFILL = openai_body(
    {
        "input_prefix": TEXT,
        "input_suffix": TEXT,
        "prompt": TEXT,
        "input_extra": list_of(record({"text": TEXT}, filename=TEXT), 0, MAX_FILES),
        "n_predict": either(one_of(-2, -1), integer(1, 2**31 - 1)),
        "stream": BOOLEAN,
        **{own: CHAT.taken[name] for own, name in SAME.items()},
    },
)
