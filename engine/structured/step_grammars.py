"""StepGrammars: the masks of a step's constrained choices, filled on several threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance as llg
import llguidance.numpy as llg_numpy
import numpy as np

from engine.structured.constraint import Constraint
from engine.structured.token_limits import Masks

HostMemory = Callable[[int, int], Masks]  # rows, words -> masks of any content

Filled = tuple[Masks, dict[int, str]]


def host_memory(rows: int, words: int) -> Masks:
    return np.empty((rows, words), np.int32)


class StepGrammars:
    """One thread calls it, and finishes what it has begun before it begins more."""

    def __init__(self, num_threads: int, steps: int = 1, memory: HostMemory = host_memory) -> None:
        """steps: whose masks may be in use at once, those being filled included. memory: is kept,
        and asked for more when a step has more choices than any before."""
        self._threads = max(1, num_threads)
        self._pool: Any = None
        self._beside = ThreadPoolExecutor(1, "masks")
        self._memory = memory
        self._buffers: list[Masks | None] = [None] * steps

    def begin(self, constraints: Sequence[Constraint]) -> Callable[[], Filled]:
        """Fill masks beside the caller, who leaves the constraints alone meanwhile. What it returns
        is to be called once: it waits for

        - [n, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is 1 if token t may come next.
          Valid until `steps` later calls.
        - index -> why that one can go no further: "code: message".
        """
        masks = self._room(len(constraints), -(-constraints[0].vocabulary.num_tokens // 32))
        # Side by side what one thread should do, as it shares a lexer.
        lexers = [
            0 if constraint.use is None else constraint.use.number for constraint in constraints
        ]
        order = sorted(range(len(constraints)), key=lexers.__getitem__)
        rows = [(constraints[row].matcher, row) for row in order if constraints[row].grammatical]

        def finish() -> Filled:
            failed = {
                row: why
                for row, constraint in enumerate(constraints)
                if (why := constraint.finish_mask(masks[row]))
            }
            return masks, failed

        if not rows:
            return finish
        if self._pool is None:
            self._pool = llg.LLExecutor(num_threads=self._threads)
        entered = threading.Lock()
        entered.acquire()

        def fill() -> None:
            entered.release()
            llg_numpy.fill_next_token_bitmask_par(self._pool, rows, masks)

        filling = self._beside.submit(fill)
        # Until that thread has the interpreter, which it gives back where the grammars begin. It
        # would wait for it as long as this thread computes.
        entered.acquire()

        def wait() -> Filled:
            filling.result()
            return finish()

        return wait

    def fill(self, constraints: Sequence[Constraint]) -> Filled:
        """Fill the masks of a step and wait for them; see `begin`."""
        return self.begin(constraints)()

    def _room(self, rows: int, words: int) -> Masks:
        """The buffer that has not been used for longest: [rows, words], every word to be
        written."""
        buffer = self._buffers.pop(0)
        if buffer is None or len(buffer) < rows or buffer.shape[1] != words:
            buffer = self._memory(1 << (rows - 1).bit_length(), words)
        self._buffers.append(buffer)
        return buffer[:rows]
