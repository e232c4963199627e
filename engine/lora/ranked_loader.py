"""RankedLoader: loads adapters of a model that is divided among ranks. No torch here."""

from dataclasses import dataclass, replace
from typing import Any

from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter, Loader
from engine.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class _OnRanks:
    """The weights of rank 0's part, and the path from which the other ranks read theirs."""

    weights: Any
    path: str
    digest: str


class RankedLoader:
    """A `Loader` (`engine.lora.tiers.adapter`) for a model that is divided among ranks.

    Ranks other than rank 0 read an adapter when it gets a slot, and refuse files whose digest
    differs from rank 0's.
    """

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
