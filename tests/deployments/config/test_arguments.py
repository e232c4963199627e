"""Arguments of Serve's applications: what `manta serve` and `manta build` write is read again where
routers and engines start."""

import importlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.serve._private.http_util import ASGIAppReplicaWrapper

from deployments import app
from deployments.config.load import MantaConfig, parse_config
from deployments.model_applications import entries
from deployments.serve.model_deployments import NodeCapacity
from engine.errors import ConfigError

MACHINE = NodeCapacity(16.0, 4.0)
POOL = [{}, {"num_gpus": 0.5}, {"replicas": 2}, {"min_replicas": 0, "max_replicas": 3}]
POOLS = [{"gpu": pool} for pool in POOL] + [{"cpu": {"num_cpus": 2}}, {"cpu": {}, "gpu": {}}]
ENGINES = [
    {"sleep_in_host_memory": True},
    {"max_loras": 2},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"seed": 7},
    {"quantization": "none", "device": "cuda"},
]
OF_MODEL = {
    "replicas": [1, 3],
    "pools": POOLS,
    "engine": ENGINES,
    "aliases": [["other"]],
    "scaling": [{"ttft": 3.0}, {"idle_seconds": 5.0}],
    "limits": [{"drain_seconds": 5.0}, {"queue_seconds": 1.0}],
}
OF_ENDPOINT = {
    "engine": ENGINES,
    "scaling": [{"ttft": 3.0}, {"idle_seconds": 5.0}],
    "limits": [{"in_flight": 7, "share_by": "user"}],
    "router": [
        {"replicas": 1},
        {"replicas": 3},
        {"batch_replicas": 2},
        {"heartbeat_seconds": 2.0, "silence_seconds": 9},
    ],
    "http": [{"store_bytes": 10_000_000}, {"store_bytes": 1, "port": 9000}, {"strict": True}],
    "grpc": [{"port": 9001}],
    "log": [{"level": "debug"}],
    "usage": [{"file": "/var/usage"}],
    "batch": [{"folder": "/var/batches"}],
    "tracing": [{"endpoint": "http://127.0.0.1:4318"}],
    "route_prefix": ["/llm"],
}


def some_of(keys: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in keys.items()})


ONE = some_of({**OF_MODEL, **OF_ENDPOINT}).map(lambda keys: {"model": "/m", **keys})
TWO = st.tuples(some_of(OF_ENDPOINT), some_of(OF_MODEL), some_of(OF_MODEL)).map(
    lambda drawn: {
        **drawn[0],
        "models": {
            "a": {"model": "/m", **drawn[1]},
            "b": {"model": "/m", **drawn[2], "aliases": []},
        },
    }
)


def schema_of(config: MantaConfig) -> dict[str, dict[str, Any]]:
    """Return Serve's schema of each application of a configuration, by name, on a fixed machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeCapacity, "here", lambda: MACHINE)
        applications = app.serve_config(config)["applications"]
    return {application["name"]: application for application in applications}


def read_again(application: dict[str, Any]) -> MantaConfig:
    """Return the configuration that the function which Serve calls reads from the arguments."""
    module, _, name = application["import_path"].partition(":")
    collected: list[MantaConfig] = []
    with pytest.MonkeyPatch.context() as patch:

        def stop(config: MantaConfig, *_: Any, **__: Any) -> Any:
            collected.append(config)
            raise InterruptedError

        patch.setattr(app, "assemble", stop)
        patch.setattr(app, "_routers", stop)
        patch.setattr(app, "engine_deployments", stop)
        patch.setattr("deployments.config.load._check_files", lambda *_: None)
        with pytest.raises(InterruptedError):
            getattr(importlib.import_module(module), name)(
                json.loads(json.dumps(application["args"]))
            )
    return collected[0]


def check(data: dict[str, Any]) -> None:
    try:
        config = parse_config(data, {}, check_files=False)
        applications = schema_of(config)
    except (ConfigError, ValidationError):
        return  # it was refused before anything is written
    for application in applications.values():
        again = read_again(application)
        written = application["args"]["config"]
        for section in ("http", "limits", "scaling", "log", "usage", "engine"):
            if section in written:
                assert getattr(again, section) == getattr(config, section) or config.models
        dumped = again.model_dump(exclude_defaults=True)
        assert {**dumped, "pools": written.get("pools")} == {"pools": None, **written}
    if config.models:
        assert entries(config.app_name, applications).keys() == config.models.keys()


@settings(max_examples=200, deadline=None)
@given(st.one_of(ONE, TWO))
def test_what_was_taken_is_taken_again_as_arguments(data: dict[str, Any]) -> None:
    """A key that `manta serve` accepts and its own replicas refuse: nobody could ever use it."""
    check(data)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("scales", [False, True])
def test_routers_of_batch_work(several: bool, scales: bool) -> None:
    """Deployments of an application without the setting that differ from before, a count that
    restarts the engines, or routers of which the policy hears nothing."""
    model = {"model": "/m", "pools": {"cpu": {"num_cpus": 1}}}
    if scales:
        model["pools"] = {"cpu": {"num_cpus": 1, "min_replicas": 1, "max_replicas": 2}}
    data = {"models": {"a": model}} if several else model

    def deployed(count: int) -> tuple[Any, dict[str, Any]]:
        config = parse_config({**data, "router": {"batch_replicas": count}}, {}, check_files=False)
        (routers,) = (
            application
            for application in schema_of(config).values()
            if any(part["name"] == "router" for part in application["deployments"])
        )
        return routers["args"], {part.pop("name"): part for part in routers["deployments"]}

    without, of_none = deployed(0)
    assert without["config"]["router"] == {"replicas": 1} and "batch-router" not in of_none
    args, of_two = deployed(2)
    assert args == deployed(3)[0]
    assert args["config"]["router"] == {"replicas": 1, "batch_replicas": 1}
    batch = of_two.pop("batch-router")
    assert of_two == of_none
    counts = {"num_replicas": 2}
    if scales and not several:
        limits = of_none["router"]["autoscaling_config"]
        counts = {"autoscaling_config": {**limits, "min_replicas": 2, "max_replicas": 2}}
    assert batch == counts


def test_what_differs_for_routers_of_batch_work() -> None:
    """Two deployments at a node's one gRPC port, batches in the routers of HTTP, or an application
    with two endpoints, which Serve refuses."""
    data = {"model": "/m", "grpc": {"port": 9001}, "router": {"replicas": 3, "num_cpus": 0.5}}

    def bound(count: int) -> Any:
        router = {**data["router"], "batch_replicas": count}
        config = parse_config({**data, "router": router}, {}, check_files=False)
        return app._routers(config, None)._bound_deployment

    alone, routers = bound(0), bound(2)
    assert not alone.init_kwargs
    batch = routers.init_kwargs["batch_routers"]._bound_deployment
    assert (routers.name, routers.num_replicas) == (alone.name, alone.num_replicas) == ("router", 3)
    assert (batch.name, batch.num_replicas) == ("batch-router", 2)
    assert batch.ray_actor_options == routers.ray_actor_options == alone.ray_actor_options
    assert issubclass(routers.func_or_class, ASGIAppReplicaWrapper)
    assert not issubclass(batch.func_or_class, ASGIAppReplicaWrapper)
    (before,), (settings,), (own,) = alone.init_args, routers.init_args, batch.init_args
    assert before.routers == ("router",) and before.runs_batches
    assert replace(settings, routers=("router",), runs_batches=True, change_models=None) == replace(
        before, change_models=None
    )
    assert own.routers == settings.routers == ("router", "batch-router")
    assert settings.grpc and own.grpc is None and own.runs_batches and not settings.runs_batches


@pytest.mark.parametrize("several", [False, True])
def test_store_bytes_can_be_turned_on(several: bool) -> None:
    """Counts of routers are no arguments, and the default of 2 in their place was refused."""
    data: dict[str, Any] = {"router": {"replicas": 1}, "http": {"store_bytes": 10_000_000}}
    data |= {"models": {"a": {"model": "/m"}}} if several else {"model": "/m"}
    applications = schema_of(parse_config(data, {}, check_files=False))
    (routers,) = (
        application
        for application in applications.values()
        if any(part["name"] == "router" for part in application["deployments"])
    )
    assert read_again(routers).http.store_bytes == 10_000_000
    assert {"name": "router", "num_replicas": 1} in routers["deployments"]
    data["http"] = {}
    more = schema_of(parse_config({**data, "router": {"replicas": 3}}, {}, check_files=False))
    same = schema_of(parse_config(data, {}, check_files=False))
    assert [application["args"] for application in more.values()] == [
        application["args"] for application in same.values()
    ]


def test_a_model_can_be_added_where_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """`manta models add` checks the routers' arguments together with the new model's."""
    data = {
        "models": {"a": {"model": "/m"}},
        "router": {"replicas": 1},
        "http": {"store_bytes": 1000},
    }
    base = read_again(schema_of(parse_config(data, {}, check_files=False))["manta"])
    applied: list[Any] = []
    monkeypatch.setattr(NodeCapacity, "here", lambda: MACHINE)
    monkeypatch.setattr(app, "check_model_files", lambda *_: None)
    monkeypatch.setattr(app.model_applications, "applications", dict)
    monkeypatch.setattr(app.model_applications, "note_change", lambda *_: None)
    monkeypatch.setattr(app.coexistence, "deploying", lambda: pytest.MonkeyPatch.context())
    monkeypatch.setattr(app, "apply", lambda schema, there: applied.append(schema))
    app.put_model(base, "b", {"model": "/m"})
    assert [application["name"] for application in applied[0]["applications"]] == ["manta.b"]


def test_several_models_may_sleep_by_what_they_have_in_common() -> None:
    """The top level's `engine` is for all models, each of which says what its replicas share."""
    pools = {"gpu": {"num_gpus": 0.5}}
    data = {
        "engine": {"sleep_in_host_memory": True},
        "models": {name: {"model": "/m", "pools": pools} for name in "ab"},
    }
    check(data)
    parse_config(data, {}, check_files=False)
    with pytest.raises(ConfigError, match="say what a replica shares"):
        parse_config({"engine": data["engine"]}, {}, check_files=False)
