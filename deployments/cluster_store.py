"""The store that the routers of an application share: Ray's own key-value store lives as long
as the cluster: routers and replicas come and go, and so may Serve's controller. Everything here
blocks, and raises OSError if the store cannot be had."""

import secrets
from typing import Any


def prefix(app: str) -> str:
    """Return the prefix of all keys of an application."""
    return f"manta/{app}/"


def store(what: str, *arguments: Any, **options: Any) -> Any:
    """Make one of the store's calls. what: "get", "put", "list" or "del"."""
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        return getattr(internal_kv, f"_internal_kv_{what}")(*arguments, **options)
    except RayError as error:
        raise OSError(f"Ray's store does not answer: {type(error).__name__}") from error


def forget_app(app: str) -> None:
    """Delete the keys of an application that is gone, with what was added to it by hand."""
    store("del", prefix(app), del_by_prefix=True)


def first_served(app: str, model: str, now: int) -> int:
    """Return the Unix seconds at which this application first served this model.

    The time is the same for each router.

    now: the time for the first router that asks
    """
    return int(_first(f"{prefix(app)}created/{model}", b"%d" % now))


def event_secret(app: str) -> bytes:
    """Return the secret that signs the ids of events, the same for all routers of an application.

    The first router draws the secret. It is not in the configuration, because a changed argument
    would restart all routers.
    """
    return _first(f"{prefix(app)}event-secret", secrets.token_bytes(32))


def _first(key: str, value: bytes) -> bytes:
    """Return the value that the first router has put under a key."""
    store("put", key, value, overwrite=False)
    stored: bytes = store("get", key) or value
    return stored
