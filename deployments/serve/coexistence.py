"""Checks and a lock for deploying applications on a cluster that already has others.

Serve accepts only a complete list of a cluster's applications, and deletes applications that are
missing in the list. So we also list the running applications as they were deployed; these are not
restarted.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from deployments import model_applications
from deployments.cluster_store import prefix, store
from deployments.config.load import parse_config
from deployments.config.models import MantaConfig
from engine.errors import ConfigError, MantaError

ONE_MODEL = "deployments.app:build"  # import path of one-model applications
SEVERAL_MODELS = "deployments.app:build_routers"
_DEPLOYING = "manta-deploying"  # key in Ray's store, which the deploying process holds as a lock
# Seconds after which the holder of the lock is presumed dead; a deployment takes a few seconds.
_STALE = 30.0
_WAIT = 60.0  # maximum seconds to wait for the lock
_POLL = 0.1


def check(wanted: Sequence[Any], there: Mapping[str, Any]) -> None:
    """Check that applications can be deployed on a cluster with the running ones.

    wanted: Serve's schemas of the applications to deploy.
    there: Serve's schemas of the running applications, by name.

    Raises ConfigError if a running application of the same name serves several models and the new
    one a single model, or vice versa; also the errors of `check_beside`.
    """
    ours = {app["name"] for app in wanted}
    configs = {name: config_of(app) for name, app in there.items()}
    others = [other for name, other in configs.items() if other is not None and name not in ours]
    for app in wanted:
        config = config_of(app)
        if config is None:
            continue
        running = configs.get(app["name"])
        before = model_applications.as_dict(there[app["name"]])["import_path"] if running else None
        if before not in (None, app["import_path"]):
            single, several = "one model", "several models (`models`)"
            now, wants = (single, several) if before == ONE_MODEL else (several, single)
            raise ConfigError(
                f"app_name: {config.app_name!r} serves {now} on this cluster, and this is a "
                f"configuration of {wants}. Set another app_name and route_prefix, or stop that "
                "one first",
                param="app_name",
            )
        check_beside(config, others, running if before == ONE_MODEL else None)


def left_out(wanted: Sequence[Any], there: Mapping[str, Any]) -> set[str]:
    """Return the names of running applications of models that are no longer in the configuration.

    Models that were added to the running endpoint are not included, as no configuration has them.

    wanted, there: as in `check`.
    """
    ours = {app["name"] for app in wanted}
    several = [app["name"] for app in wanted if app["import_path"] == SEVERAL_MODELS]
    return {
        name
        for name, app in there.items()
        if name not in ours
        and any(model_applications.is_model_of(app_name, name) for app_name in several)
        and (entry := model_applications.entry(app)) is not None
        and not entry.added
    }


def check_beside(
    config: MantaConfig, others: Sequence[MantaConfig], running: MantaConfig | None
) -> None:
    """Check that an application can run on a cluster beside others.

    others: configurations of the other applications.
    running: the configuration that runs under the same name; None: none.

    Raises ConfigError for another model under the same app_name, or for a path, gRPC port or batch
    folder that another application uses.
    """
    if running is not None and running.name() != config.name():
        raise ConfigError(
            f"app_name: {config.app_name!r} serves the model {running.name()!r} on this cluster, "
            f"and this is {config.name()!r}. To serve it beside that one, set another app_name and "
            f"route_prefix; to put it in its place, set served_name: {running.name()}, or stop "
            "that one first",
            param="app_name",
        )
    for other in others:
        holder = f"the application {other.app_name!r} on this cluster"
        if other.route_prefix == config.route_prefix:
            raise ConfigError(
                f"route_prefix: {config.route_prefix} is that of {holder}; set another, such as "
                f"/{config.app_name}",
                param="route_prefix",
            )
        if config.grpc.port is not None and other.grpc.port == config.grpc.port:
            raise ConfigError(
                f"grpc.port: {config.grpc.port} is that of {holder}; set another",
                param="grpc.port",
            )
        if config.batch.folder is not None and other.batch.folder == config.batch.folder:
            raise ConfigError(
                f"batch.folder: {config.batch.folder} is that of {holder}, whose routers would "
                "take these batches; set another",
                param="batch.folder",
            )


def check_port(port: int, endpoint: int) -> None:
    """Raise ConfigError unless `port` is the port of the cluster's endpoint."""
    if port != endpoint:
        raise ConfigError(
            f"http.port: {port}, and the one endpoint of this cluster listens on {endpoint} since "
            f"its start; set http.port: {endpoint}",
            param="http.port",
        )


def config_of(application: Any) -> MantaConfig | None:
    """Return the configuration in an application of Serve's schema.

    Returns None if the application is not Manta's, if it has no routers, or if a release with other
    configuration keys deployed it.
    """
    application = model_applications.as_dict(application)
    config = application.get("args", {}).get("config")
    ours = application.get("import_path") in (ONE_MODEL, SEVERAL_MODELS)
    if not ours or not isinstance(config, Mapping):
        return None
    with suppress(ConfigError):
        # The files in the configuration are not checked, as they may be on another machine.
        return parse_config(config, {}, check_files=False)
    return None


# -- one deployment at a time


@contextmanager
def deploying() -> Iterator[None]:
    """A context manager that holds the cluster's deployment lock, so that no other deployment runs
    meanwhile.

    Each of two simultaneous deployments would delete the applications that the other has added.

    Raises MantaError if the lock is held for a minute, and OSError if Ray's store does not answer.
    """
    mine = json.dumps(time.time()).encode()
    deadline = time.monotonic() + _WAIT
    while store("put", _DEPLOYING, mine, overwrite=False):
        # Another process holds the lock.
        held = store("get", _DEPLOYING)
        if held is not None and time.time() - json.loads(held) > _STALE:
            store("del", _DEPLOYING)
        elif time.monotonic() > deadline:
            raise MantaError("other applications are being deployed on this cluster; try again")
        time.sleep(_POLL)
    try:
        yield
    finally:
        if store("get", _DEPLOYING) == mine:
            store("del", _DEPLOYING)


# -- deployment times


def _key(app: str) -> str:
    return f"{prefix(app)}deployed"


def deployed_at(app: str, reported: float) -> float:
    """Return the Unix time at which this application was last deployed.

    reported: the deployment time that Serve reports, which also changes when any other application
        is deployed.
    """
    record = store("get", _key(app))
    seen, before = json.loads(record) if record else (reported, reported)
    return float(before) if seen == reported else reported


def note_others(now: float, others: Mapping[str, float]) -> None:
    """Record the deployment times of other applications before a deployment at `now`, which changes
    the times that Serve reports for them.

    `deployed_at` then returns the recorded times.

    others: the deployment time that Serve has reported so far, by application.
    """
    for app, deployed in others.items():
        store(
            "put", _key(app), json.dumps([now, deployed_at(app, deployed)]).encode(), overwrite=True
        )
