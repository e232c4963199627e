"""The stages of `make test`, `make test-all` and `make nightly`: one pytest each, and its outcome.

    python -m tests.stages test            what a newcomer runs
    python -m tests.stages rest            what that leaves out and CI has
    python -m tests.stages test rest       both, which is what CI runs
    python -m tests.stages --long nightly  prose, machine code and exhaustive grids
    python -m tests.stages smoke           one stage

A stage's failed tests are run once more, alone and in one process: some look at clocks, on cores
that they share with the load that they make. A test that fails twice fails the stage. One that
passes alone does not; it is counted and named at the end, and `.pytest_cache/stages/flaky.jsonl`
has a line for each run. Whatever is not a failed test fails the stage, too: a crash, a stage in
which nothing was collected, a process that a test has left behind. Later stages run all the same.

Tests that start Ray wait more than they compute: more than half of two cores is idle. Others wait
for a part of their time. Stages that look at no clock run beside them, in that time (`Beside`).
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
import traceback
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from deployments.cli.serving.processes import adopt_orphans, descendants, kill, reap, table

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".pytest_cache" / "stages"
MOST_AGAIN = 10  # maximum number of failed tests that are run again
ENDS_S = 15.0  # seconds for processes to end after a signal
BESIDE_S = 900  # time limit of a test that runs at idle priority
WITHOUT = ROOT / "tests" / "without"  # precedes the real pandas and chardet in the import path

# pytest-xdist's message about a test whose worker process died, which pytest counts as failed.
CRASHED = re.compile(r"worker 'gw\d+' crashed while running '?([^'\s\"]*)")


@dataclass(frozen=True)
class Stage:
    """One run of pytest.

    name: the stage's name, which its pytest cache also has.
    where: pytest's -m, to which `not gpu` is added.
    processes: number of processes that share the tests. Two have a core each. Four have half a core
        each, for tests that wait, such as those of clients and servers. Tests that start Ray, and
        tests of costs, run in one process, as a second would disturb their times and caches.
    paths: the folders or files of the tests; empty for all.
    without: the folders or files that are left out.
    sleeps: whether waiting threads of OpenMP sleep. Otherwise they spin on cores that other
        processes need, for up to twenty times as long as a tiny model computes.
    beside: names of stages in whose idle time this stage runs. It starts with the first of them
        that is run, and may continue until the last one ends.
    """

    name: str
    title: str
    where: str
    processes: int = 1
    paths: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sleeps: bool = True


INTERPRETER: dict[str, Any] = {
    "paths": ("tests/kernels",),
    "environment": {"TRITON_INTERPRET": "1"},
}
# Folders and files of tests that compare numbers and depend on no clock.
NUMBERS = (
    "tests/bench/test_simulate.py",
    "tests/bench/versus",
    "tests/deployments/api/generation",
    "tests/deployments/api/output",
    "tests/deployments/api/test_schemathesis.py",
    "tests/deployments/tokenizer_files",
    "tests/kernels",
    "tests/parity",
    "tests/engine/lora",
    "tests/engine/models",
    "tests/engine/text",
    "tests/engine/weights",
)
WAITING = ("quick", "slow", "smoke", "ray")
QUICK = "not triton and not serve and not timed and not slow and not nightly"
SLOW = "slow and not triton and not serve and not timed and not nightly"


def front_of(stage: Stage, chosen: Iterable[Stage]) -> str:
    """Return the name of the chosen stage beside which a stage runs; "" if it runs by itself."""
    names = {other.name for other in chosen}
    return next((name for name in stage.beside if name in names), "")


def files_with(mark: str, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the test files that use a mark, because collecting all files takes twenty seconds.

    without: the folders or files that are left out.
    """
    uses = re.compile(rf"\bmark\.{mark}\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    used = [file for file in files if uses.search(file.read_text("utf-8"))]
    names = [str(file.relative_to(ROOT)) for file in used]
    left_out = tuple(f"{path}/" for path in without)
    return tuple(name for name in names if not f"{name}/".startswith(left_out))


STAGES = {
    "test": (
        Stage(
            "interpreter",
            "Triton kernels in the interpreter",
            "triton and not slow and not nightly",
            processes=2,
            beside=WAITING,
            **INTERPRETER,
        ),
        Stage(
            "quick",
            "What starts no Ray",
            QUICK,
            processes=4,
            without=NUMBERS,
        ),
        Stage(
            "quick-numbers",
            "What starts no Ray and looks at no clock",
            QUICK,
            processes=2,
            paths=NUMBERS,
            beside=WAITING,
        ),
        Stage(
            "smoke",
            "A stream, a kill, a drain and Ctrl-C on a real Ray",
            "smoke and not nightly",
            paths=files_with("smoke"),
        ),
    ),
    "rest": (
        Stage(
            "slow",
            "What takes longer and starts no Ray",
            SLOW,
            processes=2,
            paths=files_with("slow", NUMBERS),
            without=NUMBERS,
        ),
        Stage(
            "numbers",
            "What takes longer and looks at no clock",
            SLOW,
            processes=2,
            paths=NUMBERS,
            beside=WAITING,
        ),
        Stage(
            "ray",
            "What starts Ray",
            "serve and not timed and not smoke and not triton and not nightly",
            paths=files_with("serve"),
        ),
        Stage(
            "costs",
            "What looks at costs",
            "timed and not smoke and not triton and not nightly",
            paths=files_with("timed"),
            sleeps=False,
        ),
    ),
    "nightly": (
        Stage(
            "nightly",
            "Prose, machine code and exhaustive grids",
            "nightly and not triton and not serve",
            processes=2,
            paths=files_with("nightly"),
        ),
        Stage(
            "rare",
            "What starts Ray and others catch, too",
            "nightly and serve and not triton",
            paths=files_with("serve"),
        ),
        Stage(
            "grids",
            "Every pair of what Triton kernels take, in the interpreter",
            "triton and (slow or nightly)",
            processes=2,
            **INTERPRETER,
        ),
    ),
}


@dataclass
class Outcome:
    """The outcome of a stage.

    again: tests that failed at first and passed alone. failed: tests that failed twice.
    broken: reasons other than failed tests why the stage failed.
    """

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
_beside: "Beside | None" = None


def _report(cache: Path) -> Path:
    """Return the path of pytest's JUnit report, which is next to the cache folder."""
    return cache.with_suffix(".xml")


def _pytest(stage: Stage, root: Path, cache: Path, *arguments: str, where: str) -> int:
    """Run pytest to its end; return its exit code, which is negative if a signal ended it.

    where: pytest's -m.
    """
    command = [sys.executable, "-m", "pytest", "-m", where, "-o", f"cache_dir={cache}"]
    report = _report(cache)
    report.unlink(missing_ok=True)
    command += [f"--junitxml={report}", *arguments, *stage.paths]
    command += [f"--ignore={path}" for path in stage.without]
    environment = {**os.environ, **stage.environment}
    # Let Python store bytecode, with rewritten asserts, for all stages. Otherwise each stage
    # compiles all modules for 10 s, and each of the hundreds of processes that tests start compiles
    # some.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(WITHOUT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if stage.sleeps:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if stage.processes > 1:
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(command, cwd=root, env=environment)
    while True:  # also wait for orphans, which as zombies would look alive to a test
        pid, status = os.wait()
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _counted(cache: Path) -> Counter[str]:
    """Return the numbers of passed, failed and skipped tests in pytest's JUnit report.

    A test that failed in its teardown counts twice."""
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


def _started() -> list[int]:
    """Return the pids of live processes that tests have started, except those of `Beside`."""
    processes = table()
    started = descendants(os.getpid(), processes)
    if _beside is None:
        return started
    others = {_beside.pid, *descendants(_beside.pid, processes)}
    return [pid for pid in started if pid not in others]


def _left() -> list[str]:
    """Wait for processes that tests have started, end those that remain, and return the command
    lines of these."""
    limit = time.monotonic() + ENDS_S
    while (pids := _started()) and time.monotonic() < limit:
        time.sleep(0.1)
        reap()
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            lines.append(f"{pid} {line[:120]}")
    kill(_started)
    reap()
    return lines


def run(stage: Stage, root: Path = ROOT, cache: Path = CACHE, long: bool = False) -> Outcome:
    """Run a stage, and its failed tests once more. cache: a folder for pytest's caches and
    reports."""
    outcome = first_time(stage, root, cache, long)
    once_more(outcome, root, cache, long)
    return outcome


def first_time(stage: Stage, root: Path, cache: Path, long: bool, *more: str) -> Outcome:
    """Run a stage, without running failed tests again. more: further arguments of pytest."""
    began = time.monotonic()
    outcome = Outcome(stage)
    folder = cache / stage.name
    cache.mkdir(parents=True, exist_ok=True)
    shared = ("-n", str(stage.processes), "--dist", "worksteal") if stage.processes > 1 else ()
    print(f"== {stage.title}", flush=True)
    arguments = ("--cache-clear", "--durations=30", *shared, *more)
    code = _pytest(stage, root, folder, *arguments, where=_where(stage, long))
    if why := _why(code, folder):
        outcome.broken.append(why)
    else:
        outcome.counts = _counted(folder)
        outcome.failed = _last_failed(folder) if code else []
        if code and not outcome.failed:
            outcome.broken.append("pytest failed and names no test that did")
    outcome.broken += [f"left behind: {process}" for process in _left()]
    outcome.seconds = time.monotonic() - began
    return outcome


def once_more(outcome: Outcome, root: Path, cache: Path, long: bool) -> None:
    """Run the failed tests of a stage again, alone and in one process, and record in `outcome`
    which pass."""
    began = time.monotonic()
    stage, first = outcome.stage, outcome.failed
    folder = cache / stage.name
    if not first:
        return
    if len(first) > MOST_AGAIN:
        print(f"== {len(first)} tests failed, too many to try them again", flush=True)
        return
    print(f"== Once more, alone: {len(first)} of '{stage.title}' that failed", flush=True)
    only = ("--last-failed", "--last-failed-no-failures", "none")
    code = _pytest(stage, root, folder, *only, where=_where(stage, long))
    if why := _why(code, folder):
        outcome.broken.append(f"once more: {why}")
    else:
        failed = _last_failed(folder) if code else []
        passed = [test for test in first if test not in failed]
        if _counted(folder)["passed"] < len(passed):
            outcome.broken.append("not all that had failed ran once more")
        else:
            outcome.failed, outcome.again = failed, passed
            outcome.counts["failed"] = len(failed)
            outcome.counts["passed"] += len(passed)
    outcome.broken += [f"left behind: {process}" for process in _left()]
    outcome.seconds += time.monotonic() - began


def _where(stage: Stage, long: bool) -> str:
    return f"({stage.where}) and not gpu" + ("" if long else " and not long")


class Beside:
    """A process that runs stages at idle priority, beside other stages.

    Second tries come at its end, when it has the cores to itself.
    """

    def __init__(self, stages: Sequence[Stage], root: Path, cache: Path, long: bool) -> None:
        self.stages = stages
        self._root = root
        self._cache = cache
        self._long = long
        cache.mkdir(parents=True, exist_ok=True)
        self._printed, self._found = cache / "beside.log", cache / "beside.json"
        self._found.unlink(missing_ok=True)
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run()

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGINT)

    def end(self) -> list[Outcome]:
        """Give the process normal priority, wait for its end, print its output, run its failed
        tests again, and return the outcomes of its stages."""
        take_a_part(self.pid)
        with contextlib.suppress(ChildProcessError):  # already waited for, with the orphans
            os.waitpid(self.pid, 0)
        print(self._printed.read_text("utf-8", "replace"), end="", flush=True)
        if not self._found.exists():
            why = "its process ended before it said how it went"
            return [Outcome(stage, broken=[why]) for stage in self.stages]
        outcomes = []
        for stage, fields in zip(self.stages, json.loads(self._found.read_text()), strict=True):
            fields |= {"stage": stage, "counts": Counter(fields["counts"])}
            outcome = Outcome(**fields)
            once_more(outcome, self._root, self._cache, self._long)
            outcomes.append(outcome)
        return outcomes

    def _run(self) -> NoReturn:
        code = 1
        try:
            take_what_is_left()
            adopt_orphans()
            output = os.open(self._printed, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            outcomes = []
            for stage in self.stages:
                if not _interrupted:
                    patience = f"--timeout={BESIDE_S}"
                    outcome = first_time(stage, self._root, self._cache, self._long, patience)
                    outcomes.append({**vars(outcome), "stage": stage.name})
            if not _interrupted:
                self._found.write_text(json.dumps(outcomes))
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def take_what_is_left() -> None:
    """Run this process and its later children at idle priority, in a new session.

    Linux may give each session an equal share of the cores, so the new session's priority is
    lowered, too.
    """
    os.setsid()
    if not hasattr(os, "SCHED_IDLE"):  # not Linux
        os.nice(19)
        return
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def take_a_part(pid: int) -> None:
    """Give a process and its descendants normal priority again, if the user may do so.

    At idle priority they would only get cores that no other process of the machine uses.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("0")
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, AttributeError):  # it has ended; not root; not Linux
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def _why(code: int, cache: Path) -> str:
    """Return why pytest failed, by its exit code, other than by failed tests; "" if it did not."""
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


def keep_flaky(outcomes: list[Outcome], cache: Path = CACHE) -> None:
    """Append a line with this run's flaky tests to `flaky.jsonl`."""
    line = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "stages": [outcome.stage.name for outcome in outcomes],
        "flaky": [test for outcome in outcomes for test in outcome.again],
    }
    with (cache / "flaky.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def summary(outcomes: list[Outcome], seconds: float) -> list[str]:
    """Return the lines to print at the end: the stages, the tests that failed once, and a line in
    pytest's form. seconds: the time from start to end."""
    lines = []
    for outcome in outcomes:
        title = outcome.stage.title
        if front_of(outcome.stage, [other.stage for other in outcomes]):
            title += ", beside others"
        state = "passed" if outcome.good else "FAILED"
        lines.append(f"{state}  {outcome.seconds:6.0f} s  {title}")
        lines += [f"  failed: {test}" for test in outcome.failed]
        lines += [f"  {why}" for why in outcome.broken]
    flaky = [test for outcome in outcomes for test in outcome.again]
    lines.append(f"failed once, passed alone: {len(flaky)} {' '.join(flaky)}".rstrip())
    counts: Counter[str] = sum((outcome.counts for outcome in outcomes), Counter())
    said = [f"{counts[kind]} {kind}" for kind in ("failed", "passed", "skipped") if counts[kind]]
    return [*lines, f"{', '.join(said) or 'nothing ran'} in {seconds:.2f}s"]


def in_turns(
    chosen: Sequence[Stage], root: Path = ROOT, cache: Path = CACHE, long: bool = False
) -> list[Outcome]:
    """Run stages one after the other, each with the stages that run beside it; return all outcomes.

    Stages of one process come last: they wait most, and the same stages can run beside all of them.
    """
    global _beside
    outcomes = []
    fronts = [stage for stage in chosen if not front_of(stage, chosen)]
    fronts.sort(key=lambda stage: stage.processes == 1)
    for stage, following in zip(fronts, [*fronts[1:], None], strict=True):
        if others := [other for other in chosen if front_of(other, chosen) == stage.name]:
            _beside = Beside(others, root, cache, long)
        outcomes.append(run(stage, root, cache, long))
        if _beside is not None and not (
            following is not None
            and not _interrupted
            and all(following.name in other.beside for other in _beside.stages)
        ):
            outcomes += _beside.end()
            _beside = None
        if _interrupted:
            break
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    stages = {stage.name: (stage,) for part in STAGES.values() for stage in part} | STAGES
    parser.add_argument("parts", nargs="+", choices=stages)
    parser.add_argument("--long", action="store_true", help="with the tests marked long, too")
    args = parser.parse_args()
    began = time.monotonic()
    if "MANTA_TEST_MODEL" not in os.environ:  # see tests/conftest.py
        for quantization in ("none", "auto"):  # for tests' engines, and as it is served
            fetch = [
                sys.executable,
                "-m",
                "deployments.cli.models.fetch",
                "--quantization",
                quantization,
            ]
            subprocess.run(fetch, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "tests.compiled"], cwd=ROOT)
    adopt_orphans()

    def interrupt(*_: object) -> None:  # pytest also gets SIGINT, and ends its tests' processes
        global _interrupted
        _interrupted = True
        if _beside is not None:
            _beside.interrupt()

    signal.signal(signal.SIGINT, interrupt)
    chosen = [stage for part in args.parts for stage in stages[part]]
    outcomes = in_turns(chosen, long=args.long)
    keep_flaky(outcomes)
    print("\n".join(["==", *summary(outcomes, time.monotonic() - began)]), flush=True)
    if _interrupted:
        return 130
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
