"""A trainer's orders to a deployed application: several routers, and a replica that comes anew."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.client import Client
from engine.errors import InvalidRequest, UpdateFailed
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.deployments.replica.collector import Collector

pytestmark = [pytest.mark.serve, pytest.mark.slow]

ROLLOUT = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}


@pytest.fixture
def served(shared_cluster: Cluster, shared_pair: Collector) -> Cluster:
    return shared_cluster


def until(good: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.2)


def told(cluster: Cluster) -> set[str]:
    """Return the weights' versions that a few rollouts report, at any router and replica."""
    versions = set()
    for _ in range(8):
        (choice,) = cluster.post("/inference/v1/generate", **ROLLOUT)["choices"]
        versions |= {part["version"] for part in choice["weight_versions"]}
    return versions


def info(cluster: Cluster) -> Any:
    return json.loads(cluster.get("/weight_info"))


def test_all_routers_and_replicas_have_the_weights(served: Cluster, tmp_path: Path) -> None:
    """A router does not learn of an update, or a replica that restarts serves with the old."""
    until(lambda: len(info(served)["replicas"]) == 2)
    assert told(served) == {"0"}
    update = {"model_path": str(tmp_path), "weight_version": "one"}
    assert served.post("/update_weights_from_disk", **update)["weight_version"] == "one"
    assert told(served) == {"one"}
    until(lambda: all(info(served)["weight_version"] == "one" for _ in range(6)))
    from ray import serve

    victim = serve.get_deployment_handle("engine-cpu", "pair").stats.remote().result()
    before = set(info(served)["replicas"])
    os.kill(victim["engine_pid"], signal.SIGKILL)

    def renewed() -> bool:
        replicas = info(served)["replicas"]
        now = {replica["weight_version"] for replica in replicas.values()}
        return len(replicas) == 2 and set(replicas) != before and now == {"one"}

    until(renewed)
    assert told(served) == {"one"}


def test_by_handle(served: Cluster, tmp_path: Path) -> None:
    """A trainer in the same cluster gets other weights, or another error, than over HTTP."""
    from ray import serve

    router = serve.get_app_handle("pair")
    assert router.update_weights.remote(str(tmp_path), "two").result() == "two"
    assert told(served) == {"two"}
    router.pause.remote("keep").result()
    until(lambda: all(replica["paused"] for replica in info(served)["replicas"].values()))
    router.resume.remote().result()
    assert told(served) == {"two"}
    with pytest.raises(UpdateFailed, match="no such folder"):
        router.update_weights.remote(str(tmp_path / "none")).result()
    with pytest.raises(InvalidRequest, match="mode is one of"):
        router.pause.remote("later").result()


def test_by_client(served: Cluster, tmp_path: Path) -> None:
    """A typed call does not come through Serve, or its error is another."""
    client = Client.connect("pair")
    assert client.update_weights(str(tmp_path), "typed") == "typed"
    assert told(served) == {"typed"}
    client.pause()
    until(lambda: client.weights().paused)
    client.resume()
    until(lambda: not client.weights().paused)
    assert client.world_size() == 2
    with pytest.raises(UpdateFailed, match="no such folder"):
        client.update_weights(str(tmp_path / "none"))
