"""Constraint: limits the next token of one choice by a grammar and by lists of tokens."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import numpy as np

from engine.structured.compiler import Use, Vocabulary, is_too_much
from engine.structured.thinking import ThinkingBudget, ThinkingCount
from engine.structured.token_limits import AnyToken, Masks, TokenLimits

_ALL = np.int32(-1)
TOO_COMPLEX = "grammar_too_complex: a step of the grammar is too expensive"
NOTHING_LEFT = "no_token_left: the grammar, allowed_token_ids and bad_words leave no token"


class Constraint:
    """The constraint of one choice, whose state depends only on the output's ids.

    Every sampled token has to be passed to `accept_token` in order, also tokens that another
    replica has sampled.

    stop_ids: end tokens of the request, in addition to the model's. They end the output only where
        the grammar is satisfied; elsewhere they are ordinary tokens.
    min_tokens, ignore_eos: forbid end tokens, unless the grammar allows nothing else.
    """

    __slots__ = (
        *("_free_ends", "_left", "_limits", "_matcher", "_stops", "_thinking"),
        *("sampled_in", "use", "vocabulary"),
    )

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        thinking: ThinkingBudget | None = None,
        use: Use | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        """Create the constraint of a choice.

        matcher: a matcher for this choice alone, in its initial state.
        use: the lease that `Compiler.matcher` returned with the matcher.
        thinking, limits: the thinking budget, and the lists of allowed and bad tokens; None = none.
        """
        self._thinking: ThinkingCount | None = None
        if thinking is not None:
            self._thinking = ThinkingCount(thinking, vocabulary.text_of)
        self._matcher = matcher
        self._limits = limits
        self.vocabulary = vocabulary
        self._stops = frozenset(stop_ids) - vocabulary.end_ids
        self._left = min_tokens  # number of further tokens before the output may end
        self._free_ends = not ignore_eos
        self.use = use
        self.sampled_in = 0  # the last launched step that samples a token of the choice

    @classmethod
    def without_grammar(
        cls,
        num_tokens: int,
        stop_ids: Iterable[int],
        min_tokens: int,
        limits: TokenLimits,
        output: Sequence[int],
    ) -> "Constraint":
        """Create a constraint with only allowed and bad tokens, without a grammar.

        num_tokens: the size of the vocabulary.
        stop_ids: the tokens that end the request, the model's end tokens included.
        output: the tokens that were already sampled.
        """
        vocabulary = Vocabulary(None, num_tokens, ())
        constraint = cls(AnyToken(), vocabulary, stop_ids, min_tokens, limits=limits)
        constraint.resume(output)
        return constraint

    @property
    def grammatical(self) -> bool:
        """Whether the choice has a grammar."""
        return not isinstance(self._matcher, AnyToken)

    def resume(self, token_ids: Sequence[int]) -> bool:
        """Advance by the tokens that an earlier replica sampled.

        Returns whether the grammar allows all of them.
        """
        self._left -= len(token_ids)
        for token in token_ids:
            self._observe(token)
        return not token_ids or self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def ends_with(self, token: int) -> bool:
        """Whether the sampled token ends the output without being part of its text."""
        if token in self.vocabulary.end_ids:
            return True
        return token in self._stops and self._left <= 0 and bool(self._matcher.is_accepting())

    def accept_token(self, token: int) -> bool:
        """Advance by the next token; return whether the text is complete.

        Raises ValueError, "code: message", if the grammar forbids the token or a step is too
        expensive.
        """
        self._left -= 1
        self._observe(token)
        if not self._matcher.consume_token(token):
            if is_too_much(self._matcher.get_error()):
                raise ValueError(TOO_COMPLEX)
            raise ValueError(f"engine_error: token {token} is not in the grammar")
        return self.complete

    def after(self, token: int) -> "Constraint | None":
        """Return the constraint after one more token; None if the text then ends.

        None also if the grammar or the token lists forbid the token, or the grammar is too complex.
        The thinking budget and min_tokens are not checked. The constraint itself does not change.
        """
        if self.ends_with(token) or not (self._limits is None or self._limits.allows(token)):
            return None
        later = copy(self)
        later._matcher = self._matcher.deep_copy()
        later._thinking, later._limits = copy(self._thinking), copy(self._limits)
        try:
            return None if later.accept_token(token) else later
        except ValueError:
            return None

    def forced(self) -> list[int]:
        """Return the next tokens that the grammar determines, except the last of them.

        The last one is left out, as a longer token that continues with free text may fit too.
        """
        text = self._matcher.compute_ff_bytes() if self.grammatical else b""
        if len(text) < 2:
            return []
        return list(self.vocabulary.tokens.tokenize_bytes(text)[:-1])

    def _observe(self, token: int) -> None:
        if self._thinking is not None:
            self._thinking.accept_token(token)
        if self._limits is not None:
            self._limits.accept_token(token)

    def finish_mask(self, mask: Masks) -> str:
        """Apply end tokens, and allowed and bad tokens, to the matcher's mask [num_words] int32.

        Without a grammar this fills the whole mask. Returns why no token is allowed; "" = some are.
        """
        if not self.grammatical:
            mask[:] = _ALL
        why = self._finish(mask)
        if not why and self._limits is not None and not self._limits.limit(mask):
            mask[:] = _ALL  # the mask is not used
            return NOTHING_LEFT
        return why

    def _finish(self, mask: Masks) -> str:
        matcher = self._matcher
        if matcher.is_error() or matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex"):
            mask[:] = _ALL  # the mask is not used
            return TOO_COMPLEX
        if self._thinking is not None and (token := self._thinking.forced) is not None:
            bits = mask.view(np.uint32)
            if int(bits[token >> 5]) >> (token & 31) & 1:
                mask[:] = 0
                _set(mask, (token,))
            return ""
        if (self._stops or self._left > 0 or not self._free_ends) and matcher.is_accepting():
            ends = self.vocabulary.end_ids
            if self._left <= 0:
                _set(mask, self._stops)
                if self._free_ends:
                    return ""
                _clear_unless_all(mask, ends)
            else:
                _clear_unless_all(mask, ends | self._stops)
        return ""

    @property
    def matcher(self) -> Any:
        return self._matcher


def _set(mask: Masks, ids: Iterable[int]) -> None:
    bits = mask.view(np.uint32)
    for token in ids:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def _clear_unless_all(mask: Masks, ids: Iterable[int]) -> None:
    """Clear the mask's bits of the given ids, unless no other bit is set."""
    allowed = mask.copy()
    bits = allowed.view(np.uint32)
    for token in ids:
        if token >> 5 < len(bits):
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    if allowed.any():
        mask[:] = allowed
