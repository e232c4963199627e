"""store: accesses Ray's own key-value store (GCS), which the routers of an application share.

The store lives as long as the cluster, while routers, replicas and Serve's controller come and go.
All functions here block, and raise OSError if the store is unavailable.
"""

import secrets
from typing import Any


def prefix(app: str) -> str:
    """Return the prefix of all keys of an application."""
    return f"manta/{app}/"


def store(what: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of Ray's internal key-value store and return its result.

    what: "get", "put", "list" or "del". arguments, options: those of Ray's function.
    """
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        return getattr(internal_kv, f"_internal_kv_{what}")(*arguments, **options)
    except RayError as error:
        raise OSError(f"Ray's store does not answer: {type(error).__name__}") from error


def forget_app(app: str) -> None:
    """Delete all keys of a removed application, including adapters added over the API."""
    store("del", prefix(app), del_by_prefix=True)


def first_served(app: str, model: str, now: int) -> int:
    """Return the Unix time at which this application first served this model, equal for all
    routers.

    now: the present Unix time, which is stored if no router has stored one before.
    """
    return int(_first(f"{prefix(app)}created/{model}", b"%d" % now))


def event_secret(app: str) -> bytes:
    """Return the secret that signs event ids, equal for all routers of an application.

    The first router generates the secret. It is not in the configuration, because a changed
    argument would restart all routers.
    """
    return _first(f"{prefix(app)}event-secret", secrets.token_bytes(32))


def _first(key: str, value: bytes) -> bytes:
    """Store a value unless the key already has one, and return the stored value."""
    store("put", key, value, overwrite=False)
    stored: bytes = store("get", key) or value
    return stored
