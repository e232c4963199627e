"""StepGrammars: what a step asks of its constrained choices, on several threads."""

from collections.abc import Callable, Sequence
from typing import Any

import llguidance as llg
import llguidance.numpy as llg_numpy
import numpy as np

from engine.structured.constraint import Constraint, Masks

HostMemory = Callable[[int, int], Masks]  # rows, words -> masks of any content

# Choices from which on threads are worth waking: a mask takes some 100 us, a token 4 to 20.
_PARALLEL_MASKS, _PARALLEL_TOKENS = 8, 32


def host_memory(rows: int, words: int) -> Masks:
    return np.empty((rows, words), np.int32)


class StepGrammars:
    """Tokens are taken, and masks filled. One thread calls it at a time."""

    def __init__(self, num_threads: int, steps: int = 1, memory: HostMemory = host_memory) -> None:
        """steps: whose masks may be in use at once, those being filled included. memory: is kept,
        and asked for more when a step has more choices than any before."""
        self._threads = max(1, num_threads)
        self._pool: Any = None
        self._memory = memory
        self._buffers: list[Masks | None] = [None] * steps

    def take(self, constraints: Sequence[Constraint], tokens: Sequence[int]) -> list[bool | str]:
        """`Constraint.take` of each, with the next token of its text. Its error is returned."""
        if self._in_turn(len(constraints) < _PARALLEL_TOKENS):
            fits = [
                one.matcher.consume_token(token)
                for one, token in zip(constraints, tokens, strict=True)
            ]
        else:
            told = [(one.matcher, token) for one, token in zip(constraints, tokens, strict=True)]
            fits = llg_numpy.consume_token_par(self._pool, told)
        found: list[bool | str] = []
        for one, token, fit in zip(constraints, tokens, fits, strict=True):
            try:
                found.append(one.taken(token, fit))
            except ValueError as error:
                found.append(str(error))
        return found

    def fill(self, constraints: Sequence[Constraint]) -> tuple[Masks, dict[int, str]]:
        """[n, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is 1 if token t may come next.
        Valid until `steps` later calls. And index -> why that one can go no further: "code:
        message"."""
        masks = self._room(len(constraints), -(-constraints[0].vocabulary.num_tokens // 32))
        if self._in_turn(len(constraints) < _PARALLEL_MASKS):
            for row, one in enumerate(constraints):
                llg_numpy.fill_next_token_bitmask(one.matcher, masks, row)
        else:
            rows = [(one.matcher, row) for row, one in enumerate(constraints)]
            llg_numpy.fill_next_token_bitmask_par(self._pool, rows, masks)
        failed = {
            row: why for row, one in enumerate(constraints) if (why := one.finish_mask(masks[row]))
        }
        return masks, failed

    def _in_turn(self, few: bool) -> bool:
        """Not by several threads, which are there otherwise."""
        if few or self._threads == 1:
            return True
        if self._pool is None:
            self._pool = llg.LLExecutor(num_threads=self._threads)
        return False

    def _room(self, rows: int, words: int) -> Masks:
        """The buffer that has not been used for longest: [rows, words], every word to be
        written."""
        buffer = self._buffers.pop(0)
        if buffer is None or len(buffer) < rows or buffer.shape[1] != words:
            buffer = self._memory(1 << (rows - 1).bit_length(), words)
        self._buffers.append(buffer)
        return buffer[:rows]
