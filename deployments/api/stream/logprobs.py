"""Logprobs in the three forms that clients know: chat, completions, and prompt_logprobs."""

from collections.abc import Sequence

from deployments.api.http.json_body import JsonObject
from engine.batch import TokenLogprobs
from engine.text.tokenizer import Tokenizer

_NUMBERED = "token_id:{}"
_FLOOR = -9999.0  # JSON has no -inf; clients of OpenAI know this value


def chat_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprobs], *, by_id: bool = False
) -> list[JsonObject]:
    """choices[].logprobs.content: each token with its alternatives, best first, and their bytes.

    by_id: a token's name is ``token_id:N``, as vLLM's `return_tokens_as_token_ids` has it.
    """
    return [
        {
            **_entry(tokenizer, item.token_id, item.logprob, by_id),
            "top_logprobs": [
                _entry(tokenizer, token, logprob, by_id)
                for token, logprob in zip(item.top_ids, item.top_logprobs, strict=True)
            ],
        }
        for item in items
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float, by_id: bool) -> JsonObject:
    raw = tokenizer.token_bytes(token)
    return {
        "token": _NUMBERED.format(token) if by_id else raw.decode("utf-8", "replace"),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(raw),
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    items: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    *,
    by_id: bool = False,
) -> JsonObject:
    """choices[].logprobs of completions. None (the first token of a prompt) gives nulls.

    top_logprobs always has the token itself, also where it is not among the most likely. Tokens
    that are no whole characters are written ``bytes:\\xNN``, so that two of them stay apart.
    by_id: as of `chat_logprobs`.
    """
    return {
        "tokens": [_name(tokenizer, token, by_id) for token in token_ids],
        "token_logprobs": [None if i is None else max(i.logprob, _FLOOR) for i in items],
        "top_logprobs": [None if i is None else _top(tokenizer, i, by_id) for i in items],
        "text_offset": list(offsets),
    }


def _top(tokenizer: Tokenizer, item: TokenLogprobs, by_id: bool) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for token, logprob in zip(item.top_ids, item.top_logprobs, strict=True):
        alternatives.setdefault(_name(tokenizer, token, by_id), max(logprob, _FLOOR))
    alternatives.setdefault(_name(tokenizer, item.token_id, by_id), max(item.logprob, _FLOOR))
    return alternatives


def _name(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    if by_id:
        return _NUMBERED.format(token)
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprobs | None]
) -> list[JsonObject | None]:
    """One item a prompt token: token id -> {logprob, rank, decoded_token}; null for the first."""
    listed: list[JsonObject | None] = []
    for item in items:
        if item is None:
            listed.append(None)
            continue
        entries = {
            str(token): {
                "logprob": max(logprob, _FLOOR),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for rank, (token, logprob) in enumerate(
                zip(item.top_ids, item.top_logprobs, strict=True), 1
            )
        }
        entries.setdefault(
            str(item.token_id),
            {
                "logprob": max(item.logprob, _FLOOR),
                "rank": item.rank,
                "decoded_token": tokenizer.token_text(item.token_id),
            },
        )
        listed.append(entries)
    return listed


def with_first(items: list[TokenLogprobs | None], length: int) -> list[TokenLogprobs | None]:
    """One item for each of length prompt tokens; the first, without prediction, may be missing."""
    missing: list[TokenLogprobs | None] = [None] * (length - len(items))
    return missing + items[:length]
