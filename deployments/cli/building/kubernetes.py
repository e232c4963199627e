"""`manta build --kubernetes`: builds a RayService manifest (KubeRay) for a configuration."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from deployments.app import NodeCapacity, cluster_environment, pools, serve_config
from deployments.config.load import MantaConfig
from deployments.config.pools import PoolConfig
from deployments.haproxy.environment import edge_folder
from deployments.haproxy.settings import VARIABLE, EdgeSettings
from deployments.scaling import policy as autoscaling
from engine.errors import ConfigError

IMAGE = "REGISTRY/manta:0.1.0"
MEMORY = {"head": "16Gi", "gpu": "32Gi", "cpu": "48Gi"}  # memory of a pod, by kind of group
HEAD_CPUS = 4
CACHE = "/cache"  # folder for models, kernels and the hub client's files, as in deploy/Dockerfile
_EDGE = "/usr/local/bin/manta-haproxy"  # haproxy launcher, installed by deploy/Dockerfile
_EDGE_PATH = "RAY_SERVE_HAPROXY_BINARY_PATH"
# Seconds from the end of a drain to the end of the preStop hook, and from there to the pod's end.
_MARGIN = 20
# Maximum letters of a model's name in a group's name, because pod names have at most 63 letters.
_NAME = 40
_WRITTEN = {"tmp": "/tmp", "home": "/home/ray", "cache": CACHE}
# The Secret with the token for gated and private hub models. It is optional: pods also start
# without it.
_HUB_TOKEN = {
    "name": "HF_TOKEN",
    "valueFrom": {"secretKeyRef": {"name": "manta-hub", "key": "token", "optional": True}},
}


def rayservice(
    config: MantaConfig,
    image: str = IMAGE,
    memory: Mapping[str, str] | None = None,
    cache_claim: str = "",
) -> dict[str, Any]:
    """Return the RayService manifest of a configuration.

    A pod is one replica, or one node of a multi-node replica. Each pool is a worker group with the
    pool's name, or MODEL-POOL if there are several models.

    image: container image of all pods.
    memory: memory of a pod by group, or by "head", "gpu" and "cpu", in Kubernetes' units.
    cache_claim: PersistentVolumeClaim that all pods share as their cache; "": each pod has an
        emptyDir.

    Raises ConfigError.
    """
    if cache_claim and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", cache_claim):
        raise ConfigError(
            f"--cache-claim {cache_claim}: it must be the name of a PersistentVolumeClaim: "
            "lower-case letters, digits, '-' and '.'",
            param="--cache-claim",
        )
    config = _labelled(config)
    groups = {
        _group_name(config, model, kind): (_kind(kind, pool), pool, part.divisions(pool)[-1])
        for model, part in config.by_model().items()
        for kind, pool in pools(part, NodeCapacity.here()).items()
    }
    memory = _memory(groups, memory or {})
    # The image has haproxy, whether or not this machine has it.
    http = config.http.model_copy(update={"proxy": "haproxy"})
    env: list[dict[str, Any]] = [
        {"name": name, "value": value}
        for name, value in _environment(config.model_copy(update={"http": http})).items()
    ]
    env.append(_HUB_TOKEN)
    head = _pod(image, env, {"cpu": str(HEAD_CPUS)}, memory["head"], cache_claim)
    ports = {"gcs-server": 6379, "dashboard": 8265, "serve": config.http.port}
    head["spec"]["containers"][0]["ports"] = [
        {"name": name, "containerPort": port} for name, port in ports.items()
    ]
    drain = math.ceil(config.limits.drain_seconds)
    workers = []
    for name, (_, pool, nodes) in groups.items():
        template = _pod(image, env, _resources(pool), memory[name], cache_claim)
        workers.append(_group(name, pool, nodes, template, drain))
    schema = serve_config(config)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": config.app_name},
        "spec": {
            "serveConfigV2": schema,
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300},
                "authOptions": {"mode": "token"},
                "gcsFaultToleranceOptions": {
                    "redisAddress": "redis:6379",
                    "redisPassword": {
                        "valueFrom": {"secretKeyRef": {"name": "manta-redis", "key": "password"}}
                    },
                },
                "headGroupSpec": {
                    "labels": {"pool": "head"},
                    # The operator must be able to reach the dashboard from outside the pod; other
                    # clients lack the token.
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": head,
                },
                "workerGroupSpecs": workers,
            },
        },
    }


def _labelled(config: MantaConfig) -> MantaConfig:
    """Return the configuration with node labels added to the pools of several models, so that each
    pool gets separate pods.

    Raises ConfigError if the size of a pod is unknown, or if a GPU pool sleeps.
    """
    for model, part in config.by_model().items():
        before = f"models.{model}." if config.models else ""
        if config.models and not part.pools:
            raise ConfigError(
                f"{before}pools must be there: a pool is a group of pods, and what a pod of "
                f"{model} has is not known here",
                param=f"{before}pools",
            )
        for name, pool in part.engine_pools.items():
            if part.kind(name, pool) == "cpu" and pool.num_cpus is None:
                raise ConfigError(
                    f"{before}pools.{name}.num_cpus must be there: how many cores a pod has is not "
                    "known here",
                    param=f"{before}pools.{name}.num_cpus",
                )
        for kind, pool in part.pools.items():
            if pool.num_gpus and part.sleeps(pool):
                raise ConfigError(
                    f"{before}pools.{kind}: engine.sleep_in_host_memory lets models take turns on "
                    "a GPU, and here each pool has pods with GPUs of their own. Leave it out, or "
                    "set min_replicas to 0",
                    param=f"{before}pools.{kind}.engine.sleep_in_host_memory",
                )
    models = {}
    for model, own in config.models.items():
        labelled = {
            kind: pool.model_copy(
                update={"labels": pool.labels or {"pool": _group_name(config, model, kind)}}
            )
            for kind, pool in own.pools.items()
        }
        models[model] = own.model_copy(update={"pools": labelled})
    return config.model_copy(update={"models": models}) if models else config


def _group_name(config: MantaConfig, model: str, pool: str) -> str:
    """Return the name of a pool's worker group, with characters that are valid in pod names.

    Different models never get the same name.
    """
    if not config.models:
        return pool
    plain = re.sub(r"[^a-z0-9]+", "-", model.lower())[:_NAME].strip("-")
    if plain != model:
        plain += "-" + hashlib.blake2b(model.encode(), digest_size=3).hexdigest()
    return f"{plain}-{pool}" if plain[0].isalpha() else f"m{plain}-{pool}"


def _memory(
    groups: Mapping[str, tuple[str, PoolConfig, int]], amounts: Mapping[str, str]
) -> dict[str, str]:
    """Return {group: memory of a pod in Kubernetes' units}, including the head group.

    groups: {group: (kind of pool, pool, number of nodes of a replica)}.
    amounts: amounts from the command line, by group or kind.

    Raises ConfigError for an unknown group.
    """
    for name in amounts:
        if name not in MEMORY and name not in groups:
            known = ", ".join(dict.fromkeys((*MEMORY, *groups)))
            raise ConfigError(
                f"--memory {name}={amounts[name]}: there is no group of this name; groups: {known}",
                param="--memory",
            )
    kinds = {**MEMORY, **amounts}
    of_groups = {name: amounts.get(name, kinds[kind]) for name, (kind, _, _) in groups.items()}
    return {**of_groups, "head": kinds["head"]}


def _environment(config: MantaConfig) -> dict[str, str]:
    """Return the environment variables of a pod.

    Variables with a folder or port of this machine are left out, so that pods use the defaults.
    """
    variables = {}
    folder = str(edge_folder())
    try:
        wanted = cluster_environment(config, folder)
    finally:
        shutil.rmtree(folder)
    for name, value in wanted.items():
        if name == VARIABLE:
            edge = msgspec.structs.replace(EdgeSettings.decode(value), host="", binary="")
            if edge != EdgeSettings(prefix="/"):
                variables[name] = edge.encode()
        elif not value.startswith(folder) and not name.endswith("_PORT"):
            variables[name] = value
    return {**variables, _EDGE_PATH: _EDGE}


def _kind(name: str, pool: PoolConfig) -> str:
    """Return the kind of a pool, "gpu" or "cpu", which determines the default memory of its
    pods."""
    if pool.role == "engine":
        return name
    return "gpu" if pool.num_gpus else "cpu"


def _resources(pool: PoolConfig) -> dict[str, str]:
    """Return a pod's resource requests."""
    # `model_deployments.pools` has set num_cpus.
    assert pool.num_cpus is not None
    cpus = math.ceil(pool.num_cpus) + 1  # one more core for routers, the proxy and Ray's processes
    resources = {"cpu": str(cpus)}
    if pool.num_gpus:
        resources["nvidia.com/gpu"] = str(math.ceil(pool.num_gpus))
    return resources


def _group(
    name: str,
    pool: PoolConfig,
    nodes: int,
    template: dict[str, Any],
    drain: int,
) -> dict[str, Any]:
    """Return the specification of a worker group, whose pods are drained before they end.

    nodes: number of pods of one replica.
    template: pod template, to which the drain hook is added.
    drain: seconds for running requests to end or move.
    """
    if autoscaling.scales(pool):
        limits = autoscaling.limits(pool)
        least, most = limits["min_replicas"], limits["max_replicas"]
    else:
        least = most = pool.replicas
    hook = (
        "ray drain-node --reason=DRAIN_NODE_REASON_PREEMPTION --reason-message=pod "
        f"--deadline-remaining-seconds={drain + _MARGIN}; sleep {drain + _MARGIN}"
    )
    (container,) = template["spec"]["containers"]
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
    # A spot node ends with SIGTERM; then requests have this many seconds to end or move.
    template["spec"]["terminationGracePeriodSeconds"] = drain + 2 * _MARGIN
    params: dict[str, str] = {}
    if pool.resources:  # JSON within a JSON string, as KubeRay puts the value into a shell command
        params["resources"] = json.dumps(json.dumps(dict(pool.resources)))
    return {
        "groupName": name,
        "labels": dict(pool.labels) or {"pool": name},
        "replicas": nodes * least,
        "minReplicas": nodes * least,
        "maxReplicas": nodes * max(most, 1),
        "rayStartParams": params,
        "template": template,
    }


def _pod(
    image: str,
    env: list[dict[str, Any]],
    resources: dict[str, str],
    memory: str,
    cache_claim: str,
) -> dict[str, Any]:
    """Return a pod template that runs as a non-root user with a read-only root file system."""
    limits = {name: amount for name, amount in resources.items() if name != "cpu"}
    volumes: dict[str, dict[str, Any]] = {name: {"emptyDir": {}} for name in _WRITTEN}
    if cache_claim:
        volumes["cache"] = {"persistentVolumeClaim": {"claimName": cache_claim}}
    container = {
        "name": "ray",
        "image": image,
        "env": [dict(variable) for variable in env],
        "resources": {
            "requests": {**resources, "memory": memory},
            "limits": {**limits, "memory": memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in _WRITTEN.items()],
    }
    return {
        "spec": {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        }
    }


def memory_of(options: list[str]) -> dict[str, str]:
    """Return the memory amounts of options such as `cpu=48Gi`, by group. Raises ConfigError."""
    amounts = {}
    for option in options:
        name, equals, amount = option.partition("=")
        if not name or not equals or not amount:
            raise ConfigError(
                f"--memory {option}: it must be GROUP=AMOUNT, such as cpu=48Gi",
                param="--memory",
            )
        amounts[name] = amount
    return amounts
