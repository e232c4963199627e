"""build, serve_config, deploy: create and deploy the Serve applications; only this module connects
their parts.

From a shell:    serve run deployments.app:build config=manta.yaml
As Serve's file: MANTA_CONFIG=manta.yaml serve build deployments.app:app
From Python:     serve.run(build("manta.yaml"), name="manta")
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from deployments import model_applications
from deployments.cluster_store import forget_app
from deployments.config.adapters import AdaptersConfig
from deployments.config.keys import read_api_keys
from deployments.config.load import (
    HttpConfig,
    LimitsConfig,
    MantaConfig,
    PoolConfig,
    RouterConfig,
    check_model_files,
    default_config,
    load_config,
    parse_config,
    parse_part,
)
from deployments.config.models import ScalingConfig
from deployments.router.deployment import BatchRouter, Router, RouterSettings
from deployments.router.keys.key_files import KeySettings
from deployments.router.models.model_loader import ChangeModels
from deployments.router.models.model_settings import ServedModel
from deployments.router.rpc.settings import GrpcSettings
from deployments.scaling import policy as autoscaling
from deployments.scaling.policy import BATCH_ROUTER, ROUTER
from deployments.serve import coexistence, model_deployments
from deployments.serve.model_deployments import (
    NodeCapacity,
    Prepare,
    deployment,
    deployment_name,
    engine_deployments,
    pools,
    prepare_engine,
    served_model,
    served_models,
)
from deployments.serve.proxy import behind_haproxy, cluster_environment, proxy
from engine.errors import ConfigError, InvalidRequest

__all__ = [
    "NodeCapacity",
    "as_config",
    "assemble",
    "build",
    "build_engines",
    "build_routers",
    "cluster_environment",
    "deploy",
    "drop_model",
    "model_application",
    "pools",
    "prepare_engine",
    "proxy",
    "put_model",
    "serve_config",
]

logger = logging.getLogger("manta.app")


def build(config: str | dict[str, Any] | MantaConfig) -> Application:
    """Return the Serve application of a configuration.

    config: a file's path, a mapping of keys, or Serve's arguments {"config": path or mapping}.

    Raises ConfigError before anything is started.
    """
    return assemble(as_config(config))


def __getattr__(name: str) -> Application:
    """Return the application of the configuration file in MANTA_CONFIG as the attribute `app`, for
    tools that pass no arguments."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build(default_config())


def as_config(config: str | Path | Mapping[str, Any] | MantaConfig) -> MantaConfig:
    """Return the MantaConfig for a configuration in any form that `build` accepts.

    Raises ConfigError.
    """
    if isinstance(config, MantaConfig):
        return config
    if isinstance(config, Mapping):
        if set(config) == {"config"}:
            return as_config(config["config"])
        return parse_config(config)
    return load_config(config)


def assemble(config: MantaConfig, prepare: Prepare | None = None) -> Application:
    """Return the application of a one-model configuration.

    prepare: returns a replica's EngineConfig on the replica's machine; None: `prepare_engine`.

    Raises ConfigError for several models, as each of them is a separate application.
    """
    if config.models:
        raise ConfigError(
            "models: each is an application of its own, which one application cannot hold; use "
            "`manta serve`, or `manta build` and `serve deploy`",
            param="models",
        )
    machine = NodeCapacity.here()
    model = served_model(config, machine.gpus)
    return _routers(config, (model,), *engine_deployments(config, machine, prepare))


def build_routers(config: Any) -> Application:
    """Return the application of the routers of several models.

    Each model's engines are an application of their own.

    config: the application's arguments from Serve.
    """
    return _routers(_of_arguments(config), None)


def build_engines(config: Any) -> Application:
    """Return the application of one model's engines, for an endpoint of several models.

    config: the application's arguments from Serve.
    """
    engines = engine_deployments(_of_arguments(config), NodeCapacity.here())
    return deployment(ModelApplication).options(name=model_applications.MODEL).bind(*engines)


class ModelApplication:
    """The root deployment of a model's Serve application, to which the model's pools are bound.

    The deployment never runs, because `model_application` sets its number of replicas to 0.
    """

    def __init__(self, *engines: Any) -> None: ...

    def reconfigure(self, user_config: Any) -> None:
        """Do nothing. Serve requires this method in deployments with a user_config."""


def _of_arguments(config: Any) -> MantaConfig:
    """Return the configuration in an application's arguments from Serve.

    The consistency of its sections is not checked, because it is a part of a configuration that was
    checked.
    """
    section = config["config"] if isinstance(config, Mapping) and "config" in config else config
    return parse_part(section)


def _routers(
    config: MantaConfig, models: tuple[ServedModel, ...] | None, *engines: Application
) -> Application:
    """Return the application of the routers, to which engine deployments are bound.

    models: the served models; None if models are added and removed at run time.
    """
    http = config.http
    key_files = {
        name: file
        for name in ("api_keys_file", "admin_keys_file")
        if (file := getattr(http, name)) is not None
    }
    keys = {name: read_api_keys(file, f"http.{name}") for name, file in key_files.items()}
    counts = _router_counts(config)
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": config.router.num_cpus},
        # The routers refuse requests earlier, by their own limits, with an error in the client's
        # format.
        "max_ongoing_requests": 2 * config.limits.in_flight,
        # An open stream cannot move to another router, because its connection is to this one. In an
        # update, new routers start first, and old ones remain while they have streams. If the
        # engines are also replaced, the streams end soon.
        "max_surge_percent": model_deployments.SURGE,
        "graceful_shutdown_wait_loop_s": model_deployments.DRAIN_POLL,
        "graceful_shutdown_timeout_s": http.max_stream_seconds + model_deployments.KILL_MARGIN,
        **model_deployments.logs(config),
    }
    settings = RouterSettings(
        models=models,
        find_models=None if models is not None else served_models,
        change_models=None if models is not None else _changes(config),
        routers=tuple(counts),
        runs_batches=BATCH_ROUTER not in counts,
        in_flight=config.limits.in_flight,
        keys=KeySettings(keys.get("api_keys_file", ()), keys.get("admin_keys_file", ()), key_files),
        usage_file=config.usage.file or "",
        usage_bytes=config.usage.bytes,
        usage_files=config.usage.files,
        batches=config.batch.settings(),
        tracing=config.tracing.settings(),
        share_prefixes=http.share_prefixes,
        body_bytes=config.limits.body_bytes,
        images=config.images.limits(),
        choices=config.limits.choices,
        max_tokens=config.limits.max_tokens,
        strict=http.strict,
        cors_origins=tuple(http.cors_origins),
        keepalive_seconds=http.keepalive_seconds,
        store_bytes=http.store_bytes,
        page=http.page,
        share_by=config.limits.share_by,
        deadline_seconds=config.limits.deadline_seconds,
        log_level=config.log.level,
        stream_seconds=http.max_stream_seconds,
        grpc=_grpc(config),
    )
    routers = deployment(serve.ingress()(Router)).options(
        name=ROUTER, num_replicas=counts[ROUTER], **options
    )
    if BATCH_ROUTER not in counts:
        return routers.bind(settings, *engines)
    batch_routers = deployment(BatchRouter).options(
        name=BATCH_ROUTER, num_replicas=counts[BATCH_ROUTER], **options
    )
    # Only the other routers serve gRPC, because routers of both deployments on a node would listen
    # on the same port. Only those routers store responses, because a later turn that names a
    # response comes over HTTP.
    for_batches = replace(settings, runs_batches=True, grpc=None, store_bytes=0)
    return routers.bind(settings, *engines, batch_routers=batch_routers.bind(for_batches, *engines))


def _router_counts(config: MantaConfig) -> dict[str, int]:
    """Return the number of routers of each Serve deployment of routers, by its name."""
    batch = config.router.batch_replicas
    return {ROUTER: config.router.replicas, **({BATCH_ROUTER: batch} if batch else {})}


def _changes(base: MantaConfig) -> ChangeModels:
    """Return the functions by which a router changes the models of its endpoint.

    base: the endpoint's configuration without its models.
    """
    app = base.app_name
    return ChangeModels(
        partial(put_model, base), partial(drop_model, app), partial(model_applications.trouble, app)
    )


def put_model(base: MantaConfig, name: str, section: Mapping[str, Any]) -> None:
    """Add or change a model of a running endpoint of several models. Other models are not changed.

    The models in `base` are ignored, and key files that have changed since the deployment are not
    read. Needs a connection to Ray, and blocks.

    base: the configuration of the endpoint.
    section: the keys of `models.NAME`.

    Raises ConfigError; its param is a key without the prefix `models.NAME`.
    """
    before = f"models.{name}."
    try:
        shared = base.model_dump(exclude_unset=True, exclude={"models"})
        models = {name: dict(section)}
        config = parse_config({**shared, "models": models}, {}, check_files=False).of(name)
    except ConfigError as error:
        lines = [line.removeprefix("configuration: ") for line in error.message.splitlines()]
        param = lines[0].partition(": ")[0].removeprefix(before)
        message = "; ".join(line.removeprefix(before) for line in lines)
        raise ConfigError(message, param=param) from None
    try:
        check_model_files(config)
    except ConfigError as error:
        raise ConfigError(f"{error.param}: {error.message}", param=error.param) from None
    with coexistence.deploying():
        there = model_applications.applications()
        known = model_applications.entries(base.app_name, there)
        model_applications.check_names(config, known)
        own = known.get(name)
        added = own is None or own.added
        others = [entry.config for entry in known.values() if entry is not own]
        machine = model_deployments.beside(others, config, NodeCapacity.here())
        apply({"applications": [model_application(config, machine, added=added)]}, there)
    model_applications.note_change(base.app_name)


def drop_model(app: str, name: str) -> None:
    """Remove a model from a running endpoint of several models.

    The model's replicas end once their running requests have ended, after at most
    `limits.drain_seconds`. Needs a connection to Ray, and blocks.

    Raises MantaError (model_not_found).
    """
    with coexistence.deploying():
        there = model_applications.applications()
        entry = model_applications.entries(app, there).get(name)
        if entry is None:
            raise InvalidRequest(f"no model is called {name!r}", code="model_not_found")
        apply(
            {"applications": []},
            {key: application for key, application in there.items() if key != entry.app},
        )
    forget_app(entry.app)
    model_applications.note_change(app)


def _grpc(config: MantaConfig) -> GrpcSettings | None:
    http = config.http
    if config.grpc.port is None:
        return None
    certificate, key = http.tls.certificate or "", http.tls.key or ""
    return GrpcSettings(http.host, config.grpc.port, certificate, key, http.max_stream_seconds)


# -- for `manta serve` and `serve deploy`


def serve_config(
    config: str | Path | Mapping[str, Any] | MantaConfig, *, one_machine: bool = False
) -> dict[str, Any]:
    """Return Serve's config schema (ServeDeploySchema) for a configuration.

    Replica counts and limits are not in the application's arguments. Deploying a schema that
    differs only in these restarts nothing; any other change of arguments or policy restarts every
    replica.

    one_machine: whether Ray runs on this machine only, with the variables of `cluster_environment`.
        These variables set where haproxy listens, and the schema then sets loopback for the
        routers.
    """
    config = as_config(config)
    machine = NodeCapacity.here()
    if one_machine:
        machine = replace(machine, grows=False)
    if config.models:
        applications = [_routers_application(config)]
        parts = config.by_model()
        shares = model_deployments.shares(list(parts.values()), machine)
        applications += map(model_application, parts.values(), shares)
    else:
        applications = [_application(config, machine)]
    http_options: dict[str, Any] = {
        "host": config.http.host,
        "port": config.http.port,
        "keep_alive_timeout_s": 90,
    }
    if one_machine and behind_haproxy(config):
        http_options["host"] = "127.0.0.1"
    tls = config.http.tls
    if tls.certificate and config.http.proxy == "serve":
        http_options |= {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    return {
        "proxy_location": "EveryNode",
        "http_options": http_options,
        "applications": applications,
    }


def _application(config: MantaConfig, machine: NodeCapacity) -> dict[str, Any]:
    """Return Serve's schema of one model's application: routers and engines."""
    resolved = _resolved(config, machine)
    policy = _policy(config, resolved)
    # The policy scales all pools and needs the routers' reports. Serve collects reports only of
    # autoscaled deployments, so the routers are autoscaled with equal minimum and maximum.
    routers = [
        {"name": name, "autoscaling_config": autoscaling.counts(count, count)}
        if policy
        else {"name": name, "num_replicas": count}
        for name, count in _router_counts(config).items()
    ]
    return {
        "name": config.app_name,
        "route_prefix": config.route_prefix,
        "import_path": coexistence.ONE_MODEL,
        "args": {"config": _arguments(config, resolved)},
        "deployments": [*_counts(config, resolved), *routers],
        **policy,
    }


def _routers_application(config: MantaConfig) -> dict[str, Any]:
    """Return Serve's schema of the application of several models' routers."""
    counted = config.model_copy(update={"router": _uncounted(config.router), "models": {}})
    return {
        "name": config.app_name,
        "route_prefix": config.route_prefix,
        "import_path": coexistence.SEVERAL_MODELS,
        "args": {"config": counted.model_dump(exclude_defaults=True)},
        "deployments": [
            {"name": name, "num_replicas": count} for name, count in _router_counts(config).items()
        ],
    }


def model_application(
    config: MantaConfig, machine: NodeCapacity, *, added: bool = False
) -> dict[str, Any]:
    """Return Serve's schema of the application of one model's engines, among several models.

    config: the configuration of this model, from `MantaConfig.of`.
    added: whether the model is added to a running endpoint over the API.
    """
    resolved = _resolved(config, machine)
    whole = config.model_copy(update={"replicas": 1, "pools": resolved})
    http, router, limits = config.http, config.router, config.limits
    # Keys that engines do not need are left out, because changing an argument would restart the
    # engines.
    sleeps = any(map(config.sleeps, resolved.values()))
    idle = {"idle_seconds": config.scaling.idle_seconds} if sleeps else {}
    held = {"wait_seconds": router.wait_seconds} if sleeps else {}
    engines = config.model_copy(
        update={
            "aliases": [],
            "adapters": AdaptersConfig(),
            "scaling": ScalingConfig(**idle),
            "route_prefix": "/",
            "http": HttpConfig(host=http.host),
            "router": RouterConfig(
                heartbeat_seconds=router.heartbeat_seconds,
                silence_seconds=router.silence_seconds,
                **held,
            ),
            "limits": LimitsConfig(
                drain_seconds=limits.drain_seconds, stall_seconds=limits.stall_seconds
            ),
        }
    )
    stored = {"config": whole.model_dump(exclude_defaults=True), "added": added}
    return {
        "name": model_applications.model_app(config.app_name, config.name()),
        "route_prefix": None,
        "import_path": model_applications.ENGINES,
        "args": {"config": _arguments(engines, resolved)},
        "deployments": [
            *_counts(config, resolved),
            # Serve refuses a fixed number of 0 replicas. As nothing calls this deployment,
            # autoscaling never starts a replica.
            {
                "name": model_applications.MODEL,
                "autoscaling_config": autoscaling.counts(0, 1),
                "user_config": stored,
            },
        ],
        **_policy(config, resolved),
    }


def _resolved(config: MantaConfig, machine: NodeCapacity) -> dict[str, PoolConfig]:
    resolved = pools(config, machine)
    model_deployments.check_gpus(config, resolved, machine)
    open_cores = config.pools.get("cpu", PoolConfig()).num_cpus is None
    if "cpu" in resolved and open_cores and not machine.alone:
        logger.warning(
            "pools.cpu.num_cpus is %.0f, by the largest machine seen here: a replica fits on no "
            "node with fewer cores to give, and leaves idle what a larger one has. Name it",
            resolved["cpu"].num_cpus,
        )
    return resolved


def _arguments(config: MantaConfig, resolved: Mapping[str, PoolConfig]) -> dict[str, Any]:
    """Return the application's arguments for Serve: the configuration without replica counts.

    resolved: the pools with all values.
    """
    counted = config.model_copy(
        update={"router": _uncounted(config.router), "pools": {}, "replicas": 1}
    )
    args = counted.model_dump(exclude_defaults=True)
    uncounted = PoolConfig().model_dump(include={"replicas", "min_replicas", "max_replicas"})
    unset = {"engine": {"role", "encode_seconds"}, "encoder": set[str]()}
    args["pools"] = {
        name: pool.model_copy(update=uncounted).model_dump(
            exclude=unset.get(pool.role, {"encode_seconds"})
        )
        for name, pool in resolved.items()
    }
    return args


def _uncounted(router: RouterConfig) -> RouterConfig:
    """Return the routers' configuration with counts of at most 1, so that changing the number of
    routers does not change the application's arguments.

    1 is valid in combination with all other keys when the arguments are validated again.
    """
    batch = min(1, router.batch_replicas)
    return router.model_copy(update={"replicas": 1, "batch_replicas": batch})


def _counts(config: MantaConfig, resolved: Mapping[str, PoolConfig]) -> Iterator[dict[str, Any]]:
    """Yield Serve's schema for each pool's deployment: its name, and its number of replicas or
    limits."""
    for name, pool in resolved.items():
        encodes = pool.role == "encoder"
        options: dict[str, Any] = {"num_replicas": pool.replicas}
        if autoscaling.scales(pool):
            limits = autoscaling.limits(pool)
            if encodes:
                limits = autoscaling.encoder_limits(pool, config.scaling.calm_seconds)
            options = {"autoscaling_config": limits}
        deployed = f"{autoscaling.ENCODER_PREFIX}{name}" if encodes else deployment_name(name)
        yield {"name": deployed, **options}


def _policy(config: MantaConfig, resolved: Mapping[str, PoolConfig]) -> dict[str, Any]:
    """Return the application's autoscaling policy in Serve's schema; {} if nothing scales."""
    arguments = autoscaling.policy_arguments(config, resolved)
    if not arguments["pools"]:
        return {}
    return {
        "autoscaling_policy": {
            "policy_function": "deployments.scaling.policy:PoolsPolicy",
            "policy_kwargs": arguments,
        }
    }


def deploy(schema: Mapping[str, Any]) -> None:
    """Deploy a schema as `serve deploy` does, but without the dashboard that `serve deploy` needs.

    Starts Serve if it is not running. Only changed deployments are restarted. Other applications of
    the cluster are not changed. Needs a connection to Ray.

    Raises ConfigError if an application conflicts with a running one; see
    `coexistence.check_beside`.
    """
    from ray.serve.context import _get_global_client

    serve.start(proxy_location=schema["proxy_location"], http_options=schema["http_options"])
    client = _get_global_client()
    assert client is not None  # Serve was started above
    coexistence.check_port(schema["http_options"]["port"], client.http_config.port)
    with coexistence.deploying():
        there = model_applications.applications()
        coexistence.check(schema["applications"], there)
        excluded = coexistence.left_out(schema["applications"], there)
        apply(schema, {name: app for name, app in there.items() if name not in excluded})


def apply(schema: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Deploy a schema's applications in Serve, and keep the other running applications in `there`.

    Applications that are in neither are deleted. The caller must hold `coexistence.deploying`.

    there: Serve's schema of each running application to keep, by name.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    ours = {app["name"] for app in schema["applications"]}
    others = {name: app for name, app in there.items() if name not in ours}
    wanted = ServeDeploySchema.model_validate(schema)
    wanted.applications += others.values()
    known = model_applications.statuses()
    now = time.time()
    coexistence.note_others(now, {name: known[name].deployed_at for name in others})
    client: Any = _get_global_client()
    ray.get(client._controller.apply_config.remote(wanted, deployment_time=now))
    for app in schema["applications"]:
        if app["import_path"] == coexistence.SEVERAL_MODELS:
            model_applications.note_change(app["name"])
