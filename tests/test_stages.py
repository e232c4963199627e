"""tests/stages.py: what fails a stage, and which tests are in which."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests import stages
from tests.stages import (
    MOST_AGAIN,
    NUMBERS,
    ROOT,
    STAGES,
    WITHOUT,
    Outcome,
    files_with,
    front_of,
    keep_flaky,
    summary,
)

RUN = """
import os, pickle, sys
from pathlib import Path
from deployments.cli.serving.processes import adopt_orphans
from tests import stages

adopt_orphans()
stages.ENDS_S = 1.0
made = [stages.Stage("made", "Made", "not serve", processes=int(sys.argv[2]))]
if sys.argv[3:]:
    made.insert(0, stages.Stage("beside", "Beside", "serve", beside=("made",)))
    stages.take_what_is_left = lambda: os.environ.update(LEFT="")  # the cores may be full
outcomes = stages.in_turns(made, Path(sys.argv[1]), Path(sys.argv[1], "cache"))
Path(sys.argv[1], "outcomes").write_bytes(pickle.dumps(outcomes))
"""


def outcome_of(folder: Path, code: str, processes: int = 1) -> tuple[Outcome, str]:
    """Run a stage over one file of tests; return its outcome, and what was printed.

    code: the tests. processes: those of the stage.
    """
    (outcome,), printed = outcomes_of(folder, code, processes)
    return outcome, printed


def outcomes_of(
    folder: Path, code: str, processes: int = 1, *beside: str
) -> tuple[list[Outcome], str]:
    """Run a stage, and perhaps one beside it, over a file of tests; return outcomes and printed
    text.

    They run in a process of their own, which may adopt and end what the tests leave behind.
    beside: if given, tests marked `serve` are a second stage that runs beside the first.
    """
    import pickle

    imports = "import os, pathlib, pytest, signal, subprocess, sys, time\n"
    (folder / "test_made.py").write_text(imports + code)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n long\n serve\n" + PLUGINS)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(processes), *beside],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = pickle.loads((folder / "outcomes").read_bytes())
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    return outcomes, done.stdout


PLUGINS = "addopts = -p no:schemathesis -p no:anyio -p no:hypothesispytest\n"  # seconds each run
FINE = "def test_fine(): pass\n"
ONCE = (  # fails the first time
    "def test_once():\n"
    "    path = pathlib.Path(__file__).with_name('been')\n"
    "    there, _ = path.exists(), path.touch()\n"
    "    assert there\n"
)
NEVER = "def test_never(): assert False\n"


@pytest.mark.slow
def test_a_test_that_passes_alone_is_counted(tmp_path: Path) -> None:
    """A clock that a neighbour held up fails a change; or nobody hears that it did."""
    outcome, printed = outcome_of(tmp_path, FINE + ONCE, processes=2)
    assert outcome.good and outcome.again == ["test_made.py::test_once"]
    assert outcome.counts == {"passed": 2, "failed": 0, "skipped": 0}
    assert "1 failed, 1 passed" in printed and "Once more, alone: 1 of 'Made'" in printed
    *_, flaky, last = summary([outcome], 1.0)
    assert flaky == "failed once, passed alone: 1 test_made.py::test_once"
    assert last.startswith("2 passed in ")
    for _ in range(2):
        keep_flaky([outcome], tmp_path)
    runs = (tmp_path / "flaky.jsonl").read_text().splitlines()
    assert [json.loads(run)["flaky"] for run in runs] == [["test_made.py::test_once"]] * 2


def test_a_test_that_fails_twice_fails_the_stage(tmp_path: Path) -> None:
    """A second run that hides the first."""
    outcome, _ = outcome_of(tmp_path, FINE + ONCE + NEVER)
    assert not outcome.good and outcome.failed == ["test_made.py::test_never"]
    assert outcome.again == ["test_made.py::test_once"] and not outcome.broken
    assert summary([outcome], 1.0)[-1].startswith("1 failed, 2 passed in ")


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    """A broken change runs for twice as long before it is told."""
    many = "".join(f"def test_{number}(): assert False\n" for number in range(MOST_AGAIN + 1))
    outcome, printed = outcome_of(tmp_path, many)
    assert len(outcome.failed) == MOST_AGAIN + 1 and "Once more" not in printed


@pytest.mark.parametrize(
    ("code", "processes", "why"),
    [
        ("import nothing_of_this_name\n", 1, "exit code 2"),
        ("x = 1\n", 1, "no test was collected"),
        ("def test_end(): os.kill(os.getpid(), signal.SIGSEGV)\n", 1, "ended by SIGSEGV"),
        (FINE + "def test_end(): os._exit(0)\n", 2, "died in test_made.py::test_end"),
        (FINE + "def test_end(): os._exit(0)\n", 1, "no report"),
    ],
    ids=["import", "empty", "signal", "worker", "exit"],
)
def test_what_is_not_a_failed_test_fails_the_stage(
    tmp_path: Path, code: str, processes: int, why: str
) -> None:
    """A stage that crashed, or ran nothing, counts as one in which all is well; or as one whose
    tests passed when they ran alone."""
    outcome, printed = outcome_of(tmp_path, code, processes)
    assert not outcome.good and why in outcome.broken[0] and not outcome.again
    assert "Once more" not in printed


def test_what_is_left_behind_fails_the_stage(tmp_path: Path) -> None:
    """Engines and haproxies of tests, on the cores of all tests after them."""
    code = (
        "def test_leaves():\n"
        "    left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    pathlib.Path(__file__).with_name('left').write_text(str(left.pid))\n"
    )
    outcome, _ = outcome_of(tmp_path, code)
    pid = int((tmp_path / "left").read_text())
    try:
        assert not outcome.good and outcome.broken[0].startswith(f"left behind: {pid} ")
        assert not Path(f"/proc/{pid}").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


MET = """
HERE = pathlib.Path(__file__).parent

def meet(mine, other):
    (HERE / mine).touch()
    deadline = time.monotonic() + 60
    while not (HERE / other).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def test_front():
    meet("front", "beside")
    assert "LEFT" not in os.environ

@pytest.mark.serve
def test_beside():
    meet("beside", "front")
    assert "LEFT" in os.environ
    # The stage in front ends, and looks for what is left behind, while this one runs.
    while not (HERE / "cache" / "made.xml").exists():
        time.sleep(0.01)

@pytest.mark.serve
def test_once():
    path = HERE / "been"
    there, _ = path.exists(), path.touch()
    assert there and "LEFT" not in os.environ
"""


def test_a_stage_runs_beside_another(tmp_path: Path) -> None:
    """Stages that wait for each other; one that is ended with what the other has left behind;
    failures beside others that nobody is told of, or that are tried again beside others."""
    (front, beside), printed = outcomes_of(tmp_path, MET, 1, "beside")
    assert front.good and front.counts["passed"] == 1, printed
    assert beside.good and beside.counts == {"passed": 2, "failed": 0, "skipped": 0}, printed
    assert beside.again == ["test_made.py::test_once"]
    assert printed.index("== Made") < printed.index("== Beside") < printed.index("Once more, alone")


LEFT = """
import os
from tests import stages

def tell(then, otherwise):
    idle = hasattr(os, "SCHED_IDLE") and os.sched_getscheduler(0) == os.SCHED_IDLE
    os.write(1, (then if idle or os.nice(0) == 19 else otherwise).encode())

stages.take_what_is_left()
tell("left ", "all ")
stages.take_a_part(os.getpid())
tell("left", "part")
os._exit(0)
"""


def test_what_is_left_of_the_cores() -> None:
    """Stages that take cores from tests that look at clocks; or that wait, when nothing runs beside
    them any more, for what other users of the machine leave."""
    classes = subprocess.check_output([sys.executable, "-c", LEFT], cwd=ROOT, text=True).split()
    assert classes[0] == "left" and (classes[1] == "part" or os.geteuid())


def test_a_stage_beside_another_that_dies_fails(tmp_path: Path) -> None:
    """A stage of which nothing was heard counts as one in which all is well."""
    code = FINE + "@pytest.mark.serve\ndef test_ends(): os.kill(os.getppid(), signal.SIGKILL)\n"
    (front, beside), _ = outcomes_of(tmp_path, code, 1, "beside")
    assert front.counts["passed"] == 1
    assert not beside.good and "before it said" in beside.broken[0]


def test_stages_that_wait_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage beside that has the idle time of one stage only, or runs beside one that looks at
    costs."""
    steps: list[str] = []

    class Noted(stages.Beside):
        def __init__(self, others: Sequence[stages.Stage], *_: object) -> None:
            self.stages = others
            steps.append("begin " + " ".join(stage.name for stage in others))

        def end(self) -> list[Outcome]:
            steps.append("end")
            return [Outcome(stage) for stage in self.stages]

    def run(stage: stages.Stage, *_: object) -> Outcome:
        steps.append(stage.name)
        return Outcome(stage)

    monkeypatch.setattr(stages, "Beside", Noted)
    monkeypatch.setattr(stages, "run", run)
    everything = [*STAGES["test"], *STAGES["rest"]]
    assert {outcome.stage.name for outcome in stages.in_turns(everything)} == {
        stage.name for stage in everything
    }
    first = ["begin interpreter quick-numbers numbers", "quick", "slow", "smoke", "ray", "end"]
    assert steps == [*first, "costs"]
    steps.clear()
    stages.in_turns(STAGES["test"])
    stages.in_turns(STAGES["rest"])
    assert steps == [
        *("begin interpreter quick-numbers", "quick", "smoke", "end"),
        *("begin numbers", "slow", "ray", "end", "costs"),
    ]


def test_each_test_is_in_one_stage() -> None:
    """A test that no stage has proves nothing; one that two have is waited for twice."""
    every = [stage for part in STAGES.values() for stage in part]
    by_mark = [files_with(mark) for mark in ("smoke", "serve", "timed", "nightly")]
    by_mark.append(files_with("slow", NUMBERS))
    names = ("triton", "serve", "timed", "slow", "smoke", "nightly")
    for folder, *values in product(("tests/kernels", "tests"), *[(False, True)] * len(names)):
        marks = dict(zip(names, values, strict=True))
        if marks["smoke"] and (not marks["serve"] or marks["triton"] or marks["nightly"]):
            continue
        if marks["triton"] and folder == "tests":  # nowhere: see below
            continue
        names_of = [
            stage.name
            for stage in every
            if eval(stage.where, {}, marks)
            and folder not in stage.without
            and (not stage.paths or folder in stage.paths or stage.paths in by_mark)
        ]
        assert len(names_of) == 1, (folder, marks, names_of)
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text("utf-8")
        if "mark.triton" in text and path.name != Path(__file__).name:
            assert path.parent == ROOT / "tests" / "kernels", path
        if not path.name.startswith("test_"):  # files_with would not see their users
            assert not re.search(r"mark\.(smoke|serve|timed|nightly)\b", text), path
            numbers = any(path.is_relative_to(ROOT / folder) for folder in NUMBERS)
            assert numbers or not re.search(r"mark\.slow\b", text), path
    paths = {
        stage.name: stage.paths for stage in every if stage.paths and stage.paths not in by_mark
    }
    triton = ("tests/kernels",)
    numbers = dict.fromkeys(("quick-numbers", "numbers"), NUMBERS)
    assert paths == {"interpreter": triton, "grids": triton, **numbers}
    without = {stage.name: stage.without for stage in every if stage.without}
    assert without == dict.fromkeys(("quick", "slow"), NUMBERS)
    assert all((ROOT / path).exists() for path in NUMBERS)
    assert {stage.beside for stage in every} == {(), ("quick", "slow", "smoke", "ray")}
    fronts = {
        part: {front_of(stage, STAGES[part]) for stage in STAGES[part]} for part in ("test", "rest")
    }
    assert fronts == {"test": {"", "quick"}, "rest": {"", "slow"}}
    assert {front_of(stage, [*STAGES["test"], *STAGES["rest"]]) for stage in every} == {"", "quick"}


def test_packages_are_left_out_for_one_importer() -> None:
    """Ray Serve imports pandas after all, or a test's own pipeline has none."""
    program = """
for name, importer in (("pandas", "ray.serve._private.utils"), ("chardet", "requests.compat")):
    try:
        exec(f"import {name}", {"__name__": importer})
    except ImportError:
        exec(f"import {name}", {"__name__": "ray.serves"})
        print(__import__(name).__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(WITHOUT)},
        capture_output=True,
        text=True,
        check=True,
    )
    folders = [Path(line).parent for line in done.stdout.splitlines()]
    assert [folder.name for folder in folders] == ["pandas", "chardet"]
    assert WITHOUT not in folders[0].parents
