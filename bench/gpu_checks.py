r"""Checks of kernels, models and the engine on the GPU. The result file has the tests that ran,
their duration, and measurements.

    MANTA_TEST_MODEL=SmolLM2.gguf python -m bench.gpu_checks --model LLAMA --name llama-8b \
        --out bench/results

It runs from a checkout, on a machine with a CUDA device. It runs every test with the mark gpu
(except those with the mark long, which take ten minutes), and every kernel against float64. With
--model (a folder with a config.json), it also runs one request of 32,768 and one of 131,072 tokens.
MANTA_TEST_MODEL is for machines that cannot download the default model.

The tests are collected first and divided into parts of a few tests, each in its own process. So a
failing or hanging part does not affect others. A hanging test ends its process, and the part's
other tests run in a new process.

First come tests with the mark two_gpus, which see all devices. Tests with the mark whole_gpu come
next; each has a device for itself. Then each device runs --at-once parts concurrently, since most
need few GB. Kernel tests without a gpu mark follow. Their slow references take most of the time;
--marked leaves them out. The long requests come last.

--seconds limits the whole run. --resume continues from the day's lines in --out. It runs the tests
that did not pass: first those that never began, then those that failed or were interrupted. The
exit code is 1 unless all tests ran and passed. `not run` in the result file is the number of tests
without an outcome.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.report.result_file import Line, RawLines, commit, versions

FIRST = ("tests/parity/test_gpu_default_model.py", "tests/parity/test_gpu.py")
SPLIT = FIRST[1]  # the file that takes longest: each of its functions is a part
PART_TESTS = 12  # maximum number of tests in a part, of other files
TEST_SECONDS = 240  # time limit after which a test counts as hanging; the longest take 160
GPU = "gpu and not long"
ALONE, TOGETHER = "whole_gpu", "two_gpus"  # marks
LONG = ("32768", "131072")  # tokens of the long requests
# CPU threads of each part. References are small models on the CPU. With 64 threads they would take
# several times as long and slow down other parts.
CPU_THREADS = "8"
# pytest's own frames in the traceback of a hanging test
_PYTESTS = re.compile(r'^ *File ".*/(?:_pytest|pluggy|pytest)/.*\n', re.MULTILINE)
# fields of a line that are not measurements
_PLAIN = {"part", "case", "outcome", "seconds", "why", "commit"}


class CheckPart(NamedTuple):
    name: str
    command: list[str]
    alone: bool = False  # whether the part needs a device for itself
    together: bool = False  # whether the part needs all devices
    tests: tuple[str, ...] = ()  # node ids, which follow the command; () if the command has all


def collect(root: Path, extra: Sequence[str] = ()) -> tuple[dict[str, set[str]], Line]:
    """Collect the tests that need a GPU; return {node id: marks} and the collection's result line.

    extra: more arguments for pytest.
    """
    files = [
        str(path.relative_to(root))
        for path in sorted(root.glob("tests/**/test_*.py"))
        if re.search(r"\bmark\.gpu\b", path.read_text())
    ]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests"
        options = ["-m", GPU, "--collect-only", "--collected", str(path)]
        done = subprocess.run(
            [*_pytest(extra), *options, *files], cwd=root, capture_output=True, text=True
        )
        lines = path.read_text().splitlines() if path.exists() else []
    tests = {line["case"]: set(line["marks"]) for line in map(json.loads, lines)}
    outcome = "passed" if done.returncode == 0 else "failed"
    line: Line = {"part": "collection", "case": "collection", "outcome": outcome}
    line |= {"seconds": round(time.monotonic() - began, 1), "commit": commit(root)}
    if done.returncode:
        line |= {"exit": done.returncode, "why": (done.stdout + done.stderr)[-1500:]}
    return tests, line


def _pytest(extra: Sequence[str]) -> list[str]:
    """Return pytest's command line.

    If a test takes TEST_SECONDS, the process prints all threads' tracebacks and ends.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.report.pytest_lines"]
    command += ["-o", f"faulthandler_timeout={TEST_SECONDS}"]
    return [*command, "-o", "faulthandler_exit_on_timeout=true", *extra]


def marked_parts(tests: Mapping[str, set[str]], extra: Sequence[str] = ()) -> list[CheckPart]:
    """Return the collected tests divided into parts, in the order in which the parts start.

    tests: node id -> marks. extra: more arguments for pytest.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for test, marks in tests.items():
        file, _, function = test.partition("::")
        kind = TOGETHER if TOGETHER in marks else ALONE if ALONE in marks else ""
        piece = function.partition("[")[0] if file == SPLIT else ""
        groups.setdefault((kind, file, piece), []).append(test)

    def order(group: tuple[str, ...]) -> tuple[int, int]:
        kind, file, _ = group
        first = FIRST.index(file) if file in FIRST else len(FIRST)
        return (TOGETHER, ALONE, "").index(kind), first

    parts = []
    for group in sorted(groups, key=order):  # stable: equal keys stay in the order of collection
        kind, file, piece = group
        name = f"{file} {piece}" if piece else f"{file} ({kind})" if kind else file
        cases = groups[group]
        size = len(cases) if kind == TOGETHER else PART_TESTS  # ranks are started once for a file
        for start in range(0, len(cases), size):
            some = tuple(cases[start : start + size])
            label = f"{name} from {start + 1}" if len(cases) > size else name
            parts.append(CheckPart(label, _pytest(extra), kind == ALONE, kind == TOGETHER, some))
    return parts


def other_parts(
    root: Path, model: str | None, name: str, extra: Sequence[str] = (), marked: bool = False
) -> list[CheckPart]:
    """Return the parts that follow the marked tests: tests of kernels, unless `marked`, and the
    long requests.
    """
    parts = []
    mark = "not gpu and not slow"
    # Tests that import tests.kernels.oracle have no gpu mark: they also run without a device.
    for path in sorted(root.glob("tests/**/test_*.py")) if not marked else ():
        if "tests.kernels.oracle" in path.read_text():
            file = str(path.relative_to(root))
            # use four processes, as references are slow Python
            parts.append(
                CheckPart(f"{file} ({mark})", [*_pytest(extra), "-n", "4", "-m", mark, file])
            )
    if model:
        command = [sys.executable, "-m", "bench.long_context", "--model", model]
        command += ["--name", name, "--tokens", *LONG]
        parts.append(CheckPart("long contexts", command, alone=True))
    return parts


def remaining(parts: Sequence[CheckPart], earlier: Sequence[Line]) -> list[CheckPart]:
    """Return the parts with the tests that have not passed in an earlier run.

    earlier: the lines of that run.

    Tests that failed or were interrupted come after those that never began, and so do parts of only
    such tests. So a hanging test does not delay other tests.
    """
    outcomes = {line["case"]: line["outcome"] for line in earlier}

    def is_done(case: str) -> bool:
        return outcomes.get(case) in ("passed", "skipped")

    todo = []
    for part in parts:
        tests = [test for test in part.tests if not is_done(test)]
        if not tests and outcomes.get(part.name) == "failed":
            tests = list(part.tests)  # the process failed, not a test
        if tests or not (part.tests or is_done(part.name)):
            tests.sort(key=outcomes.__contains__)
            todo.append(part._replace(tests=tuple(tests)))
    todo.sort(key=lambda part: all(case in outcomes for case in part.tests or (part.name,)))
    return todo


def not_begun(part: CheckPart, lines: Sequence[Line]) -> CheckPart | None:
    """Return a part with the tests that did not run because an earlier test ended the process.

    Returns None if there are none. lines: the lines of the part's run.
    """
    outcomes = {line["case"]: line["outcome"] for line in lines}
    tests = tuple(test for test in part.tests if test not in outcomes)
    died = any(outcomes.get(test) == "died" for test in part.tests)
    return part._replace(tests=tests) if died and tests else None


_running: set[subprocess.Popen[bytes]] = set()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of a part and those that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
                [*part.command, *options, *part.tests],
                env={"OMP_NUM_THREADS": CPU_THREADS, **os.environ, "CUDA_VISIBLE_DEVICES": device},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running.add(process)
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
                _running.discard(process)
        logged = log.read_text(errors="replace")
        output = path.read_text() if path.exists() else logged
    unfinished = "died" if code is not None else "cut off"
    lines = ended(
        [json.loads(text) for text in output.splitlines() if text.startswith('{"')], unfinished
    )
    # 5: pytest's exit code if no test of the file has the mark
    good = code in (0, 5) and all(line["outcome"] in ("passed", "skipped") for line in lines)
    last: Line = {"case": part.name, "outcome": "passed" if good else "failed"}
    if code is None:
        last["outcome"] = "out of time"
    last["seconds"] = round(time.monotonic() - began, 1)
    if not good:
        last |= {"exit": code, "why": _PYTESTS.sub("", logged)[-1500:]}
    return [{"part": part.name, **line} for line in [*lines, last]]


def ended(lines: list[Line], unfinished: str) -> list[Line]:
    """Return the last line of each test.

    unfinished: the outcome for tests that began but did not end, because the process died or its
    time was over.
    """
    last: dict[str, Line] = {}
    for line in lines:
        line.setdefault("outcome", "passed")
        last[line["case"]] = line
    return [line | {"outcome": unfinished} if line["outcome"] == "began" else line
            for line in last.values()]  # fmt: skip


def latest(lines: Sequence[Line]) -> list[Line]:
    """Return the last line of each case; its field `earlier` has an earlier failed outcome."""
    cases: dict[str, Line] = {}
    for line in lines:
        before = cases.get(line["case"], {})
        failed = before if before.get("outcome") in ("failed", "died") else {}
        earlier = before.get("earlier", failed.get("outcome"))
        is_test = line["case"] != line["part"]
        cases[line["case"]] = line | ({"earlier": earlier} if earlier and is_test else {})
    return list(cases.values())


def rows_of(lines: list[Line], tests: Sequence[str] = ()) -> list[Line]:
    """Return rows: test counts by outcome, then measurements and tests that did not pass.

    tests: node ids of all tests that should have an outcome.
    """
    outcomes = [line["outcome"] for line in lines if line["case"] != line["part"]]
    counts: list[Line] = [
        {"case": outcome, "tests": outcomes.count(outcome)} for outcome in sorted(set(outcomes))
    ]
    if missing := len(set(tests) - {line["case"] for line in lines}):
        counts.append({"case": "not run", "tests": missing})
    notable = [
        {key: value for key, value in line.items() if key not in ("part", "why")}
        for line in lines
        if line["outcome"] not in ("passed", "skipped") or not line.keys() <= _PLAIN
    ]
    return counts + notable


class Devices:
    """The slots of all devices, of which a part takes one, or all slots of a device."""

    def __init__(self, names: Sequence[str], at_once: int) -> None:
        self._at_once = at_once
        self._free = dict.fromkeys(names, at_once)
        self._changed = threading.Condition()

    def take(self, part: CheckPart) -> dict[str, int]:
        """Wait for a part's slots; take them and return {device: number of slots}."""
        with self._changed:
            while not (places := self._places(part)):
                self._changed.wait()
            self._add(places, -1)
        return places

    def give_back(self, places: Mapping[str, int]) -> None:
        with self._changed:
            self._add(places, 1)
            self._changed.notify_all()

    def _places(self, part: CheckPart) -> dict[str, int]:
        idle = {name: free for name, free in self._free.items() if free == self._at_once}
        if part.together:
            return idle if len(idle) == len(self._free) else {}
        if part.alone:
            return dict(list(idle.items())[:1])
        name = max(self._free, key=self._free.__getitem__)
        return {name: 1} if self._free[name] else {}

    def _add(self, places: Mapping[str, int], sign: int) -> None:
        for name, count in places.items():
            self._free[name] += sign * count


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
    """Run the parts until the deadline, write the result file, and return the exit code.

    until: deadline by time.monotonic(). devices: names for CUDA_VISIBLE_DEVICES.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        raw = RawLines(out, "gpu-checks", (lambda lines: lines) if args.resume else None)
        one_at_a_time = threading.Lock()

        def keep(lines: list[Line]) -> None:
            with one_at_a_time:
                for line in lines:
                    raw.keep(line, show=False)
                last = lines[-1]
                seconds = last.get("seconds", 0)
                print(f"{last['outcome']:<12} {last['case']} ({seconds} s)", flush=True)
                for line in lines:
                    if "why" in line and line["outcome"] != "skipped":
                        print(f"--- {line['case']}\n{line['why'][-600:]}", flush=True)

        tests, line = collect(Path(), args.pytest)
        marked = marked_parts(tests, args.pytest)
        others = other_parts(Path(), args.model, args.name, args.pytest, args.marked)
        todo = remaining(marked, raw.all) + remaining(others, raw.all)
        keep([line])
        places = Devices(devices, args.at_once)

        def run_one(part: CheckPart, slots: Mapping[str, int]) -> None:
            todo: CheckPart | None = part
            try:
                while todo:
                    lines = run(todo, until, ",".join(slots))
                    keep(lines)
                    todo = not_begun(todo, lines)
            finally:
                places.give_back(slots)

        with ThreadPoolExecutor(len(devices) * args.at_once) as pool:
            try:
                runs = [pool.submit(run_one, part, places.take(part)) for part in todo]
                for future in runs:
                    future.result()  # raises the exception of a part
            finally:
                for process in list(_running):
                    _end(process)
        lines = latest(raw.all)
        rows = rows_of(lines, list(tests))
        parts_run = {
            line["part"]: line["outcome"] for line in lines if line["case"] == line["part"]
        }
        cut_off = [part for part in marked if parts_run.get(part.name) == "out of time"]
        unfinished = {part.name for part in remaining(cut_off, raw.all)}
        parts_run |= {part.name: "passed" for part in cut_off if part.name not in unfinished}
        commits = sorted({line["commit"] for line in raw.all if "commit" in line})
        config = {"ours": {"parts": parts_run, "pytest": args.pytest, "commits": commits}}
        raw.finish({**config, "versions": versions("transformers", "pytest")}, rows)
    for row in rows:
        print(json.dumps(row))
    missing = any(row["case"] == "not run" for row in rows)
    outcomes = [line["outcome"] for line in lines if line["case"] != line["part"]]
    bad = any(outcome not in ("passed", "skipped") for outcome in outcomes)
    return int(missing or bad or any(outcome != "passed" for outcome in parts_run.values()))


if __name__ == "__main__":
    main()
