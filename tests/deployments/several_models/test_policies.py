"""The policies that Serve is told of, made as Serve makes them."""

from importlib import import_module
from typing import Any

from deployments.app import serve_config
from deployments.config.load import parse_config
from deployments.scaling.policy import replica_options
from deployments.serve.model_deployments import NodeCapacity, pools


def made(function: str, kwargs: dict[str, Any]) -> object:
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(**kwargs)


def test_serve_can_make_every_policy_that_it_is_told_of() -> None:
    """An argument that the policy does not know: Serve logs a TypeError and scales by its own rule,
    which knows neither calm nor idle seconds."""
    scaled = {"pools": {"cpu": {"num_cpus": 1, "min_replicas": 0, "max_replicas": 2}}}
    several = parse_config({"models": {"a": {"model": "org/a", **scaled}}}, {})
    one = parse_config({"model": "org/a", **scaled}, {})
    found = []
    for config in (several, one):
        for application in serve_config(config)["applications"]:
            if told := application.get("autoscaling_policy"):
                found.append(made(told["policy_function"], told["policy_kwargs"]))
    assert len(found) == 2
    for name, pool in pools(one, NodeCapacity(2, 0)).items():
        told = replica_options(name, pool, one)["autoscaling_config"]["policy"]
        assert made(told["policy_function"], told["policy_kwargs"])
