"""bench.gpu_checks: parts that fail, die or hang, and what is told of them."""

import argparse
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_checks
from bench.gpu_checks import CheckPart, check, parts, rows_of, run

ROOT = Path(__file__).parents[2]
TESTS = """
import os, pytest

def test_good(record_property):
    record_property("chunks", "KL 1e-3")

def test_bad():
    assert 1 == 2

@pytest.mark.skip
def test_none(): ...

def test_dies():
    os._exit(9)

def test_after(): ...
"""


def test_a_part_that_dies(tmp_path: Path) -> None:
    """A failed or skipped test that is told as passed; a figure that is lost; a test that takes
    its process with it, and with it what the others said."""
    file = tmp_path / "test_x.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.report.pytest_lines", str(file)]
    lines = run(CheckPart("x", command), time.monotonic() + 60, "0")
    assert {line["case"].rpartition(":")[2]: line["outcome"] for line in lines} == {
        "test_good": "passed", "test_bad": "failed", "test_none": "skipped",
        "test_dies": "died", "x": "failed",
    }  # fmt: skip
    assert lines[-1]["exit"] == 9 and "assert 1 == 2" in lines[1]["why"]
    rows = rows_of(lines)
    assert [row["tests"] for row in rows if "tests" in row] == [1, 1, 1, 1]
    assert next(row for row in rows if "chunks" in row)["chunks"] == "KL 1e-3"
    assert len(rows) == 4 + 4  # measured, failed, died, and the part


def says(text: str, seconds: float = 0) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import time; print({text!r}, flush=True); time.sleep({seconds})",
    ]


def test_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that waits for ever and costs the others their results; a test that was cut off and is
    told as one that died; a second run that repeats what is done, or does not do what is missing.
    """
    monkeypatch.setattr(gpu_checks, "versions", lambda *_: {})
    args = argparse.Namespace(
        model=None, name="m", out=tmp_path, pytest=[], resume=False, marked=False, at_once=1
    )
    measured = json.dumps({"case": "m/32768", "ttft_s": 1.4})
    began = json.dumps({"case": "test_waits", "outcome": "began"})

    def with_parts(*found: CheckPart) -> None:
        monkeypatch.setattr(gpu_checks, "parts", lambda *_: list(found))

    with_parts(
        CheckPart("quick", says(measured)),
        CheckPart("hangs", says(began, 60)),
        CheckPart("late", []),
    )
    assert check(args, time.monotonic() + 2.5, ["0"]) == 1
    (table,) = tmp_path.glob("gpu-checks-*.json")
    rows = json.loads(table.read_text())["rows"]
    assert {"case": "test_waits", "outcome": "cut off"} in rows

    def outcomes() -> dict[str, Any]:
        (table,) = tmp_path.glob("gpu-checks-*.json")
        document = json.loads(table.read_text())
        assert next(row for row in document["rows"] if row["case"] == "m/32768")["ttft_s"] == 1.4
        parts_run: dict[str, Any] = document["config"]["ours"]["parts"]
        return parts_run

    assert outcomes() == {"quick": "passed", "hangs": "out of time", "late": "not run"}
    args.resume = True
    with_parts(
        CheckPart("quick", ["/nonexistent"]),
        CheckPart("hangs", says("x")),
        CheckPart("late", says("x")),
    )
    assert check(args, time.monotonic() + 20, ["0"]) == 0
    assert outcomes() == {"quick": "passed", "hangs": "passed", "late": "passed"}


@pytest.mark.parametrize("devices", [["0"], ["2", "5"]])
@pytest.mark.parametrize("at_once", [1, 2])
def test_parts_that_need_a_device_have_it_alone(
    at_once: int, devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that want a device alone meet others on it; more run beside each other than was said,
    or fewer; one that wants all devices sees one; one without the mark runs all the same."""
    monkeypatch.setattr(gpu_checks, "versions", lambda *_: {})
    code = (
        "import json, os, sys, time; began = time.time(); time.sleep(0.4);"
        "print(json.dumps({'case': sys.argv[1], 'device': os.environ['CUDA_VISIBLE_DEVICES'],"
        "'began': began, 'ended': time.time()}))"
    )
    alone = {"a": True, "b": False, "c": False, "d": False, "e": False, "f": True}
    parts = [CheckPart(name, [sys.executable, "-c", code, name], alone[name]) for name in alone]
    parts.append(CheckPart("all", [sys.executable, "-c", code, "all"], together=True))
    parts.append(CheckPart("of a CPU", ["/nonexistent"], marked=False))
    monkeypatch.setattr(gpu_checks, "parts", lambda *_: parts)
    args = argparse.Namespace(
        model=None, name="m", out=tmp_path, pytest=[], resume=False, marked=True, at_once=at_once
    )
    assert check(args, time.monotonic() + 30, devices) == 0
    (table,) = tmp_path.glob("gpu-checks-*.json")
    ran = {row["case"]: row for row in json.loads(table.read_text())["rows"] if "began" in row}
    last = ran.pop("all")
    assert last["device"] == ",".join(devices)
    assert last["began"] >= max(row["ended"] for row in ran.values())
    assert ran.keys() == alone.keys()
    assert {row["device"] for row in ran.values()} == set(devices)
    met = dict.fromkeys(ran, 1)
    for first, other in itertools.permutations(ran, 2):
        if ran[first]["device"] == ran[other]["device"]:
            met[first] += ran[other]["began"] <= ran[first]["began"] < ran[other]["ended"]
    assert all(met[name] == 1 for name in ran if alone[name])
    assert max(met.values()) == at_once


def test_the_order() -> None:
    """Tests that run beside each other and disturb those that measure; what matters most left for
    the end of a visit, or left out."""
    checks = parts(ROOT, "folder", "m")
    first = [part.name for part in checks if part.name.startswith(gpu_checks.FIRST)]
    assert [part.name for part in checks[: len(first)]] == first
    split = {name.partition("::")[2] for name in first[1:]}
    functions = vars(importlib.import_module("tests.parity.test_gpu"))
    assert split == {name for name in functions if name.startswith("test_")}
    assert checks[-1].name == "long contexts" and "131072" in checks[-1].command
    assert [part.name for part in checks if part.alone] == [gpu_checks.ALONE, "long contexts"]
    assert [part.name for part in checks if part.together] == [gpu_checks.TOGETHER]
    assert {part.marked for part in checks if "(not gpu" in part.name} == {False}
    files = [file for part in checks for file in part.command if file.endswith(".py")]
    assert files.count("tests/kernels/test_attention.py") == 2  # with and without the mark
    assert files.count("tests/engine/scheduling/test_token_pool.py") == 1
    assert "tests/bench/test_gpu_checks.py" not in files
