"""TrainerCalls and AsyncTrainerCalls: the methods of `Client` and `AsyncClient` for a trainer's
orders.

Each method calls a route of docs/rl.md, with its fields and errors. An order is sent only once: if
the router is lost meanwhile, EngineDead (code router_lost) is raised. The order may have been
carried out; `weights` returns the present state.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deployments.route_call import Answer, RouteCall, UpdateRefused

T = TypeVar("T")
WeightsSource = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """The weights of a replica, and whether it is paused or asleep.

    version: name of the weights.
    weights_dropped: whether a sleep of level 2 has dropped the weights, with no update since.
    """

    version: str
    paused: bool
    asleep: bool
    weights_dropped: bool = False


@dataclass(frozen=True, slots=True)
class FleetWeights:
    """The weights that all replicas of a model should have, and those that each replica has.

    version: name of the weights.
    paused, asleep: whether a trainer has ordered a pause, and whether a sleep.
    replicas: the state of each replica, by name.
    weights_dropped: whether no replica has weights, and all wait for an update.
    """

    version: str
    paused: bool
    asleep: bool
    replicas: Mapping[str, ReplicaWeights]
    weights_dropped: bool = False


def _nothing(answer: Answer) -> None:
    """Return None; used as `RouteCall.read` for orders without a result."""


def _version(answer: Answer) -> str:
    version: str = answer.get("weight_version", "")
    return version


def _update_weights(source: WeightsSource, version: str) -> RouteCall[str]:
    if isinstance(source, Mapping):
        return _take_weights(source, version)
    if not isinstance(source, (str, os.PathLike)):
        raise UpdateRefused(
            "weights for replicas are a folder, or a message such as SharedWeights(tensors)."
            f"update_info, which take_weights takes too, not {type(source).__name__}",
            param="source",
            code="invalid_type",
        )
    body = {"model_path": os.fspath(source), **({"weight_version": version} if version else {})}
    return RouteCall("/update_weights_from_disk", _version, body, updates=True)


def _take_weights(update_info: Mapping[str, Any], version: str) -> RouteCall[str]:
    named = {"weight_version": version} if version else {}
    body = {"update_info": update_info, **named}
    return RouteCall("/update_weights", _version, body, updates=True)


def _finish(version: str) -> RouteCall[str]:
    body = {"weight_version": version} if version else {}
    return RouteCall("/finish_weight_update", _version, body, updates=True)


def _init(init_info: Mapping[str, Any]) -> RouteCall[None]:
    body = {"init_info": init_info}
    return RouteCall("/init_weight_transfer_engine", _nothing, body, updates=True)


def _pause(mode: str, clear_cache: bool) -> RouteCall[None]:
    query = [("mode", mode), ("clear_cache", str(clear_cache).lower())]
    return RouteCall("/pause", _nothing, {}, query)


def _sleep(level: int, tags: Sequence[str], mode: str) -> RouteCall[None]:
    return RouteCall("/sleep", _nothing, {}, [("level", str(level)), ("mode", mode), *_tags(tags)])


def _wake(tags: Sequence[str]) -> RouteCall[None]:
    return RouteCall("/wake_up", _nothing, {}, _tags(tags))


def _tags(tags: Sequence[str]) -> list[tuple[str, str]]:
    return [("tags", tag) for tag in tags]


def _read_weights(answer: Answer) -> FleetWeights:
    replicas = {
        name: ReplicaWeights(
            replica["weight_version"],
            replica["paused"],
            replica["asleep"],
            replica.get("weights_dropped", False),
        )
        for name, replica in answer["replicas"].items()
    }
    asleep = answer["is_sleeping"]
    dropped = answer.get("weights_dropped", False)
    return FleetWeights(answer["weight_version"], answer["is_paused"], asleep, replicas, dropped)


def _read_world_size(answer: Answer) -> int:
    size: int = answer["world_size"]
    return size


_START: RouteCall[None] = RouteCall("/start_weight_update", _nothing, {}, updates=True)
_RESUME: RouteCall[None] = RouteCall("/resume", _nothing, {})
_ABORT: RouteCall[None] = RouteCall("/abort_requests", _nothing, {})
_RESET: RouteCall[None] = RouteCall("/reset_prefix_cache", _nothing, {})
_WEIGHTS = RouteCall("/weight_info", _read_weights, None)
_WORLD_SIZE = RouteCall("/get_world_size", _read_world_size, None)


class TrainerCalls:
    """The orders of a trainer to all replicas of a model. All methods raise MantaError.

    Methods of an update raise UpdateFailed if it is refused; the old weights then remain in use.
    """

    def _carry_out(self, call: RouteCall[T]) -> T:
        raise NotImplementedError

    def update_weights(self, source: WeightsSource, version: str = "") -> str:
        """Replace the weights, and return the version of the new ones.

        source: the folder of a checkpoint that all nodes can read, or an argument of
            `take_weights`.
        """
        return self._carry_out(_update_weights(source, version))

    def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Make all replicas join a trainer's process group.

        init_info: as for vLLM; {}: the trainer shares its weights on the replicas' machine.
        """
        self._carry_out(_init(init_info))

    def start_weight_update(self) -> None:
        """Begin an update with several calls of `take_weights`, which `finish_weight_update`
        ends."""
        self._carry_out(_START)

    def take_weights(self, update_info: Mapping[str, Any], version: str = "") -> str:
        """Have the replicas receive tensors from the trainer.

        Returns the version of the new weights if the tensors are a whole update, or "" after
        `start_weight_update`.

        update_info: as for vLLM.
        """
        return self._carry_out(_take_weights(update_info, version))

    def finish_weight_update(self, version: str = "") -> str:
        """Replace the weights by the tensors of the update; return their version."""
        return self._carry_out(_finish(version))

    def pause(self, mode: str = "keep", *, clear_cache: bool = False) -> None:
        """Pause all replicas. mode: "keep", "wait" or "abort"."""
        self._carry_out(_pause(mode, clear_cache))

    def resume(self) -> None:
        """End the pause."""
        self._carry_out(_RESUME)

    def abort_requests(self) -> None:
        """Abort all running requests, which return the outputs so far."""
        self._carry_out(_ABORT)

    def sleep(self, level: int = 1, tags: Sequence[str] = (), *, mode: str = "abort") -> None:
        """Pause all replicas and free memory; see `engine.LLM.sleep`. mode: as in `pause`."""
        self._carry_out(_sleep(level, tags, mode))

    def wake(self, tags: Sequence[str] = ()) -> None:
        """Allocate memory that a sleep has freed. When all of it is allocated, the sleep's pause
        ends.

        tags: names of the memory parts; none: all parts.
        """
        self._carry_out(_wake(tags))

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self._carry_out(_RESET)

    def weights(self) -> FleetWeights:
        """Return the weights version, pause and sleep of the model and of each replica."""
        return self._carry_out(_WEIGHTS)

    def world_size(self) -> int:
        """Return the number of replicas, each of which receives weights once."""
        return self._carry_out(_WORLD_SIZE)


class AsyncTrainerCalls:
    """The methods of `TrainerCalls` as coroutines."""

    async def _carry_out(self, call: RouteCall[T]) -> T:
        raise NotImplementedError

    async def update_weights(self, source: WeightsSource, version: str = "") -> str:
        return await self._carry_out(_update_weights(source, version))

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        await self._carry_out(_init(init_info))

    async def start_weight_update(self) -> None:
        await self._carry_out(_START)

    async def take_weights(self, update_info: Mapping[str, Any], version: str = "") -> str:
        return await self._carry_out(_take_weights(update_info, version))

    async def finish_weight_update(self, version: str = "") -> str:
        return await self._carry_out(_finish(version))

    async def pause(self, mode: str = "keep", *, clear_cache: bool = False) -> None:
        await self._carry_out(_pause(mode, clear_cache))

    async def resume(self) -> None:
        await self._carry_out(_RESUME)

    async def abort_requests(self) -> None:
        await self._carry_out(_ABORT)

    async def sleep(self, level: int = 1, tags: Sequence[str] = (), *, mode: str = "abort") -> None:
        await self._carry_out(_sleep(level, tags, mode))

    async def wake(self, tags: Sequence[str] = ()) -> None:
        await self._carry_out(_wake(tags))

    async def reset_prefix_cache(self) -> None:
        await self._carry_out(_RESET)

    async def weights(self) -> FleetWeights:
        return await self._carry_out(_WEIGHTS)

    async def world_size(self) -> int:
        return await self._carry_out(_WORLD_SIZE)
