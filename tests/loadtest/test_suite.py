"""`loadtest chaos` against servers whose losses are known, and against Manta's own routers."""

import asyncio
import json
import os
import socket
import subprocess
import sys

import msgspec
import pytest
import uvicorn
from typer.testing import CliRunner

from deployments.api.app import build_asgi
from deployments.router.models.model_settings import DispatchLimits
from loadtest.cli import app
from loadtest.errors import RunError, ScenarioError
from loadtest.suite.cases import SuiteOptions, check, run
from loadtest.suite.figures import CaseFigures, SuiteResult, table
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import FAST, Fleet
from tests.loadtest.fake_server import FakeServer

QUICK = {"seconds": 0.6, "questions": 3, "output_tokens": 8, "users": 6, "patience_s": 1.0}


def by_case(result: SuiteResult) -> dict[str, CaseFigures]:
    return {figures.case: figures for figures in result.cases}


def test_lost_streams_and_other_texts_are_seen():
    """A suite that counts a broken stream as refused, or another text as the same."""
    asked: dict[str, int] = {}

    def fault(number: int, body: dict) -> str | None:
        question = json.dumps(body["messages"])
        asked[question] = asked.get(question, 0) + 1
        if asked[question] == 1:  # asked alone
            return None
        return {0: "cut", 1: "wrong"}.get(number % 5)

    with FakeServer(first=0.01, gap=0.002, fault=fault) as server:
        options = SuiteOptions(url=server.url, cases=("kill",), kill_commands=("true",), **QUICK)
        check(options)
        result = asyncio.run(run(options, lambda line: None))
    cases = by_case(result)
    assert list(cases) == ["capacity", "kills", "after"]
    for figures in result.cases:
        assert figures.begun == figures.requests >= 3
        assert figures.errors == ({"cut": figures.lost} if figures.lost else {})
        assert figures.compared == figures.answered == figures.requests - figures.lost
        assert 0 < figures.pause_p99_s < 0.5 and not figures.failed and not figures.refused
        # Servers whose text depends on the batch would have no goodput without any fault.
        assert figures.good == figures.answered
    begun, lost = (sum(getattr(f, name) for f in result.cases) for name in ("begun", "lost"))
    assert 0.15 < lost / begun < 0.25
    other = sum(figures.compared - figures.identical for figures in result.cases)
    assert 0.15 < other / begun < 0.25
    assert "true (exit status 0)" in cases["kills"].marks[0]
    shown = table(result)
    assert f"{cases['after'].lost} of {cases['after'].begun}" in shown
    written = msgspec.json.decode(msgspec.json.encode(result), type=SuiteResult)
    assert written.cases == result.cases and written.config["kill_commands"] == ["true"]


def test_a_killed_server_is_seen():
    """Kills that reach nothing, or streams without an end that count as answered."""
    command = [sys.executable, "-m", "tests.loadtest.fake_server", "0.01", "0.02"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    # The kill, after 0.75 s, hits the first streams, which take 1.4 s; more requests follow it.
    values = {**QUICK, "seconds": 1.5, "output_tokens": 70}
    options = SuiteOptions(url=url, cases=("kill",), kill_pids=(server.pid,), **values)
    check(options)
    cases = by_case(asyncio.run(run(options, lambda line: None)))
    server.communicate()
    assert cases["capacity"].lost == 0 and cases["capacity"].goodput == 1.0
    kills = cases["kills"]
    assert 0 < kills.lost < kills.requests / 2 and kills.failed > 0
    assert cases["after"].answered == 0 and cases["after"].failed > 0
    assert f"pid {server.pid} killed" in cases["kills"].marks[0]
    with pytest.raises(RunError, match="refused"):
        asyncio.run(run(options, lambda line: None))


def test_other_machines_and_wrong_victims_are_refused():
    """Harm done to a server by a slip of the URL."""
    with pytest.raises(ScenarioError, match=r"not this machine.*--allow-remote"):
        check(SuiteOptions(url="http://192.0.2.7:8000"))
    check(SuiteOptions(url="http://192.0.2.7:8000", allow_remote=True))
    check(SuiteOptions(url="http://localhost:8000"))
    with pytest.raises(ScenarioError, match="--case floods: there is none; it may be overload"):
        check(SuiteOptions(url="http://[::1]:1", cases=("floods",)))
    with pytest.raises(ScenarioError, match="there is no such process of this user"):
        check(SuiteOptions(url="http://127.0.0.1:1", kill_pids=(2**22 + 1,)))
    with pytest.raises(ScenarioError, match="the case kill is not among --case"):
        check(SuiteOptions(url="http://127.0.0.1:1", kill_pids=(os.getpid(),), cases=("slow",)))
    result = CliRunner().invoke(app, ["chaos", "--url", "http://192.0.2.7:8000"])
    assert result.exit_code == 2 and "--allow-remote" in result.output


@pytest.mark.slow
async def test_routers_of_our_own_lose_nothing():
    """A server of ours that fails at poison, loses a stream of which an engine dies, or answers
    otherwise under load."""
    limits = DispatchLimits(channel=FAST)
    async with Fleet(
        2, limits=limits, rows=8, options="vocab_size=250", tokenizer=tiny_tokenizer()
    ) as fleet:
        for engine in fleet.engines.values():
            engine.pace = 0.01
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        config = uvicorn.Config(build_asgi(fleet.dispatcher), log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = SuiteOptions(
            url=url,
            cases=("overload", "slow", "poison"),
            users=12,
            seconds=2.0,
            questions=4,
            output_tokens=16,
        )
        kill = asyncio.get_running_loop().call_later(6.0, fleet.engines["r0"].crash)
        result = await run(options, print)
        kill.cancel()
        server.should_exit = True
        await serving
    print(table(result))
    for figures in result.cases:
        assert not figures.lost and not figures.failed
        assert figures.identical == figures.compared > 0
    assert {item.outcome for item in result.poison} <= {"refused", "closed", "silent", "answered"}
    refused = {item.name for item in result.poison if item.outcome in ("refused", "closed")}
    assert {"cut JSON", "not UTF-8", "wrong types", "deep JSON", "negative counts"} <= refused
