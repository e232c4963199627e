"""A node is lost, or told that it will be. Ray nodes of one machine; the killed node's
processes are real."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from loadtest.chaos.server_processes import _table
from tests.deployments.on_ray.serve_cluster import tiny_model
from tests.faults.clients import Said
from tests.faults.cluster import Broken, deployed
from tests.faults.ray_nodes import NodesCluster

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

_KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"n": 2, "logprobs": True, "top_logprobs": 2},
]


def bodies(test: str) -> list[dict[str, Any]]:
    """Return requests of 2 s each at the engines' pace.

    Their prompts are this test's alone, as equal prompts would go where they have been before.
    """
    return [
        {"messages": [{"role": "user", "content": f"{test} {number}"}], "max_tokens": 100}
        | _KINDS[number % 3]
        for number in range(9)
    ]


# One replica on the head node, two on nodes that come and go. A router needs two cores, which only
# the head node has.
POOLS = {
    "cpu": {"replicas": 1, "num_cpus": 0.1, "resources": {"stays": 0.1}},
    "gpu": {"replicas": 2, "num_cpus": 0.1, "num_gpus": 0, "resources": {"spot": 0.5}},
}


@dataclass
class Nodes:
    cluster: NodesCluster
    broken: Broken
    spot: Any  # the node that has both replicas of the pool

    def add_node(self) -> Any:
        return self.cluster.add(num_cpus=1, resources={"spot": 1})

    def processes(self) -> list[int]:
        """The raylet of the spot node and all below it: workers, replicas, engines."""
        table = _table()
        collected = [self.spot.all_processes["raylet"][0].process.pid]
        for pid in collected:
            collected += [p.pid for p in table.values() if p.parent == pid]
        return collected


@pytest.fixture(scope="module")
def nodes(shared_nodes: NodesCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    spot = shared_nodes.add(num_cpus=1, resources={"spot": 1})
    model = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    router = {"replicas": 1, "num_cpus": 2}
    with deployed(
        shared_nodes.where, model, replicas=3, routers=1, pools=POOLS, router=router
    ) as broken:
        yield Nodes(shared_nodes, broken, spot)
    shared_nodes.remove_all()


async def run_there(broken: Broken, test: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return requests under way, some of them on the node that will be lost, and their bodies.

    Requests are sent until that is so: replicas within half a step of each other are equal to a
        router, and a busy machine makes one of them look slower for a while.
    """
    asked: list[dict[str, Any]] = []
    tasks: list[Any] = []
    for wave in range(10):
        more = bodies(f"{test} {wave}")
        asked += more
        tasks += [asyncio.create_task(broken.ask(body)) for body in more]
        await asyncio.sleep(0.7)
        replicas = (await broken.handle.state.remote())["replicas"]
        if any(replica["running"] for name, replica in replicas.items() if "gpu" in name):
            return asked, tasks
    await asyncio.gather(*tasks)
    raise AssertionError("nothing ran there")


async def answers(broken: Broken, asked: list[dict[str, Any]]) -> list[Said]:
    """Return the right answer to each request."""
    right = await asyncio.gather(*map(broken.ask, asked))
    assert not any(answer.error for answer in right), right
    return right


@pytest.mark.parametrize(
    "how",
    [
        # Closed connections are those of test_kills.py; Ray's part is that of `silent`.
        pytest.param("killed", marks=pytest.mark.nightly),
        "silent",
    ],
)
def test_a_node_is_lost(nodes: Nodes, how: str) -> None:
    """Bug: streams of a lost machine stop until Ray notices, which takes it 13 s and more. silent:
    as after a power cut, nothing is closed and nothing comes."""
    broken = nodes.broken

    async def case() -> float:
        await broken.settled()
        pids = nodes.processes()

        async def fault() -> None:
            for pid in pids:  # the raylet first; alone it leaves its workers seconds to live
                with contextlib.suppress(ProcessLookupError):  # ended with it
                    os.kill(pid, signal.SIGSTOP if how == "silent" else signal.SIGKILL)

        try:
            asked, tasks = await run_there(broken, how)
            await fault()
            said = await asyncio.gather(*tasks)
            # Afterwards: a prompt that was there before would go where it was.
            right = await answers(broken, asked)
        finally:
            for pid in pids:
                with_pid(pid)
        assert [answer.outcome for answer in said] == [answer.outcome for answer in right]
        moved = sum(answer.migrations for answer in said)
        print(f"{moved} choices moved")
        assert moved >= 1
        return max(answer.gap for answer in said)

    async def afterwards() -> float:
        """Wait until the replicas are elsewhere, and nobody holds anything of those that are
        gone."""
        took = await broken.settled(90)
        state = await broken.handle.state.remote()
        assert not any(state["held"].values()), state["held"]
        for replica in state["replicas"].values():
            assert (replica["running"], replica["free_blocks"]) == (0, replica["total_blocks"])
        return took

    try:
        gap = asyncio.run(case())
    finally:  # the tests after it need a node
        nodes.cluster.remove(nodes.spot)
        nodes.spot = nodes.add_node()
    print(f"node lost ({how}): longest gap {gap:.2f} s")
    assert gap < (4.0 if how == "silent" else 2.0)
    print(f"on a new node after {asyncio.run(afterwards()):.1f} s")


def with_pid(pid: int) -> None:
    """Kill a process if it still runs."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_a_node_gets_notice(nodes: Nodes) -> None:
    """Bug: a node with a notice still gets requests, or its replacement is only asked for when it
    is dead, or streams that are there at the deadline break."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    broken, asked = nodes.broken, bodies("notice")
    nodes.add_node()  # where the replacements find room

    async def load(over: asyncio.Event, right: list[Said]) -> list[Said]:
        said: list[Said] = []

        async def client(number: int) -> None:
            while not over.is_set():
                outcome = await broken.ask(asked[number])
                assert outcome.outcome == right[number].outcome
                said.append(outcome)

        await asyncio.gather(*map(client, range(len(asked))))
        return said

    async def case() -> None:
        await broken.settled()
        right = await answers(broken, asked)
        before = set((await broken.handle.state.remote())["replicas"])
        node = nodes.spot.node_id
        over = asyncio.Event()
        work = asyncio.create_task(load(over, right))
        await asyncio.sleep(1)
        gcs = GcsClient(address=nodes.cluster.where.address)
        # Long enough for two starts on any machine: what happens at it is test_update.py's.
        deadline = int(time.time() * 1000) + 60_000
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = await asyncio.to_thread(gcs.drain_node, node, reason, "spot", deadline)
        assert accepted, why
        began = time.monotonic()
        refused = replaced = 0.0
        while time.monotonic() < began + 50 and not (refused and replaced):
            seen = (await broken.handle.state.remote())["replicas"]
            since = time.monotonic() - began
            leaving = [s for name, s in seen.items() if name in before and "gpu" in name]
            if not refused and all(state["draining"] for state in leaving):
                refused = since
            if not replaced and len([n for n in seen if "gpu" in n and n not in before]) == 2:
                replaced = since
            await asyncio.sleep(0.1)
        print(f"notice: nothing new after {refused:.1f} s, replaced after {replaced:.1f} s")
        while any(  # the last streams there end by themselves
            replica["running"]
            for name, replica in (await broken.handle.state.remote())["replicas"].items()
            if "gpu" in name and name in before
        ):
            assert time.monotonic() < began + 58, "they would be cut at the deadline"
            await asyncio.sleep(0.1)
        for pid in nodes.processes():  # the instance is taken away
            with_pid(pid)
        await asyncio.sleep(2)
        over.set()
        said = await work
        print(f"{len(said)} requests, none wrong; gap {max(replica.gap for replica in said):.2f} s")
        assert 0 < refused < 4 and replaced

    asyncio.run(case())
