"""DecodeGraphs: one CUDA graph a batch size for a whole decode step.

A graph holds assembly, forward, logits, sampling and the write of the next token. Launching it
costs the host microseconds whatever the number of layers. Unused entries of the next larger size
point at the padding row: they write no key and their token goes nowhere.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.sampling.sampler import SamplePlan

if TYPE_CHECKING:
    from engine.runner.model_runner import ModelRunner


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then by 8 to 256, then by 32; max_num_seqs always is the last.

    Padding wastes few rows where rows are dear: at most 7 up to 256, one in eight above.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 1, 32)]
    sizes = [size for size in sizes if size <= max_num_seqs]
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


class DecodeGraphs:
    """Graphs for batches of decodes whose sampling is greedy or temperature only.

    Two variants a size: "greedy" (all rows greedy) and "sampled" (some have a temperature). The
    second is captured when first needed, because many deployments never use one of them.
    """

    def __init__(self, runner: "ModelRunner", sizes: Sequence[int]) -> None:
        self._runner = runner
        self._sizes = sorted(sizes)
        self._graphs: dict[tuple[int, Any], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def can_run(self, count: int, plan: SamplePlan) -> bool:
        return plan.simple and count <= self._sizes[-1]

    def capture(self) -> None:
        """Record the greedy variants, largest first so that smaller ones reuse its memory."""
        greedy = self._runner.sampler.simple_plan(greedy=True)
        for size in reversed(self._sizes):
            self._runner.model.tune(size)
            self._capture(size, greedy)

    def forget(self) -> None:
        """Each is captured again when it is first needed."""
        self._graphs.clear()
        self._pool = None

    @torch.inference_mode()
    def run(self, batch: Batch, plan: SamplePlan) -> Tensor:
        """Upload the batch and replay.

        Returns the tokens, [size] int64 (padded), valid until the next run.
        """
        count = len(batch.rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        key = (size, plan.greedy)
        if key not in self._graphs:
            self._capture(size, plan)
        self._runner.inputs.upload(batch, size)
        self._runner.sampler.flush()
        graph, tokens = self._graphs[key]
        graph.replay()
        return tokens

    @torch.inference_mode()
    def _capture(self, size: int, plan: SamplePlan) -> None:
        # Point every entry at the padding row, so that recording and warming touch no request.
        inputs, runner = self._runner.inputs, self._runner
        inputs.rows[:size].fill_(runner.rows.pad_row)
        inputs.starts[:size].zero_()
        inputs.query_start[: size + 1].copy_(torch.arange(size + 1, dtype=torch.int32))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size, plan)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tokens = self._step(size, plan)
        self._pool = graph.pool()
        self._graphs[size, plan.greedy] = (graph, tokens)

    def _step(self, size: int, plan: SamplePlan) -> Tensor:
        runner = self._runner
        max_kv_len = runner.rows.tokens.shape[1] - 1
        token_ids, meta = runner.inputs.lay_out(size, size, size, 1, max_kv_len)
        runner.kernels.prepare(meta, runner._num_heads, runner.kv.layers[0][0])
        hidden = runner.model.forward(token_ids, meta, runner.kv.layers)
        rows = runner.inputs.rows[:size].long()
        return runner.sample(hidden, rows, meta.kv_len.long(), plan).tokens
