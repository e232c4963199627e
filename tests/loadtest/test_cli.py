"""The command line: exit codes, files, and nothing sent when something is wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.measure.records import read_records, read_summary
from tests.loadtest.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
SCENARIO = """\
name: small
work: {name: tokens, input: 4, output: 6}
phases:
  - {name: warm, warmup: true, arrivals: {kind: at_once}, requests: 2}
  - {name: load, arrivals: {kind: poisson, rate: 60}, requests: 30}
slo: {e2e: 20s}
"""


def cli(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtest", *map(str, args)],
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def test_needs_neither_ray_nor_torch() -> None:
    """The load tester on a laptop without the engine's gigabytes."""
    heavy = (
        "ray",
        "torch",
        "transformers",
        "deployments",
        "engine",
        "kernels",
        "aiohttp",
        "triton",
    )
    code = (
        "import loadtest.cli, loadtest.runner, loadtest.reference_answers, loadtest.live\n"
        "import loadtest.client.process\n"
        f"import sys; print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_run_writes_its_files(scenario: Path, tmp_path: Path) -> None:
    """Files that do not agree with each other, or a summary that cannot be read back."""
    out = tmp_path / "out"
    with FakeServer() as server:
        done = cli("run", scenario, "--url", server.url, "--out", out, "--procs", 2, "--lenient",
                   "--assert", "failed==0, requests==30, p99_e2e<20s")  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "30 answered" in done.stdout and "holds: failed==0" in done.stdout
    records = list(read_records(out / "requests.jsonl"))
    summary = read_summary(out / "summary.json")
    assert len(records) == 32 and summary.requests == 30 and summary.warmup_requests == 2
    assert summary.run.model == "fake" and summary.run.procs == 2 and summary.goodput.good == 30
    assert summary.output_tokens == sum(r.output_tokens for r in records if not r.warmup)
    with (out / "requests.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [int(row["output_tokens"]) for row in rows] == [r.output_tokens for r in records]
    assert len(server.seen) == 32
    again = cli("run", scenario, "--url", server.url, "--out", out)
    assert again.returncode == 2 and "results in it already" in again.stderr


def test_same_seed_same_requests(scenario: Path, tmp_path: Path) -> None:
    """Runs that cannot be compared because their prompts differ with the number of processes."""
    asked = []
    for number, procs in enumerate((1, 3)):
        with FakeServer() as server:
            out = tmp_path / str(number)
            done = cli(
                "run", scenario, "--url", server.url, "--out", out, "--procs", procs, "--lenient"
            )
        assert done.returncode == 0, done.stderr
        asked.append(sorted(json.dumps(body) for body in server.seen))
    assert asked[0] == asked[1]
    times = [
        [(r.index, r.phase, r.intended_s) for r in read_records(tmp_path / n / "requests.jsonl")]
        for n in "01"
    ]
    assert [t[:2] for t in times[0]] == [t[:2] for t in times[1]]


def test_failed_assertion_is_exit_1(scenario: Path, tmp_path: Path) -> None:
    """A CI job that stays green."""
    with FakeServer(fault=lambda n, b: "refuse_500" if n == 20 else None) as server:
        done = cli("run", scenario, "--url", server.url, "--out", tmp_path / "o", "--lenient",
                   "--assert", "failed==0", "--assert", "p99_queue<1s")  # fmt: skip
    assert done.returncode == 1
    assert "FAILS: failed==0 (1)" in done.stdout
    assert "FAILS: p99_queue<1s (there is no such figure)" in done.stdout
    assert "failed, http_5xx: 1" in done.stdout


@pytest.mark.slow
def test_nothing_is_sent_when_something_is_wrong(scenario: Path, tmp_path: Path) -> None:
    """E 94: rate 0, negative, 10^9; unknown metric; empty trace; unwritable result file."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    trace = tmp_path / "trace.yaml"
    trace.write_text("phases: [{name: a, arrivals: {kind: trace, file: empty.jsonl}}]")
    with FakeServer() as server:
        url = ["--url", server.url, "--out", tmp_path / "never"]
        for rate in ("0", "-1", "1000000000"):
            done = cli("run", scenario, *url, "--set", f"phases.1.arrivals.rate={rate}")
            assert done.returncode == 2 and "phases.1.arrivals.rate" in done.stderr
        for arguments, item in [
            ([scenario, *url, "--assert", "p98_ttft<1s"], "did you mean 'p99_ttft'"),
            ([trace, *url], "empty trace"),
            (
                [scenario, "--url", server.url, "--out", tmp_path / "file" / "x"],
                "cannot be written",
            ),
            ([scenario, *url, "--verify", tmp_path / "none"], "none: No such file"),
            ([scenario, *url, "--verify", tmp_path / "file"], "no reference answers"),
            ([scenario, *url, "--set", "slo.tftt=1s"], "did you mean 'ttft'"),
            ([scenario, *url, "--set", "novalue"], "write KEY=VALUE"),
            ([tmp_path / "absent.yaml", *url], "absent.yaml: No such file"),
            ([tmp_path, *url], "directory"),
        ]:
            done = cli("run", *arguments)
            assert done.returncode == 2, (arguments, done.stderr)
            assert item in done.stderr and "Traceback" not in done.stderr
        assert server.seen == []
    assert not (tmp_path / "never").exists()


def test_dry_run_sends_nothing(scenario: Path, tmp_path: Path) -> None:
    """--dry-run that asks the server for its models, or makes a folder."""
    with FakeServer() as server:
        done = cli("run", scenario, "--url", server.url, "--out", tmp_path / "o", "--dry-run")
        assert server.seen == []
    assert done.returncode == 0 and "load: 30 requests" in done.stdout
    assert "POST /v1/completions" in done.stdout and not (tmp_path / "o").exists()


def test_unreachable_is_one_line(scenario: Path, tmp_path: Path) -> None:
    """A traceback of forty lines for a server that is not there."""
    done = cli("run", scenario, "--url", "http://127.0.0.1:9", "--out", tmp_path / "o")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: http://127.0.0.1:9: Connection refused"
    assert not (tmp_path / "o" / "summary.json").exists()


def test_reference_then_verify(scenario: Path, tmp_path: Path) -> None:
    """Wrong answers under load that nobody notices."""
    reference = tmp_path / "ref.jsonl"
    with FakeServer() as server:
        done = cli("reference", scenario, "--url", server.url, "--out", reference)
    assert done.returncode == 0 and "32 answers to 32 questions" in done.stdout, done.stderr
    assert len(reference.read_text().splitlines()) == 32
    with FakeServer(fault=lambda n, b: "wrong" if n % 8 == 7 else None) as server:
        done = cli("run", scenario, "--url", server.url, "--out", tmp_path / "o", "--lenient",
                   "--verify", reference, "--assert", "different==0")  # fmt: skip
    assert done.returncode == 1
    summary = read_summary(tmp_path / "o" / "summary.json")
    assert summary.verified_ok + summary.verified_different == 30
    assert 3 <= summary.verified_different <= 4
    refused = cli("reference", scenario, "--url", server.url, "--out", reference)
    assert refused.returncode == 2 and "exists already" in refused.stderr


@pytest.mark.slow
def test_a_run_without_what_was_asked_for_is_refused(scenario: Path, tmp_path: Path) -> None:
    """A test of faults passes because none came, or one of answers because none was compared."""
    with FakeServer() as server:
        late = cli("run", scenario, "--url", server.url, "--out", tmp_path / "late",
                   "--chaos", "delay-network@60s for 1s by 10ms")  # fmt: skip
        reference = tmp_path / "ref.jsonl"
        assert cli("reference", scenario, "--url", server.url, "--out", reference).returncode == 0
        other = cli("run", scenario, "--url", server.url, "--out", tmp_path / "other",
                    "--set", "seed=77", "--verify", reference)  # fmt: skip
    assert late.returncode == 1
    assert "REFUSED: delay network, due at 60 s: the load had ended before" in late.stdout
    assert other.returncode == 1
    assert "REFUSED: no answer was compared" in other.stdout


def test_ctrl_c_keeps_what_there_is(scenario: Path, tmp_path: Path) -> None:
    """Half an hour of load thrown away by Ctrl-C, or client processes left behind."""
    scenario.write_text(SCENARIO.replace("rate: 60}, requests: 30", "rate: 20}, duration: 60s"))
    out = tmp_path / "o"
    with FakeServer(first=0.05) as server:
        run = subprocess.Popen(
            [sys.executable, "-m", "loadtest", "run", scenario, "--url", server.url, "--out", out],
            cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while len(server.seen) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=30)
        seen = len(server.seen)
        time.sleep(0.5)
        assert len(server.seen) == seen
    assert run.returncode == 130 and b"Traceback" not in errors
    summary = read_summary(out / "summary.json")
    assert 0 < summary.requests < 200 and summary.unsent > 900


def test_through_manta(tmp_path: Path) -> None:
    """`manta loadtest` that is not there."""
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", "loadtest", "list"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "sharegpt" in done.stdout and "p99_ttft" in done.stdout
