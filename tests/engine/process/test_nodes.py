"""NUMA: which cores and which memory the processes of an engine get, on nodes of a made machine.
What the kernel is told is recorded; on this machine's own node it is told in earnest."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deployments.cli import doctor, plan
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.parallel import nodes as nodes_module
from engine.parallel.nodes import MPOL_PREFERRED, Node, Places, bind, place, read_nodes, shares
from engine.parallel.ranks import Ranks, RankStart
from engine.process import main as engine_process
from engine.resolve import _threads


def made(folder: Path, cpulists: dict[int, str], mems: str = "0-63") -> tuple[Path, Path]:
    """Write sysfs's folder of nodes and a process's status as Linux does; return their paths."""
    for number, cores in cpulists.items():
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (folder / "online").write_text("0\n")
    status = folder / "status"
    status.write_text(f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{mems}\n")
    return folder, status


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(model="m", device="cpu", numa="bind", **fields)


TWO = [Node(0, (0, 1, 2, 3)), Node(1, (4, 5, 6, 7))]


def test_nodes_are_read_with_what_the_process_may_use(tmp_path: Path) -> None:
    """Bugs: a core that a cpuset has taken away; a node of memory alone (CXL, HBM) counted; nodes
    in the order of their names; memory of a node that the cgroup forbids."""
    made_up = made(tmp_path, {0: "0-3,16-19", 10: "12-15", 2: "4-7", 3: "", 1: "8-11"}, "0,2")
    nodes = read_nodes({0, 1, 5, 6, 12, 16}, *made_up)
    assert nodes == [Node(0, (0, 1, 16)), Node(2, (5, 6)), Node(10, (12,), False)]
    assert str(nodes[0]) == "node 0, cores 0-1,16"
    # A system that tells nothing is one node; this machine has its own cores, all of them.
    assert read_nodes({3, 1}, tmp_path / "none", tmp_path / "none") == [Node(0, (1, 3))]
    assert {core for node in read_nodes() for core in node.cores} == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("count", "ranks", "cores"),
    [
        (2, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),  # those that follow each other: one node
        (1, 1, [(0, 1, 2, 3)]),
        (1, 3, [(0,), (1,), (2,)]),  # the fourth would make two wait for one
    ],
)
def test_each_rank_has_its_share(count: int, ranks: int, cores: list[tuple[int, ...]]) -> None:
    """Bugs: ranks that add up with each other on other nodes; a core in two shares; one rank with a
    core more, which waits for the others."""
    ranks_nodes = shares(TWO[:count], ranks)
    assert [node.cores for node in ranks_nodes] == cores


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensor_parallel": 3}, "numa: 3 ranks cannot be divided among 2 nodes"),
        ({"tensor_parallel": 10}, "node 0 has 4 cores .* 5 ranks need as many"),
        ({"num_threads": 5}, "num_threads: 5 are more than the 4 cores"),
        ({"tensor_parallel": 4, "num_threads": 3}, "3 are more than the 2 cores .* gives a rank"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, int], said: str, tmp_path: Path) -> None:
    """Bug: more threads than cores, which wait for each other in every product."""
    with pytest.raises(ConfigError, match=said):
        place(config(**fields), Places(tmp_path), TWO)


def test_the_setting_is_checked() -> None:
    """Bug: a pool of GPUs is told to bind, and does not."""
    with pytest.raises(ConfigError, match="numa: bind is of engines on the CPU"):
        EngineConfig(model="m", numa="bind")
    with pytest.raises(ConfigError, match="numa must be"):
        EngineConfig(model="m", device="cpu", numa="node 0")  # type: ignore[arg-type]
    assert place(EngineConfig(model="m"), Places(), TWO) == []


def test_replicas_spread_over_the_nodes(tmp_path: Path) -> None:
    """Bugs: two engines on one node while another has none; a node stays taken by an engine that
    was killed."""
    engines = [Places(tmp_path / "places") for _ in range(3)]
    taken = [place(config(), engine, TWO)[0].number for engine in engines]
    assert taken == [0, 1, 0]
    for lock in engines[1]._held:
        os.close(lock)  # as the kernel does when a process ends
    assert place(config(), Places(tmp_path / "places"), TWO)[0].number == 1
    four = [*TWO, Node(2, (8, 9)), Node(3, (10, 11))]
    nodes = place(config(tensor_parallel=2), Places(tmp_path / "places"), four)
    assert [node.number for node in nodes] == [2, 3]  # the free ones
    # A folder that cannot be written: a file is in its place.
    (tmp_path / "file").write_text("")
    assert place(config(), Places(tmp_path / "file"), TWO) == [TWO[0]]


def test_what_the_kernel_is_told() -> None:
    """Bugs: an engine that does not start where the policy is not allowed; a policy for memory that
    may not be taken."""
    calls: list[tuple[Any, ...]] = []

    def affinity(process: int, cores: Collection[int]) -> None:
        calls.append(("cores", process, cores))

    def memory(mode: int, node: int) -> None:
        calls.append(("memory", mode, node))
        raise PermissionError(1, "Operation not permitted")  # Docker: not an error of ours

    bind(TWO[1], affinity, memory)
    bind(Node(0, (0,), memory=False), affinity, memory)
    assert calls == [
        ("cores", 0, (4, 5, 6, 7)),
        ("memory", MPOL_PREFERRED, 1),
        ("cores", 0, (0,)),
    ]

    def gone(process: int, cores: Collection[int]) -> None:
        raise OSError(22, "Invalid argument")

    with pytest.raises(ConfigError, match="cannot have node 1, cores 4-7"):
        bind(TWO[1], gone, memory)


def test_a_process_is_bound_in_earnest() -> None:
    """On this machine's first node, in a process of its own: the system call's number and mask,
    and threads that start later."""
    node = read_nodes()[0]
    # 239: get_mempolicy, which gives back the mode; numa_maps says the same of new memory.
    script = f"""
import os, threading
from engine.parallel.nodes import Node, bind
bind(Node({node.number}, {node.cores[:1]!r}, {node.memory}))
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
with open("/proc/self/numa_maps") as file:
    print(sorted(found[0]), any("prefer:{node.number}" in line for line in file))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if "numa_maps" in done.stderr:
        pytest.skip("a kernel without NUMA")
    assert done.stdout.split("] ")[0] == f"[{node.cores[0]}", done.stderr
    if "no policy" not in done.stderr:
        assert done.stdout.endswith("True\n"), done.stdout


def test_ranks_are_told_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: rank 0 binds itself first, and the others find its cores alone; a rank gets another's
    node; threads are divided among ranks once more."""
    started: list[RankStart] = []
    bound: list[Node] = []

    def start(self: Ranks, given: RankStart, passed: object) -> Any:
        started.append(msgspec.json.decode(msgspec.json.encode(given), type=RankStart))
        assert not bound
        return SimpleNamespace(pid=1, wait=lambda *_: 0, kill=lambda: None)

    monkeypatch.setattr(Ranks, "_start", start)
    monkeypatch.setattr(Ranks, "_watch", lambda self, rank: None)
    monkeypatch.setattr(nodes_module, "read_nodes", lambda: TWO)
    monkeypatch.setattr(engine_process, "bind", bound.append)

    class Built(Exception):
        pass

    def build(*given: object) -> None:
        raise Built

    monkeypatch.setitem(sys.modules, "engine.factory", SimpleNamespace(build=build))
    with contextlib.ExitStack() as ends, pytest.raises(Built):
        resolved: Any = SimpleNamespace(config=config(tensor_parallel=2), remote=None)
        engine_process._model(resolved, lambda *_: None, lambda _: None, ends)
    assert [(line.rank, line.node) for line in started] == [(1, TWO[1])] and bound == [TWO[0]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert _threads(config(tensor_parallel=2), cuda=False) == 4
    free = EngineConfig(model="m", device="cpu", tensor_parallel=2)
    assert _threads(free, cuda=False) == 2


def test_doctor_and_plan_say_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a plan that the engine refuses."""
    monkeypatch.setattr(doctor, "read_nodes", lambda: TWO)
    monkeypatch.setattr(plan, "read_nodes", lambda: TWO)
    check = doctor._cores()
    assert check.text == "8, on 2 NUMA nodes: node 0, cores 0-3; node 1, cores 4-7"
    assert "numa: bind" in check.way_out
    rows = dict(plan._nodes(config(tensor_parallel=4)))
    assert rows["NUMA nodes"] == "2, of which a replica has 2"
    assert rows["  rank 3"] == "node 1, cores 6-7"
    assert "on another node" in dict(plan._nodes(config()))["  rank 0"]
    assert "bound to none" in dict(plan._nodes(EngineConfig(model="m")))["NUMA nodes"]
    with pytest.raises(ConfigError, match="num_threads: 8"):
        list(plan._nodes(config(num_threads=8)))
