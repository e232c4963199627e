"""The deployment beside other applications of a cluster: what collides, and who deploys now.

Serve takes the whole list of a cluster's applications and deletes those that are not in it. So the
applications that are there are put into it again, as they were deployed: that restarts nothing.
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

ONE_MODEL = "deployments.app:build"  # import paths of applications that answer requests
SEVERAL_MODELS = "deployments.app:build_routers"
_DEPLOYING = "manta-deploying"  # the process that deploys now, in Ray's store
_STALE = 30.0  # seconds after which one that deploys is taken for dead; it needs a few
_WAIT = 60.0  # seconds that one waits for its turn
_POLL = 0.1


def check(wanted: Sequence[Any], there: Mapping[str, Any]) -> None:
    """Check that applications can be deployed beside those that are there. Both in Serve's schema.

    Raises ConfigError.
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
    """Models of an earlier file that this one has no more, as names of applications. Those that
    were added to the running endpoint stay."""
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
    """Whether an application can stand beside others. running: what its own name serves now.

    Raises ConfigError: another model under the same app_name, or a path, a gRPC port or a folder
    of batches that another application has. Pure.
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
    """Raise ConfigError unless a configuration has the cluster's port. endpoint: that port."""
    if port != endpoint:
        raise ConfigError(
            f"http.port: {port}, and the one endpoint of this cluster listens on {endpoint} since "
            f"its start; set http.port: {endpoint}",
            param="http.port",
        )


def config_of(application: Any) -> MantaConfig | None:
    """Return the configuration in an application of Serve's schema; None if it is not one of ours
    that answers requests, or of a release with other keys."""
    application = model_applications.as_dict(application)
    config = application.get("args", {}).get("config")
    ours = application.get("import_path") in (ONE_MODEL, SEVERAL_MODELS)
    if not ours or not isinstance(config, Mapping):
        return None
    with suppress(ConfigError):
        return parse_config(config, {}, check_files=False)  # it may be on another machine
    return None


# -- one at a time


@contextmanager
def deploying() -> Iterator[None]:
    """Keep other deployments out: two at once would each delete what the other has added. Raises
    MantaError after a minute, and OSError if Ray's store does not answer."""
    mine = json.dumps(time.time()).encode()
    deadline = time.monotonic() + _WAIT
    while store("put", _DEPLOYING, mine, overwrite=False):  # it was there already
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


# -- when an application itself was deployed


def _key(app: str) -> str:
    return f"{prefix(app)}deployed"


def deployed_at(app: str, reported: float) -> float:
    """Unix seconds at which this very application was last deployed. reported: Serve's time,
    which is also that of the last deployment beside it."""
    record = store("get", _key(app))
    seen, before = json.loads(record) if record else (reported, reported)
    return float(before) if seen == reported else reported


def note_others(now: float, others: Mapping[str, float]) -> None:
    """Another application is deployed at `now`. others: Serve's time of each one beside it."""
    for app, deployed in others.items():
        store(
            "put", _key(app), json.dumps([now, deployed_at(app, deployed)]).encode(), overwrite=True
        )
