"""DraftGraphs: CUDA graphs of a drafter's passes, for certain numbers of proposals.

The drafts of a step are computed by a chain of graphs:

 begin   which drafts of the step were accepted
         -> one launch without a graph copies the drafter's rows of the last accepted tokens
 draw    logits and the sampling of the first draft
 extend  the pass over the newest draft, then logits and sampling of the next; once for each draft
         after the first

The number of the draft is a tensor that `extend` increments. Proposals are padded to the next size
with the padding row, whose KV is not written. Data passes from one graph to the next in buffers
outside of the graphs' memory. The graphs have a separate memory pool, so that they do not overwrite
data between a step's graphs.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.runner.drafts.passes import DraftPasses
from engine.sampling.sampler import SamplePlan
from engine.speculation.settings import MAX_TOKENS

Replay = Callable[[], None]
# captures what a function launches as a CUDA graph
Record = Callable[[Callable[[], None]], Replay]

# proposals of the largest graph; with more, launching without a graph is not the bottleneck
_MOST = 256

_OBJECTS = 128 << 20  # estimated bytes of graph objects and small buffers


def chain_sizes(most: int) -> list[int]:
    """Return the numbers of proposals to capture: powers of two up to `most`, but at most 256."""
    return [1 << power for power in range(min(most, _MOST).bit_length())]


def graph_bytes(most: int, vocab: int, itemsize: int) -> int:
    """Return the bytes to reserve for a drafter's CUDA graphs.

    The largest graph's logits are counted twice: EAGLE-3 copies those of its own vocabulary to
    those of the whole one. Sampling makes no copy. Graph objects and small buffers are estimated.

    most: the maximum number of proposals of a step.
    itemsize: bytes of a logit, in the model's dtype.
    """
    return _OBJECTS + 2 * max(chain_sizes(most)) * vocab * itemsize


class Recorder:
    """A recorder of CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, launch: Callable[[], None]) -> Replay:
        """Capture what a function launches; return the function that replays it."""
        graph = torch.cuda.CUDAGraph()
        # Checks only this thread's calls, as another thread may be loading an adapter.
        with (
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            launch()
        self._pool = graph.pool()
        return graph.replay


class DraftGraphs:
    """The graphs of a drafter's chains, captured at start."""

    def __init__(
        self, passes: DraftPasses, sizes: Sequence[int], like: Tensor, longest: int, record: Record
    ) -> None:
        """Set up the graphs; `capture` captures them.

        sizes: the numbers of proposals, ascending.
        like: output rows of the drafter [any, width], for their width and dtype.
        longest: the maximum number of tokens of a request.
        """
        self._passes, self._longest, self._record = passes, longest, record
        self._sizes, most = list(sizes), max(sizes)
        device = like.device

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self._tables = {size: numbers(7, size) for size in sizes}
        self._index, self._last, self._drawn = numbers(most), numbers(most), numbers(most)
        self._number, self._drafts = numbers(1), numbers(most, MAX_TOKENS)
        self._states = torch.zeros(most, like.shape[1], dtype=like.dtype, device=device)
        self._begins: dict[int, Replay] = {}
        # The key is (number of proposals, whether some row has a temperature).
        self._draws: dict[tuple[int, bool], Replay] = {}
        self._extends: dict[tuple[int, bool], Replay] = {}

    def capture(self) -> None:
        """Capture all sizes, largest first, so that smaller graphs reuse the memory of larger
        ones."""
        for size, sampled in self._each():
            if size not in self._begins:
                self._begins[size] = self._record(lambda size=size: self._begin(size))  # type: ignore[misc]
            key = size, sampled
            self._draws[key] = self._record(lambda key=key: self._draw(*key))  # type: ignore[misc]
            self._extends[key] = self._record(lambda key=key: self._extend(*key))  # type: ignore[misc]

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch all passes that will be captured, without capturing, to compile their kernels."""
        for size, sampled in self._each():
            self._begin(size)
            self._draw(size, sampled)
            self._extend(size, sampled)

    def _each(self) -> list[tuple[int, bool]]:
        """Fill the tables with padding, and return the keys of the graphs, largest first.

        A key is (number of proposals, whether some row has a temperature).
        """
        for table in self._tables.values():
            table.copy_(torch.from_numpy(self._padded(np.zeros((7, 0), np.int64), table.shape[1])))
        return [(size, sampled) for size in reversed(self._sizes) for sampled in (False, True)]

    def _padded(self, table: np.ndarray, size: int) -> np.ndarray:
        padded = np.zeros((7, size), np.int64)
        padded[0], padded[6] = self._passes.rows.pad_row, -1
        padded[:, : table.shape[1]] = table
        return padded

    def _begin(self, size: int) -> None:
        index, last = self._passes.accept(self._tables[size], MAX_TOKENS)
        self._index[:size].copy_(index)
        self._last[:size].copy_(last)
        self._number.fill_(1)

    def _draw(self, size: int, sampled: bool) -> None:
        passes, table, number = self._passes, self._tables[size], self._number
        plan = passes.sampler.simple_plan(not sampled)
        drawn = passes.draw(table, self._last[:size], self._states[:size], number, plan)
        self._drawn[:size].copy_(drawn)
        self._drafts[:size].scatter_(1, (number - 1).expand(size, 1), drawn[:, None])
        passes.drafts[table[0]] = self._drafts[:size]

    def _extend(self, size: int, sampled: bool) -> None:
        self._number.add_(1)
        states = self._states[:size]
        rows = self._passes.extend(
            self._tables[size],
            self._last[:size],
            self._drawn[:size],
            states,
            self._number,
            self._longest,
        )
        states.copy_(rows)
        self._draw(size, sampled)

    def propose(
        self, table: np.ndarray, rows: Tensor, plan: SamplePlan, most: int
    ) -> Tensor | None:
        """Compute the drafts of proposals [n, most] int64 with graphs; None if no graph fits.

        table: the table of proposals, see `DraftPasses`.
        rows: the drafter's rows of the step's tokens.
        """
        count = table.shape[1]
        at = bisect_left(self._sizes, count)
        if at == len(self._sizes) or not plan.simple or not self._begins:
            return None
        size, passes = self._sizes[at], self._passes
        key = size, plan.sampled
        host = torch.from_numpy(self._padded(table, size))
        host = host.pin_memory() if passes.cuda else host
        self._tables[size].copy_(host, non_blocking=True)
        passes.sampler.flush()
        self._begins[size]()
        torch.index_select(rows, 0, self._index[:size], out=self._states[:size])
        self._draws[key]()
        for _ in range(1, most):
            self._extends[key]()
        return self._drafts[:count, :most].clone()
