"""entries: lists the models of an endpoint of several models, which are Serve applications.

Each model is a separate application without a route, besides the application of the routers. So
killing, updating or removing one model restarts nothing of another. Serve's list of applications is
the only record of the models. Fields that routers need but engines do not are stored as
`user_config` of a deployment without replicas, because a changed argument would restart every
engine.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deployments.api.served_model import same_pattern
from deployments.cluster_store import prefix, store
from deployments.config.load import parse_part
from deployments.config.models import MantaConfig
from deployments.error_text import error_line, plain
from engine.errors import ConfigError

ENGINES = "deployments.app:build_engines"  # import path of a model's application
MODEL = "model"  # name of the deployment without replicas


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model of an endpoint that serves several.

    app: name of the model's Serve application.
    config: the model's configuration as if it were served alone, with all values of its pools
        filled in.
    added: whether the model was added to a running endpoint, so that it is in no configuration
        file.
    """

    app: str
    config: MantaConfig
    added: bool


def model_app(app: str, model: str) -> str:
    """Return the name of a model's Serve application.

    app: name of the routers' application, which must not contain a dot.
    """
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", model)
    if safe != model:
        # The hash makes the application names of different models different.
        safe += "-" + hashlib.blake2b(model.encode(), digest_size=4).hexdigest()
    return f"{app}.{safe}"


def is_model_of(app: str, name: str) -> bool:
    """Return whether `name` is the name of a model's application at the endpoint `app`."""
    return name.startswith(f"{app}.")


def as_dict(application: Any) -> Mapping[str, Any]:
    """Convert an application in Serve's schema (pydantic model or mapping) to a mapping."""
    if isinstance(application, Mapping):
        return application
    dumped: Mapping[str, Any] = application.model_dump(exclude_unset=True)
    return dumped


def entry(application: Any) -> CatalogEntry | None:
    """Return the catalog entry of an application in Serve's schema.

    Returns None if the application is not a model's, or if it was deployed by a release with other
    keys.
    """
    application = as_dict(application)
    if application.get("import_path") != ENGINES:
        return None
    for deployment in application.get("deployments", ()):
        if deployment.get("name") == MODEL:
            user_config = deployment.get("user_config") or {}
            try:
                config = _config(json.dumps(user_config["config"]))
            except (ConfigError, KeyError, TypeError):
                return None
            return CatalogEntry(str(application["name"]), config, bool(user_config.get("added")))
    return None


@lru_cache(maxsize=1024)
def _config(text: str) -> MantaConfig:
    """Return the configuration in a JSON text.

    Cached, because routers poll all models every few seconds and few of them change.
    """
    return parse_part(json.loads(text))


def entries(app: str, applications: Mapping[str, Any]) -> dict[str, CatalogEntry]:
    """Return the models of the endpoint `app` by name, those of the configuration file first.

    applications: Serve's schema of each running application, by name.
    """
    entries = [
        model
        for name, application in applications.items()
        if is_model_of(app, name) and (model := entry(application)) is not None
    ]
    entries.sort(key=lambda one: (one.added, one.app))
    return {model.config.name(): model for model in entries}


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """The status of an application, as Serve reports it.

    messages: messages of its deployments, followed by its own.
    deployed_at: Unix time of its last deployment.
    """

    status: str
    messages: tuple[str, ...]
    deployed_at: float


def statuses() -> dict[str, ApplicationStatus]:
    """Return the status of each Serve application, by name.

    Needs a connection to Ray, and blocks; raises Ray's exceptions. `serve.status()` is not used,
    because it pickles a class for each deployment: that takes tens of milliseconds, during which a
    router's streams stall.
    """
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return {
        report.name: ApplicationStatus(
            report.app_status.status.value,
            (*(status.message for status in report.deployment_statuses), report.app_status.message),
            report.app_status.deployment_timestamp,
        )
        for report in client.list_serve_statuses()
    }


def applications() -> dict[str, Any]:
    """Return Serve's schema of each application that exists, by name.

    Needs a connection to Ray, and blocks; raises Ray's exceptions.
    """
    import ray
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    there = statuses()
    # Serve also returns configurations of deleted applications, which are left out.
    return {
        name: app
        for name, app in ray.get(client._controller.get_app_configs.remote()).items()
        if name in there and there[name].status != "DELETING"
    }


def check_names(config: MantaConfig, known: Mapping[str, CatalogEntry]) -> None:
    """Check that a model's name, aliases and adapter names are not used by another model.

    known: the models by name; the model itself may be among them.

    Raises ConfigError.
    """
    mine = {config.name(): "name", **dict.fromkeys(map(same_pattern, config.aliases), "aliases")}
    mine |= dict.fromkeys(config.adapters.paths, "adapters.paths")
    for name, other in known.items():
        if name == config.name():
            continue
        for other_name in (name, *other.config.aliases, *other.config.adapters.paths):
            if (key := mine.get(same_pattern(other_name))) is not None:
                raise ConfigError(
                    f"{key}: {other_name!r} is a name of the model {name!r}", param=key
                )


def trouble(app: str, name: str) -> dict[str, str]:
    """Return why a model does not start, as Serve reports it; {} if no reason is known.

    The key "message" has the reason. The key "status" is "failed", or missing if the model only
    waits for resources. After a failure Serve may still be retrying. Needs a connection to Ray, and
    blocks.
    """
    application = statuses().get(model_app(app, name))
    if application is None:
        return {}
    reasons = why_failed(application.messages)
    if application.status in ("DEPLOY_FAILED", "UNHEALTHY") or "Error: " in reasons:
        return {"status": "failed", "message": reasons}
    waits = why_waiting(application.messages) if application.status == "DEPLOYING" else ""
    return {"message": waits} if waits else {}


# Serve's message when a replica has waited half a minute for a node.
_NO_ROOM = re.compile(r"to be scheduled\. .*Resources required for each replica: (\{.*?\})")


def why_waiting(messages: Sequence[str]) -> str:
    """Return a sentence about the resources that a waiting replica needs and no node has free; ""
    if no replica waits.

    messages: `ApplicationStatus.messages`.
    """
    for message in messages:
        if match := _NO_ROOM.search(message):
            needs = re.findall(r"[\"'](\w+)[\"']: ([0-9.]+)", match[1])
            if not needs:  # the replica has room, but a busy node is slow to start it
                continue
            named = ", ".join(f"{float(count):g} {name}" for name, count in needs)
            on_gpus = any(name == "GPU" for name, _ in needs)
            keys = "pools.gpu.num_gpus, or num_cpus" if on_gpus else "pools.cpu.num_cpus"
            return (
                f"no node has {named} free, which a replica reserves. Give its pool less "
                f"({keys}), or other pools less, or the cluster a node"
                f"{' with GPUs' if on_gpus else ''}"
            )
    return ""


def why_failed(messages: Sequence[str]) -> str:
    """Return the line of an application's messages with the deepest cause of its failure.

    messages: `ApplicationStatus.messages`.
    """
    for message in messages:
        if line := error_line(message):
            return line
    whole = plain(messages[-1]).strip()
    return whole.splitlines()[-1] if whole else "no reason given"


# -- the change mark, by which routers notice that models have changed


def mark(app: str) -> bytes:
    """Return the change mark of an endpoint's models: bytes that are different after each change.

    Blocks; raises OSError.
    """
    mark_bytes: bytes = store("get", f"{prefix(app)}models/mark") or b""
    return mark_bytes


def note_change(app: str) -> None:
    """Write a new change mark, so that routers reload the models. Blocks; raises OSError."""
    store("put", f"{prefix(app)}models/mark", secrets.token_bytes(8), overwrite=True)
