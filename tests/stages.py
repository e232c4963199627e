"""The stages of `make test` and `make test-all`: one pytest each, and what became of them.

    python -m tests.stages test          what a newcomer runs
    python -m tests.stages rest          what that leaves out and needs no GPU
    python -m tests.stages test rest     both, which is what CI runs
    python -m tests.stages smoke         one stage

A stage's failed tests are run once more, alone and in one process, and both outcomes are told: some
tests look at clocks, on cores that they share with the load that they make. A test that fails twice
fails the stage. So does whatever is not a failed test: a crash, a stage in which nothing was
collected, a process that a test has left behind. Later stages run all the same.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.cli.serving.processes import adopt_orphans, descendants, kill, reap

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "stages"
MOST_AGAIN = 10  # failed tests: more are no accident of the clock
ENDS_S = 15.0  # for processes to end that were told to

# What pytest-xdist says of a test in which one of its processes died: to pytest it has failed.
CRASHED = re.compile(r"worker 'gw\d+' crashed while running '?([^'\s\"]*)")


@dataclass(frozen=True)
class Stage:
    """name: of its cache. where: pytest's -m. processes: that share its tests.

    Two have a core each, four half of one: tests that wait, such as those of clients and servers,
    leave it to others. One for tests that start Ray, whose processes look at the clock and for each
    other, and for those that tell what something costs: a neighbour spoils the caches."""

    name: str
    title: str
    where: str
    processes: int = 1
    paths: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


INTERPRETER: dict[str, Any] = {
    "paths": ("tests/kernels",),
    "environment": {"TRITON_INTERPRET": "1"},
}
STAGES = {
    "test": (
        Stage(
            "interpreter",
            "Triton kernels in the interpreter",
            "triton and not slow",
            processes=2,
            **INTERPRETER,
        ),
        Stage(
            "quick",
            "What starts no Ray",
            "not triton and not serve and not timed and not slow",
            processes=4,
        ),
        Stage("smoke", "A stream, a kill, a drain and Ctrl-C on a real Ray", "smoke"),
    ),
    "rest": (
        Stage(
            "grids",
            "Every pair of what Triton kernels take, in the interpreter",
            "triton and slow",
            processes=2,
            **INTERPRETER,
        ),
        Stage(
            "slow",
            "What takes longer and starts no Ray",
            "slow and not triton and not serve and not timed",
            processes=2,
        ),
        Stage(
            "ray",
            "What starts Ray or looks at costs",
            "(serve or timed) and not smoke and not triton",
        ),
    ),
}


@dataclass
class Outcome:
    """again: tests that failed at first and passed alone. failed: those that failed twice. broken:
    why the stage failed whatever its tests say, empty if it did not."""

    stage: Stage
    counts: Counter[str] = field(default_factory=Counter)
    again: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.failed and not self.broken


_interrupted = False


def _report(cache: Path) -> Path:
    """Pytest's, beside its cache."""
    return cache.with_suffix(".xml")


def _pytest(stage: Stage, root: Path, cache: Path, *arguments: str, where: str) -> int:
    """Runs pytest to its end; its exit code, negative if a signal ended it."""
    command = [sys.executable, "-m", "pytest", "-m", where, "-o", f"cache_dir={cache}"]
    report = _report(cache)
    report.unlink(missing_ok=True)
    command += [f"--junitxml={report}", *arguments, *stage.paths]
    environment = {**os.environ, **stage.environment}
    # Asserts are rewritten and modules compiled once for all stages: without what is kept, each
    # stage does it anew for 10 s, and each of the hundreds of processes that tests start for some.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if stage.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(command, cwd=root, env=environment)
    while True:  # whatever else ends is an orphan: as a zombie it would look alive to a test
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _counted(cache: Path) -> Counter[str]:
    """What pytest's report counts; a test that failed in its teardown counts twice."""
    counts: Counter[str] = Counter()
    for suite in xml.parse(_report(cache)).getroot().iter("testsuite"):
        kinds = ("tests", "failures", "errors", "skipped")
        tests, failures, errors, skipped = (int(suite.get(kind, 0)) for kind in kinds)
        counts["passed"] += tests - failures - errors - skipped
        counts["failed"] += failures + errors
        counts["skipped"] += skipped
    return counts


def _last_failed(cache: Path) -> list[str]:
    path = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def _left() -> list[str]:
    """Command lines of the processes that are still there after a while; they are ended."""
    limit = time.monotonic() + ENDS_S
    while (pids := descendants(os.getpid())) and time.monotonic() < limit:
        time.sleep(0.1)
        reap()
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            found.append(f"{pid} {line[:120]}")
    kill(lambda: descendants(os.getpid()))
    reap()
    return found


def run(stage: Stage, root: Path = ROOT, cache: Path = CACHE, long: bool = False) -> Outcome:
    """The stage, then its failed tests once more. cache: a folder for what failed."""
    began = time.monotonic()
    outcome = Outcome(stage)
    where = f"({stage.where}) and not gpu" + ("" if long else " and not long")
    folder = cache / stage.name
    cache.mkdir(parents=True, exist_ok=True)
    shared = ("-n", str(stage.processes), "--dist", "worksteal") if stage.processes > 1 else ()
    print(f"== {stage.title}", flush=True)
    code = _pytest(stage, root, folder, "--cache-clear", "--durations=30", *shared, where=where)
    if why := _why(code, folder):
        outcome.broken.append(why)
    else:
        outcome.counts = _counted(folder)
        first = _last_failed(folder) if code else []
        if code and not first:
            outcome.broken.append("pytest failed and names no test that did")
        elif len(first) > MOST_AGAIN:
            print(f"== {len(first)} tests failed, too many to try them again", flush=True)
            outcome.failed = first
        elif first:
            print(f"== Once more, alone: {len(first)} of '{stage.title}' that failed", flush=True)
            _again(stage, root, folder, where, first, outcome)
    outcome.broken += [f"left behind: {process}" for process in _left()]
    outcome.seconds = time.monotonic() - began
    return outcome


def _again(
    stage: Stage, root: Path, folder: Path, where: str, first: list[str], outcome: Outcome
) -> None:
    only = ("--last-failed", "--last-failed-no-failures", "none")
    code = _pytest(stage, root, folder, *only, where=where)
    if why := _why(code, folder):
        outcome.failed = first
        outcome.broken.append(f"once more: {why}")
        return
    outcome.failed = _last_failed(folder) if code else []
    passed = [test for test in first if test not in outcome.failed]
    if _counted(folder)["passed"] < len(passed):
        outcome.failed = first
        outcome.broken.append("not all that had failed ran once more")
        return
    outcome.again = passed
    outcome.counts["failed"] = len(outcome.failed)
    outcome.counts["passed"] += len(passed)


def _why(code: int, cache: Path) -> str:
    """Why this end of pytest is worse than failed tests; empty if it is not."""
    if code < 0:
        return f"pytest was ended by {signal.Signals(-code).name}"
    if code not in (0, 1):
        reasons = {2: "it was interrupted, or tests could not be collected", 3: "its own error"}
        reasons |= {4: "wrong arguments", 5: "no test was collected"}
        return f"exit code {code} of pytest: {reasons.get(code, 'unknown')}"
    if not _report(cache).exists():
        return "pytest wrote no report: a test ended its process"
    if crashed := CRASHED.search(_report(cache).read_text("utf-8", "replace")):
        return f"a process of pytest's died in {crashed[1]}"
    return ""


def told(outcomes: list[Outcome]) -> list[str]:
    """Lines for the end; the last is of pytest's form."""
    lines = []
    for outcome in outcomes:
        title = outcome.stage.title
        state = "passed" if outcome.good else "FAILED"
        lines.append(f"{state}  {outcome.seconds:6.0f} s  {title}")
        lines += [f"  failed at first, passed alone: {test}" for test in outcome.again]
        lines += [f"  failed: {test}" for test in outcome.failed]
        lines += [f"  {why}" for why in outcome.broken]
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    said = [f"{counts[kind]} {kind}" for kind in ("failed", "passed", "skipped") if counts[kind]]
    seconds = sum(outcome.seconds for outcome in outcomes)
    return [*lines, f"{', '.join(said) or 'nothing ran'} in {seconds:.2f}s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    stages = {stage.name: (stage,) for part in STAGES.values() for stage in part} | STAGES
    parser.add_argument("parts", nargs="+", choices=stages)
    parser.add_argument("--long", action="store_true", help="with the tests marked long, too")
    args = parser.parse_args()
    if "MANTA_TEST_MODEL" not in os.environ:  # as of tests/conftest.py
        for quantization in ("none", "auto"):  # as tests' engines take it, and as it is served
            fetch = [
                sys.executable,
                "-m",
                "deployments.cli.models.fetch",
                "--quantization",
                quantization,
            ]
            subprocess.run(fetch, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    adopt_orphans()

    def interrupt(*_: object) -> None:  # pytest has it too, and ends what its tests have started
        global _interrupted
        _interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    outcomes = []
    for stage in (stage for part in args.parts for stage in stages[part]):
        outcomes.append(run(stage, long=args.long))
        if _interrupted:
            break
    print("\n".join(["==", *told(outcomes)]), flush=True)
    if _interrupted:
        return 130
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
