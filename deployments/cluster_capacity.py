"""check_pools: checks that a cluster's nodes have room for the initial replicas of a configuration.

Without room `manta serve` refuses to start, which `manta doctor` reports beforehand.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray._private.utils import get_num_cpus

from deployments.config.load import MantaConfig, PoolConfig
from deployments.environment import gpus_here
from deployments.scaling.policy import scales
from deployments.serve.model_deployments import NodeCapacity, check_gpus, pools, shares
from engine.errors import ConfigError

_WORDS = {"CPU": "core", "GPU": "GPU"}
_ALL = "models"  # name used for faults that concern several models together


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster: the resources that replicas may reserve on it, and its labels.

    here: whether the node is this machine as the only node, because Ray is not started yet.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    here: bool = False


@dataclass(frozen=True, slots=True)
class _Demand:
    """The resources that the replicas of a pool need.

    pool: configuration key of the pool.
    least: initial number of replicas.
    count: number of replicas that must fit.
    nodes: number of nodes that each replica spans.
    per_node: {resource: amount that a replica reserves on each of its nodes}.
    labels: labels that the nodes must have.
    counted: configuration key that sets the number of replicas.
    """

    pool: str
    least: int
    count: int
    nodes: int
    per_node: Mapping[str, float]
    labels: Mapping[str, str]
    counted: str

    def places(self, node: RayNode, names: Sequence[str]) -> float:
        """Return the number of replicas for which a node has enough of the named resources; inf if
        `names` is empty."""
        if any(node.labels.get(key) != value for key, value in self.labels.items()):
            return 0
        wanted = [(node.resources.get(name, 0), self.per_node[name]) for name in names]
        return min((math.floor(has / amount + 1e-6) for has, amount in wanted), default=math.inf)


def this_machine() -> list[RayNode]:
    """Return this machine as the only node of a cluster, with the cores that Ray would count."""
    cores = get_num_cpus(override_docker_cpu_warning=True)
    return [RayNode({"CPU": float(cores), "GPU": float(gpus_here())}, here=True)]


def cluster_nodes() -> list[RayNode]:
    """Return the live nodes of the Ray cluster that this process has joined."""
    return [
        RayNode(node["Resources"], node.get("Labels") or {})
        for node in cast(Any, ray).nodes()
        if node["Alive"]
    ]


def pool_faults(config: MantaConfig, nodes: Sequence[RayNode]) -> Iterator[tuple[str, ConfigError]]:
    """Yield (name, error) for replicas that can never fit on the nodes.

    The name is the model's, or "models" for several models together. Replicas that might fit cause
    no fault.
    """
    most = {name: max(node.resources.get(name, 0) for node in nodes) for name in _WORDS}
    machine = NodeCapacity(
        most["CPU"], most["GPU"], len(nodes) == 1 and most["CPU"] > 0, grows=False
    )
    parts = config.by_model()
    together: list[_Demand] = []
    for (name, part), share in zip(
        parts.items(), shares(list(parts.values()), machine), strict=True
    ):
        try:
            resolved = pools(part, share)
            check_gpus(part, resolved, share)
            wanted = [_demand(part, kind, pool, resolved) for kind, pool in resolved.items()]
            for demand in wanted:
                _check(demand, nodes)
        except ConfigError as error:
            yield name, error
            return
        together += wanted
    if fault := _fault_of_all(config, together, nodes):
        yield _ALL if config.models else next(iter(parts)), fault


def check_pools(config: MantaConfig, nodes: Sequence[RayNode]) -> None:
    """Check that the replicas fit on the nodes. Raises the first error of `pool_faults`."""
    for name, error in pool_faults(config, nodes):
        before = f"models.{name}: " if config.models and name != _ALL else ""
        raise ConfigError(f"{before}{error.message}", param=error.param)


def _demand(
    config: MantaConfig, kind: str, pool: PoolConfig, resolved: Mapping[str, PoolConfig]
) -> _Demand:
    named = kind in config.pools
    counted = f"pools.{kind}.{'min_replicas' if scales(pool) else 'replicas'}"
    least = pool.min_replicas if scales(pool) else pool.replicas
    # If a model has only one pool, the pool needs at least one replica for the first request.
    engines = [pool for pool in resolved.values() if pool.role == "engine"]
    count = max(least, 1) if engines == [pool] else least
    resources = {"CPU": pool.num_cpus or 0.0, "GPU": pool.num_gpus or 0.0, **pool.resources}
    return _Demand(
        pool=f"pools.{kind}",
        least=least,
        count=count,
        nodes=config.divisions(pool)[-1],
        per_node={name: amount for name, amount in resources.items() if amount > 0},
        # Label operators such as !value and in(a, b) are ignored, as only Ray can match them.
        labels={k: v for k, v in pool.labels.items() if not set(v) & set("!(,")},
        counted=counted if named else "replicas",
    )


def _check(demand: _Demand, nodes: Sequence[RayNode]) -> None:
    """Check that one pool's replicas fit on the nodes if there are no other replicas. Raises
    ConfigError."""
    if not demand.count:
        return
    names = list(demand.per_node)
    room = [demand.places(node, names) for node in nodes]
    hosts = sum(places > 0 for places in room)
    places = sum(room) // demand.nodes if hosts >= demand.nodes else 0
    if places >= demand.count:
        return
    what = f"{demand.pool}: {_replicas(demand.count)}"
    if 0 < hosts < demand.nodes:
        raise ConfigError(
            f"{what} on {demand.nodes} nodes each, and {_where(nodes)} {hosts} with room; lower "
            f"engine.pipeline_nodes, or {_more(nodes)}",
            param="engine.pipeline_nodes",
        )
    lower = [f"lower {demand.counted} to {places:g}"] if places else []
    if demand.labels and not hosts:
        labels = ", ".join(f"{key}={value}" for key, value in demand.labels.items())
        if not any(demand.places(node, []) for node in nodes):
            raise ConfigError(
                f"{what} on nodes with the labels {labels}, which no node has; change "
                f"{demand.pool}.labels, or {_more(nodes)}",
                param=f"{demand.pool}.labels",
            )
    scarce = min(names, key=lambda name: sum(demand.places(node, [name]) for node in nodes))
    amount = demand.per_node[scarce]
    there = sum(node.resources.get(scarce, 0) for node in nodes)
    reserve = "reserves {}" if demand.count == 1 else "reserve {} each"
    text = f"{what} {reserve.format(_amount(amount, scarce))}, and {_where(nodes)} {there:g}"
    text += f", with room for {places:g}" if len(nodes) > 1 else ""
    key = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(scarce, f"resources.{scarce}")
    raise ConfigError(
        f"{text}; {', or '.join([*lower, f'set {demand.pool}.{key} lower'])}, or {_more(nodes)}",
        param=demand.counted,
    )


def _fault_of_all(
    config: MantaConfig, demands: Sequence[_Demand], nodes: Sequence[RayNode]
) -> ConfigError | None:
    """Return the error for pools that fit separately but not together; None if all fit."""
    for name in dict.fromkeys(name for demand in demands for name in demand.per_node):
        routers = config.router.processes * config.router.num_cpus if name == "CPU" else 0.0
        engines = sum(
            other.least * other.nodes * other.per_node.get(name, 0.0) for other in demands
        )
        there = sum(node.resources.get(name, 0.0) for node in nodes)
        if engines + routers <= there + 1e-6:
            continue
        key = "models" if config.models else "pools"
        count = sum(other.least for other in demands)
        text = (
            f"{key}: {_replicas(count)} reserve{'s' * (count == 1)} {_amount(engines, name)} in all"
        )
        text += f" and the routers {_amount(routers, name)}" if routers else ""
        way_out = "have fewer replicas, or lower what each reserves (pools.cpu.num_cpus, ...)"
        return ConfigError(
            f"{text}, and {_where(nodes)} {there:g}; {way_out}, or {_more(nodes)}",
            param=key,
        )
    return None


def _replicas(count: int) -> str:
    return f"{count} replica{'s' * (count != 1)}"


def _amount(amount: float, name: str) -> str:
    word = _WORDS.get(name)
    return f"{amount:g} {name if word is None else word + 's' * (amount != 1)}"


def _where(nodes: Sequence[RayNode]) -> str:
    if len(nodes) == 1:
        return "this machine has" if nodes[0].here else "the only node has"
    return f"the cluster's {len(nodes)} nodes have"


def _more(nodes: Sequence[RayNode]) -> str:
    if nodes and nodes[0].here:
        return "serve on a cluster that has room (--address)"
    return "give the cluster such a node"
