"""Ranks on another node than rank 0: what connects them, how they end, and that the texts are those
of one rank. Both nodes are this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, MantaError
from engine.parallel.connections import RemoteRanks, accept, connect
from engine.parallel.rank_host import RankHost
from engine.parallel.ranks import Ranks
from engine.parallel.rendezvous import same_kind
from tests.engine.process.ranked import (
    add_adapters,
    config_of,
    everything,
    model_and_adapters,
    serve,
    start,
    told,
)
from tests.engine.process.test_process import running, wait_until

HERE, KEY = "127.0.0.1", b"k" * 32
# Answers what it is told; says one line for the log first.
ECHO = """
import json, sys
from multiprocessing.connection import Connection
from engine.parallel.ranks import RankReport
start = json.loads(sys.stdin.readline())
Connection(start["reports"]).send(RankReport("here", level=30))
calls = Connection(start["calls"])
while True:
    calls.send((start["rank"], calls.recv()))
"""


class EchoHost(RankHost):
    PROGRAM = ("-c", ECHO)


class EchoRanks(Ranks):
    PROGRAM = ("-c", ECHO)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RankHost]]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # as Ranks does, for good
    hosts: list[RankHost] = []
    yield hosts
    for host in hosts:
        host.close()
        assert not any(map(running, host.pids))


def remote_ranks(hosts: list[RankHost], config: EngineConfig, kind: type[RankHost]) -> RemoteRanks:
    for node in range(1, config.pipeline_nodes):
        hosts.append(kind(config, node, HERE, KEY))
    return RemoteRanks(HERE, tuple((HERE, host.port) for host in hosts), KEY)


def test_only_who_has_the_key_is_let_in() -> None:
    """Bug: whoever reaches the port has its bytes unpickled, which runs what they say; or keeps
    rank 0 out by saying nothing."""
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    connections: list[Any] = []
    thread = threading.Thread(target=lambda: connections.append(accept(listener, KEY)))
    thread.start()
    with pytest.raises(AuthenticationError):
        connect(HERE, port, b"another")
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    ours = connect(HERE, port, KEY)
    thread.join()
    ours.send(("launch", ()))
    assert connections[0].recv() == ("launch", ())
    for connection in (ours, connections[0], listener):
        connection.close()


def test_ranks_of_another_node_end_with_rank_0_and_it_with_them(
    hosts: list[RankHost], caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: a call for one rank comes to another; a killed rank is not noticed, or not named; the
    ranks of a node outlive the connection from rank 0's, which is all that they see of its end."""
    config = EngineConfig(model="m", device="cpu", pipeline_parallel=4, pipeline_nodes=2)
    deaths: list[MantaError] = []
    ranks = EchoRanks(config, deaths.append, (), remote_ranks(hosts, config, EchoHost))
    try:
        for rank in ranks._ranks:
            rank.calls.send("a")
        assert [rank.calls.recv() for rank in ranks._ranks] == [(1, "a"), (2, "a"), (3, "a")]
        assert wait_until(lambda: all(f"rank {n}: here" in caplog.text for n in (1, 2, 3)), 5.0)
        os.kill(hosts[0].pids[1], signal.SIGKILL)
        named = f"rank 3 of 4 of the engine on {HERE} was killed by signal 9"
        with pytest.raises(EngineDead, match=named):
            ranks.check(5.0)
        assert wait_until(lambda: bool(deaths), 5.0) and deaths[0].code == "engine_killed"
    finally:
        ranks.close()
    assert not any(map(running, [*ranks.pids, *hosts[0].pids]))
    assert len(deaths) == 1


def test_what_cannot_be_on_several_nodes_is_refused(tmp_path: Path) -> None:
    """Bugs: an engine without Ray waits for ranks that nobody starts; the slower of two GPUs
    decides the time of each step, without a word; an address of no interface ends the start."""
    config = EngineConfig(model="m", device="cpu", pipeline_parallel=2, pipeline_nodes=2)
    with pytest.raises(ConfigError, match="`manta serve` starts their ranks; leave it out") as why:
        Ranks(config, lambda error: None)
    assert why.value.param == "pipeline_nodes"
    with pytest.raises(EngineDead, match=f"cannot reach rank 1 of 2 at {HERE}:9"):
        Ranks(config, lambda error: None, (), RemoteRanks("192.0.2.77", ((HERE, 9),), KEY))
    store = dist.FileStore(str(tmp_path / "store"), 2)
    same_kind(store, 0, "H100 with 79 GiB")
    same_kind(store, 4, "H100 with 79 GiB")
    with pytest.raises(ConfigError, match="rank 0 has H100 with 79 GiB, rank 4 on another node L4"):
        same_kind(store, 4, "L4 with 22 GiB")


@pytest.mark.slow
def test_texts_are_those_of_one_rank(tmp_path: Path, real_cores: None) -> None:
    """Bugs: activations that are overwritten before they are sent; an adapter or a prefix on one
    node's layers only; the ranks of a stage add up in another stage's memory; nodes that plan
    unequally many blocks."""
    # In a process of its own: rank 0 waits in torch for a rank that has died, as no engine does,
    # which ends then.
    command = [sys.executable, "-m", "tests.engine.process.test_rank_host", str(tmp_path)]
    done = subprocess.run(command, timeout=200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(folder: Path) -> None:
    """Assert that the texts of two nodes are those of one."""
    model = model_and_adapters(folder, num_hidden_layers=3)
    requests = everything(model)
    texts = []
    for nodes in (1, 2):
        shape = {"pipeline_parallel": 2, "pipeline_nodes": 2, "tensor_parallel": 2}
        config = config_of(model["model"], **(shape if nodes > 1 else {}))
        hosts: list[RankHost] = []

        def joined(config: EngineConfig, lost: Any) -> Ranks:
            def end(error: MantaError) -> None:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)

            return Ranks(config, end, (), remote_ranks(hosts, config, RankHost))  # noqa: B023

        core, ranks = start(config, joined)  # type: ignore[arg-type]
        add_adapters(core, model)
        first = serve(core, requests)
        assert core.stats().preemptions > 0
        assert told(serve(core, requests[-3:])).items() <= told(first).items()
        texts.append(told(first))
        if ranks is not None:
            ranks.close()
            dist.destroy_process_group()
        for host in hosts:
            host.close()
            assert not any(map(running, host.pids))
    assert texts[0] == texts[1]


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    compare(Path(sys.argv[1]))
