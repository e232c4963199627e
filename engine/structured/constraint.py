"""Constraint: what one choice's next token may be, by a grammar and by lists of tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.structured.compiler import Use, Vocabulary, is_too_much
from engine.structured.thinking import ThinkingBudget, ThinkingCount
from engine.structured.token_limits import AnyToken, Masks, TokenLimits

_ALL = np.int32(-1)
TOO_COMPLEX = "grammar_too_complex: a step of the grammar is too expensive"
NOTHING_LEFT = "no_token_left: the grammar, allowed_token_ids and bad_words leave no token"


class Constraint:
    """A function of the output's ids alone: `take` them in order, wherever they were sampled.

    stop_ids: of the request, beside the model's end tokens. They end it, and are legal, only where
    the grammar is satisfied; elsewhere they are text. min_tokens, ignore_eos: forbid ends, unless
    the grammar leaves nothing else.
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
        """matcher: its own, before the first token. use: what
        `Compiler.matcher` gave with it."""
        self._thinking: ThinkingCount | None = None
        if thinking is not None:
            self._thinking = ThinkingCount(thinking, vocabulary.text_of)
        self._matcher = matcher
        self._limits = limits
        self.vocabulary = vocabulary
        self._stops = frozenset(stop_ids) - vocabulary.end_ids
        self._left = min_tokens  # tokens until it may end
        self._free_ends = not ignore_eos
        self.use = use
        self.sampled_in = 0  # the last launched step that samples a token for it

    @classmethod
    def without_grammar(
        cls,
        num_tokens: int,
        stop_ids: Iterable[int],
        min_tokens: int,
        limits: TokenLimits,
        output: Sequence[int],
    ) -> "Constraint":
        """Make a constraint of lists of tokens alone.

        num_tokens: the size of the vocabulary.
        stop_ids: the tokens that end the request, the model's end tokens included.
        output: the tokens that were sampled before.
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
        """Take what was sampled elsewhere. False: it does not fit the grammar."""
        self._left -= len(token_ids)
        for token in token_ids:
            self._observe(token)
        return not token_ids or self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)

    @property
    def complete(self) -> bool:
        """Nothing may follow but an end token."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def ends_with(self, token: int) -> bool:
        """The sampled token ends the output and is no part of its text."""
        if token in self.vocabulary.end_ids:
            return True
        return token in self._stops and self._left <= 0 and bool(self._matcher.is_accepting())

    def take(self, token: int) -> bool:
        """The next token of the text; True: it completes it.

        Raises ValueError, "code: message": the grammar forbids it, or it is too much for one step.
        """
        self._left -= 1
        self._observe(token)
        if not self._matcher.consume_token(token):
            if is_too_much(self._matcher.get_error()):
                raise ValueError(TOO_COMPLEX)
            raise ValueError(f"engine_error: token {token} is not in the grammar")
        return self.complete

    def _observe(self, token: int) -> None:
        if self._thinking is not None:
            self._thinking.take(token)
        if self._limits is not None:
            self._limits.take(token)

    def finish_mask(self, mask: Masks) -> str:
        """Write ends, lists and errors into a mask [num_words] int32, which the matcher has filled
        if there is a grammar. Return why there is no mask, or ""."""
        if not self.grammatical:
            mask[:] = _ALL
        why = self._finish(mask)
        if not why and self._limits is not None and not self._limits.limit(mask):
            mask[:] = _ALL  # the mask will not be read
            return NOTHING_LEFT
        return why

    def _finish(self, mask: Masks) -> str:
        matcher = self._matcher
        if matcher.is_error() or matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex"):
            mask[:] = _ALL  # the mask will not be read
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
    """Forbid these tokens, if that leaves any."""
    allowed = mask.copy()
    bits = allowed.view(np.uint32)
    for token in ids:
        if token >> 5 < len(bits):
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    if allowed.any():
        mask[:] = allowed
