"""The page of a run: complete, escaped, alone, and the same as the figures."""

import http.server
import json
import re
import shutil
import subprocess
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import ScenarioError
from loadtest.measure.records import RequestRecord
from loadtest.report import write_report
from loadtest.report.charts import (
    Axis,
    ChartPanel,
    Mark,
    Series,
    duration,
    line_chart,
    log_ticks_of,
    number,
    ticks_of,
    timeline,
)
from loadtest.report.series import cdf, read_run, silences, timeline_of, values
from tests.loadtest.made_run import make_run

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, name='<img src=x onerror="alert(1)">', faults=True, seconds=30.0)
    write_report(folder)
    return folder


def test_page_is_escaped_and_loads_nothing(folder: Path) -> None:
    """A server's error message or a model's name must not become code in the reader's browser."""
    text = (folder / "report.html").read_text("utf-8")
    assert "<script" not in text and "<img" not in text and "<b>not bold" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; the stream ended" in text
    tags = "".join(re.findall(r"<[^>]+>", text))
    loads = re.findall(r"""\s(?:src|href)\s*=\s*["']?([^"'\s>]+)""", tags)
    assert loads == ["data:,"] and "url(" not in text
    assert "@import" not in text and "Content-Security-Policy" in text


def test_every_drawing_is_well_formed(folder: Path) -> None:
    """One wrong attribute, and a browser draws half a chart without a word."""
    text = (folder / "report.html").read_text("utf-8")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6  # two of the timeline, four of latency
    for drawing in drawings:
        ET.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in drawing


def test_page_shows_figures_and_faults(folder: Path) -> None:
    """The page is what people read; what it leaves out has not happened."""
    text = (folder / "report.html").read_text("utf-8")
    run = read_run(folder)
    for shown in (
        f"{run.summary.failed} failed",
        "1 fault injected",
        "kill replica (pid 4711)",
        "the stream ended without [DONE]",
        duration(run.summary.ttft.p99),
        "gold",
        "1 x H200",
        "0123456789ab",
        "SLO",
    ):
        assert shown in text, shown


class _Requests(http.server.BaseHTTPRequestHandler):
    """A request handler that serves one page and records every requested path."""

    page: bytes
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        self.send_response(200 if self.path == "/report.html" else 404)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.end_headers()
        if self.path == "/report.html":
            self.wfile.write(self.page)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, such as Debian's package")
@pytest.mark.parametrize("width", [500, 1400])  # headless Chromium has no window below 500
def test_browser_renders_it_alone(folder: Path, tmp_path: Path, width: int) -> None:
    """A font, script or icon from elsewhere fails on the machine where the report is read."""
    handler = type("Handler", (_Requests,), {"asked": []})
    handler.page = (folder / "report.html").read_bytes()
    log = tmp_path / "net.json"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/report.html"
        done = subprocess.run(
            [
                CHROMIUM,
                *FLAGS,
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},2000",
                f"--screenshot={tmp_path / 'page.png'}",
                f"--log-net-log={log}",
                url,
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        server.shutdown()
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr
    assert handler.asked == ["/report.html"]
    # The browser's own look-ups have no initiator; what the page asks for names its origin.
    events = log.read_text("utf-8", "replace").splitlines()
    own = [e for e in events if f'"initiator":"{url.removesuffix("/report.html")}' in e]
    assert any(url in event for event in events) and not own, own
    assert (tmp_path / "page.png").stat().st_size > 30_000  # a blank page has a tenth of it


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium, such as Debian's package")
def test_page_fits_400_pixels(folder: Path, tmp_path: Path) -> None:
    """A page that must be pushed sideways on a phone is not read there."""
    page = (folder / "report.html").read_text("utf-8")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    (tmp_path / "report.html").write_text(page, "utf-8")
    (tmp_path / "frame.html").write_text(
        '<iframe src="report.html" style="width:400px;height:900px;border:0"></iframe><script>'
        "onload=()=>{const d=document.querySelector('iframe').contentDocument.documentElement;"
        "document.title=JSON.stringify([d.clientWidth,d.scrollWidth])}</script>"
    )
    done = subprocess.run(
        [
            CHROMIUM,
            *FLAGS,
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            f"file://{tmp_path}/frame.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)
    match = re.search(r"<title>(.*?)</title>", done.stdout)
    assert match, done.stderr[-2000:]
    visible, needed = json.loads(match[1])
    assert 380 <= visible <= 400 and needed <= visible


def test_timeline_counts_every_request_once() -> None:
    """A request on the edge of two bins must not be drawn twice, nor the last one left out."""
    records = [
        RequestRecord(
            index=i,
            phase="main",
            intended_s=float(i),
            sent_s=float(i),
            end_s=i + 2.0,
            chunks=[(i + 1.0, 1), (i + 2.0, 3)],
            chunks_exact=True,
            output_tokens=4,
            replica="a" if i < 5 else "b",
        )
        for i in range(10)
    ]
    t = timeline_of(records, bins=12)
    assert t.width == 1 and len(t.edges) == 12
    assert sum(t.offered) * t.width == 10 == sum(t.served) * t.width
    assert sum(t.tokens) * t.width == 40
    assert t.in_flight == [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]
    assert max(t.replicas) == 2 and t.replicas[2] == 1
    assert t.ttft[50][1] == [1.0] * 10


def test_values_are_of_successes_once_a_token() -> None:
    """Failures are quick; counted in, they make a broken server look fast."""

    def record(**more: object) -> RequestRecord:
        base = {"index": 0, "phase": "m", "intended_s": 0.0, "sent_s": 0.0, "end_s": 2.0}
        chunks = [(1.0, 1), (1.4, 4)]
        return RequestRecord(  # type: ignore[arg-type]
            **{**base, "chunks": chunks, "chunks_exact": True, "output_tokens": 5, **more}
        )

    records = [record(), record(error_class="cut"), record(slow_reader=True)]
    assert values(records, "ttft").tolist() == [1.0]
    assert np.allclose(values(records, "itl"), [0.1] * 4)
    assert np.allclose(values(records, "tpot"), [0.1])
    assert silences(records, 0.9) == [(0.0, 1.0)]


def test_empty_run_still_has_a_page(tmp_path: Path) -> None:
    """A run in which nothing was answered is the one that most needs a report."""
    make_run(tmp_path, seconds=1.0)
    (tmp_path / "requests.jsonl").write_bytes(b"")
    assert "load test" in write_report(tmp_path).read_text("utf-8")


def test_folder_without_a_run_is_told(tmp_path: Path) -> None:
    """A traceback about msgspec does not say that the folder is wrong."""
    with pytest.raises(ScenarioError, match="not a run's folder"):
        write_report(tmp_path)
    make_run(tmp_path, seconds=1.0)
    (tmp_path / "requests.jsonl").write_bytes(b"{\n")
    with pytest.raises(ScenarioError, match="cannot read it"):
        write_report(tmp_path)


def test_ticks_are_round() -> None:
    """Nobody reads a value off an axis marked 0, 13.7, 27.4."""
    assert ticks_of(0, 97) == [0, 20, 40, 60, 80]
    assert ticks_of(3, 3) == [3]
    assert np.allclose(log_ticks_of(0.001, 10), [0.001, 0.01, 0.1, 1, 10])
    assert [duration(v) for v in (0, 85e-5, 0.012, 1.5, 3600)] == [
        *("0", "850 µs", "12 ms", "1.5 s", "60 min"),
    ]
    assert [number(v) for v in (0, 0.25, 1234, 12_340, 2.5e6)] == [
        *("0", "0.25", "1234", "12.3k", "2.5M"),
    ]


def test_charts_take_odd_data() -> None:
    """One point, all alike, or none: each is a real run's."""
    for xs, ys in ([], []), ([1.0], [0.0]), ([1.0, 1.0], [2.0, 2.0]):
        for log in (False, True):
            svg = line_chart([Series("a", xs, ys)], Axis(log=log), Axis(log=log), name="odd")
            ET.fromstring(svg)
    ET.fromstring(
        timeline(
            [ChartPanel("none", [Series("", [], [])])],
            name="odd",
            end=0.0,
            width=400,
            marks=[Mark(0.0, "1", "a & b")],
        )
    )
    xs, ys = cdf(np.array([2.0, 1.0, 3.0]))
    assert xs == sorted(xs) and xs[-1] == 3.0 and ys[-1] == 1.0 and cdf(np.zeros(0)) == ([], [])


def test_a_line_is_broken_where_nothing_was_measured() -> None:
    """An outage drawn as a latency that rises slowly."""
    line = Series("p50", [0, 1, 2, 30, 31], [1, 2, 1, 2, 1], gap=10)
    drawn = line_chart([line], Axis(), Axis(), name="x")
    path = re.search(r'class="line"[^>]* d="([^"]+)"', drawn)
    assert path and path[1].count("M") == 2 and path[1].count("L") == 3
