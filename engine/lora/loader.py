"""AdapterLoader: reads and uploads adapters of all kinds for a model on its device."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import AdapterError
from engine.lora.base_model import another_model
from engine.lora.device import LoraDevice
from engine.lora.peft_config import PeftConfig, read_peft_config, stamp
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter
from engine.lora.tiers.disk import CachedFolder, DiskCache
from engine.lora.tiers.remote import fetched, is_remote
from engine.lora.virtual_tokens import HostVirtualTokens, VirtualTokensDevice, VirtualTokensReader
from engine.lora.weights import HostLora, LoraReader

logger = logging.getLogger("manta.engine")


@contextmanager
def _named(path: str, entry: CachedFolder) -> Iterator[None]:
    """Replace the path of the cached copy by the adapter's URL in errors of the `with` block.

    path: the URL.
    entry: the cached copy.
    """
    folder = str(entry.folder)
    try:
        yield
    except AdapterError as error:
        raise AdapterError(error.message.replace(folder, path), code=error.code) from None


class AdapterLoader:
    """A `Loader` (`engine.lora.tiers.adapter`) of LoRA and virtual-token adapters.

    prompts: the reader and the device memory of virtual tokens; None = such adapters are refused.
    model: the model's folder. An adapter for a model with another name only causes a warning, as
        names vary and shapes are checked.
    lora: the reader and the device memory of LoRA adapters.
    disk: the disk cache, by digest, of adapters from object stores. An adapter with a known digest
        is read from the cache without a request to the store; others are always downloaded.
    """

    def __init__(
        self,
        lora: tuple[LoraReader, LoraDevice],
        prompts: tuple[VirtualTokensReader, VirtualTokensDevice] | None = None,
        disk: DiskCache | None = None,
        model: str = "",
    ) -> None:
        self._lora_reader, self._lora = lora
        self._prompts = prompts
        self._disk = disk or DiskCache()
        self._model = model
        self._warned: set[str] = set()  # digests of adapters for which a warning was logged

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        if not is_remote(path):
            return self._describe(Path(path), stamp(Path(path)))
        copy = self._disk.find(digest)
        if copy is not None:
            # the cached copy may be damaged, which `read` reports
            with copy, suppress(AdapterError):
                return self._describe(copy.folder, digest)
        entry = self._disk.open()
        with fetched(path, entry, weights=False) as seen, _named(path, entry):
            return self._describe(entry.folder, seen)

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        if not is_remote(path):
            return self._read(path, Path(path), stamp(Path(path)))
        while (entry := self._disk.open(digest)).filled:
            with entry, _named(path, entry):
                try:
                    loaded = self._read(path, entry.folder, digest)
                    if loaded.digest == digest:
                        return loaded
                except AdapterError as error:
                    if error.code == "adapter_incompatible":
                        raise
                logger.warning("%s is damaged; %s is downloaded again", entry.folder, path)
                entry.remove()
        with fetched(path, entry, weights=True) as seen, _named(path, entry):
            loaded = self._read(path, entry.folder, seen)
            entry.keep(loaded.digest)
            return loaded

    def _read(self, path: str, folder: Path, seen: str) -> LoadedAdapter:
        config = read_peft_config(folder)
        other = another_model(config.base, self._model)
        try:
            loaded = self._reader(folder, config).read(folder, seen)
        except AdapterError as error:
            if other and error.code == "adapter_incompatible":
                raise AdapterError(f"{error.message}; {other}", code=error.code) from None
            raise
        if other and loaded.digest not in self._warned:
            self._warned.add(loaded.digest)
            logger.warning("adapter %s: %s; it fits, and is served", path, other)
        return loaded

    def _describe(self, folder: Path, seen: str) -> AdapterDescription:
        return self._reader(folder, read_peft_config(folder)).describe(folder, seen)

    def _reader(self, folder: Path, config: PeftConfig) -> LoraReader | VirtualTokensReader:
        if config.kind == "lora":
            return self._lora_reader
        if self._prompts is None:
            raise AdapterError(
                f"{folder}: {config.virtual_tokens} virtual tokens are over max_virtual_tokens 0",
                code="adapter_incompatible",
            )
        return self._prompts[0]

    def upload(self, weights: HostLora | HostVirtualTokens, slot: int) -> None:
        if isinstance(weights, HostLora):
            self._lora.upload(weights, slot)
        else:
            assert self._prompts is not None
            self._prompts[1].upload(weights, slot)
