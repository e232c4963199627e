"""build_drafter, load_drafter: make the drafter network that the setting `speculation` names."""

from pathlib import Path

from engine.config.draft_config import draft_config
from engine.config.eagle3_config import Eagle3Config
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.drafters.draft_model import DraftModel, same_vocabulary
from engine.models.drafters.drafter import ModelDrafter
from engine.models.drafters.eagle3 import Eagle3Drafter
from engine.models.drafters.mtp import MtpDrafter
from engine.models.registry import Model
from engine.shards import weight_files
from engine.speculation.settings import SpeculationSettings
from engine.weights import check_headers, load_weights
from engine.weights.converted import Manifest
from engine.weights.index import read_index
from engine.weights.load import fill_part, read_named
from engine.weights.stored import StoredTensor


def build_drafter(
    settings: SpeculationSettings | None, model: Model, quantization: str
) -> ModelDrafter | None:
    """Return the drafter, allocated on the model's device; None if no drafter network is used.

    settings: the setting `speculation`, which `resolve` has checked for this model.
    quantization: see `build_model`.
    """
    if settings is None or not settings.by_model:
        return None
    assert isinstance(model, Decoder)
    if settings.method == "mtp":
        return MtpDrafter(model)
    folder = Path(settings.model)
    if settings.method == "draft_model":
        return DraftModel(draft_config(folder, model.config), model, quantization)
    # `manta plan` may have config.json alone
    stored = read_index(folder) if weight_files(folder) else {}
    own_embedding = any(name.endswith("embed_tokens.weight") for name in stored)
    config = Eagle3Config.from_folder(folder, model.config)
    return Eagle3Drafter(config, model, own_embedding=own_embedding)


def load_drafter(
    drafter: ModelDrafter, settings: SpeculationSettings, folder: Path | None, seed: int
) -> None:
    """Fill the drafter from its folder, or with random weights if folder is None.

    folder: the model's folder.
    Raises ConfigError as `check_drafter` does.
    """
    own = folder and Path(settings.model or folder)
    if folder is None or own is None or isinstance(drafter, DraftModel):
        if folder is not None and own is not None:
            _check_vocabulary(own, folder)
        load_weights(drafter, own, seed=seed)
    else:
        fill_part(drafter, _read(drafter, own), own)


def check_drafter(drafter: ModelDrafter, settings: SpeculationSettings, folder: Path) -> None:
    """Raise ConfigError naming file and tensor for faults of the drafter's files.

    Faults are a tensor that is missing, unexpected or of another shape, and a draft model's
    tokenizer whose tokens are not the target model's.

    drafter: a drafter on any device.
    folder: the target model's folder.
    """
    own = Path(settings.model or folder)
    if isinstance(drafter, DraftModel):
        _check_vocabulary(own, folder)
        check_headers(drafter, own)
    else:
        _read(drafter, own)


def _check_vocabulary(own: Path, folder: Path) -> None:
    if not same_vocabulary(own, folder):
        raise ConfigError(
            f"speculation: draft model {own}: its tokenizer has other tokens than the model's, so "
            "that its drafts would be of another text; take a draft model of the same family",
            param="speculation",
        )


def _read(drafter: ModelDrafter, folder: Path) -> dict[str, StoredTensor]:
    """Return the drafter's tensors in its folder, by the names that it uses.

    drafter: a drafter on any device.
    Raises ConfigError naming file and tensor for a tensor that is missing, unexpected or of another
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
            f"speculation: by its config.json {folder} has an MTP layer, and its files have no "
            "tensor of it; set speculation: auto or off",
            param="speculation",
        )
    return read_named(drafter, folder, tell=False)
