"""publish, subscribe: a registry of the running replicas that Serve reports to this process's
handles.

Serve pickles the modules of request routers by value, so a global there would be copied. Therefore
the registry is in this module, which is imported by name.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

# Replica id -> metadata that the replica published when it became ready.
Replicas = Mapping[str, Mapping[str, Any]]
Listener = Callable[[Replicas], None]

_lock = threading.Lock()
_replicas: dict[tuple[str, str], Replicas] = {}
_listeners: dict[tuple[str, str], list[Listener]] = {}


def publish(app: str, deployment: str, replicas: Replicas) -> None:
    """Set the running replicas of a deployment, and call its listeners. Runs on the handle's
    thread."""
    key = (app, deployment)
    with _lock:
        if _replicas.get(key) == replicas:
            return
        _replicas[key] = replicas
        listeners = list(_listeners.get(key, ()))
    for listener in listeners:
        listener(replicas)


def subscribe(app: str, deployment: str, listener: Listener) -> Callable[[], None]:
    """Call a listener with a deployment's replicas at each change, and now if they are known.

    The listener may be called on any thread.

    Returns a function that ends the subscription.
    """
    key = (app, deployment)
    with _lock:
        _listeners.setdefault(key, []).append(listener)
        known = _replicas.get(key)
    if known is not None:
        listener(known)

    def unsubscribe() -> None:
        with _lock:
            if listener in _listeners.get(key, ()):
                _listeners[key].remove(listener)

    return unsubscribe
