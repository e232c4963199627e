"""The report of loadtest.gpu_checks."""

from pathlib import Path

from loadtest.gpu_checks import rows_of


def test_rows(tmp_path: Path) -> None:
    """A failed or skipped test that is told as passed; a figure that is lost."""
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="good" time="1.234"><properties>'
        '<property name="chunks" value="KL 1e-3"/></properties></testcase>'
        '<testcase classname="tests.a" name="bad" time="2"><failure message="x"/></testcase>'
        '<testcase classname="tests.a" name="none" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert rows_of(report) == [
        {"case": "a.good", "outcome": "passed", "seconds": 1.23, "chunks": "KL 1e-3"},
        {"case": "a.bad", "outcome": "failure", "seconds": 2.0},
        {"case": "a.none", "outcome": "skipped", "seconds": 0.0},
    ]
