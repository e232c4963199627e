r"""Checks of kernels, models and the engine on the GPU, with a result file of what ran, how long,
and the measurements.

    MANTA_TEST_MODEL=SmolLM2.gguf python -m bench.gpu_checks --model LLAMA --name llama-8b \
        --out bench/results

It runs from a checkout, on a machine with a CUDA device, in this order: the default model in
bfloat16 and tiny models in float32 against transformers, other tests that need a GPU, every kernel
against float64, and with --model (a folder with a config.json) one request of
32,768 and one of 131,072 tokens. MANTA_TEST_MODEL is for machines that cannot download the default
model.

Each part has its own process, so that a failing or hanging part does not affect others. With
several devices each runs its own parts, --at-once of them concurrently, since most need few GB.
Parts that need a whole device come last, then those that need all devices. --seconds limits the
whole run, and --resume runs the parts that are missing in the day's lines in --out. --marked leaves
out the kernels' tests that have no gpu mark: their slow references take most of the time. The exit
code is 1 unless all parts ran and passed.
"""

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.report.result_file import Line, RawLines, versions

FIRST = ("tests/parity/test_gpu_default_model.py", "tests/parity/test_gpu.py")
SPLIT = FIRST[1]  # takes longest, so each of its tests is a part, to be spread over devices
ALONE = "tests/engine/scheduling/test_out_of_memory.py"  # fills the whole memory of a device
TOGETHER = "tests/engine/process/test_two_gpus.py"  # its ranks need a device each
GPU = "gpu and not long"
LONG = ("32768", "131072")  # tokens of the long requests
# Threads of each part. References are small models on the CPU, which take several times as long
# with 64 threads and slow down other parts.
CPU_THREADS = "8"
_PLAIN = {"part", "case", "outcome", "seconds", "why"}  # fields of a line that are not measurements


class CheckPart(NamedTuple):
    name: str
    command: list[str]
    alone: bool = False  # whether it needs a device for itself
    together: bool = False  # whether it needs all devices
    marked: bool = True  # whether its tests need a GPU


def parts(root: Path, model: str | None, name: str, extra: Sequence[str] = ()) -> list[CheckPart]:
    """Return the parts of the whole check, in order. extra: more arguments for pytest."""
    files = [str(path.relative_to(root)) for path in sorted(root.glob("tests/**/test_*.py"))]
    texts = {file: (root / file).read_text() for file in files}
    marked = [file for file in files if re.search(r"\bmark\.gpu\b", texts[file])]
    others: dict[str, list[str]] = {}  # one part per folder, since a process takes seconds to start
    for file in marked:
        if file not in (*FIRST, ALONE, TOGETHER):
            others.setdefault(str(Path(file).parent), []).append(file)
    # These files have no gpu mark, because they use a device only if there is one.
    plain = [file for file in files if "tests.kernels.oracle" in texts[file]]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "bench.report.pytest_lines", *extra]
    tests = re.findall(r"^def (test_\w+)", texts.get(SPLIT, ""), re.MULTILINE)
    first = [file for file in FIRST if file != SPLIT] + [f"{SPLIT}::{test}" for test in tests]
    parts = [CheckPart(name, [*pytest, "-m", GPU, name]) for name in first]
    mark = "not gpu and not slow"
    # four processes each, as their references are slow Python
    parts += [CheckPart(folder, [*pytest, "-m", GPU, *some]) for folder, some in others.items()]
    parts += [
        CheckPart(f"{file} ({mark})", [*pytest, "-n", "4", "-m", mark, file], marked=False)
        for file in plain
    ]
    if ALONE in marked:
        parts.append(CheckPart(ALONE, [*pytest, "-m", GPU, ALONE], alone=True))
    if TOGETHER in marked:
        command = [*pytest, "-m", GPU, TOGETHER]
        parts.append(CheckPart(TOGETHER, command, together=True))
    if model:
        command = [sys.executable, "-m", "bench.long_context", "--model", model]
        command += ["--name", name, "--tokens", *LONG]
        parts.append(CheckPart("long contexts", command, alone=True))
    return parts


def run(part: CheckPart, until: float, device: str) -> list[Line]:
    """Run a part and return its lines; the last line has the part's outcome.

    until: deadline by time.monotonic().
    """
    seconds = until - time.monotonic()
    if seconds < 1:
        return [{"part": part.name, "case": part.name, "outcome": "not run"}]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "lines", Path(folder) / "log"
        options = ["--lines", str(path)] if "pytest" in part.command else []
        with log.open("w") as file:
            process = subprocess.Popen(
                [*part.command, *options],
                env={"OMP_NUM_THREADS": CPU_THREADS, **os.environ, "CUDA_VISIBLE_DEVICES": device},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
        said = log.read_text(errors="replace")
        output = path.read_text() if path.exists() else said
    unfinished = "died" if code is not None else "cut off"
    lines = ended(
        [json.loads(text) for text in output.splitlines() if text.startswith('{"')], unfinished
    )
    # 5: no test of the file has the mark
    good = code in (0, 5) and all(line["outcome"] in ("passed", "skipped") for line in lines)
    last: Line = {"case": part.name, "outcome": "passed" if good else "failed"}
    if code is None:
        last["outcome"] = "out of time"
    last["seconds"] = round(time.monotonic() - began, 1)
    if not good:
        last |= {"exit": code, "why": said[-1500:]}
    return [{"part": part.name, **line} for line in [*lines, last]]


def ended(lines: list[Line], unfinished: str) -> list[Line]:
    """Return the last line of each test.

    unfinished: outcome of tests without an end, because the process died or ran out of time.
    """
    last: dict[str, Line] = {}
    for line in lines:
        line.setdefault("outcome", "passed")
        last[line["case"]] = line
    return [line | {"outcome": unfinished} if line["outcome"] == "began" else line
            for line in last.values()]  # fmt: skip


def whole(lines: list[Line]) -> list[Line]:
    """Return an earlier run's lines for the parts that passed."""
    good = {
        line["part"]
        for line in lines
        if line["case"] == line["part"] and line["outcome"] == "passed"
    }
    return [line for line in lines if line["part"] in good]


def rows_of(lines: list[Line]) -> list[Line]:
    """Return rows: test counts by outcome, then measurements and tests that did not pass."""
    outcomes = [line["outcome"] for line in lines if line["case"] != line["part"]]
    counts: list[Line] = [
        {"case": outcome, "tests": outcomes.count(outcome)} for outcome in sorted(set(outcomes))
    ]
    notable = [
        {key: value for key, value in line.items() if key not in ("part", "why")}
        for line in lines
        if line["outcome"] not in ("passed", "skipped") or not line.keys() <= _PLAIN
    ]
    return counts + notable


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder with config.json, for the long contexts")
    parser.add_argument("--name", default="model", help="label of their cases")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument(
        "--at-once", type=int, default=1, help="parts beside each other on a device"
    )
    parser.add_argument("--seconds", type=float, default=570, help="for all of it")
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    parser.add_argument("--marked", action="store_true", help="only tests with the mark gpu")
    parser.add_argument("pytest", nargs="*", help="after --: for every run of pytest")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here; every one of these tests would be skipped")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    sys.exit(check(args, until, devices))


def check(args: argparse.Namespace, until: float, devices: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        raw = RawLines(args.out or Path(folder), "gpu-checks", whole if args.resume else None)
        there = {line["part"] for line in raw.all}

        one_at_a_time = threading.Lock()

        def keep(lines: list[Line]) -> None:
            with one_at_a_time:
                for line in lines:
                    raw.keep(line, show=False)
                last = lines[-1]
                seconds = last.get("seconds", 0)
                print(f"{last['outcome']:<12} {last['case']} ({seconds} s)", flush=True)
                for line in lines:
                    if "why" in line:
                        print(f"--- {line['case']}\n{line['why'][-600:]}", flush=True)

        def run_all(todo: Sequence[CheckPart], places: Sequence[str]) -> None:
            free: queue.SimpleQueue[str] = queue.SimpleQueue()
            for device in places:
                free.put(device)

            def run_one(part: CheckPart) -> None:
                device = free.get()
                try:
                    keep(run(part, until, device))
                finally:
                    free.put(device)

            with ThreadPoolExecutor(len(places)) as pool:
                for _ in pool.map(run_one, todo):
                    pass  # raise a part's exception here

        todo = [
            part
            for part in parts(Path(), args.model, args.name, args.pytest)
            if part.name not in there and (part.marked or not args.marked)
        ]
        apart = [part for part in todo if not part.alone and not part.together]
        run_all(apart, [*devices] * args.at_once)
        run_all([part for part in todo if part.alone], devices)
        run_all([part for part in todo if part.together], [",".join(devices)])
        rows = rows_of(raw.all)
        parts_run = {
            line["part"]: line["outcome"] for line in raw.all if line["case"] == line["part"]
        }
        config = {"ours": {"parts": parts_run, "pytest": args.pytest}}
        raw.finish({**config, "versions": versions("transformers", "pytest")}, rows)
    for row in rows:
        print(json.dumps(row))
    return int(any(outcome != "passed" for outcome in parts_run.values()))


if __name__ == "__main__":
    main()
