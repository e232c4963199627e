"""First and later starts of Manta's engine on a GPU: seconds until ready, against another commit.

    git worktree add ../before d119f6527
    python -m bench.operate.starts --model bench/models/llama-8b --name llama-8b --against ../before

A round is a first start and a later one of each side, each in its own process. A first start has an
empty folder of compiled kernels (TRITON_CACHE_DIR); the later start uses the folder that the first
has filled. Each side has its own folder, and sides take turns to begin a round. Before the first
round both checkouts are compiled to bytecode, as by an installation, and torch is read from disk
once. Weights are random. A round takes 45 to 60 s with llama-8b on an H100.

Rows are `NAME/first start` and `NAME/later start`: the best round of each side. The raw lines also
have the seconds of each phase. --cores simulates machines with fewer cores: compilers, engine and
libraries can use only these.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.report.result_file import Line, RawLines, commit, print_ratios, ratio_row
from bench.versus.engine import BEFORE, run_side

KINDS = ("first", "later")
SIDES = ("manta", BEFORE)
_PACKAGES = ("bench", "engine", "kernels", "loadtest")  # what a start imports


def starts(model: str, side: str, against: Path) -> Iterator[Line]:
    """Yield a line for the first start of a side with an empty kernel cache, and for the next."""
    cache = tempfile.mkdtemp(prefix="manta-starts-")
    os.environ["TRITON_CACHE_DIR"] = cache
    try:
        for kind in KINDS:
            for line in run_side(side, model, [], [], against):
                yield {"start": kind, **line}
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def rows(name: str, lines: list[Line]) -> list[Line]:
    """Return a row for first starts and one for later ones."""
    rows = []
    for kind in KINDS:
        ours, peer = (
            min(li["ready_s"] for li in lines if li["start"] == kind and li["side"] == side)
            for side in SIDES
        )
        rows.append(ratio_row(f"{name}/{kind} start", ours, peer, "s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the rows")
    parser.add_argument(
        "--against", type=Path, required=True, metavar="FOLDER", help="another checkout of Manta"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, help="use so many cores of the machine")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    compiled = [sys.executable, "-m", "compileall", "-q", *_PACKAGES]
    for folder in (Path.cwd(), args.against):
        subprocess.run(compiled, cwd=folder, check=True)
    subprocess.run([sys.executable, "-c", "import torch, triton"], check=True)
    label = f"starts-{args.name}" + (f"-{args.cores}-cores" if args.cores else "")
    raw = RawLines(args.out, label)
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            for line in starts(args.model, side, args.against):
                raw.keep({"round": number, **line})
    ours = next(line["config"] for line in raw.all if line["side"] == "manta")
    peers = {BEFORE: {"commit": commit(args.against)}}
    results = rows(args.name, raw.all)
    raw.finish({"ours": {**ours, "cores": len(cores)}, "peers": peers}, results)
    print_ratios(results)


if __name__ == "__main__":
    main()
