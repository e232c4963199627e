"""bench.versus.http: a comparison can be interrupted and resumed, and only comparable loads
count."""

import argparse
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.versus import http as versus_http
from bench.versus import ray_llm
from bench.versus.http import (
    STREAMS,
    command_of,
    compare,
    environment_of,
    finished,
    generate,
    rows_of,
    server,
    serving,
    whole_load,
)
from loadtest.scenario import workloads
from tests.loadtest.fake_server import FakeServer


def lines_of(side: str, rate: float, streams: tuple[int, ...] = tuple(STREAMS)) -> list[dict]:
    times = {"ttft_ms_p50": 10.0 * rate, "itl_ms_p99": rate}
    return [{"label": side, "ready_s": 1.0}] + [
        {"label": side, "concurrency": n, "out_tok_s": rate * n, **times} for n in streams
    ]


def test_a_side_that_was_cut_off_runs_again() -> None:
    """Half a side beside a whole one would be a run under different conditions."""
    assert finished(("manta",), lines_of("manta", 2.0))
    assert not finished(("vllm",), lines_of("vllm", 1.0, (1, 64)))


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
        monkeypatch.setattr(versus_http, "URL", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(versus_http.subprocess, "Popen", None)  # is not to be called
        with (
            pytest.raises(SystemExit, match=f"vllm is not started: .* has port {port}"),
            server("vllm", "model", ""),
        ):
            pass
    assert versus_http.held(port) != f"port {port}"


# A server whose child has a process group of its own and ignores SIGINT, as HAProxy does under Ray.
WITH_CHILD = """\
import http.server, subprocess, sys
child = ("import os, signal, time; os.setpgid(0, 0); signal.signal(signal.SIGINT, signal.SIG_IGN);"
         "print(os.getpid(), file=open('child', 'w'), flush=True); time.sleep(600)")
subprocess.Popen([sys.executable, "-c", child])
http.server.HTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_no_process_outlives_its_server(tmp_path: Path) -> None:
    """HAProxy stayed behind a killed Ray, and kept the port from the next side."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", WITH_CHILD.format(port=port)]
    url = f"http://127.0.0.1:{port}/child"  # found once the child has written it
    with serving("side", command, {**os.environ}, url, str(tmp_path)):
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
        session = os.getsid(child)
        assert set(versus_http.processes_of(session)) == {session, child}
    assert not versus_http.processes_of(session)


def test_ray_serve_llm_has_the_settings_of_its_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer without the settings that its users take; a setting that another side gets, too."""
    monkeypatch.setenv("PYTHONPATH", "/all")
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    environment = environment_of("ray-serve-llm", "/first")
    assert environment.items() >= ray_llm.SETTINGS.items()
    assert environment["PYTHONPATH"] == "/first:/all"
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment_of("manta", "/first")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert environment_of("ray-serve-llm", "")["RAY_SERVE_ENABLE_HA_PROXY"] == "0"

    script, options = command_of("ray-serve-llm", "/model", tmp_path, changes={"port": 81})[-2:]
    assert script == ray_llm.__file__
    config = json.loads(options)["llm_config"]
    assert config["model_loading_config"] == {"model_id": "m", "model_source": "/model"}
    assert config["engine_kwargs"]["max_num_seqs"] == versus_http.MAX_NUM_SEQS
    assert json.loads(options)["port"] == 81 and json.loads(options)["devices"]["num_gpus"] == 1


def args_of(out: Path, **others: Any) -> argparse.Namespace:
    common = {"model": "model", "name": "m", "peers": ["vllm"]}
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


def test_a_result_has_each_sides_versions_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ratio to a peer of which nobody knows how it was started."""

    def run_side(args: argparse.Namespace, side: str) -> Any:
        started, *loads = lines_of(side, 1.0)
        if side != "offline":
            started["versions"] = {"ray": f"of {side}"}
        if side == "ray-serve-llm":
            started["environment"] = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        yield from [started, *loads]

    monkeypatch.setattr(versus_http, "run_side", run_side)
    args = args_of(tmp_path, seconds=9999.0)
    args.peers = ["vllm", "ray-serve-llm"]
    assert compare(args) == 0
    (result,) = tmp_path.glob("*.json")
    config = json.loads(result.read_text())["config"]
    assert config["ours"]["versions"] == {"ray": "of manta"} and "environment" not in config["ours"]
    assert config["peers"]["vllm"]["versions"] == {"ray": "of vllm"}
    peer = config["peers"]["ray-serve-llm"]
    assert peer["versions"] == {"ray": "of ray-serve-llm"} and peer["replicas"] == 1
    assert peer["environment"] == {"RAY_SERVE_ENABLE_HA_PROXY": "1"}


@pytest.mark.parametrize("answered, failed", [(724, 300), (724, 0)])
def test_a_load_that_is_not_whole_is_none(
    monkeypatch: pytest.MonkeyPatch, answered: int, failed: int
) -> None:
    """A side that refused 300 of 1,024 requests was quoted with the throughput of the others."""
    line = {"ok": answered, "failed": failed, "error": "503 busy", "out_tok_s": 1.0}
    monkeypatch.setattr(versus_http, "load", lambda *_, **__: line)
    with pytest.raises(SystemExit, match=f"vllm.* 1024 requests 724 .* {failed} failed: 503 busy"):
        whole_load("", "vllm", 1024, 1024, "dialogue")
    if not failed:
        assert whole_load("", "vllm", 1024, 724, "dialogue") == line


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten a side's loads to seconds."""
    monkeypatch.setattr(versus_http, "STREAMS", {1: 2, 4: 8})
    monkeypatch.setattr(versus_http, "WARM", 2)
    monkeypatch.setattr(versus_http, "clients_of", lambda streams: min(2, streams))
    monkeypatch.setattr(versus_http, "versions_under", lambda *_: {})


def side(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str = "manta"
) -> list[dict[str, Any]]:
    """Return a side's lines, with this server in place of its own."""
    monkeypatch.setattr(versus_http, "URL", server.url)
    monkeypatch.setattr(versus_http, "server", lambda *_: contextlib.nullcontext(1.5))
    args = argparse.Namespace(model="model", ray_llm_path="")
    return list(versus_http.run_side(args, name))


def test_ray_serve_llms_first_line_has_its_settings(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of the code in a result whose server had others from the environment."""
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    with FakeServer(per_chunk=64) as server:
        started = side(server, monkeypatch, "ray-serve-llm")[0]
    wanted = {**ray_llm.SETTINGS, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
    assert started["environment"] == wanted


def test_a_side_is_loaded_by_our_load_tester(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that nobody could repeat: what made its load was not in the repository. And
    another load than that of the engine alone, whose figure it is compared with."""
    with FakeServer(first=0.01, gap=0.02, per_chunk=64) as server:
        started, *lines = side(server, monkeypatch)
    assert started == {"label": "manta", "ready_s": 1.5, "versions": {}}
    assert [(line["concurrency"], line["ok"]) for line in lines] == [(1, 2), (4, 8)]
    for line in lines:
        assert line["label"] == "manta" and line["workload"] == "dialogue"
        assert line["failed"] == 0 and line["error"] is None and line["out_tok_s"] > 0
        assert line["ttft_ms_p99"] >= line["ttft_ms_p50"] >= 10
        assert line["itl_ms_p99"] >= line["itl_ms_p50"] and line["itl_ms_p99"] > 0
        assert line["chunks"] > 8
    warm, *asked = [server.seen[:2], server.seen[2:4], server.seen[4:]]
    for bodies, name in ((warm, "uniform"), *((some, "dialogue") for some in asked)):
        wanted = workloads.build(name)[: len(bodies)]
        sizes = [(body["prompt"], body["max_tokens"]) for body in bodies]
        assert sorted(sizes) == sorted(wanted)
        for body in bodies:
            fields = (body["model"], body["temperature"], body["ignore_eos"], body["stream"])
            assert fields == ("m", 0, True, True)
    rows = rows_of("m", [*lines, *lines_of("offline", 1.0, (1, 4))], [])
    assert [row["case"] for row in rows] == ["m/1/engine", "m/4/engine"]


@pytest.mark.parametrize("fault", [pytest.param("refuse_503", marks=pytest.mark.slow), "cut"])
def test_a_side_that_fails_a_request_is_none(
    small: None, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Figures of the requests that were answered, as if they were all."""

    def at_the_fifth(number: int, body: dict[str, Any]) -> str | None:
        return fault if number == 5 else None

    with (
        FakeServer(per_chunk=64, fault=at_the_fifth) as server,
        pytest.raises(SystemExit, match="manta, dialogue at 4 streams: of 8 requests 7 got all"),
    ):
        side(server, monkeypatch)


class FakeLLM:
    """A fake engine that counts the requests in flight.

    Its first calls wait until `wanted` requests are in flight.
    """

    def __init__(self, wanted: int) -> None:
        self.most = self.now = self.calls = 0
        self.wanted = wanted
        self.changed = threading.Condition()

    def generate(self, prompts: list[list[int]], params: list[Any], **_: Any) -> list[Any]:
        with self.changed:
            self.calls += 1
            self.now += len(prompts)
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.wanted, timeout=10)
        time.sleep(0.001)
        with self.changed:
            self.now -= len(prompts)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * param.max_tokens)])
            for param in params
        ]


@pytest.mark.parametrize("streams, count, calls", [(1, 6, 6), (64, 256, 256), (1024, 1024, 1)])
def test_offline_has_as_much_in_flight_as_the_load(streams: int, count: int, calls: int) -> None:
    """An engine of `streams` rows instead, which is not the server's and made the endpoint's share
    of it too large."""
    llm = FakeLLM(min(streams, count))
    requests = workloads.build("dialogue")[:count]
    assert generate(llm, requests, streams) == [num_out for _, num_out in requests]  # type: ignore[arg-type]
    assert (llm.most, llm.calls) == (min(streams, count), calls)
