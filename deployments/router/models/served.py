"""ServedModel: what a router has to know of a model to serve it, out of the configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.adapters.registry import AdapterSettings
from deployments.router.admission.limits import DispatchLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: the one that requests use; aliases: patterns of others. find_model: gives the local
    folder, and fetches the model if need be. seed, generation_config: the engines'.
    start_seconds: of a replica, where the model may sleep; else None. app: Serve's application of
    its engines, "" for the router's own; pools: their deployments there."""

    name: str
    find_model: Callable[[], Path]
    dispatch: DispatchLimits
    adapters: AdapterSettings
    aliases: tuple[str, ...] = ()
    seed: int | None = None
    generation_config: str = "auto"
    start_seconds: float | None = None
    app: str = ""
    pools: tuple[str, ...] = ()

    def same(self, other: "ServedModel") -> bool:
        """Whether a router need not do anything for the other. Functions are compared by what they
        were made of."""
        mine, theirs = _made_of(self.find_model), _made_of(other.find_model)
        return mine == theirs and all(
            getattr(self, name) == getattr(other, name)
            for name in self.__slots__
            if name != "find_model"
        )


def _made_of(function: Callable[[], Path]) -> object:
    """Of a partial: two of them are never equal."""
    parts = ("func", "args", "keywords")
    return [getattr(function, name, None) for name in parts] or function
