"""Builds and loads the drafter that `engine.speculation` names."""

from pathlib import Path

from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.drafters.drafter import ModelDrafter
from engine.models.drafters.mtp import MtpDrafter
from engine.models.registry import Model
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
    return MtpDrafter(model)


def load_drafter(drafter: ModelDrafter, folder: Path | None, seed: int) -> None:
    """Fill the drafter from the model's files, or with random weights if folder is None.

    Raises ConfigError as `read_drafter` does.
    """
    if folder is None:
        load_weights(drafter, None, seed=seed)
    else:
        fill_part(drafter, read_drafter(drafter, folder), folder)


def read_drafter(drafter: ModelDrafter, folder: Path) -> dict[str, StoredTensor]:
    """Return the drafter's tensors in the model's files, by the names that it uses.

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
    if all(map(drafter.ignores, read_index(folder))):
        raise ConfigError(
            f"speculation: config.json of {folder} has an MTP layer, and its files have no tensor "
            "of it; set speculation: auto or off",
            param="speculation",
        )
    return read_named(drafter, folder, tell=False)
