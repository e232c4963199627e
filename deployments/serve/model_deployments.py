"""The Serve deployments of one model's engines, and the settings that engines and routers share."""

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from deployments import model_applications
from deployments.adapters.registry import AdapterSettings
from deployments.checkpoints.resolve import keeps_blocks, resolve_model, with_drafter
from deployments.cluster_store import store
from deployments.config.load import MantaConfig, PoolConfig
from deployments.config.pools import on_cpu
from deployments.encoder.deployment import EncoderReplica
from deployments.environment import gpus_here
from deployments.replica.deployment import EngineReplica, ReplicaSettings
from deployments.replica.sleep import SleepSettings
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.models.model_settings import DispatchLimits, ServedModel
from deployments.scaling import policy as autoscaling
from deployments.transport.channel import ChannelLimits
from engine.config.engine_config import EngineConfig, ranks_said
from engine.errors import ConfigError

_DISCOVERY = "deployments.router.serve.request_router:DiscoveryRouter"
_ENCODER_ROUTER = "deployments.encoder.request_router:EncoderRouter"
# Seconds. Channels report a dead engine at once, but only this check makes Serve replace it.
_HEALTH_PERIOD = 2.0
_HEALTH_TIMEOUT = 10.0
_IMAGES_AT_ENCODER = 16  # maximum number of images at an encoder, and waiting in a replica
DRAIN_POLL = 0.2  # seconds between Serve's polls of an ending replica; Serve's default is 2
# Percentage of new replicas, at least one, that start before old ones stop; Serve updates 20 % at a
# time.
SURGE = 20
# Seconds from the end of the drain until Serve kills a replica, in which the engine stops.
KILL_MARGIN = 10.0

# Key of the autoscaler's JSON report in Ray's store, which the monitor rewrites every few seconds.
_MONITOR = "__autoscaling_status"

logger = logging.getLogger("manta.app")

deployment = cast(Callable[[Any], Deployment], serve.deployment)

Prepare = Callable[[ReplicaSettings], EngineConfig]


def channel_limits(config: MantaConfig) -> ChannelLimits:
    """Return the limits of channels between routers and replicas.

    max_backlog, in bytes, leaves room for all images that a router may hold, because they may all
    wait to be sent to one replica.
    """
    return ChannelLimits(
        heartbeat=config.router.heartbeat_seconds,
        timeout=config.router.silence_seconds,
        max_backlog=ChannelLimits().max_backlog + config.images.memory_bytes,
    )


def dispatch_limits(config: MantaConfig) -> DispatchLimits:
    """Return the DispatchLimits of a router for the model."""
    return DispatchLimits(
        wait_seconds=config.router.wait_seconds,
        in_flight=config.limits.in_flight,
        waiting=config.limits.waiting,
        admission=AdmissionLimits(
            queue_seconds=config.queue_seconds(),
            queue_tokens=config.limits.queue_tokens,
            age_seconds=config.limits.age_seconds,
        ),
        losses=config.router.losses,
        channel=channel_limits(config),
    )


def logs(config: MantaConfig) -> dict[str, Any]:
    """Return the logging options of a Serve deployment: JSON logs, or none for text logs.

    Without options, Serve's config file may set them.
    """
    return {"logging_config": {"encoding": "JSON"}} if config.log.format == "json" else {}


def engine_deployments(
    config: MantaConfig, machine: "NodeCapacity", prepare: Prepare | None = None
) -> list[Application]:
    """Return a Serve deployment for each engine pool of a model.

    The deployments of encoder pools are bound to them as arguments.

    prepare: returns the EngineConfig on a replica's machine; None: `prepare_engine`.
    """
    engines = []
    prepare = prepare or prepare_engine
    resolved = pools(config, machine)
    encoders = {name: pool for name, pool in resolved.items() if pool.role == "encoder"}
    asked = [_encoders(config, name, pool, prepare) for name, pool in encoders.items()]
    for name, pool in resolved.items():
        if pool.role == "encoder":
            continue
        settings = ReplicaSettings(
            engine=config.engine_options(pool),
            stall_seconds=config.limits.stall_seconds,
            drain_seconds=config.limits.drain_seconds,
            loopback=config.http.loopback,
            channel=channel_limits(config),
            sleep=_sleep_settings(config, pool),
            encode_seconds=max(
                (encoder.encode_seconds for encoder in encoders.values()), default=0.0
            ),
            role=pool.role,
        )
        engine = deployment(EngineReplica).options(
            name=deployment_name(name),
            **autoscaling.replica_options(name, pool, config),
            **_update_options(pool),
            **_placement_options(pool, config.divisions(pool)[-1]),
            max_ongoing_requests=100,
            health_check_period_s=_HEALTH_PERIOD,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            graceful_shutdown_wait_loop_s=DRAIN_POLL,
            graceful_shutdown_timeout_s=config.limits.drain_seconds + KILL_MARGIN,
            request_router_config=RequestRouterConfig(request_router_class=cast(Any, _DISCOVERY)),
            **logs(config),
        )
        engines.append(engine.bind(settings, prepare, *asked))
    return engines


def _encoders(config: MantaConfig, name: str, pool: PoolConfig, prepare: Prepare) -> Application:
    """Return the Serve deployment of an encoder pool."""
    scaling = (
        {"autoscaling_config": autoscaling.encoder_limits(pool, config.scaling.calm_seconds)}
        if autoscaling.scales(pool)
        else {"num_replicas": pool.replicas}
    )
    encoders = deployment(EncoderReplica).options(
        name=f"{autoscaling.ENCODER_PREFIX}{name}",
        **scaling,
        **_update_options(pool),
        **_placement_options(pool, 1),
        max_ongoing_requests=_IMAGES_AT_ENCODER,
        max_queued_requests=_IMAGES_AT_ENCODER,
        health_check_period_s=_HEALTH_PERIOD,
        health_check_timeout_s=_HEALTH_TIMEOUT,
        graceful_shutdown_wait_loop_s=DRAIN_POLL,
        graceful_shutdown_timeout_s=pool.encode_seconds,
        request_router_config=RequestRouterConfig(request_router_class=cast(Any, _ENCODER_ROUTER)),
        **logs(config),
    )
    settings = ReplicaSettings(engine=config.encoder_options(pool))
    return encoders.bind(partial(prepare, settings), config.limits.stall_seconds)


def _sleep_settings(config: MantaConfig, pool: PoolConfig) -> SleepSettings | None:
    if not config.sleeps(pool):
        return None
    return SleepSettings(
        idle_seconds=config.scaling.idle_seconds,
        wait_seconds=config.router.wait_seconds,
        takes_turns=bool(pool.num_gpus),
    )


def prepare_engine(settings: ReplicaSettings) -> EngineConfig:
    """Return the EngineConfig of a replica on this machine; download the model if needed."""
    options = dict(settings.engine)
    dummy = options.get("load_format") == "dummy"
    folder = resolve_model(
        options["model"],
        options.pop("revision"),
        weights=not dummy,
        blocks=keeps_blocks(options),
    )
    options["model"] = str(folder)
    options = with_drafter(options, weights=not dummy)
    if "graph_sizes" in options:
        options["graph_sizes"] = tuple(options["graph_sizes"])
    return EngineConfig(**options)


# -- for the routers


def served_model(config: MantaConfig, gpus: float, app: str = "") -> ServedModel:
    """Return the ServedModel of a one-model configuration.

    gpus: number of GPUs of a machine, see `pools_on`.
    app: Serve application of the engines; "": the routers' own application.
    """
    return ServedModel(
        name=config.name(),
        aliases=tuple(config.aliases),
        # The router uses the same converted files of the model as the pools.
        find_model=partial(
            resolve_model,
            config.model,
            config.revision,
            weights=False,
            blocks=max(config.kept_blocks(gpus)),
        ),
        dispatch=dispatch_limits(config),
        adapters=AdapterSettings(
            model=config.name(),
            paths=config.adapters.paths,
            roots=tuple(config.adapters.roots),
            watch=config.adapters.watch,
        ),
        seed=config.engine.get("seed"),
        generation_config=config.engine.get("generation_config", "auto"),
        chat_template=config.chat_template,
        images=all(
            config.engine_options(pool).get("images") != "off"
            for pool in config.pools_on(gpus).values()
        ),
        start_seconds=wake_seconds(config),
        app=app,
        pools=tuple(map(deployment_name, config.engine_pools)),
    )


def wake_seconds(config: MantaConfig) -> float | None:
    """Return the assumed seconds of a replica's start; None if some pool always has a replica."""
    pools = config.engine_pools.values()
    if not pools or any(not autoscaling.scales(pool) or pool.min_replicas for pool in pools):
        return None
    return max(pool.start_seconds for pool in pools)


def served_models(app: str) -> dict[str, ServedModel]:
    """Return the models that the endpoint `app` serves now, by name. Blocks, and needs a connection
    to Ray."""
    entries = model_applications.entries(app, model_applications.applications())
    return {name: served_model(entry.config, 0, entry.app) for name, entry in entries.items()}


# -- pools


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The CPU cores and GPUs of the largest node, which a replica can get at most.

    alone: whether this is the only node, as far as known.
    grows: whether an autoscaler may start further nodes; None: unknown, as there is no cluster yet.
    """

    cores: float
    gpus: float
    alone: bool = False
    grows: bool | None = None

    @classmethod
    def here(cls) -> "NodeCapacity":
        """Return the capacity of the cluster's nodes if Ray is started, else of this machine."""
        nodes = (
            [node["Resources"] for node in cast(Any, ray).nodes() if node["Alive"]]
            if ray.is_initialized()
            else []
        )
        if nodes:
            cores = max(node.get("CPU", 0) for node in nodes)
            # A node without cores is the head of a cluster in which other nodes start on demand.
            alone = len(nodes) == 1 and cores > 0
            return cls(cores, max(node.get("GPU", 0) for node in nodes), alone, _grows())
        return cls(len(os.sched_getaffinity(0)), gpus_here())


def _grows() -> bool:
    """Return whether an autoscaler may start further nodes, according to the report of Ray's
    monitor.

    A monitor without an autoscaler lists nodes by their ids. In its first seconds it reports
    nothing, and the result is true.
    """
    try:
        report = json.loads(store("get", _MONITOR) or b"{}")
    except (OSError, ValueError):
        return True
    ids = [f"node_{node['NodeID']}" for node in cast(Any, ray).nodes()]
    return not _only_ids(report, ids)


def _only_ids(report: dict[str, Any], ids: Collection[str]) -> bool:
    """Return whether the monitor's report lists nodes only by ids, not by an autoscaler's node
    types.

    ids: "node_" and the id of each node.
    """
    types = (report.get("autoscaler_report") or {}).get("active_nodes") or {}
    return bool(types) and set(types) <= set(ids)


def deployment_name(pool: str) -> str:
    """Return the name of an engine pool's Serve deployment."""
    return f"engine-{pool}"


def pools(config: MantaConfig, machine: NodeCapacity) -> dict[str, PoolConfig]:
    """Return the pools, including encoders, with values filled in for unset cores, GPUs and
    threads.

    A CPU replica uses one thread per core, because with more threads replicas would wait for each
    other. An encoder has one core unless configured otherwise. A replica with several ranks is one
    actor with as many GPUs, or one actor on each of its nodes.

    Raises ConfigError if a replica's share of the machine has fewer cores than ranks.
    """
    resolved: dict[str, PoolConfig] = {}
    for name, pool in config.encoders.items():
        own = _encoder_cores(pool)
        engine = {"num_threads": max(1, int(own)), **pool.engine}
        resolved[name] = pool.model_copy(
            update={"num_cpus": own, "num_gpus": pool.num_gpus or 0.0, "engine": engine}
        )
    for name, pool in config.pools_on(machine.gpus).items():
        engine = dict(pool.engine)
        cores, kind = pool.num_cpus, config.kind(name, pool)
        if kind == "cpu":
            if cores is None:
                count = _open_replicas(config, machine)
                cores = float(max(1, (machine.cores - _encoding(config)) // count))
                _check_share(config, pool, machine, cores)
            if not {**config.engine, **engine}.get("num_threads"):
                engine["num_threads"] = max(1, int(cores) // config.node_ranks(pool))
        num_gpus = pool.num_gpus
        if num_gpus is None:
            num_gpus = float(config.node_ranks(pool)) if kind == "gpu" else 0.0
        resolved[name] = pool.model_copy(
            update={
                "num_cpus": float(config.node_ranks(pool)) if cores is None else cores,
                "num_gpus": num_gpus,
                "engine": engine,
            }
        )
    return resolved


def check_gpus(
    config: MantaConfig, resolved: Mapping[str, PoolConfig], machine: NodeCapacity
) -> None:
    """Check that some node has the GPUs of a replica, or that such a node may be started; otherwise
    the replica would wait for ever.

    A GPU pool with minimum 0 is accepted if a CPU pool can answer requests. If an autoscaler may
    start a node with the GPUs, only a warning is logged.

    resolved: result of `pools`.

    Raises ConfigError.
    """
    for name, encoders in config.encoders.items():
        if machine.gpus < (encoders.num_gpus or 0) and machine.grows is False:
            raise ConfigError(
                f"pools.{name}.num_gpus is {encoders.num_gpus:g}, the largest node has "
                f"{machine.gpus:g}, and nothing starts other nodes; leave it out, so that encoders "
                "run on the CPU",
                param=f"pools.{name}.num_gpus",
            )
    engines = {name: pool for name, pool in resolved.items() if pool.role != "encoder"}
    for name, pool in engines.items():
        if config.kind(name, pool) == "gpu":
            _check_gpu_pool(config, name, engines, machine)


def _check_gpu_pool(
    config: MantaConfig, name: str, engines: Mapping[str, PoolConfig], machine: NodeCapacity
) -> None:
    """Check the nodes for one engine pool on GPUs; see `check_gpus`."""
    pool = engines[name]
    if machine.gpus >= (pool.num_gpus or 0):
        return
    if "cpu" in engines and autoscaling.scales(pool) and not pool.min_replicas:
        return
    assert pool.num_gpus is not None
    needs = f"a replica needs {pool.num_gpus:g} GPU{'s' * (pool.num_gpus != 1)} of one node"
    there = f"the largest has {machine.gpus:g}" if machine.gpus else "no node has one"
    subject = key = f"pools.{name}"
    way_out = on_cpu(name)
    if name not in config.pools:
        key = "engine.device"
        subject, way_out = f"{key}: {config.engine.get('device', 'auto')}", f"set {key}: cpu"
    if machine.grows:
        logger.warning("%s: %s, and %s: it waits until one is started", subject, needs, there)
    if machine.grows is not False:
        return
    if machine.gpus:
        _, pipeline, _ = config.divisions(pool)
        key = "engine.pipeline_parallel" if pipeline > 1 else "engine.tensor_parallel"
        key = f"pools.{name}.num_gpus" if config.node_ranks(pool) == 1 else key
        way_out = f"lower {key}"
    raise ConfigError(
        f"{subject}: {needs}, {there}, and nothing starts other nodes; {way_out}, or give the "
        "cluster such a node",
        param=key,
    )


def _check_share(
    config: MantaConfig, pool: PoolConfig, machine: NodeCapacity, cores: float
) -> None:
    """Check that a CPU replica's share of the machine has a core per rank. Raises ConfigError.

    Called for pools without a configured num_cpus. cores: the replica's share of the cores.
    """
    ranks = config.node_ranks(pool)
    if ranks == 1 or cores >= ranks:
        return
    key = "pools.cpu.replicas" if "cpu" in config.pools else "replicas"
    fewer = "" if pool.replicas <= 1 else f", or {key}"
    # Nodes that have not started yet may have more cores.
    way_out = f"lower it{fewer}" if machine.alone else f"lower it{fewer}, or set pools.cpu.num_cpus"
    raise ConfigError(
        f"{ranks_said(*config.divisions(pool))}: so many ranks on the CPU need as many cores, and "
        f"a replica's share of this machine is {cores:g}; {way_out}",
        param="pools.cpu",
    )


def shares(models: Sequence[MantaConfig], machine: NodeCapacity) -> list[NodeCapacity]:
    """Return the capacity that each of several models may use, if the machine is the only node.

    CPU replicas without a configured num_cpus share equally the cores that other pools leave. If
    each reserved all cores, the second model would never start.
    """
    if not machine.alone:
        return [machine] * len(models)
    open_replicas = [_open_replicas(model, machine) for model in models]
    free = machine.cores - sum(_cores_taken(model, machine) for model in models)
    share = free // max(1, sum(open_replicas))
    return [replace(machine, cores=share * count) if count else machine for count in open_replicas]


def beside(
    others: Iterable[MantaConfig], config: MantaConfig, machine: NodeCapacity
) -> NodeCapacity:
    """Return the capacity for a model that is added beside others: the cores that the others leave.

    others: configurations of the other models.
    """
    if not machine.alone or not _open_replicas(config, machine):
        return machine
    used_cores = sum(_cores_taken(model, machine) for model in (*others, config))
    return replace(machine, cores=machine.cores - used_cores)


def _open_replicas(config: MantaConfig, machine: NodeCapacity) -> int:
    """Return the number of a model's CPU replicas in pools without a configured num_cpus."""
    return sum(
        max(1, pool.replicas)
        for name, pool in config.pools_on(machine.gpus).items()
        if config.kind(name, pool) == "cpu" and pool.num_cpus is None
    )


def _cores_taken(config: MantaConfig, machine: NodeCapacity) -> float:
    """Return the number of cores reserved by those replicas of a model whose number of cores is
    known.

    Encoders' cores are not included if a CPU pool has no configured num_cpus, because the share of
    that pool includes them.
    """
    return (0.0 if _open_replicas(config, machine) else _encoding(config)) + sum(
        pool.replicas * (config.node_ranks(pool) if pool.num_cpus is None else pool.num_cpus)
        for name, pool in config.pools_on(machine.gpus).items()
        if config.kind(name, pool) != "cpu" or pool.num_cpus is not None
    )


def _encoder_cores(pool: PoolConfig) -> float:
    return 1.0 if pool.num_cpus is None else pool.num_cpus


def _encoding(config: MantaConfig) -> float:
    """Return the number of cores of all encoders of a model."""
    return sum(pool.replicas * _encoder_cores(pool) for pool in config.encoders.values())


def _update_options(pool: PoolConfig) -> dict[str, Any]:
    return {"max_surge_percent": SURGE} if pool.start_first else {}


def _placement_options(pool: PoolConfig, nodes: int) -> dict[str, Any]:
    """Return the Serve deployment options that set the resources reserved for a replica.

    For several nodes they are a placement group with one bundle per node, all of which are reserved
    together. The replica's actor is in the first bundle, and starts the actors in the others.
    """
    actor: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.resources:
        actor["resources"] = dict(pool.resources)
    if nodes == 1:
        if pool.labels:
            actor["label_selector"] = dict(pool.labels)
        return {"ray_actor_options": actor}
    bundle = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "placement_group_bundles": [{name: n for name, n in bundle.items() if n}] * nodes,
        "placement_group_strategy": "STRICT_SPREAD",
    }
    if pool.labels:
        options["placement_group_bundle_label_selector"] = [dict(pool.labels)]
    return options
