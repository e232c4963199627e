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
    outcome = parse_config({"model": "org/a", **scaled}, {})
    collected = []
    for config in (several, outcome):
        for application in serve_config(config)["applications"]:
            if policy := application.get("autoscaling_policy"):
                collected.append(made(policy["policy_function"], policy["policy_kwargs"]))
    assert len(collected) == 2
    for name, pool in pools(outcome, NodeCapacity(2, 0)).items():
        policy = replica_options(name, pool, outcome)["autoscaling_config"]["policy"]
        assert made(policy["policy_function"], policy["policy_kwargs"])
