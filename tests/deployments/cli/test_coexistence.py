"""Applications beside each other on one cluster: what collides, whose turn it is, who was deployed
when."""

import json
import threading
from typing import Any

import pytest

from deployments.config.load import MantaConfig, parse_config
from deployments.serve import coexistence
from deployments.serve.coexistence import (
    check_beside,
    check_port,
    config_of,
    deployed_at,
    note_others,
)
from engine.errors import ConfigError, MantaError


def config(**fields: Any) -> MantaConfig:
    return parse_config({"model": "/models/a", **fields}, {}, check_files=False)


A = config(grpc={"port": 9000}, batch={"folder": "/batches"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "/models/b"}, "app_name: 'manta' serves the model 'a' .* this is 'b'"),
        ({"app_name": "b"}, "route_prefix: / is that of the application 'manta'.* such as /b"),
        ({"app_name": "b", "route_prefix": "/b", "grpc": {"port": 9000}}, "grpc.port: 9000"),
        ({"app_name": "b", "route_prefix": "/b", "batch": {"folder": "/batches"}}, "batch.folder"),
    ],
)
def test_what_collides_is_named(fields: dict[str, Any], said: str) -> None:
    """`manta serve b.yaml` replaced the application of a.yaml, for both have the default name."""
    with pytest.raises(ConfigError, match=said) as raised:
        mine = config(**fields)
        same = mine.app_name == A.app_name
        check_beside(mine, [] if same else [A], A if same else None)
    assert raised.value.param == said.partition(":")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": {"max_num_seqs": 4}},  # an update
        {"model": "/models/b", "served_name": "a"},  # of the weights, too
        {"model": "/models/b", "app_name": "b", "route_prefix": "/b"},
        {"model": "/models/a", "app_name": "b", "route_prefix": "/b", "grpc": {"port": 9001}},
    ],
)
def test_updates_and_neighbours_are_let_in(fields: dict[str, Any]) -> None:
    """A changed file that is refused as if it were another application's."""
    mine = config(**fields)
    same = mine.app_name == A.app_name
    check_beside(mine, [] if same else [A], A if same else None)


def test_a_port_that_nothing_will_ever_listen_on_is_told() -> None:
    """Serve minds the port of the first application alone: /ready was asked for 30 s elsewhere."""
    check_port(8000, 8000)
    with pytest.raises(ConfigError, match=r"set http\.port: 8123"):
        check_port(8000, 8123)


def test_applications_that_are_not_ours_are_no_configurations() -> None:
    """A KeyError about somebody else's application, and nothing can be deployed any more."""
    ours = {"import_path": "deployments.app:build", "args": {"config": {"model": "/models/a"}}}
    config = config_of(ours)
    assert config is not None and config.name() == "a"
    assert config_of({**ours, "import_path": "theirs:app"}) is None
    assert config_of({**ours, "args": {"config": {"modle": "of another release"}}}) is None
    assert config_of({"import_path": "theirs:app"}) is None


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Replace Ray's key-value store by a dictionary, and return it."""
    by_name: dict[str, bytes] = {}
    lock = threading.Lock()

    def store(what: str, key: str, value: bytes = b"", overwrite: bool = True) -> Any:
        with lock:
            if what == "get":
                return by_name.get(key)
            if what == "del":
                return by_name.pop(key, None)
            there = key in by_name
            if overwrite or not there:
                by_name[key] = value
            return there

    monkeypatch.setattr(coexistence, "store", store)
    monkeypatch.setattr(coexistence, "_POLL", 0.001)
    return by_name


def test_deployments_take_turns(kept: dict[str, bytes]) -> None:
    """Two `manta serve` in one script: each read the list of applications, then wrote its own."""
    inside, most = 0, []

    def deploy_once() -> None:
        nonlocal inside
        with coexistence.deploying():
            inside += 1
            most.append(inside)
            threading.Event().wait(0.005)
            inside -= 1

    threads = [threading.Thread(target=deploy_once) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1] and not kept


def test_a_turn_of_the_dead_ends(kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that was killed in its turn would keep all others out for good."""
    with coexistence.deploying():
        monkeypatch.setattr(coexistence, "_WAIT", 0.01)
        with pytest.raises(MantaError, match="other applications"), coexistence.deploying():
            pass
        monkeypatch.setattr(coexistence, "_STALE", 0.0)
        with coexistence.deploying():
            taken = dict(kept)
            assert taken
        assert not kept
    assert not kept, "the first one, which is late, ended a turn that was not its own"


def test_a_deployment_beside_it_is_none_of_its_own(kept: dict[str, bytes]) -> None:
    """Serve gives all applications the time of the last deployment. After `manta serve b.yaml`,
    Ctrl-C took the application of a.yaml for one that somebody had deployed anew, and left it."""
    assert deployed_at("a", 100.0) == 100.0
    note_others(200.0, {"a": 100.0})
    note_others(300.0, {"a": 200.0, "b": 200.0})
    assert deployed_at("a", 300.0) == 100.0 and deployed_at("b", 300.0) == 200.0
    assert deployed_at("a", 400.0) == 400.0, "deployed anew"
    note_others(500.0, {"a": 400.0})
    assert deployed_at("a", 500.0) == 400.0
    assert json.loads(kept["manta/a/deployed"]) == [500.0, 400.0]
