"""The comparison of servers can be cut off and taken up again, and tells what from what."""

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import versus_http
from bench.versus_http import STREAMS, compare, generate, load, rows_of, server, whole_sides
from loadtest.scenario import workloads


def lines_of(side: str, rate: float, streams: tuple[int, ...] = tuple(STREAMS)) -> list[dict]:
    times = {"ttft_ms_p50": 10.0 * rate, "itl_ms_p99": rate}
    return [{"label": side, "ready_s": 1.0}] + [
        {"label": side, "concurrency": n, "out_tok_s": rate * n, **times} for n in streams
    ]


def test_a_side_that_was_cut_off_runs_again() -> None:
    """Half a side beside a whole one would be a run under different conditions."""
    lines = lines_of("manta", 2.0) + lines_of("vllm", 1.0, (1, 64))
    assert whole_sides(lines) == lines_of("manta", 2.0)


def test_rows_compare_the_same_load() -> None:
    """A ratio across loads, or upside down, would claim what was not measured."""
    lines = lines_of("offline", 2.5) + lines_of("manta", 2.0) + lines_of("vllm", 1.6)
    rows = {row["case"]: row for row in rows_of("m", lines, ["vllm"])}
    assert rows["m/64/engine"]["ratio"] == 0.8
    assert rows["m/256/vllm"]["ratio"] == 1.25
    assert (rows["m/256/vllm"]["ours"], rows["m/256/vllm"]["peer"]) == (512.0, 409.6)
    assert rows["m/1/vllm/ttft_ms_p50"]["ours"] == 20.0


def test_no_side_starts_while_another_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a call that was cut off answered in place of the next side, under its name."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(versus_http, "PORT", port)
        monkeypatch.setattr(versus_http.subprocess, "Popen", None)  # is not to be called
        with (
            pytest.raises(SystemExit, match=f"vllm is not started: .* has port {port}"),
            server("vllm", "model", ""),
        ):
            pass
    assert versus_http.held() != f"port {port}"


def args_of(out: Path, **others: Any) -> argparse.Namespace:
    common = {"model": "model", "name": "m", "load_script": out / "load.py", "peers": ["vllm"]}
    return argparse.Namespace(**common, out=out, ray_llm_path="", resume=True, **others)


def test_no_side_begins_that_would_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server left behind by the end of the time; a table of a part of the sides."""
    ran = []

    def run_side(args: argparse.Namespace, side: str) -> Any:
        ran.append(side)
        yield from lines_of(side, 1.0)

    monkeypatch.setattr(versus_http, "run_side", run_side)
    monkeypatch.setattr(versus_http, "EXPECTED", {"offline": 10, "manta": 90, "vllm": 20})
    assert compare(args_of(tmp_path, seconds=50.0)) == 3
    assert ran == ["offline", "vllm"] and "manta; run it again" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))
    assert compare(args_of(tmp_path, seconds=100.0)) == 0
    assert ran == ["offline", "vllm", "manta"] and list(tmp_path.glob("*.json"))


def test_lines_of_a_side_that_fails_are_kept() -> None:
    """The offline side's figures, all lost with its last load."""
    kept = []
    with pytest.raises(subprocess.CalledProcessError):
        program = "print('{\"a\": 1}'); print('else'); exit(5)"
        for line in versus_http.lines_of([sys.executable, "-c", program]):
            kept.append(line)
    assert kept == [{"a": 1}]


@pytest.mark.parametrize("answered, failed", [(724, 300), (724, 0)])
def test_a_load_that_is_not_whole_is_none(tmp_path: Path, answered: int, failed: int) -> None:
    """A side that refused 300 of 1,024 requests was quoted with the throughput of the others."""
    line = {"ok": answered, "failed": failed, "error": "503 busy", "out_tok_s": 1.0}
    script = tmp_path / "load.py"
    script.write_text(f"print({json.dumps(json.dumps(line))})")
    with pytest.raises(SystemExit, match=f"vllm.* 1024 requests 724 .* {failed} failed: 503 busy"):
        load(script, "vllm", 1024, 1024, "dialogue")
    if not failed:
        assert load(script, "vllm", 1024, 724, "dialogue") == line


class FakeLLM:
    """Counts what is in flight."""

    def __init__(self) -> None:
        self.most = self.now = self.calls = 0
        self.lock = threading.Lock()

    def generate(self, prompts: list[list[int]], params: list[Any], **_: Any) -> list[Any]:
        with self.lock:
            self.calls += 1
            self.now += len(prompts)
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            self.now -= len(prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens)])
            for one in params
        ]


@pytest.mark.parametrize("streams, count, calls", [(1, 6, 6), (64, 256, 256), (1024, 1024, 1)])
def test_offline_has_as_much_in_flight_as_the_load(streams: int, count: int, calls: int) -> None:
    """An engine of `streams` rows instead, which is not the server's and made the endpoint's share
    of it too large."""
    llm = FakeLLM()
    requests = workloads.build("dialogue")[:count]
    assert generate(llm, requests, streams) == [num_out for _, num_out in requests]  # type: ignore[arg-type]
    assert (llm.most, llm.calls) == (min(streams, count), calls)
