"""Replicas that sleep, as a configuration says it."""

from typing import Any

import pytest

from deployments.app import model_application
from deployments.config.load import parse_config
from deployments.replica.sleep import SleepSettings
from deployments.serve.model_deployments import NodeCapacity, engine_deployments
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({}, ["engine.sleep_in_host_memory", "num_gpus: 0.5"]),
        ({"gpu": {}}, ["pools.gpu", "num_gpus is 1", "such as 0.5"]),
        ({"gpu": {"num_gpus": 1.0}}, ["pools.gpu", "num_gpus is 1"]),
        ({"gpu": {"num_gpus": 0.5, "max_replicas": 2, "min_replicas": 0}}, ["min_replicas is 0"]),
        ({"cpu": {"max_replicas": 2, "min_replicas": 0}}, ["pools.cpu", "min_replicas to 1"]),
    ],
)
def test_sleep_is_refused_where_nobody_would_gain_by_it(pools: Any, words: list[str]) -> None:
    """Bug: a model that was configured to sleep, and holds its GPU all the same, or never does."""
    section = {"engine": {"sleep_in_host_memory": True}, "pools": pools}
    with pytest.raises(ConfigError) as error:
        parse_config({"models": {"rare": section, "other": {}}}, {})
    assert all(word in str(error.value) for word in ["rare", *words])


def test_a_pool_that_sleeps_says_so_to_its_replicas() -> None:
    """Bug: an engine that could sleep, and a replica that never lets it."""
    overrides = {
        "scaling": {"idle_seconds": 7.0},
        "router": {"wait_seconds": 9.0},
        "engine": {"sleep_in_host_memory": True},
        "pools": {"gpu": {"num_gpus": 0.25}, "cpu": {}},
    }
    config = parse_config(overrides, {})
    by_name = {
        app._bound_deployment.name: app._bound_deployment.init_args[0].sleep
        for app in engine_deployments(config, NodeCapacity(4, 1))
    }
    assert by_name["engine-gpu"] == SleepSettings(7.0, 9.0, takes_turns=True)
    assert by_name["engine-cpu"] == SleepSettings(7.0, 9.0, takes_turns=False)


def test_one_of_several_models_sleeps_when_its_section_says_so() -> None:
    """Bug: what a model's engines are told leaves out how long it may be idle, so that it sleeps
    after the default; or a change of it restarts the engines of models that never sleep."""
    collected = []
    for idle in (3.0, 4.0):
        sleeping = {"engine": {"sleep_in_host_memory": True}, "pools": {"cpu": {}}}
        models = {
            "rare": {**sleeping, "scaling": {"idle_seconds": idle}},
            "other": {"pools": {"cpu": {}}, "scaling": {"idle_seconds": idle}},
        }
        config = parse_config({"models": models, "router": {"wait_seconds": 8.0}}, {})
        by_name = {
            name: model_application(config.of(name), NodeCapacity(4, 0))["args"]["config"]
            for name in models
        }
        collected.append(by_name)
        (app,) = engine_deployments(parse_config(by_name["rare"], {}), NodeCapacity(4, 0))
        assert app._bound_deployment.init_args[0].sleep == SleepSettings(idle, 8.0)
    assert collected[0]["other"] == collected[1]["other"]
