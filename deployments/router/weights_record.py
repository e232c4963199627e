"""WeightsRecord: the weights that a model's replicas should have, and the stores that share it.

A record lives as long as its weights: after a deletion of the application too. Routers drop it once
no replica has the weights and their folder is gone.
"""

from typing import Protocol

import msgspec

from deployments.cluster_store import prefix, store


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The weights and the pause that all replicas of a model should have.

    number: grows with each change.
    base: identity of the weights in the model's own folder, which the record is good for.
    folder: the checkpoint in place, or several of which a node has one, one a line; "": the
        model's own.
    version: the name of these weights.
    paused: the mode of the pause; "": none.
    asleep: the parts of the engines' memory that a trainer's sleep has freed.
    level: the level of that sleep.
    dozes: whether the sleep has begun the pause, which ends with it.
    sending: whether tensors of an update have come by SGLang's routes, and others will.
    sent_version: the name of their weights; "": none was given.
    """

    number: int = 0
    base: str = ""
    folder: str = ""
    version: str = "0"
    paused: str = ""
    asleep: tuple[str, ...] = ()
    level: int = 1
    dozes: bool = False
    sending: bool = False
    sent_version: str = ""


class WeightsStore(Protocol):
    """A store of one record. Methods block; they raise OSError if the store is unavailable."""

    def get(self) -> WeightsRecord | None: ...
    def put(self, record: WeightsRecord) -> None: ...


class LocalWeightsStore:
    """A store in this process, for a single router."""

    def __init__(self) -> None:
        self._record: WeightsRecord | None = None

    def get(self) -> WeightsRecord | None:
        return self._record

    def put(self, record: WeightsRecord) -> None:
        self._record = record


class RayWeightsStore:
    """A store in Ray's key-value store, which survives replicas, routers and Serve's controller.

    app: application of the model.
    """

    def __init__(self, app: str) -> None:
        self._key = f"{prefix(app)}weights"

    def get(self) -> WeightsRecord | None:
        raw = store("get", self._key)
        return None if raw is None else msgspec.msgpack.decode(raw, type=WeightsRecord)

    def put(self, record: WeightsRecord) -> None:
        store("put", self._key, msgspec.msgpack.encode(record))
