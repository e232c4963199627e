"""bench.gpu_checks: tests that are collected and cut into parts, parts that fail, die or hang, what
is told of them, and runs that go on."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_checks
from bench.gpu_checks import (
    CheckPart,
    check,
    collect,
    latest,
    marked_parts,
    other_parts,
    remaining,
    rows_of,
    run,
)

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pytest

def test_good(record_property):
    record_property("chunks", "KL 1e-3")

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="no such model")
def test_none(): ...

def test_dies():
    os._exit(9)

def test_after(): ...
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "bench.report.pytest_lines"]


def test_a_part_that_dies(tmp_path: Path) -> None:
    """A failed or skipped test that is told as passed; a figure that is lost; a test that takes
    its process with it, and with it what the others said."""
    file = tmp_path / "test_x.py"
    file.write_text(TESTS)
    names = ["test_good", "test_bad", "test_none", "test_dies", "test_after"]
    cases = tuple(f"{file}::{name}" for name in names)
    lines = run(CheckPart("x", PYTEST, tests=cases), time.monotonic() + 60, "0")
    assert {line["case"].rpartition(":")[2]: line["outcome"] for line in lines} == {
        "test_good": "passed", "test_bad": "failed", "test_none": "skipped",
        "test_dies": "died", "x": "failed",
    }  # fmt: skip
    assert lines[-1]["exit"] == 9 and "assert 1 == 2" in lines[1]["why"]
    assert "no such model" in lines[2]["why"]
    rows = rows_of(lines, [*(line["case"] for line in lines), "test_after"])
    assert [row["tests"] for row in rows if "tests" in row] == [1, 1, 1, 1, 1]
    assert {"case": "not run", "tests": 1} in rows
    assert next(row for row in rows if "chunks" in row)["chunks"] == "KL 1e-3"
    assert len(rows) == 5 + 4  # measured, failed, died, and the part


def says(text: str, seconds: float = 0) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import time; print({text!r}, flush=True); time.sleep({seconds})",
    ]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return arguments of a run; its commit and versions are not asked for."""
    monkeypatch.setattr(gpu_checks, "versions", lambda *_: {})
    return argparse.Namespace(
        model=None, name="m", out=tmp_path, pytest=[], resume=False, marked=True, at_once=1
    )


@pytest.fixture
def with_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what a run finds: parts of tests, and other parts."""

    def set_parts(*parts: CheckPart) -> None:
        tests: dict[str, set[str]] = {test: set() for part in parts for test in part.tests}
        line = {"part": "collection", "case": "collection", "outcome": "passed", "commit": "abc"}
        monkeypatch.setattr(gpu_checks, "collect", lambda *_: (tests, line))
        monkeypatch.setattr(gpu_checks, "marked_parts", lambda *_: [p for p in parts if p.tests])
        monkeypatch.setattr(gpu_checks, "other_parts", lambda *_: [p for p in parts if not p.tests])

    return set_parts


def document(folder: Path) -> dict[str, Any]:
    (table,) = folder.glob("gpu-checks-*.json")
    content: dict[str, Any] = json.loads(table.read_text())
    return content


def test_parts_go_on(options: argparse.Namespace, with_parts: Callable[..., None]) -> None:
    """A part that waits for ever and costs the others their results; a test that was cut off and is
    told as one that died; a second run that repeats what is done, or does not do what is missing.
    """
    measured = json.dumps({"case": "m/32768", "ttft_s": 1.4})
    began = json.dumps({"case": "test_waits", "outcome": "began"})
    with_parts(
        CheckPart("quick", says(measured)),
        CheckPart("hangs", says(began, 60)),
        CheckPart("late", []),
    )
    assert check(options, time.monotonic() + 2.5, ["0"]) == 1
    assert {"case": "test_waits", "outcome": "cut off"} in document(options.out)["rows"]

    def outcomes() -> dict[str, Any]:
        content = document(options.out)
        row = next(row for row in content["rows"] if row["case"] == "m/32768")
        assert row["ttft_s"] == 1.4
        parts_run: dict[str, Any] = content["config"]["ours"]["parts"]
        assert parts_run.pop("collection") == "passed"
        return parts_run

    assert outcomes() == {"quick": "passed", "hangs": "out of time", "late": "not run"}
    options.resume = True
    waited = json.dumps({"case": "test_waits"})
    with_parts(
        CheckPart("quick", ["/nonexistent"]),
        CheckPart("hangs", says(waited)),
        CheckPart("late", says("x")),
    )
    assert check(options, time.monotonic() + 20, ["0"]) == 0
    assert outcomes() == {"quick": "passed", "hangs": "passed", "late": "passed"}
    assert document(options.out)["config"]["ours"]["commits"] == ["abc"]


SLOW_TESTS = """
import os, subprocess, sys, time, pathlib

folder = pathlib.Path({folder!r})

def ran(name):
    with (folder / "ran").open("a") as file:
        file.write(name + " ")

def test_first():
    ran("first")

def test_hangs():
    ran("hangs")
    if not (folder / "again").exists():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(60)

def test_fails():
    ran("fails")
    assert (folder / "again").exists()

def test_last():
    ran("last")
"""


def test_tests_go_on(
    options: argparse.Namespace,
    with_parts: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part that was cut off repeats its tests that passed, or begins with the one that hung and
    never reaches the others; a process of a killed test that keeps the device; a whole file that
    counts tests twice, or hides that one failed at first."""
    (tmp_path / "test_slow.py").write_text(SLOW_TESTS.format(folder=str(tmp_path)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # so that its folder begins node ids
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def cases(*names: str) -> tuple[str, ...]:
        return tuple(f"test_slow.py::test_{name}" for name in names)

    def ran() -> list[str]:
        return (tmp_path / "ran").read_text().split()

    with_parts(
        CheckPart("fails", PYTEST, tests=cases("fails")),
        CheckPart("slow", PYTEST, tests=cases("first", "hangs", "last")),
    )
    begin = time.monotonic()
    while "hangs" not in (ran() if (tmp_path / "ran").exists() else []):
        (tmp_path / "ran").unlink(missing_ok=True)  # a busy machine: once more, with more time
        seconds = 2 * (time.monotonic() - begin) + 8
        assert check(options, time.monotonic() + seconds, ["0"]) == 1
    assert ran() == ["fails", "first", "hangs"]
    child = int((tmp_path / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
    rows = document(options.out)["rows"]
    assert {"case": "not run", "tests": 1} in rows and {"case": "cut off", "tests": 1} in rows

    (tmp_path / "again").touch()
    options.resume = True
    assert check(options, time.monotonic() + 60, ["0"]) == 0
    assert ran()[3:] == ["last", "hangs", "fails"], "those that never began come first"
    content = document(options.out)
    assert {"case": "passed", "tests": 4} in content["rows"]
    (row,) = (row for row in content["rows"] if "earlier" in row)
    assert row["case"].endswith("test_fails")
    assert (row["earlier"], row["outcome"]) == ("failed", "passed")
    assert {row["case"] for row in content["rows"]} == {"passed", row["case"]}
    assert set(content["config"]["ours"]["parts"].values()) == {"passed"}
    assert check(options, time.monotonic() + 60, ["0"]) == 0 and len(ran()) == 6
    assert document(options.out)["rows"] == content["rows"]


HANGS = """
import os, time

def test_first(): ...

def test_hangs():
    time.sleep(60)

def test_last(): ...
"""


def test_a_test_hangs(
    options: argparse.Namespace,
    with_parts: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test that hangs takes the time of all others, and nobody learns where it hung."""
    (tmp_path / "test_x.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # so that its folder begins node ids
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(gpu_checks, "TEST_SECONDS", 1.5)
    cases = tuple(f"test_x.py::test_{name}" for name in ("first", "hangs", "last"))
    with_parts(CheckPart("x", gpu_checks._pytest([]), tests=cases))
    assert check(options, time.monotonic() + 50, ["0"]) == 1
    content = document(options.out)
    assert [row for row in content["rows"] if "tests" in row] == [
        {"case": "died", "tests": 1}, {"case": "passed", "tests": 2},
    ]  # fmt: skip
    lines = [json.loads(line) for line in next(options.out.glob("*.jsonl")).read_text().split("\n")
             if line]  # fmt: skip
    assert any("in test_hangs" in line.get("why", "") for line in lines)


def test_what_remains() -> None:
    """A part whose process failed after its tests had passed is called done; one that was cut off
    after its last test runs again."""
    parts = [
        CheckPart("crashes at its end", [], tests=("a", "b")),
        CheckPart("was cut off at its end", [], tests=("c",)),
        CheckPart("new", [], tests=("d",)),
    ]
    ends = {"crashes at its end": "failed", "was cut off at its end": "out of time"}
    lines = [{"part": "x", "case": case, "outcome": "passed"} for case in "abc"]
    lines += [{"part": part, "case": part, "outcome": end} for part, end in ends.items()]
    assert remaining(parts, lines) == [parts[2], parts[0]]
    lines = [{"part": "x", "case": "a", "outcome": outcome} for outcome in ("died", "cut off")]
    assert latest(lines) == [{"part": "x", "case": "a", "outcome": "cut off", "earlier": "died"}]


@pytest.mark.parametrize("devices", [["0"], ["2", "5"]])
@pytest.mark.parametrize("at_once", [1, 2])
def test_parts_that_need_a_device_have_it_alone(
    at_once: int,
    devices: list[str],
    options: argparse.Namespace,
    with_parts: Callable[..., None],
) -> None:
    """Parts that want a device alone meet others on it; more run beside each other than was said,
    or fewer; one that wants all devices sees one."""
    code = (
        "import json, os, sys, time; began = time.time(); time.sleep(0.4);"
        "print(json.dumps({'case': sys.argv[1], 'device': os.environ['CUDA_VISIBLE_DEVICES'],"
        "'began': began, 'ended': time.time()}))"
    )
    alone = {"a": True, "b": False, "c": False, "d": False, "e": False, "f": True}
    parts = [CheckPart("part all", [sys.executable, "-c", code, "all"], together=True)]
    parts += [CheckPart(f"part {n}", [sys.executable, "-c", code, n], alone[n]) for n in alone]
    with_parts(*parts)
    options.at_once = at_once
    assert check(options, time.monotonic() + 30, devices) == 0
    ran = {row["case"]: row for row in document(options.out)["rows"] if "began" in row}
    first = ran.pop("all")
    assert first["device"] == ",".join(devices)
    assert first["ended"] <= min(row["began"] for row in ran.values())
    assert ran.keys() == alone.keys()
    assert {row["device"] for row in ran.values()} == set(devices)
    met = dict.fromkeys(ran, 1)
    for one, other in itertools.permutations(ran, 2):
        if ran[one]["device"] == ran[other]["device"]:
            met[one] += ran[other]["began"] <= ran[one]["began"] < ran[other]["ended"]
    assert all(met[name] == 1 for name in ran if alone[name])
    assert max(met.values()) == at_once


def test_the_order() -> None:
    """Tests that need several GPUs, or one for themselves, meet others or come too late; a test is
    in two parts, or in none."""
    slow = gpu_checks.SPLIT
    tests: dict[str, set[str]] = {
        **{f"tests/a.py::test_x[{number}]": {"gpu"} for number in range(20)},
        "tests/b.py::test_fills": {"gpu", "whole_gpu"},
        "tests/b.py::test_small": {"gpu"},
        **{f"tests/b.py::test_ranks[{number}]": {"gpu", "two_gpus"} for number in range(10)},
        f"{slow}::test_p[0]": {"gpu"}, f"{slow}::test_p[1]": {"gpu"}, f"{slow}::test_q": {"gpu"},
        f"{gpu_checks.FIRST[0]}::test_r": {"gpu"},
    }  # fmt: skip
    parts = marked_parts(tests, ["-x"])
    assert [(part.name, len(part.tests)) for part in parts] == [
        ("tests/b.py (two_gpus)", 10), ("tests/b.py (whole_gpu)", 1),
        (gpu_checks.FIRST[0], 1), (f"{slow} test_p", 2), (f"{slow} test_q", 1),
        ("tests/a.py from 1", 12), ("tests/a.py from 13", 8),
        ("tests/b.py", 1),
    ]  # fmt: skip
    assert [part.name for part in parts if part.together] == ["tests/b.py (two_gpus)"]
    assert [part.name for part in parts if part.alone] == ["tests/b.py (whole_gpu)"]
    assert sorted(test for part in parts for test in part.tests) == sorted(tests)
    assert len({part.name for part in parts} | tests.keys()) == len(parts) + len(tests)
    assert all("-x" in part.command for part in parts)

    others = other_parts(ROOT, "folder", "m")
    assert others[-1].name == "long contexts" and "131072" in others[-1].command
    files = [file for part in others for file in part.command if file.endswith(".py")]
    assert files.count("tests/kernels/test_attention.py") == 1
    assert "tests/bench/test_gpu_checks.py" not in files
    assert [part.name for part in other_parts(ROOT, "folder", "m", marked=True)] == [
        "long contexts"
    ]


def test_collection(tmp_path: Path) -> None:
    """A file that cannot be imported goes unnoticed and takes its tests away; marks that are not
    seen; a test that needs no GPU is collected."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    markers = 'markers = ["gpu: x", "long: x", "whole_gpu: x"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{markers}\n")
    (folder / "test_a.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.whole_gpu\ndef test_a(): ...\n"
        "@pytest.mark.gpu\n@pytest.mark.long\ndef test_long(): ...\ndef test_plain(): ...\n"
    )
    tests, line = collect(tmp_path)
    assert tests == {"tests/test_a.py::test_a": {"gpu", "whole_gpu"}}
    assert line["outcome"] == "passed"
    (folder / "test_b.py").write_text("import pytest, no_such_module\npytest.mark.gpu\n")
    tests, line = collect(tmp_path)
    assert len(tests) == 1 and line["outcome"] == "failed"
    assert "no_such_module" in line["why"]
