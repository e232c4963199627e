"""Sweeps of launch parameters of latent attention and recurrent layers on one GPU.

They print values for the tables and constants in kernels/recurrent and kernels/attention/latent.

    python -m bench.kernels.mixer_sweep --only "delta prefill" "kimi prefill" latent

For each case they print the microseconds of each kernel with the engine's launches, then with one
launch changed at a time. At the end come a table per case, fastest first, and the recommended
constants. Every variant first runs in another process, so that a variant that crashes or hangs is
merely left out.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from bench.kernels.measure import KernelWork, copies_for, time_us
from bench.kernels.mixers import DECODES, RANK, ROPE, cuda, delta, mixer_cases
from bench.kernels.sizes import LLAMA, meta_of
from bench.kernels.sweeping import Timed, differs, first_launches, launch_these, lines
from kernels.attention.candidates import LATENT_DECODE
from kernels.attention.decode_plan import DecodeLaunch
from kernels.attention.inputs import AbsorbedInputs
from kernels.attention.latent import decode, expanded
from kernels.attention.latent.expanded import ExpandedLaunch
from kernels.candidates import first_fit
from kernels.recurrent import (
    delta_chunks_cuda,
    delta_rule_cuda,
    delta_verify_cuda,
    kimi_chunks_cuda,
    mamba2_chunks_cuda,
)
from kernels.recurrent.chunks_cuda import Launch, PassLaunch
from kernels.recurrent.delta_chunks_cuda import RowsLaunch
from kernels.recurrent.delta_rule_cuda import DecodeLaunch as DeltaLaunch
from kernels.recurrent.delta_verify_cuda import VerifyLaunch
from kernels.recurrent.kimi_chunks_cuda import PiecesLaunch

COMPILE_S = 320  # seconds for all first runs
Table = tuple[Any, str, Sequence[Any]]  # a module, its table's name, launches
Change = tuple[Any, str, Any]
MANY_HEADS = [
    DecodeLaunch(*launch)
    for launch in ((64, 8, 2, 1), (32, 8, 2, 1), (32, 8, 4, 1), (16, 8, 4, 1), (64, 8, 1, 1))
]
FEW_HEADS = [
    DecodeLaunch(*launch)
    for launch in (
        *((64, 8, 2, 1), (64, 4, 2, 1), (32, 4, 2, 2), (32, 4, 3, 2), (32, 4, 4, 1), (32, 4, 5, 1)),
        *((32, 8, 3, 2), (16, 4, 4, 2), (16, 4, 5, 2), (16, 4, 3, 3), (16, 2, 4, 2), (16, 2, 3, 3)),
    )
]
PASSES: list[Table] = [
    (
        delta_chunks_cuda,
        "pass_launch",
        [
            PassLaunch(*launch)
            for launch in (
                *((16, 4, 3), (32, 4, 3), (32, 8, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3)),
                (128, 8, 2),
            )
        ],
    )
]
PIECES = [
    PiecesLaunch(*launch)
    for launch in (
        *((32, 8, 1, 128), (32, 8, 2, 128), (32, 8, 1, 255), (32, 4, 1, 255), (32, 4, 2, 255)),
        *((32, 4, 1, 168), (32, 4, 2, 168), (64, 8, 1, 128), (64, 8, 2, 128), (64, 8, 1, 255)),
        *((64, 4, 1, 168), (64, 4, 1, 255), (64, 4, 2, 255), (128, 8, 1, 255)),
    )
]
TABLES: dict[str, list[Table]] = {
    "delta prefill/": [
        (
            delta_chunks_cuda,
            "CONVOLVE",
            [RowsLaunch(*launch) for launch in ((16, 4), (32, 4), (64, 2), (64, 8))],
        ),
        (delta_chunks_cuda, "SOLVE", [Launch(8, 1), Launch(2, 1)]),
        *PASSES,
        (
            delta_chunks_cuda,
            "NORM",
            [RowsLaunch(*launch) for launch in ((4, 1), (4, 2), (8, 1), (16, 4), (32, 4))],
        ),
    ],
    "kimi prefill/": [
        (kimi_chunks_cuda, "SOLVE", PIECES),
        *PASSES,
    ],
    "delta decode/": [
        (
            delta_rule_cuda,
            "decode_launch",
            [
                DeltaLaunch(*launch)
                for launch in (
                    *((8, 1, 1), (8, 1, 4), (16, 1, 1), (16, 2, 1), (16, 2, 4), (32, 2, 1)),
                    *((32, 2, 4), (16, 4, 1), (16, 4, 8), (32, 4, 1), (32, 4, 4), (64, 4, 2)),
                )
            ],
        )
    ],
    "delta drafts/": [
        (
            delta_verify_cuda,
            "verify_launch",
            [
                VerifyLaunch(*launch)
                for launch in (
                    *((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4)),
                    *((64, 8), (128, 4), (128, 8)),
                )
            ],
        )
    ],
    "mamba2 prefill/": [
        (mamba2_chunks_cuda, "PREPARE", [Launch(2, 1), Launch(8, 1)]),
        (
            mamba2_chunks_cuda,
            "PASS",
            [
                PassLaunch(*launch)
                for launch in ((32, 4, 2), (32, 2, 3), (64, 4, 1), (64, 4, 3), (64, 8, 2))
            ],
        ),
        (mamba2_chunks_cuda, "READ", [Launch(8, 1), Launch(4, 2)]),
    ],
    **{
        f"{case}/": [(decode, "_launch", FEW_HEADS)]
        for case in ("latent decode", "latents of 16 heads")
    },
    **{
        f"latents of {heads} heads/": [
            (decode, "_launch", MANY_HEADS),
            (decode, "few_heads", [False]),
        ]
        for heads in (20, 32)
    },
    **{
        f"latents of {heads} heads/": [
            (decode, "_launch", MANY_HEADS),
            (decode, "merge_pieces", [1, 2, 4]),
        ]
        for heads in (64, 128)
    },
    "latent prefill/": [
        (
            expanded,
            "expanded_launch",
            [
                ExpandedLaunch(*launch)
                for launch in (
                    *((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2)),
                    *((64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2)),
                )
            ],
        )
    ],
}


class Variant(NamedTuple):
    case: str
    make: Callable[[], KernelWork]
    change: Change | None

    @property
    def what(self) -> str:
        return said(self.change) if self.change else "as it is"

    @property
    def table(self) -> str:
        return self.change[1] if self.change else ""


def said(change: Change) -> str:
    module, name, value = change
    value = getattr(value, "__name__", value)
    return f"{module.__name__.rpartition('.')[2]}.{name} = {value}"


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a module's constant within the context; a table then returns `value` for any key."""
    old = getattr(module, name)
    table = callable(old) and not callable(value)
    setattr(module, name, (lambda *_: value) if table else value)
    try:
        yield
    finally:
        setattr(module, name, old)


def latents(lengths: list[int], heads: int) -> KernelWork:
    """Make a case of latent decodes with blocks of 64 tokens, without the surrounding GEMMs."""
    num_bytes, count = float(sum(lengths)) * (RANK + ROPE) * LLAMA.dtype.itemsize, len(lengths)
    meta, num_blocks = meta_of(LLAMA, lengths, [1] * count, count, 64)
    copies = range(copies_for(num_bytes))
    caches = [LLAMA.random(num_blocks, 1, 64, RANK + ROPE) for _ in copies]
    cuda.prepare(meta, heads, caches[0], RANK)
    absorbed, q = LLAMA.random(heads, count, RANK), LLAMA.random(count, heads, 2 * ROPE)

    def call(cache: Tensor) -> Tensor:
        out = q.new_empty(count, heads, RANK)
        inputs = AbsorbedInputs(absorbed, q, cache, 0.1)
        first_fit(LATENT_DECODE, inputs, meta).run(inputs, meta, out)
        return out

    return KernelWork([partial(call, cache) for cache in caches], num_bytes)


def cases() -> dict[str, Callable[[], KernelWork]]:
    cases = mixer_cases(LLAMA)
    for count, tokens in ((8, 2048), (2, 4096)):
        lengths = [tokens] * count
        cases[f"delta prefill/{count} x {tokens}"] = partial(delta, LLAMA, lengths, lengths)
    for heads in (16, 20, 32, 64, 128):
        for name, lengths in DECODES.items():
            cases[f"latents of {heads} heads/{name}"] = partial(latents, lengths, heads)
    return cases


def variants(only: list[str]) -> Iterator[Variant]:
    for case, make in cases().items():
        if not case.startswith(tuple(only)):
            continue
        yield Variant(case, make, None)
        for prefix, tables in TABLES.items():
            if case.startswith(prefix):
                for module, name, launches in tables:
                    for launch in launches:
                        yield Variant(case, make, (module, name, launch))


def by_kernel(work: KernelWork) -> str:
    """Return a text with the microseconds of each kernel in one of the case's calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    work.calls[0]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            work.calls[0]()
        torch.cuda.synchronize()
    rows = [
        (row.self_device_time_total / 3, row.count // 3, row.key) for row in seen.key_averages()
    ]
    return ", ".join(f"{us:.1f} {count}x {key[:40]}" for us, count, key in sorted(rows)[::-1])


def first(work: KernelWork) -> Any:
    """Return the result of a case's first call."""
    import torch

    output = work.calls[0]()
    torch.cuda.synchronize()
    return output


def run(variant: Variant, use: Callable[[KernelWork], Any]) -> Any:
    """Make a variant's case and return use(case), both with the variant's constants.

    Random numbers are the same in each call.
    """
    import torch

    torch.manual_seed(0)
    with replaced(*variant.change) if variant.change else nullcontext():
        return use(variant.make())


def timed(variant: Variant, wanted: Any) -> tuple[Timed, Any]:
    """Time a variant; return its row and its result."""
    output, us = run(variant, lambda work: (first(work), time_us(work.calls, 10)))
    return Timed(us, variant.what, variant.table, differs(output, wanted)), output


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*TABLES], metavar="PREFIX")
    parser.add_argument(
        "--seconds", type=float, default=500, help="nothing is timed later; default %(default)s"
    )
    parser.add_argument("--these", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = list(variants(args.only))
    if args.these is not None:
        launch_these(args.these, lambda number: run(every[number], first))
        return 0
    began = time.monotonic()
    name = "bench.kernels.mixer_sweep"
    failed = first_launches(name, ["--only", *args.only], len(every), COMPILE_S)
    print(f"compiled after {time.monotonic() - began:.1f} s", flush=True)
    rows: dict[str, list[Timed]] = {}
    wanted, dead = {}, ""
    for number, variant in enumerate(every):
        why = failed.get(number, "") or dead
        if time.monotonic() > began + args.seconds:
            why = why or "no time"
        row, parts = Timed(math.inf, variant.what, variant.table, why), ""
        if not why:
            try:
                row, output = timed(variant, wanted.get(variant.case))
                if not variant.change:
                    wanted[variant.case] = output
                    parts = f"\n    {run(variant, by_kernel)}"
            except RuntimeError as error:  # a CUDA error ends this process's use of CUDA
                row = row._replace(remark=str(error).splitlines()[0])
                dead = f"not run after {variant.what}" if "CUDA" in str(error) else ""
        rows.setdefault(variant.case, []).append(row)
        print(f"{variant.case:<28} {row}{parts}", flush=True)
    for case, tried in rows.items():
        print(f"\n{case}\n" + "\n".join(lines(tried)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
