"""TokenLimits: a request's lists of allowed and bad tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Masks = NDArray[np.int32]


class TokenLimits:
    """The limits on the tokens of one output by `allowed_token_ids` and bad words.

    Every token has to be passed to `accept_token` in order, also tokens that another replica has
    sampled. A mask is [num_words] int32: bit t % 32 of word t // 32 is 1 if token t may come next.
    """

    __slots__ = ("_allowed", "_bad", "_endings", "_longest", "_tail")

    def __init__(
        self, allowed: Sequence[int], bad: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """Build the bit masks of allowed and forbidden tokens.

        allowed: ids that may be sampled; () = all.
        bad: non-empty sequences of ids that must never appear complete.
        num_tokens: the size of the vocabulary.
        """
        num_words = -(-num_tokens // 32)
        self._allowed: Masks | None = _mask(allowed, num_words) if allowed else None
        single = [ids[0] for ids in bad if len(ids) == 1]
        self._bad: Masks | None = _mask(single, num_words) if single else None
        # all tokens of a bad sequence but the last -> the last tokens of such sequences, which are
        # forbidden next
        self._endings: dict[tuple[int, ...], list[int]] = {}
        for ids in bad:
            if len(ids) > 1:
                self._endings.setdefault(tuple(ids[:-1]), []).append(ids[-1])
        self._longest = max(map(len, self._endings), default=0)
        self._tail: tuple[int, ...] = ()

    def accept_token(self, token: int) -> None:
        """Record the next token of the output, on which bad words depend."""
        if self._longest:
            self._tail = (*self._tail, token)[-self._longest :]

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        word, bit = token >> 5, 1 << (token & 31)
        if self._allowed is not None and not int(self._allowed.view(np.uint32)[word]) & bit:
            return False
        if self._bad is not None and int(self._bad.view(np.uint32)[word]) & bit:
            return False
        return all(
            token not in self._endings.get(self._tail[-length:], ())
            for length in range(1, len(self._tail) + 1)
        )

    def limit(self, mask: Masks) -> bool:
        """Clear the bits of tokens that may not come next; return whether any bit is left."""
        if self._allowed is not None:
            mask &= self._allowed
        if self._bad is not None:
            mask &= ~self._bad
        bits = mask.view(np.uint32)
        for length in range(1, len(self._tail) + 1):
            for token in self._endings.get(self._tail[-length:], ()):
                bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return bool(mask.any())


def _mask(ids: Sequence[int], num_words: int) -> Masks:
    """Return a mask in which the bits of the given ids are 1."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class AnyToken:
    """A matcher with llguidance's interface that allows all tokens, for requests without a
    grammar."""

    def deep_copy(self) -> "AnyToken":
        """Return itself, as it has no state."""
        return self

    @staticmethod
    def consume_token(token: int) -> bool:
        """Return True: every token fits."""
        return True

    @staticmethod
    def try_consume_tokens(token_ids: list[int]) -> int:
        """Return the number of tokens, as all fit."""
        return len(token_ids)

    @staticmethod
    def is_accepting() -> bool:
        """Return whether the text may end here, which is always so."""
        return True

    @staticmethod
    def is_stopped() -> bool:
        """Return whether the text must end here, which is never so."""
        return False

    @staticmethod
    def is_error() -> bool:
        """Return whether the grammar has failed, which is never so."""
        return False

    @staticmethod
    def stop_reason() -> str:
        """Return "", as there is no reason why the text must end."""
        return ""
