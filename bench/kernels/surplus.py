"""The cost of prefill attention's programs without work, as a share of a step of llama-8b.

    python -m bench.kernels.surplus --out bench/results

The host launches an upper bound of blocks of queries (`AttentionMeta.most_blocks`), and blocks
without queries end at once. Each step is launched unchanged, and with thousands of additional empty
blocks. The difference gives the time of an empty block. This time multiplied by the number of
launched blocks without work is the maximum that an exact grid would save. It is reported as a share
of the attention's time, and of a layer's time (this attention and the layer's matmuls). The rest of
a step is left out, so the true share is smaller. The run takes half a minute on one GPU, mostly for
compilation.

Cases are kernels of `kernels.attention.candidates` times steps; `in a graph` is a step that a CUDA
graph replays, whose grid must be large enough for any lengths.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.ablations.lengths import sharegpt
from bench.kernels.measure import Timer, time_us
from bench.kernels.sizes import LLAMA, Sizes, meta_of
from bench.report.result_file import write
from kernels.attention.inputs import AttentionInputs
from kernels.metadata import AttentionMeta

EXTRA = 8192  # empty blocks that are added, for each KV head
Kernel = Callable[[AttentionInputs, AttentionMeta, Tensor], object]


class Step(NamedTuple):
    """The sequences of a step: decodes and prompts' chunks."""

    decodes: int  # number of decodes
    chunks: list[int]  # tokens of each prompt's chunk
    before: int = 0  # tokens of each chunk's request that earlier steps computed
    graph: bool = False  # whether a graph replays the step


STEPS = {
    "one prompt of 8,192": Step(0, [8192]),
    "16 prompts of 512": Step(0, [512] * 16),
    "72 prompts, ShareGPT's lengths": Step(0, [prompt for prompt, _ in sharegpt(72)]),
    "256 decodes, a chunk of 512": Step(256, [512], 1024),
    "1,000 decodes, 8 chunks of 64": Step(1000, [64] * 8, 1024),
    "256 decodes, a chunk of 512, in a graph": Step(256, [512], 1024, graph=True),
}


def layout_of(s: Sizes, step: Step) -> tuple[AttentionMeta, int]:
    """Return a step's metadata and the number of KV blocks.

    Decodes have one key each, as prefill attention does not read their keys.
    """
    queries = [1] * step.decodes + step.chunks
    keys = [1] * step.decodes + [step.before + chunk for chunk in step.chunks]
    meta, num_blocks = meta_of(s, keys, queries, step.decodes, 16)
    starts = None if step.graph else meta.query_start.tolist()
    counts = s.ints([step.decodes, len(queries)])
    return replace(meta, query_start_host=starts, counts=counts), num_blocks


def with_blocks(call: Callable[[], object], extra: int) -> tuple[Callable[[], object], list[int]]:
    """Return (a call that launches `extra` more empty blocks, a list).

    Each call sets the list to [queries of a block, number of blocks without the extra ones].
    """
    seen: list[int] = []
    most_blocks = AttentionMeta.most_blocks

    def more(self: AttentionMeta, num_tokens: int, queries: int, *, decodes: bool) -> int:
        blocks = most_blocks(self, num_tokens, queries, decodes=decodes)
        seen[:] = [queries, blocks]
        return blocks + extra

    def patched() -> object:
        with patch.object(AttentionMeta, "most_blocks", more):
            return call()

    return patched, seen


def price(s: Sizes, step: Step, kernel: Kernel, timer: Timer, extra: int = EXTRA) -> dict[str, Any]:
    """Return the times of a kernel's launch for a step, and the time of its empty blocks."""
    meta, num_blocks = layout_of(s, step)
    tokens = step.decodes + sum(step.chunks)
    q = s.random(tokens, s.heads, s.dim)
    shape = (num_blocks, s.kv_heads, 16, s.dim)
    calls = []
    for _ in range(2):
        inputs = AttentionInputs(q, s.random(*shape), s.random(*shape), s.dim**-0.5)
        out = q.new_empty(tokens, s.heads * s.dim)
        calls.append(partial(kernel, inputs, meta, out))
    times = []
    for empty in (0, extra):
        patched = [with_blocks(call, empty) for call in calls]
        times.append(timer([call for call, _ in patched]))
    queries, launched = patched[0][1]
    with_work = sum(-(-chunk // queries) for chunk in step.chunks)
    empty_us = max(0.0, times[1] - times[0]) / extra
    return {
        "with_work": with_work,
        "launched": launched,
        "attention_us": round(times[0], 2),
        "surplus_us": round(empty_us * (launched - with_work), 3),
        "empty_ns": round(empty_us * 1e3, 2),
    }


def matmuls_us(s: Sizes, tokens: int, timer: Timer) -> float:
    """Return the microseconds of a layer's matmuls."""
    widths = [
        (s.hidden, (s.heads + 2 * s.kv_heads) * s.dim),
        (s.heads * s.dim, s.hidden),
        (s.hidden, 2 * s.inner),
        (s.inner, s.hidden),
    ]
    total = 0.0
    for width, outputs in widths:
        x, weight = s.random(tokens, width), s.random(outputs, width)
        total += timer([partial(torch.nn.functional.linear, x, weight)])
    return total


def kernels_of(s: Sizes) -> dict[str, Kernel]:
    """Return the kernel for all GPUs, and the kernel that an engine chooses here if they differ."""
    from kernels.attention.candidates import CHUNK_ATTENTION
    from kernels.attention.prefill import attention_prefill
    from kernels.candidates import first_fit

    meta, num_blocks = layout_of(s, Step(0, [512]))
    cache = s.random(num_blocks, s.kv_heads, 16, s.dim)
    inputs = AttentionInputs(s.random(512, s.heads, s.dim), cache, cache, s.dim**-0.5)
    chosen = first_fit(CHUNK_ATTENTION, inputs, meta)
    kernels: dict[str, Kernel] = {"prefill": attention_prefill}
    if chosen.name != "prefill":
        kernels[chosen.name] = chosen.run
    return kernels


def rows(
    s: Sizes, steps: dict[str, Step], kernels: dict[str, Kernel], timer: Timer, extra: int = EXTRA
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and step."""
    for name, step in steps.items():
        matmuls = matmuls_us(s, step.decodes + sum(step.chunks), timer)
        for kernel_name, kernel in kernels.items():
            row = price(s, step, kernel, timer, extra)
            surplus, attention = row["surplus_us"], row["attention_us"]
            row |= {"matmuls_us": round(matmuls, 1), "of_attention": round(surplus / attention, 5)}
            row["of_step"] = round(surplus / (attention + matmuls), 5)
            yield {"case": f"{kernel_name}/{name}", **row}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("error: bench.kernels.surplus needs a CUDA device, and there is none")
    lines = []
    for row in rows(LLAMA, STEPS, kernels_of(LLAMA), time_us):
        lines.append(row)
        print(
            f"{row['case']:<62} {row['with_work']:5} of {row['launched']:5} blocks, "
            f"{row['surplus_us']:7.2f} of {row['attention_us']:8.1f} us, "
            f"{row['of_step']:.2%} of the step at most",
            flush=True,
        )
    if args.out:
        write(args.out, "prefill-surplus", {"sizes": "llama-8b", "extra": EXTRA}, lines, lines)


if __name__ == "__main__":
    main()
