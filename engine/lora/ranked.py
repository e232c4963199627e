"""RankedLoader: adapters of a model whose ranks each have a part of them. No torch here."""

from dataclasses import dataclass, replace
from typing import Any

from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter, Loader
from engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class _OnRanks:
    """The weights of rank 0's part, and where the other ranks read theirs."""

    weights: Any
    path: str
    digest: str


class RankedLoader:
    """See `engine.lora.tiers.adapter.Loader`. The other ranks read an adapter when it gets a slot,
    and only if it is still what rank 0 has read."""

    def __init__(self, loader: Loader, ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        return self._loader.describe(path, digest)

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        loaded = self._loader.read(path, digest)
        return replace(loaded, weights=_OnRanks(loaded.weights, path, loaded.digest))

    def upload(self, weights: Any, slot: int) -> None:
        self._ranks.load_adapter(weights.path, weights.digest, slot)
        self._loader.upload(weights.weights, slot)
