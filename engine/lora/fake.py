"""FakeLoader: an adapter loader with real configurations and errors, but no weights."""

import time
from pathlib import Path

from engine.lora.peft_config import read_peft_config, stamp
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter


class FakeLoader:
    """A `Loader` (`engine.lora.tiers.adapter`) without weights.

    seconds: the simulated duration of an upload.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        config = read_peft_config(Path(path))
        targets = list(config.targets or ())
        seen = stamp(Path(path))
        return AdapterDescription(
            config.kind, config.max_rank, 1, targets, seen, config.virtual_tokens
        )

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        described = self.describe(path)
        return LoadedAdapter(described, described.stamp, 1, "weights")

    def upload(self, weights: object, slot: int) -> None:
        time.sleep(self._seconds)
