"""A pytest plugin that writes JSON lines while tests run.

It writes a line to --lines FILE when a test begins and when it ends, so that results survive if the
process dies or is killed. To --collected FILE it writes a line for each collected test, with its
marks.

    python -m pytest -p bench.report.pytest_lines --lines FILE
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, help="file for a JSON line of each test")
    parser.addoption("--collected", type=Path, help="file for a JSON line of each collected test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--lines")
    if path is not None:
        config.pluginmanager.register(_Lines(path))


def pytest_collection_finish(session: pytest.Session) -> None:
    path = session.config.getoption("--collected")
    if path is not None:
        lines = [
            json.dumps({"case": item.nodeid, "marks": [mark.name for mark in item.iter_markers()]})
            for item in session.items
        ]
        path.write_text("".join(line + "\n" for line in lines))


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def _say(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(case=nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test's line: recorded properties, and the reason if it failed or was skipped."""
        if report.when != "call" and report.passed:
            return
        line: dict[str, Any] = {"case": report.nodeid, "outcome": report.outcome}
        line |= {"seconds": round(report.duration, 2), **dict(report.user_properties)}
        if not report.passed:
            line["why"] = report.longreprtext[-1500:]
        self._say(**line)
