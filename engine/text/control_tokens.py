"""ControlTokens: the control tokens that clients must not be able to type in a message."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken

from engine.text.chat_template import ChatTemplate

_TAG = re.compile(r"</?\w+>")  # tags that people also write, such as <think>


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer.

    text: a pattern that matches a control token.
    span: a pattern that matches a control token and the spaces that the token absorbs.
    reach: number of characters of the longest control token.
    """

    ids: frozenset[int]
    text: re.Pattern[str]
    span: re.Pattern[str]
    reach: int

    @classmethod
    def of(cls, added: Mapping[int, AddedToken], template: ChatTemplate | None) -> "ControlTokens":
        """Return the control tokens of a tokenizer: special tokens, and others that the template
        writes.

        The tokens that delimit messages of DeepSeek and Cohere are not special. A tag such as
        <tool_call> is a control token only if the template writes it around a plain message.

        added: id -> added token.
        """
        source = "" if template is None else "".join(template.sources.values())
        turns = "" if template is None else template.plain_turns()

        def controls(token: AddedToken) -> bool:
            text = token.content
            if token.special or not text.strip():
                return token.special
            return text in turns or (text in source and _TAG.fullmatch(text) is None)

        controls_by_id = {i: token for i, token in added.items() if controls(token)}
        # Longest first, so that the longest match wins.
        tokens = sorted(controls_by_id.values(), key=lambda token: -len(token.content))
        spans = [
            (r"\s*" if t.lstrip else "") + re.escape(t.content) + (r"\s*" if t.rstrip else "")
            for t in tokens
        ]
        return cls(
            frozenset(controls_by_id),
            re.compile("|".join(re.escape(token.content) for token in tokens) or "(?!)"),
            re.compile("|".join(spans) or "(?!)"),
            len(tokens[0].content) if tokens else 0,
        )
