"""StepGrammars: fills the masks of a step's constrained choices on several threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance as llg
import llguidance.numpy as llg_numpy
import numpy as np

from engine.structured.constraint import Constraint
from engine.structured.token_limits import Masks

HostMemory = Callable[[int, int], Masks]  # (rows, words) -> masks with undefined content

Filled = tuple[Masks, dict[int, str]]


def host_memory(rows: int, words: int) -> Masks:
    return np.empty((rows, words), np.int32)


class StepGrammars:
    """The threads that fill masks. One thread calls the methods, for one step at a time."""

    def __init__(self, num_threads: int, steps: int = 1, memory: HostMemory = host_memory) -> None:
        """Set up the threads.

        num_threads: the number of threads.
        steps: number of steps whose masks may be in use at once, including those being filled.
        memory: allocates masks, which are reused until a step needs more rows.
        """
        self._threads = max(1, num_threads)
        self._pool: Any = None
        self._beside = ThreadPoolExecutor(1, "masks")
        self._memory = memory
        self._buffers: list[Masks | None] = [None] * steps

    def begin(self, constraints: Sequence[Constraint]) -> Callable[[], Filled]:
        """Begin to fill masks on other threads; return a function that waits for the masks.

        The constraints must not change until that function has returned. Call the function once; it
        returns two values.
        - masks [n, ceil(vocab / 32)] int32: bit t % 32 of word t // 32 is 1 if token t may come
          next. Masks are valid until `begin` was called `steps` more times.
        - {index of a constraint that allows no token: "code: message"}.
        """
        masks = self._room(len(constraints), -(-constraints[0].vocabulary.num_tokens // 32))
        # Constraints that share a lexer are adjacent, so that the same thread fills their masks.
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
        # Waits until the thread of `fill` has acquired the GIL, which it releases when grammars
        # run. Otherwise `fill` would begin only after this thread has computed its part.
        entered.acquire()

        def wait() -> Filled:
            filling.result()
            return finish()

        return wait

    def fill(self, constraints: Sequence[Constraint]) -> Filled:
        """Fill masks, wait for them, and return what the function of `begin` returns."""
        return self.begin(constraints)()

    def _room(self, rows: int, words: int) -> Masks:
        """Return the least recently used mask buffer, [rows, words], with undefined content."""
        buffer = self._buffers.pop(0)
        if buffer is None or len(buffer) < rows or buffer.shape[1] != words:
            buffer = self._memory(1 << (rows - 1).bit_length(), words)
        self._buffers.append(buffer)
        return buffer[:rows]
