"""F12 and F13: a node is lost, or told that it will be. Ray nodes of one machine; the killed node's
processes are real."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from loadtest.processes import _table
from tests.deployments.serve_cluster import Cluster, free_port, tiny_model
from tests.faults.clients import Said
from tests.faults.cluster import Broken, deployed

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

BODY = {"messages": [{"role": "user", "content": "the answer"}], "max_tokens": 100}
BODY |= {"temperature": 0}  # 2 s at the engines' pace
# One replica on the head node, two on nodes that come and go. A router needs two cores, which only
# the head node has.
POOLS = {
    "cpu": {"replicas": 1, "num_cpus": 0.1, "resources": {"stays": 0.1}},
    "gpu": {"replicas": 2, "num_cpus": 0.1, "num_gpus": 0, "resources": {"spot": 0.5}},
}


@dataclass
class Nodes:
    cluster: Any
    broken: Broken
    spot: Any  # the node that has both replicas of the pool

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, resources={"spot": 1}, **_COMMON)

    def processes(self) -> list[int]:
        """The raylet of the spot node and all below it: workers, replicas, engines."""
        table = _table()
        found = [self.spot.all_processes["raylet"][0].process.pid]
        for pid in found:
            found += [p.pid for p in table.values() if p.parent == pid]
        return found


_COMMON = {
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster as RayCluster

    args = {"num_cpus": 8, "resources": {"stays": 1}, **_COMMON}
    cluster = RayCluster(initialize_head=True, head_node_args=args)
    try:
        spot = cluster.add_node(num_cpus=1, resources={"spot": 1}, **_COMMON)
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        # One port, one machine: only the head node can have the proxy.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        model = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
        router = {"replicas": 1, "num_cpus": 2}
        where = Cluster(cluster.address, port)
        with deployed(where, model, replicas=3, routers=1, pools=POOLS, router=router) as broken:
            yield Nodes(cluster, broken, spot)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


async def streams(broken: Broken, count: int, fault: Any) -> tuple[list[Said], Said]:
    right = await broken.ask(BODY)
    assert not right.error
    tasks = [asyncio.create_task(broken.ask(BODY)) for _ in range(count)]
    await asyncio.sleep(0.7)
    await fault()
    return await asyncio.gather(*tasks), right


@pytest.mark.parametrize("how", ["raylet killed", "silent"])
def test_f12_a_node_is_lost(nodes: Nodes, how: str) -> None:
    """Bug: streams of a lost machine stop until Ray notices, which takes it 13 s and more. silent:
    as after a power cut, nothing is closed and nothing comes."""
    broken = nodes.broken

    async def case() -> float:
        await broken.settled()
        pids = nodes.processes()

        async def fault() -> None:
            if how == "silent":
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            else:
                os.kill(pids[0], signal.SIGKILL)

        try:
            said, right = await streams(broken, 9, fault)
        finally:
            for pid in pids:
                with_pid(pid)
        assert [one.outcome for one in said] == [right.outcome] * 9
        return max(one.gap for one in said)

    gap = asyncio.run(case())
    print(f"node lost ({how}): longest gap {gap:.2f} s")
    assert gap < (4.0 if how == "silent" else 2.0)
    nodes.cluster.remove_node(nodes.spot, allow_graceful=False)
    nodes.spot = nodes.add()
    print(f"on a new node after {asyncio.run(broken.settled(90)):.1f} s")


def with_pid(pid: int) -> None:
    """End it if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_f13_a_node_gets_notice(nodes: Nodes) -> None:
    """Bug: a node with a notice still gets requests, or its replacement is only asked for when it
    is dead, or streams that are there at the deadline break."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    broken = nodes.broken
    nodes.add()  # where the replacements find room

    async def load(until: float) -> list[Said]:
        said: list[Said] = []

        async def client() -> None:
            while time.monotonic() < until:
                said.append(await broken.ask(BODY))

        await asyncio.gather(*(client() for _ in range(6)))
        return said

    async def case() -> None:
        await broken.settled()
        right = await broken.ask(BODY)
        before = set((await broken.handle.state.remote())["replicas"])
        node = nodes.spot.node_id
        work = asyncio.create_task(load(time.monotonic() + 18))
        await asyncio.sleep(1)
        gcs = GcsClient(address=nodes.cluster.address)
        deadline = int(time.time() * 1000) + 14_000
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, why = await asyncio.to_thread(gcs.drain_node, node, reason, "spot", deadline)
        assert accepted, why
        began = time.monotonic()
        refused = replaced = 0.0
        while time.monotonic() < began + 13.5 and not (refused and replaced):
            seen = (await broken.handle.state.remote())["replicas"]
            since = time.monotonic() - began
            leaving = [s for name, s in seen.items() if name in before and "gpu" in name]
            if not refused and all(state["draining"] for state in leaving):
                refused = since
            if not replaced and len([n for n in seen if "gpu" in n and n not in before]) == 2:
                replaced = since
            await asyncio.sleep(0.1)
        print(f"notice: nothing new after {refused:.1f} s, replaced after {replaced:.1f} s")
        await asyncio.sleep(began + 14 - time.monotonic())
        for pid in nodes.processes():  # the instance is taken away
            with_pid(pid)
        said = await work
        wrong = [one for one in said if one.outcome != right.outcome]
        print(f"{len(said)} requests, {len(wrong)} wrong; gap {max(o.gap for o in said):.2f} s")
        assert not wrong and 0 < refused < 4 and replaced

    asyncio.run(case())
