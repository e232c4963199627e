"""The three JSON forms of log-probabilities: of chats, of completions, and of prompt_logprobs."""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from engine.batch import TokenLogprobs
from engine.text.tokenizer import Tokenizer

_NUMBERED = "token_id:{}"
# JSON has no -inf; OpenAI's API uses this value instead.
FLOOR = -9999.0


class ScoredToken(Struct, gc=False):
    """A token of a chat's answer with its log-probability, and its alternatives, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[ScoredToken] | UnsetType" = UNSET


class ScoredTexts(Struct, gc=False):
    """The tokens of a completion with their log-probabilities, in the form of OpenAI's
    completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, after: "ScoredTexts") -> "ScoredTexts":
        return ScoredTexts(
            self.tokens + after.tokens,
            self.token_logprobs + after.token_logprobs,
            self.top_logprobs + after.top_logprobs,
            self.text_offset + after.text_offset,
        )


class RankedToken(Struct, gc=False):
    """A token's log-probability and rank at a position of the prompt, in vLLM's form."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


def chat_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprobs], *, by_id: bool = False
) -> list[ScoredToken]:
    """Return `choices[].logprobs.content` of a chat: each token with its bytes and its
    alternatives, best first.

    by_id: whether tokens are named ``token_id:N``, as with vLLM's `return_tokens_as_token_ids`.
    """
    scored = []
    for item in items:
        token = _scored(tokenizer, item.token_id, item.logprob, by_id)
        token.top_logprobs = [
            _scored(tokenizer, id, logprob, by_id)
            for id, logprob in zip(item.top_ids, item.top_logprobs, strict=True)
        ]
        scored.append(token)
    return scored


def _scored(tokenizer: Tokenizer, token: int, logprob: float, by_id: bool) -> ScoredToken:
    raw = tokenizer.token_bytes(token)
    name = _NUMBERED.format(token) if by_id else raw.decode("utf-8", "replace")
    return ScoredToken(name, max(logprob, FLOOR), list(raw))


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    items: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    *,
    by_id: bool = False,
) -> ScoredTexts:
    """Return `choices[].logprobs` of a completion. An item None, for a prompt's first token,
    results in nulls.

    top_logprobs always contains the token itself, even if it is not among the most likely. Tokens
    that are not whole characters are written ``bytes:\\xNN``, so that they have different names.
    offsets: position of each token's text, in characters. by_id: see `chat_logprobs`.
    """
    return ScoredTexts(
        [_name(tokenizer, token, by_id) for token in token_ids],
        [None if i is None else max(i.logprob, FLOOR) for i in items],
        [None if i is None else _top(tokenizer, i, by_id) for i in items],
        list(offsets),
    )


def _top(tokenizer: Tokenizer, item: TokenLogprobs, by_id: bool) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for token, logprob in zip(item.top_ids, item.top_logprobs, strict=True):
        alternatives.setdefault(_name(tokenizer, token, by_id), max(logprob, FLOOR))
    alternatives.setdefault(_name(tokenizer, item.token_id, by_id), max(item.logprob, FLOOR))
    return alternatives


def _name(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    if by_id:
        return _NUMBERED.format(token)
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """Return {token id: RankedToken} for each prompt position; None for the first."""
    listed: PromptLogprobs = []
    for item in items:
        if item is None:
            listed.append(None)
            continue
        best = zip(item.top_ids, item.top_logprobs, strict=True)
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(best, 1)]
        if item.token_id not in item.top_ids:
            ranked.append((item.token_id, item.logprob, item.rank))
        listed.append(
            {
                str(token): RankedToken(max(logprob, FLOOR), rank, tokenizer.token_text(token))
                for token, logprob, rank in ranked
            }
        )
    return listed


def own_logprobs(items: Sequence[TokenLogprobs | None]) -> list[float | None]:
    """Return the log-probability of each token, without alternatives; None for a prompt's first
    token."""
    return [None if item is None else max(item.logprob, FLOOR) for item in items]


def with_first(items: list[TokenLogprobs | None], length: int) -> list[TokenLogprobs | None]:
    """Return one item for each of `length` prompt tokens; a missing first item is None."""
    missing: list[TokenLogprobs | None] = [None] * (length - len(items))
    return missing + items[:length]
