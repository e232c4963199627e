"""Result files: what a run that was cut off leaves, and what ran where."""

import json
import os
from pathlib import Path

import pytest

from bench.report.result_file import Line, RawLines, versions, versions_under, write


def names(lines: list[Line]) -> list[str]:
    return [line["name"] for line in lines]


def test_taken_up_again(tmp_path: Path) -> None:
    """Lines lost, doubled, or of a run that does not count; a half-written last line that keeps a
    comparison from going on."""
    raw = RawLines(tmp_path / "new", "x")
    for name in ("whole", "cut"):
        raw.keep({"name": name})
    (path,) = (tmp_path / "new").glob("x-*.jsonl")
    with path.open("a") as file:
        file.write('{"name": "hal')
    raw = RawLines(tmp_path / "new", "x", lambda lines: lines[:1])
    assert names(raw.all) == ["whole"]
    raw.keep({"name": "more"})
    raw.finish({"ours": {}}, [{"case": "a"}])
    assert names([json.loads(line) for line in path.read_text().splitlines()]) == ["whole", "more"]
    document = json.loads(path.with_suffix(".json").read_text())
    assert document["rows"] == [{"case": "a"}] and document["date"] == raw.date
    assert RawLines(tmp_path / "new", "x").all == [] and path.read_text() == ""


def test_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of an earlier run of the day among those of this one."""
    for name in ("earlier", "now"):
        write(tmp_path, "x", {"ours": {}}, [], [{"name": name}])
    (path,) = tmp_path.glob("x-*.jsonl")
    assert names([json.loads(line) for line in path.read_text().splitlines()]) == ["now"]
    config = json.loads(path.with_suffix(".json").read_text())["config"]
    assert {"torch", "device", "python"} <= config["versions"].keys()
    assert capsys.readouterr().out == ""


def test_versions_of_another_environment() -> None:
    """A peer's figures under the versions of ours; a comparison lost for want of a version."""
    installed = versions_under(dict(os.environ), "msgspec", "no-such-package")
    assert installed == versions("msgspec") and "no-such-package" not in installed
    assert versions_under({**os.environ, "PYTHONHOME": "/nonexistent"}).keys() == {"unknown"}
