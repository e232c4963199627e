"""build_drafter, load_drafter: create the draft model of the setting `speculation`."""

from pathlib import Path

from engine.config.draft_config import check_vocabulary, draft_config
from engine.config.eagle3_config import Eagle3Config
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.drafters.draft_model import DraftModel
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
    """Allocate the draft model on the model's device; None if the settings use none.

    settings: the resolved setting `speculation`.
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
    # the folder may have only config.json, in `manta plan`
    stored = read_index(folder) if weight_files(folder) else {}
    own_embedding = any(name.endswith("embed_tokens.weight") for name in stored)
    config = Eagle3Config.from_folder(folder, model.config)
    return Eagle3Drafter(config, model, own_embedding=own_embedding)


def load_drafter(
    drafter: ModelDrafter, settings: SpeculationSettings, folder: Path | None, seed: int
) -> None:
    """Load the drafter's weights, or fill it with random weights if folder is None.

    folder: the target model's folder, which is used if the settings name none.
    Raises ConfigError as `check_drafter` does.
    """
    own = folder and Path(settings.model or folder)
    if folder is None or own is None or isinstance(drafter, DraftModel):
        if folder is not None and own is not None:
            check_vocabulary(own, folder)
        load_weights(drafter, own, seed=seed)
    else:
        fill_part(drafter, _read(drafter, own), own)


def check_drafter(drafter: ModelDrafter, settings: SpeculationSettings, folder: Path) -> None:
    """Raise ConfigError, naming file and tensor, for faults of the drafter's files.

    Faults are tensors that are missing, unexpected or of another shape, and a draft model whose
    tokenizer differs from the target model's.

    drafter: a drafter on any device.
    folder: the target model's folder.
    """
    own = Path(settings.model or folder)
    if isinstance(drafter, DraftModel):
        check_vocabulary(own, folder)
        check_headers(drafter, own)
    else:
        _read(drafter, own)


def _read(drafter: ModelDrafter, folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the drafter's folder by the drafter's names.

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
