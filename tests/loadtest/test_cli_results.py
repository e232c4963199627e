"""Report, compare, search and faults as a person runs them, against servers of our own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loadtest.fake_server import FakeServer
from tests.loadtest.made_run import make_run

ROOT = Path(__file__).parents[2]
SCENARIO = """
name: short
work: {name: tokens, input: 8, output: 4}
phases: [{name: load, arrivals: {kind: constant, rate: 40}, duration: 1.5s}]
slo: {ttft: 500ms}
"""


def cli(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "loadtest", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "short.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def server_process() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the URL and the process of a server that can be killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loadtest.fake_server", "0.01", "0.01"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()


def test_killed_server_is_in_the_report(
    scenario: Path, tmp_path: Path, server_process: tuple[str, "subprocess.Popen[str]"]
) -> None:
    """The fault, its time and what it cost belong into one report, not into two tools' logs."""
    url, process = server_process
    out = tmp_path / "out"
    done = cli(
        "run", scenario, "--url", url, "--out", out, "--lenient", "--chaos", "kill-server@1s"
    )
    assert process.wait(5) == -9, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert [mark["what"] for mark in summary["faults"]] == [f"kill server (pid {process.pid})"]
    assert 1.0 <= summary["faults"][0]["t"] < 1.4
    assert summary["failed"] > 0 and summary["succeeded"] > 0
    assert f"kill server (pid {process.pid})" in (out / "report.html").read_text()


def test_bad_faults_end_before_any_request(scenario: Path, tmp_path: Path) -> None:
    """A misspelt fault must not cost a run, nor must one without a victim."""
    with FakeServer() as server:
        base = ("run", scenario, "--url", server.url, "--out", tmp_path / "out")
        for chaos, item in (("kill-severs@1s", "no target"), ("kill-replica@1s", "no replica")):
            done = cli(*base, "--chaos", chaos)
            assert done.returncode == 2 and item in done.stderr, done.stderr
        assert server.seen == []
    scenario.write_text(SCENARIO + "chaos: [kill-replica]\n")
    done = cli("run", scenario, "--dry-run")
    assert done.returncode == 2 and "short.yaml:6: chaos.0" in done.stderr, done.stderr


@pytest.mark.slow
def test_sweep_and_search(scenario: Path, tmp_path: Path) -> None:
    """Every trial's results stay, the page has them all, and a second call only reads."""
    out = tmp_path / "found"
    with FakeServer(first=0.01, gap=0.001) as server:
        base = (
            "search",
            scenario,
            "--url",
            server.url,
            "--out",
            out,
            "--lenient",
            "--sweep",
            "10,20",
        )
        done = cli(*base)
        assert done.returncode == 0, done.stderr + done.stdout
        asked = len(server.seen)
        assert 40 <= asked <= 50
        again = cli(*base)
        assert again.returncode == 0 and len(server.seen) == asked
        done = cli(*base[:-2], "--slo", "p90_ttft<1s")
        assert done.returncode == 2 and "another scenario or SLO" in done.stderr
        more = (
            "--lenient",
            "--slo",
            "p80_ttft<1s",
            "--start",
            20,
            "--top",
            20,
            "--out",
            tmp_path / "s",
        )
        done = cli("search", scenario, "--url", server.url, *more)
        assert "highest load that keeps the SLO: 20 requests/s" in done.stdout, done.stderr
    assert sorted(p.parent.name for p in out.glob("*/summary.json")) == ["10-1", "20-1"]
    assert "saturated" not in (out / "report.html").read_text().split("<footer>")[0]
    assert cli("compare", out / "10-1", out / "20-1").returncode == 0


def test_report_and_compare_exit_codes(tmp_path: Path) -> None:
    """CI reads nothing but the exit code."""
    for name, how in (("a", {"seed": 1}), ("b", {"seed": 2, "slower": 1.3})):
        make_run(tmp_path / name, seconds=15.0, **how)
    a, b, html = tmp_path / "a", tmp_path / "b", tmp_path / "c.html"
    assert cli("report", a, "--out", html).returncode == 0 and html.exists()
    assert cli("report", tmp_path).returncode == 2
    assert cli("report", a, "--out", tmp_path / "none" / "x.html").returncode == 2
    done = cli("compare", a, b, "--html", html, "--fail-if", "p50_tpot>+10%")
    assert done.returncode == 1 and "p50_tpot>+10%" in done.stderr and "worse" in done.stdout
    assert cli("compare", a, b, "--fail-if", "p50_tpot>+60%").returncode == 0
    assert cli("compare", a, b, "--fail-if", "p50_tpot>60").returncode == 2
