"""What cores of one machine several models get, and what a model that is added needs no more."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deployments import app, catalog, neighbours
from deployments.config.load import parse_config
from deployments.parts import NodeCapacity, beside, pools, shares
from engine.errors import ConfigError


def cores(machine: NodeCapacity, models: dict[str, Any]) -> list[float | None]:
    each = list(parse_config({"models": models}, {}).each().values())
    given = zip(each, shares(each, machine), strict=True)
    return [pools(one, share)["cpu"].num_cpus for one, share in given]


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
        given = {
            "engine": {"tensor_parallel": ranks},
            "pools": {"cpu": {"replicas": replicas}},
        }
        with pytest.raises(ConfigError, match=f"tensor_parallel {ranks}: so many ranks.*{why}"):
            pools(parse_config(given, {}), machine)
    with pytest.raises(ConfigError, match=r"or set pools\.cpu\.num_cpus$"):
        pools(parse_config(given, {}), NodeCapacity(2, 0))
    alone = parse_config({"engine": {"pipeline_parallel": 2}}, {})
    assert pools(alone, machine)["cpu"].num_cpus == 2


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
        applied.extend(one["name"] for one in schema["applications"])

    monkeypatch.setattr(app, "apply", apply)
    monkeypatch.setattr(neighbours, "turn", nullcontext)
    monkeypatch.setattr(catalog, "applications", dict)
    monkeypatch.setattr(catalog, "note_change", applied.append)
    app.put_model(base, "b", {"pools": {"cpu": {"num_cpus": 1}}})
    assert applied == ["manta.b", "manta"]
    with pytest.raises(ConfigError, match=r"^model: .*no such folder") as caught:
        app.put_model(base, "b", {"model": "/nowhere"})
    assert caught.value.param == "model"
    assert applied == ["manta.b", "manta"]
