"""Other launches of the kernels of latent attention and of recurrent layers beside today's, on one
GPU: what the tables in kernels/recurrent and kernels/attention/latent should say there.

    python -m bench.kernels.mixer_sweep --only "delta prefill"

For each case the microseconds of each kernel in a call as it is today, then of a call with one
launch changed at a time. Kernels are compiled before anything is timed, in several processes.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.kernels.measure import KernelWork, time_us
from bench.kernels.mixers import mixer_cases
from bench.kernels.sizes import LLAMA
from kernels.attention.decode_plan import DecodeLaunch
from kernels.attention.latent import decode, expanded
from kernels.attention.latent.expanded import ExpandedLaunch
from kernels.recurrent import (
    delta_chunks_cuda,
    delta_rule_cuda,
    kimi_chunks_cuda,
    mamba2_chunks_cuda,
)
from kernels.recurrent.chunks_cuda import Launch, PassLaunch
from kernels.recurrent.delta_chunks_cuda import RowsLaunch
from kernels.recurrent.delta_rule_cuda import WalkLaunch

PROCESSES, COMPILE_S = 8, 100
Table = tuple[Any, str, list[Any]]  # a module, its table's name, launches
TABLES: dict[str, list[Table]] = {
    "delta prefill/": [
        (
            delta_chunks_cuda,
            "CONVOLVE",
            [RowsLaunch(*launch) for launch in ((16, 2), (16, 4), (32, 2), (32, 8), (64, 4))],
        ),
        (delta_chunks_cuda, "SOLVE", [Launch(8, 1), Launch(2, 1)]),
        (
            delta_chunks_cuda,
            "PASS",
            [
                PassLaunch(*launch)
                for launch in (
                    *((16, 4, 2), (16, 4, 3), (32, 4, 1), (32, 4, 3), (32, 8, 2), (32, 8, 3)),
                    *((64, 4, 2), (64, 8, 2), (64, 8, 3), (128, 8, 2)),
                )
            ],
        ),
        (
            delta_chunks_cuda,
            "NORM",
            [RowsLaunch(*launch) for launch in ((8, 2), (16, 2), (16, 4), (64, 4), (64, 8))],
        ),
    ],
    "kimi prefill/": [
        (kimi_chunks_cuda, "GATES", [Launch(2, 1), Launch(8, 1)]),
        (kimi_chunks_cuda, "PAIRS", [Launch(1, 1), Launch(4, 1)]),
        (kimi_chunks_cuda, "SOLVE", [Launch(8, 1), Launch(4, 2)]),
        (
            delta_chunks_cuda,
            "PASS",
            [PassLaunch(*launch) for launch in ((32, 4, 3), (64, 4, 2), (64, 8, 2))],
        ),
    ],
    "delta decode/": [
        (
            delta_rule_cuda,
            "walk_launch",
            [
                WalkLaunch(*launch)
                for launch in (
                    *((16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8)),
                    *((128, 8), (128, 16)),
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
    "latent decode/": [
        (
            decode,
            "_launch",
            [
                DecodeLaunch(*launch)
                for launch in (
                    *((64, 8, 2, 1), (64, 4, 2, 1), (32, 4, 2, 2), (32, 4, 3, 2), (32, 4, 4, 1)),
                    *((32, 2, 3, 2), (16, 4, 4, 2), (16, 2, 4, 2), (128, 4, 1, 1)),
                )
            ],
        ),
        (decode, "few_heads", [False]),  # rows, where they are columns today
    ],
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


@contextmanager
def replaced(module: Any, name: str, launch: Any) -> Iterator[None]:
    """A table that says `launch` whatever it is asked."""
    old = getattr(module, name)
    setattr(module, name, (lambda *_: launch) if callable(old) and name.islower() else launch)
    try:
        yield
    finally:
        setattr(module, name, old)


def variants(only: list[str]) -> Iterator[tuple[str, Any, Table | None, Any]]:
    """Case, what makes its work, and of another launch the table and the launch."""
    for case, make in mixer_cases(LLAMA).items():
        if not case.startswith(tuple(only)):
            continue
        yield case, make, None, None
        for prefix, tables in TABLES.items():
            if case.startswith(prefix):
                for table in tables:
                    yield from ((case, make, table, launch) for launch in table[2])


def by_kernel(work: KernelWork) -> str:
    """Microseconds of each kernel of a call."""
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
    """What the first call returns."""
    import torch

    found = work.calls[0]()
    torch.cuda.synchronize()
    return found


def differs(found: Any, wanted: Any, most: float = 0.02) -> str:
    """A remark, of results that are not those of the launch as it is."""
    if wanted is None or found is None:
        return ""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return "" if error < most else f"  WRONG: differs by {error:.2g} of the result"


def compile_all(
    module: str, only: list[str], count: int, processes: int = PROCESSES, seconds: float = COMPILE_S
) -> dict[int, str]:
    """Launch each of a module's variants once, in several processes; why those failed that did, by
    their number. What reads beyond its memory takes its process with it: the rest goes on in
    another one."""
    base = [sys.executable, "-m", module, "--only", *only, "--these"]
    failed: dict[int, str] = {}
    limit = time.monotonic() + seconds

    def walk(numbers: list[int]) -> None:
        while numbers and time.monotonic() < limit:
            try:
                done = subprocess.run(
                    [*base, *map(str, numbers)],
                    capture_output=True,
                    text=True,
                    timeout=max(0.0, limit - time.monotonic()),
                )
            except subprocess.TimeoutExpired:
                return
            ran = [int(line) for line in done.stdout.split()]
            if numbers := [number for number in numbers if number not in ran]:
                failed[numbers.pop(0)] = done.stderr.strip().splitlines()[-1]

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(walk, [[*range(i, count, processes)] for i in range(processes)]))
    return failed


def run(make: Any, table: Table | None, launch: Any, use: Any) -> Any:
    """use(the case's work), with the launch if there is one. The same numbers each time."""
    import torch

    torch.manual_seed(0)
    if table is None:
        return use(make())
    with replaced(table[0], table[1], launch):
        return use(make())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*TABLES], metavar="PREFIX")
    parser.add_argument("--these", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = list(variants(args.only))
    if args.these is not None:
        for number in args.these:
            _, make, table, launch = every[number]
            run(make, table, launch, first)
            print(number, flush=True)
        return 0
    began = time.perf_counter()
    failed = compile_all("bench.kernels.mixer_sweep", args.only, len(every))
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    wanted = None
    for number, (case, make, table, launch) in enumerate(every):
        what = "as it is" if table is None else f"{table[1]} {launch}"
        if number in failed:
            print(f"{case:<28} {what}: {failed[number]}"[:200], flush=True)
            continue
        found, us = run(make, table, launch, lambda work: (first(work), time_us(work.calls, 10)))
        wanted = found if table is None else wanted
        print(f"{case:<28} {us:9.1f} us  {what}{differs(found, wanted)}", flush=True)
        if table is None:
            print(f"    {by_kernel(make())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
