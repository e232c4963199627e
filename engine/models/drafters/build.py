"""Builds and loads the drafter that `engine.speculation` names."""

from pathlib import Path

from engine.config.eagle3_config import Eagle3Config
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.drafters.drafter import ModelDrafter
from engine.models.drafters.eagle3 import Eagle3Drafter
from engine.models.drafters.mtp import MtpDrafter
from engine.models.registry import Model
from engine.shards import weight_files
from engine.speculation.settings import SpeculationSettings
from engine.weights import load_weights
from engine.weights.converted import Manifest
from engine.weights.index import read_index
from engine.weights.load import fill_part, read_named
from engine.weights.stored import StoredTensor


def build_drafter(settings: SpeculationSettings | None, model: Model) -> ModelDrafter | None:
    """Allocate the drafter beside a model, on its device; None if no model drafts.

    settings: of `engine.speculation`, which `resolve` has checked for this model.
    """
    if settings is None or not settings.by_model:
        return None
    assert isinstance(model, Decoder)
    if settings.method == "mtp":
        return MtpDrafter(model)
    folder = Path(settings.model)
    # a plan may have config.json alone
    stored = read_index(folder) if weight_files(folder) else {}
    own_embedding = any(name.endswith("embed_tokens.weight") for name in stored)
    config = Eagle3Config.from_folder(folder, model.config)
    return Eagle3Drafter(config, model, own_embedding=own_embedding)


def drafter_folder(settings: SpeculationSettings | None, folder: Path) -> Path:
    """Return the folder of the drafter's files.

    folder: of the model.
    """
    return Path(settings.model) if settings is not None and settings.model else folder


def load_drafter(drafter: ModelDrafter, folder: Path | None, seed: int) -> None:
    """Fill the drafter from its folder, or with random weights if folder is None.

    Raises ConfigError as `read_drafter` does.
    """
    if folder is None:
        load_weights(drafter, None, seed=seed)
    else:
        fill_part(drafter, read_drafter(drafter, folder), folder)


def read_drafter(drafter: ModelDrafter, folder: Path) -> dict[str, StoredTensor]:
    """Return the drafter's tensors in its folder, by the names that it uses.

    drafter: on any device.
    Raises ConfigError naming file and tensor for one that is missing, unexpected or of another
    shape.
    """
    if Manifest.read(folder) is not None:
        raise ConfigError(
            f"speculation: {folder} is converted, which leaves MTP layers out; serve the "
            "checkpoint that it was made of, or set speculation: auto",
            param="speculation",
        )
    if isinstance(drafter, MtpDrafter) and all(map(drafter.ignores, read_index(folder))):
        raise ConfigError(
            f"speculation: config.json of {folder} has an MTP layer, and its files have no tensor "
            "of it; set speculation: auto or off",
            param="speculation",
        )
    return read_named(drafter, folder, tell=False)
