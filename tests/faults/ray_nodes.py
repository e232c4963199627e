"""A Ray with Serve on several nodes of this machine, which come and go."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadtest.chaos.server_processes import _table
from tests.deployments.on_ray.serve_cluster import Cluster, free_port, look_often

COMMON = {
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}


@dataclass
class NodesCluster:
    """A Ray of several nodes on this machine. where: the head node's addresses."""

    cluster: Any
    where: Cluster

    def add(self, **fields: Any) -> Any:
        """Return a new node. fields: as `ray start` takes them."""
        return self.cluster.add_node(**fields, **COMMON)

    def remove(self, node: Any) -> None:
        """Take a node away at once, with its processes."""
        self.cluster.remove_node(node, allow_graceful=False)

    def remove_all(self) -> None:
        """Take all nodes away but the head."""
        for node in list(self.cluster.worker_nodes):
            self.remove(node)


def _head() -> Any:
    """Return a cluster of one node.

    Ray forks this process, in which earlier tests have left threads, so a child may hang before it
    becomes a server. It is then ended, and started once more.
    """
    from ray.cluster_utils import Cluster as RayCluster

    args = {"num_cpus": 8, "resources": {"stays": 1}, **COMMON}
    try:
        return RayCluster(initialize_head=True, head_node_args=args)
    except RuntimeError as error:
        if "Timed out waiting for file" not in str(error):
            raise
        table = _table()
        for process in table.values():
            if process.parent == os.getpid() and process.title == table[os.getpid()].title:
                process.send(signal.SIGKILL)
        return RayCluster(initialize_head=True, head_node_args=args)


@contextlib.contextmanager
def ray_nodes() -> Iterator[NodesCluster]:
    """Start a head node with Serve, and stop all nodes whatever happens."""
    import ray
    from ray import serve

    look_often()
    cluster = _head()
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        port = free_port()
        # One port, one machine: only the head node can have the proxy.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield NodesCluster(cluster, Cluster(cluster.address, port))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
