"""What cores of one machine several models get, and what a model that is added needs no more."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments import app, cluster_capacity, model_applications
from deployments.cli import doctor, serve
from deployments.cluster_capacity import RayNode, check_pools, pool_faults
from deployments.config.load import parse_config
from deployments.serve import coexistence
from deployments.serve.model_deployments import (
    NodeCapacity,
    _only_ids,
    beside,
    check_gpus,
    pools,
    shares,
)
from engine.errors import ConfigError

IDS = ("node_a", "node_b", "node_c")


def node(cores: int, gpus: int = 0) -> RayNode:
    return RayNode({"CPU": cores, "GPU": gpus}, here=True)


def cores(machine: NodeCapacity, models: dict[str, Any]) -> list[float | None]:
    items = list(parse_config({"models": models}, {}).by_model().values())
    pairs = zip(items, shares(items, machine), strict=True)
    return [pools(config, share)["cpu"].num_cpus for config, share in pairs]


def test_models_share_the_cores_of_one_machine() -> None:
    """A second model that reserves all cores, as the first has done, and never starts."""
    machine = NodeCapacity(8, 0, alone=True)
    named = {"pools": {"cpu": {"replicas": 2, "num_cpus": 1.5}}}
    assert cores(machine, {"a": {}, "b": {}}) == [4, 4]
    assert cores(machine, {"a": named, "b": {}}) == [1.5, 5]
    assert cores(machine, {"a": {"replicas": 3}, "b": {}}) == [2, 2]
    assert cores(NodeCapacity(2, 0, alone=True), {"a": {}, "b": {}, "c": {}}) == [1, 1, 1]
    # In a cluster each may have a node of its own.
    assert cores(NodeCapacity(8, 0), {"a": {}, "b": {}}) == [8, 8]


def test_a_share_of_fewer_cores_than_ranks_is_refused() -> None:
    """An error that names num_cpus, which nobody has set, and wants more than the machine has."""
    machine = NodeCapacity(2, 0, alone=True)
    for replicas, ranks, why in (
        (1, 3, "share of this machine is 2; lower it$"),
        (2, 2, "share of this machine is 1; lower it, or pools.cpu.replicas$"),
    ):
        fields = {
            "engine": {"tensor_parallel": ranks},
            "pools": {"cpu": {"replicas": replicas}},
        }
        with pytest.raises(ConfigError, match=f"tensor_parallel {ranks}: so many ranks.*{why}"):
            pools(parse_config(fields, {}), machine)
    with pytest.raises(ConfigError, match=r"or set pools\.cpu\.num_cpus$"):
        pools(parse_config(fields, {}), NodeCapacity(2, 0))
    fields = {"engine": {"tensor_parallel": 2}, "replicas": 2}
    with pytest.raises(ConfigError, match=r"lower it, or replicas$"):
        pools(parse_config(fields, {}), machine)
    alone = parse_config({"engine": {"pipeline_parallel": 2}}, {})
    assert pools(alone, machine)["cpu"].num_cpus == 2


def test_doctor_refuses_what_serve_refuses() -> None:
    """Bug: doctor says that a machine can serve replicas for which it has too few cores, or GPUs,
    one model or several."""
    two = {"engine": {"tensor_parallel": 2, "device": "cpu"}, "replicas": 2}
    for item, name in ((two, "pools"), ({"models": {"a": two, "b": {}}}, "model a")):
        config = parse_config(item, {})
        (check,) = doctor.pool_checks(config, [node(2)])
        assert (check.name, check.state) == (name, "MISSING")
        assert "a replica's share of this machine is 1" in check.text
        assert check.way_out == "lower it, or replicas"
        assert not list(doctor.pool_checks(config, [node(6)]))
    gpu = parse_config({"engine": {"device": "cuda"}}, {})
    (check,) = doctor.pool_checks(gpu, [node(2)])
    assert check.text.startswith("engine.device: cuda: a replica needs 1 GPU of one node, no node")
    assert check.way_out.startswith("set engine.device: cpu, or ")
    assert not list(doctor.pool_checks(gpu, [node(2, 1)]))


@pytest.mark.parametrize(
    ("given", "cores", "said"),
    [
        ({"pools": {"cpu": {"num_cpus": 3}}}, 3, "1 replica reserves 3 cores, and .* has 2; set"),
        ({"pools": {"cpu": {"replicas": 2, "num_cpus": 2}}}, 4, "lower pools.cpu.replicas to 1,"),
        (
            {"pools": {"cpu": {"num_cpus": 3, "min_replicas": 2, "max_replicas": 4}}},
            6,
            "lower pools.cpu.min_replicas to 1, or set pools.cpu.num_cpus lower",
        ),
        ({"replicas": 50}, 50, "50 replicas reserve 1 core each, .* lower replicas to 49,"),
        ({"pools": {"cpu": {"replicas": 3}}}, 3, "lower pools.cpu.replicas to 2, or set"),
        ({"models": {"a": {}, "b": {}, "c": {}}}, 3, "models: 3 replicas reserve 3 cores in all"),
        ({"router": {"num_cpus": 1, "replicas": 2}, "pools": {"cpu": {"num_cpus": 1}}}, 3, "rout"),
        (
            {
                "router": {"num_cpus": 1, "batch_replicas": 2},
                "pools": {"cpu": {"num_cpus": 1}},
            },
            5,
            "the routers 4 cores",
        ),
    ],
)
def test_replicas_that_no_machine_can_take(given: dict[str, Any], cores: int, said: str) -> None:
    """Bug: `manta serve` waits for cores for ever, and doctor says that the machine can serve."""
    config = parse_config(given, {})
    assert not list(doctor.pool_checks(config, [node(cores)]))
    check_pools(config, [node(cores)])
    (check,) = doctor.pool_checks(config, [node(cores - 1)])
    assert check.state == "MISSING" and check.way_out.endswith("that has room (--address)")
    with pytest.raises(ConfigError, match=said):
        check_pools(config, [node(cores - 1)])


def test_replicas_that_a_cluster_can_take_node_by_node() -> None:
    """A pool that the sum of the nodes' cores has room for, and no node; or one that is refused
    although nodes of another kind take it."""
    config = parse_config({"pools": {"cpu": {"replicas": 2, "num_cpus": 3}}}, {})
    for there, said in (([4, 4], ""), ([6], ""), ([2, 2, 5], "room for 1"), ([2] * 9, "to|set")):
        nodes = [replace(node(cores), here=False) for cores in there]
        faults = list(pool_faults(config, nodes))
        assert bool(faults) == bool(said)
        for _, error in faults:
            assert re.search(said, error.message) and "pools.cpu" in error.message
    where = {"pools": {"cpu": {"num_cpus": 1, "labels": {"zone": "b"}, "resources": {"disk": 1}}}}
    config = parse_config(where, {})
    with pytest.raises(
        ConfigError, match=r"labels zone=b, which no node has; change pools\.cpu\.l"
    ):
        check_pools(config, [RayNode({"CPU": 4, "disk": 1}, {"zone": "a"})])
    with pytest.raises(
        ConfigError, match=r"1 disk, and the only node has 0; set .*resources\.disk"
    ):
        check_pools(config, [RayNode({"CPU": 4}, {"zone": "b"})])
    check_pools(config, [RayNode({"CPU": 4, "disk": 1}, {"zone": "b"})])
    operator = {"pools": {"cpu": {"num_cpus": 1, "labels": {"zone": "!c"}}}}
    check_pools(parse_config(operator, {}), [RayNode({"CPU": 4}, {"zone": "b"})])


@pytest.mark.parametrize(("own", "grows"), [(True, None), (False, False), (False, True)])
def test_serve_waits_only_for_nodes_that_may_come(
    own: bool, grows: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 400 s of silence for replicas that no node can take; or a cluster that would have
    started a node is not given the time."""
    config = parse_config({"replicas": 3}, {})
    monkeypatch.setattr(cluster_capacity, "cluster_nodes", lambda: [replace(node(2), here=False)])
    monkeypatch.setattr(NodeCapacity, "here", lambda: NodeCapacity(2, 0, grows=grows))
    cluster = cast(Any, SimpleNamespace(own=own))
    if grows:
        said = serve._check_room(config, cluster)
        assert said.startswith("pools.cpu: 3 replicas reserve 1 core each, and the only node has 2")
        assert said.endswith("waiting for nodes that the cluster's autoscaler may start")
    else:
        with pytest.raises(ConfigError, match="lower replicas to 2"):
            serve._check_room(config, cluster)
    monkeypatch.setattr(cluster_capacity, "cluster_nodes", lambda: [node(3)])
    assert serve._check_room(config, cluster) == ""


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ({"engine": {"device": "cuda"}}, 0, "^engine.device: cuda: .*no node .*engine.device: cpu"),
        ({"pools": {"gpu": {}, "cpu": {}}}, 0, "^pools.gpu: .*no node has one.*take pools.cpu"),
        ({"pools": {"gpu": {"min_replicas": 0, "max_replicas": 2}}}, 0, "^pools.gpu: "),
        ({"engine": {"tensor_parallel": 4}}, 2, "4 GPUs .* has 2.*lower engine.tensor_parallel"),
        ({"pools": {"gpu": {"num_gpus": 0.5}}}, 0.25, "lower pools.gpu.num_gpus"),
        ({"pools": {"gpu": {"min_replicas": 0, "max_replicas": 2}, "cpu": {}}}, 0, ""),
        ({}, 0, ""),
        ({"pools": {"gpu": {"num_gpus": 0.5}}}, 0.5, ""),
    ],
)
def test_a_pool_whose_gpus_no_node_will_have(
    given: dict[str, Any], gpus: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a command that waits for ever for a GPU; one that is refused where another pool answers,
    where something may start a node with one, or before there is a cluster."""
    config = parse_config(given, {})
    for grows in (None, True, False):
        machine = NodeCapacity(8, gpus, grows=grows)
        waits = nullcontext()
        if said and grows is False:
            waits = pytest.raises(ConfigError, match=f"{said}.*or give the cluster such a node$")
        caplog.clear()
        with waits:
            check_gpus(config, pools(config, machine), machine)
        assert ("waits until one is started" in caplog.text) == bool(said and grows)


def test_own_cluster_never_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `manta serve` on a machine without GPUs deploys what waits for one."""
    monkeypatch.setattr(NodeCapacity, "here", lambda: NodeCapacity(8, 0))
    config = parse_config({"engine": {"device": "cuda"}}, {})
    assert app.serve_config(config)["applications"]
    with pytest.raises(ConfigError, match=r"^engine\.device: cuda"):
        app.serve_config(config, one_machine=True)


def test_a_monitor_with_node_types_may_start_nodes() -> None:
    """Bug: a cluster that has an autoscaler is taken for one of so many machines, or the other way;
    a report of a monitor that has just begun."""
    assert _only_ids({"autoscaler_report": {"active_nodes": {"node_a": 1, "node_b": 1}}}, IDS)
    for types in ({"head": 1}, {"node_a": 1, "node_gpu": 1}, {}, None):
        assert not _only_ids({"autoscaler_report": {"active_nodes": types}}, IDS)
    assert not _only_ids({"autoscaler_report": None}, IDS)
    assert not _only_ids({}, IDS)


def test_a_model_that_is_added_gets_what_the_others_left() -> None:
    """The same for one that is added by hand; one that states its cores and gets others."""
    machine = NodeCapacity(8, 0, alone=True)
    there = parse_config({"pools": {"cpu": {"num_cpus": 3}}}, {})
    added = beside([there, there], parse_config({}, {}), machine)
    assert pools(parse_config({}, {}), added)["cpu"].num_cpus == 2
    assert beside([there], there, machine) == machine


def test_adding_a_model_reads_no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault in the keys file, which routers bear, and no model can be added or changed; a model
    that is not there, and is added."""
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    keys.chmod(0o600)
    base = parse_config({"http": {"admin_keys_file": str(keys)}, "models": {"a": {}}}, {})
    keys.write_text("key no-field\n")
    applied: list[str] = []

    def apply(schema: dict[str, Any], there: object) -> None:
        applied.extend(application["name"] for application in schema["applications"])

    monkeypatch.setattr(app, "apply", apply)
    monkeypatch.setattr(coexistence, "deploying", nullcontext)
    monkeypatch.setattr(model_applications, "applications", dict)
    monkeypatch.setattr(model_applications, "note_change", applied.append)
    app.put_model(base, "b", {"pools": {"cpu": {"num_cpus": 1}}})
    assert applied == ["manta.b", "manta"]
    with pytest.raises(ConfigError, match=r"^model: .*no such folder") as caught:
        app.put_model(base, "b", {"model": "/nowhere"})
    assert caught.value.param == "model"
    assert applied == ["manta.b", "manta"]
