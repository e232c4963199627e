"""AdapterLoader: reads and uploads adapters of all kinds for a model on its device."""

from pathlib import Path

from engine.errors import AdapterError
from engine.lora.adapter import Described, Loaded
from engine.lora.device import LoraDevice
from engine.lora.peft_config import read_peft_config, stamp
from engine.lora.prompts import HostPrompt, PromptDevice, PromptReader
from engine.lora.remote import fetched, is_remote
from engine.lora.weights import HostLora, LoraReader


class AdapterLoader:
    """See `engine.lora.adapter.Loader`. prompts: None if the engine takes none."""

    def __init__(
        self,
        lora: tuple[LoraReader, LoraDevice],
        prompts: tuple[PromptReader, PromptDevice] | None = None,
    ) -> None:
        self._lora_reader, self._lora = lora
        self._prompts = prompts

    def describe(self, path: str) -> Described:
        if not is_remote(path):
            return self._reader(Path(path)).describe(Path(path), stamp(Path(path)))
        with fetched(path, weights=False) as (folder, seen):
            return self._reader(folder).describe(folder, seen)

    def read(self, path: str) -> Loaded:
        if not is_remote(path):
            return self._reader(Path(path)).read(Path(path), stamp(Path(path)))
        with fetched(path, weights=True) as (folder, seen):
            return self._reader(folder).read(folder, seen)

    def _reader(self, folder: Path) -> LoraReader | PromptReader:
        config = read_peft_config(folder)
        if config.kind == "lora":
            return self._lora_reader
        if self._prompts is None:
            raise AdapterError(
                f"{folder}: {config.virtual_tokens} virtual tokens are over max_virtual_tokens 0",
                code="adapter_incompatible",
            )
        return self._prompts[0]

    def upload(self, weights: HostLora | HostPrompt, slot: int) -> None:
        if isinstance(weights, HostLora):
            self._lora.upload(weights, slot)
        else:
            assert self._prompts is not None
            self._prompts[1].upload(weights, slot)
