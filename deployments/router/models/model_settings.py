"""ServedModel, DispatchLimits: the settings that a router needs to serve a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deployments.adapters.registry import AdapterSettings
from deployments.router.admission.fair_queue import AdmissionLimits
from deployments.transport.channel import ChannelLimits


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """The limits of one router for one model.

    wait_seconds: longest wait of a request for a replica.
    in_flight: maximum number of concurrent requests.
    waiting: maximum of choices that wait while no replica is ready.
    admission: limits of the queue while replicas are ready.
    losses: number of replicas killed from outside that a request may lose in a row without a new
        token.
    """

    wait_seconds: float = 30.0
    in_flight: int = 4096
    waiting: int = 1024
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    losses: int = 1
    channel: ChannelLimits = field(default_factory=ChannelLimits)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The settings with which a router serves a model.

    name: name that requests use.
    aliases: patterns of other names.
    find_model: returns the model's local folder, and downloads the model if needed.
    seed, generation_config: settings of the engines.
    chat_template: jinja that replaces the model's own template; None: the model's own.
    images: whether engines of a multimodal model accept images; `engine.images` of all pools.
    start_seconds: assumed seconds of a replica's start if the model may scale to zero; else None.
    app: Serve application of the model's engines; "": the router's own.
    pools: deployments of the engines in that application.
    """

    name: str
    find_model: Callable[[], Path]
    dispatch: DispatchLimits
    adapters: AdapterSettings
    aliases: tuple[str, ...] = ()
    seed: int | None = None
    generation_config: str | Mapping[str, float] = "auto"
    chat_template: str | None = None
    images: bool = True
    start_seconds: float | None = None
    app: str = ""
    pools: tuple[str, ...] = ()

    def same(self, other: "ServedModel") -> bool:
        """Whether `other` has the same settings, so that a router need not load it again.

        The functions `find_model` are compared by the results of `_made_of`.
        """
        mine, theirs = _made_of(self.find_model), _made_of(other.find_model)
        return mine == theirs and all(
            getattr(self, name) == getattr(other, name)
            for name in self.__slots__
            if name != "find_model"
        )


def _made_of(function: Callable[[], Path]) -> object:
    """Return the function and arguments of a functools.partial, as partials themselves never
    compare equal.

    Returns any other function itself.
    """
    parts = ("func", "args", "keywords")
    return [getattr(function, name, None) for name in parts] or function
