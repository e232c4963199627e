"""A Ray cluster with Serve and several nodes on this machine, which tests add and remove."""

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
    """A Ray cluster of several nodes on this machine. where: the head node's addresses."""

    cluster: Any
    where: Cluster

    def add(self, **fields: Any) -> Any:
        """Start a node and return it. fields: options of `ray start`."""
        return self.cluster.add_node(**fields, **COMMON)

    def remove(self, node: Any) -> None:
        """Kill a node and its processes at once."""
        self.cluster.remove_node(node, allow_graceful=False)

    def remove_all(self) -> None:
        """Remove all nodes but the head node."""
        for node in list(self.cluster.worker_nodes):
            self.remove(node)


def _head() -> Any:
    """Start and return a cluster of one node, the head.

    Ray forks this process, which has threads of earlier tests, so a child may hang before it
    executes Ray's server. The child is then killed, and the start repeated once.
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
        # All nodes are on one machine and share a port, so only the head node can have the proxy.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield NodesCluster(cluster, Cluster(cluster.address, port))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
