"""discovery: the running replicas, as Serve tells this process's handles, kept for the dispatcher.

Serve sends the request router class to other processes by value together with its module, so a
global in that module would be a different object there. The registry therefore lives here, and the
class in `deployments.router.serve.request_router` imports it.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

Replicas = Mapping[str, Mapping[str, Any]]  # replica id -> what it published when it became ready
Listener = Callable[[Replicas], None]

_lock = threading.Lock()
_replicas: dict[tuple[str, str], Replicas] = {}
_listeners: dict[tuple[str, str], list[Listener]] = {}


def publish(app: str, deployment: str, replicas: Replicas) -> None:
    """The set of running replicas of a deployment is now this. Called on the handle's thread."""
    key = (app, deployment)
    with _lock:
        if _replicas.get(key) == replicas:
            return
        _replicas[key] = replicas
        listeners = list(_listeners.get(key, ()))
    for listener in listeners:
        listener(replicas)


def subscribe(app: str, deployment: str, listener: Listener) -> Callable[[], None]:
    """Call listener now, if replicas are known, and at each change, on whatever thread. Returns a
    function that ends the subscription."""
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
