"""WeightsRecord: the weights that a model's replicas should have, and the stores by which routers
share the record.

A record remains after the application is deleted, as its weights may remain. Routers reset the
record once no replica has the weights and their folder is gone.
"""

from typing import Protocol

import msgspec

from deployments.cluster_store import prefix, store


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The weights and the pause that all replicas of a model should have.

    number: incremented with each change of the record.
    base: identity of the weights in the model's own folder; the record holds for this model only.
    folder: path of the checkpoint, or several paths, one per line, of which each node has one; "":
        the model's own folder.
    version: name of the weights.
    paused: mode of the pause; "": no pause.
    asleep: parts of the engines' memory that a trainer's sleep has freed.
    level: level of the last sleep, as in `engine.LLM.sleep`.
    dozes: whether the sleep also began the pause, so that both end together.
    sending: whether an update by SGLang's routes is under way.
    sent_version: version name in that update; "": none.
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
    """A store of one WeightsRecord. Methods block, and raise OSError if it is unavailable."""

    def get(self) -> WeightsRecord | None: ...
    def put(self, record: WeightsRecord) -> None: ...


class LocalWeightsStore:
    """A store of a WeightsRecord in this process, for a single router."""

    def __init__(self) -> None:
        self._record: WeightsRecord | None = None

    def get(self) -> WeightsRecord | None:
        return self._record

    def put(self, record: WeightsRecord) -> None:
        self._record = record


class RayWeightsStore:
    """A WeightsRecord in Ray's store, which outlives replicas, routers and Serve's controller.

    app: Serve application of the model.
    """

    def __init__(self, app: str) -> None:
        self._key = f"{prefix(app)}weights"

    def get(self) -> WeightsRecord | None:
        raw = store("get", self._key)
        return None if raw is None else msgspec.msgpack.decode(raw, type=WeightsRecord)

    def put(self, record: WeightsRecord) -> None:
        store("put", self._key, msgspec.msgpack.encode(record))
